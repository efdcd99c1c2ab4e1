"""A plan's JSON form, fingerprint, checks and export; `tests/property` and `tests/faults` damage its files."""

import json
from dataclasses import replace
from typing import Any

import pytest

from hf_osdp.errors import PlanError
from hf_osdp.planner.decision import Batch, UnitDecision, UnitLayout
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.split import ModelSplit
from tests.helpers.descriptions import transformer

DESCRIPTION = transformer(layers=3)
PLAN = Plan(
    world_size=4, strategy="osdp",
    units=tuple(
        UnitDecision(fqn=unit.fqn, shard_size=size, reshard_after_forward=size != 2, reduce_every_micro_step=False)
        for unit, size in zip(DESCRIPTION.units, (1, 4, 2, 4, 1), strict=True)
    ),
    micro_batch_size=2, accumulation_steps=3, model_fingerprint=DESCRIPTION.fingerprint, model_name="transformer",
    sequence_length=32, memory_limit_bytes=10**9, peak_bytes=10**8, step_s=0.25, proven_optimal=True,
    hardware="4 x toy (nccl)",
)  # fmt: skip


def without(name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(PLAN.to_json()).items() if key != name})


def unit_changed(index: int, **values: Any) -> Plan:
    units = list(PLAN.units)
    units[index] = replace(units[index], **values)
    return replace(PLAN, units=tuple(units))


def test_files_hold_plan_exactly_and_survive_failed_saves(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    for plan in (PLAN, replace(PLAN, memory_limit_bytes=None, peak_bytes=None, step_s=None)):
        plan.save(path)
        assert Plan.load(path) == plan == Plan.from_json(plan.to_json().encode())
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]
    monkeypatch.setattr(Plan, "to_json", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        PLAN.save(path)
    monkeypatch.undo()
    assert Plan.load(path) == plan


def test_json_has_decisions_by_unit_and_needs_no_fingerprint():
    plan = unit_changed(3, reduce_every_micro_step=True, activations=Activations.RECOMPUTE, on_host=True)
    data = json.loads(plan.to_json())
    assert "reduce_every_micro_step" not in data and next(iter(data["units"][3])) == "fqn"
    again, saved = {"saved_calls": [], "share": 1.0, "names": []}, None
    for index, given, recomputation in ((3, True, again), (1, False, saved)):
        unit, kept = data["units"][index], {"recomputation": recomputation, "offloads": False}
        assert (unit["reduce_every_micro_step"], unit["on_host"], unit["activations"]) == (given, given, kept)
    assert Plan.from_json(without("fingerprint")) == PLAN


DIFFERENT = [
    unit_changed(0, shard_size=2), unit_changed(3, reshard_after_forward=False), unit_changed(4, fqn="other"),
    replace(PLAN, units=PLAN.units[:-1]), replace(PLAN, micro_batch_size=3), replace(PLAN, accumulation_steps=2),
    replace(PLAN, world_size=8), replace(PLAN, model_fingerprint="0"), replace(PLAN, split=ModelSplit(operators=True)),
    unit_changed(3, reduce_every_micro_step=True), unit_changed(3, activations=Activations.RECOMPUTE),
    unit_changed(3, on_host=True), replace(PLAN, compiled_classes=("Block",)), unit_changed(3, stage_size=2),
]  # fmt: skip


def test_fingerprint_tells_every_decision_and_nothing_else():
    assert len({plan.fingerprint for plan in (PLAN, *DIFFERENT)}) == 1 + len(DIFFERENT)
    same = replace(PLAN, peak_bytes=1, step_s=9.0, memory_limit_bytes=None, proven_optimal=False)
    same = replace(same, hardware="", model_name="x")
    assert same.fingerprint == PLAN.fingerprint


@pytest.mark.parametrize(("layout", "text"), [
    (dict(shard_size=1, reduce_every_micro_step=False), "replicate"),
    (dict(shard_size=1, on_host=True), "replicate, on host"),
    (dict(shard_size=2), "shard 2 x replicate 4"),
    (dict(shard_size=8, reshard_after_forward=False), "shard 8, keep"),
    (dict(shard_size=8, stage_size=2), "shard 8 in 2 stages (4 x 2)"),
    (dict(shard_size=4, stage_size=2), "shard 4 x replicate 2 in 2 stages (2 x 2)"),
    (
        dict(shard_size=8, reshard_after_forward=False, reduce_every_micro_step=False,
            activations=Activations.RECOMPUTE, on_host=True),
        "shard 8, keep, hold gradients, recompute, on host",
    ),
    (dict(shard_size=1, activations=Activations.RECOMPUTE_OFFLOAD), "replicate, recompute, offload activations"),
])  # fmt: skip
def test_describe_names_what_differs_from_the_default(layout, text):
    assert UnitLayout(**{"reshard_after_forward": True, **layout}).describe(8) == text


def test_plan_of_layouts_decides_unit_by_unit():
    plain = UnitLayout(shard_size=4, reshard_after_forward=True)
    kept, away = replace(plain, reshard_after_forward=False), replace(plain, on_host=True, stage_size=2)
    layouts = [plain, kept, away, plain, plain]
    plan = Plan.of(DESCRIPTION, layouts, Batch(micro_batch_size=1, accumulation_steps=2), world_size=4)
    assert [unit.layout for unit in plan.units] == layouts
    assert [unit.fqn for unit in plan.units] == [unit.fqn for unit in DESCRIPTION.units]
    assert (plan.micro_batch_size, plan.accumulation_steps, plan.model_fingerprint) == (1, 2, DESCRIPTION.fingerprint)
    assert plan.decision("layers.1") is plan.units[3]
    with pytest.raises(PlanError, match=r"no unit 'layers.9'; it has \(root\), embedding\+head, layers.0"):
        plan.decision("layers.9")
