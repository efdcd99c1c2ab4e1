"""A plan's JSON form, fingerprint, diff and checks; damaged files give one clear line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hf_osdp.errors import PlanError
from hf_osdp.planner.decision import Batch, ShardMode, UnitDecision, UnitLayout
from hf_osdp.planner.description import Activations
from hf_osdp.planner.plan import PLAN_VERSION, Plan
from tests.helpers.descriptions import transformer

DESCRIPTION = transformer(layers=3)


def decision(fqn: str, shard_size: int, reshard: bool = True) -> UnitDecision:
    return UnitDecision(fqn=fqn, shard_size=shard_size, reshard_after_forward=reshard, reduce_every_micro_step=False)


PLAN = Plan(
    world_size=4,
    strategy="osdp",
    units=tuple(
        decision(unit.fqn, size, size != 2) for unit, size in zip(DESCRIPTION.units, (1, 4, 2, 4, 1), strict=True)
    ),
    micro_batch_size=2,
    accumulation_steps=3,
    model_fingerprint=DESCRIPTION.fingerprint,
    model_name="transformer",
    sequence_length=32,
    memory_limit_bytes=10**9,
    peak_bytes=10**8,
    step_s=0.25,
    proven_optimal=True,
    hardware="4 x toy (nccl)",
)  # fmt: skip


def changed(**values) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **values})


def without(name: str) -> str:
    data = json.loads(PLAN.to_json())
    del data[name]
    return json.dumps(data)


def refused(text: str | bytes) -> str:
    """The message with which the text is refused: one line."""
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text, source="p.json")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_json_round_trip_is_exact():
    assert Plan.from_json(PLAN.to_json()) == PLAN
    bare = replace(PLAN, memory_limit_bytes=None, peak_bytes=None, step_s=None)
    assert Plan.from_json(bare.to_json().encode()) == bare


def test_file_round_trip_leaves_nothing_beside_it(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_batch_and_rate_follow_from_the_plan():
    assert PLAN.global_batch_size == 4 * 2 * 3
    assert PLAN.samples_per_s == 24 / 0.25
    assert replace(PLAN, step_s=None).samples_per_s is None


@pytest.mark.parametrize(
    "estimates",
    [{"peak_bytes": 1}, {"step_s": 9.0}, {"memory_limit_bytes": None}, {"proven_optimal": False}, {"hardware": ""}, {"model_name": "x"}],
)
def test_fingerprint_ignores_estimates_and_names(estimates):
    assert replace(PLAN, **estimates).fingerprint == PLAN.fingerprint


def unit_changed(index: int, **values) -> Plan:
    units = list(PLAN.units)
    units[index] = replace(units[index], **values)
    return replace(PLAN, units=tuple(units))


DIFFERENT = {
    "another shard size": unit_changed(0, shard_size=2),
    "another reshard_after_forward": unit_changed(3, reshard_after_forward=False),
    "another unit": unit_changed(4, fqn="other"),
    "one unit less": replace(PLAN, units=PLAN.units[:-1]),
    "another world": replace(PLAN, world_size=8),
    "another micro-batch": replace(PLAN, micro_batch_size=3),
    "other micro-steps": replace(PLAN, accumulation_steps=2),
    "one unit's gradients reduced in every micro-step": unit_changed(2, reduce_every_micro_step=True),
    "one unit's activations run again": unit_changed(2, activations=Activations.RECOMPUTE),
    "one unit's states on the host": unit_changed(2, on_host=True),
    "in two stages": unit_changed(1, stage_size=2),
    "another model": replace(PLAN, model_fingerprint="0" * 16),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_fingerprint_and_diff_change_with_every_decision(what):
    assert DIFFERENT[what].fingerprint != PLAN.fingerprint
    assert PLAN.diff(DIFFERENT[what])


def test_fingerprints_of_different_plans_differ():
    assert len({plan.fingerprint for plan in DIFFERENT.values()}) == len(DIFFERENT)


def test_diff_has_one_line_for_each_change():
    assert PLAN.diff(PLAN) == ()
    assert PLAN.diff(replace(PLAN, peak_bytes=1, step_s=2.0)) == ()
    other = replace(unit_changed(0, shard_size=4), micro_batch_size=1)
    assert PLAN.diff(other) == ("micro_batch_size: 2 -> 1", "(root): replicate, hold gradients -> shard 4, hold gradients")
    reducing = unit_changed(3, reduce_every_micro_step=True, activations=Activations.RECOMPUTE, on_host=True)
    assert PLAN.diff(reducing) == ("layers.1: shard 4, hold gradients -> shard 4, recompute, on host",)
    assert PLAN.diff(replace(PLAN, units=PLAN.units[:-1])) == ("layers.2: replicate, hold gradients -> absent",)
    assert replace(PLAN, units=PLAN.units[:-1]).diff(PLAN) == ("layers.2: absent -> replicate, hold gradients",)


@pytest.mark.parametrize(
    ("shard_size", "mode", "text"),
    [(1, ShardMode.REPLICATE, "replicate"), (2, ShardMode.GROUP_SHARD, "shard 2 x replicate 4"), (8, ShardMode.SHARD, "shard 8")],
)
def test_layouts_have_names(shard_size, mode, text):
    unit = UnitDecision(fqn="u", shard_size=shard_size, reshard_after_forward=True)
    assert unit.mode(8) is mode
    assert unit.describe(8) == text
    assert replace(unit, reshard_after_forward=False).describe(8) == f"{text}, keep"


def test_decision_is_found_by_name():
    assert PLAN.decision("layers.1") is PLAN.units[3]
    with pytest.raises(PlanError, match=r"no unit 'layers.9'; it has \(root\), embedding\+head, layers.0"):
        PLAN.decision("layers.9")


# check


def test_plan_fits_its_own_model_and_world():
    PLAN.check(DESCRIPTION, 4)


def test_wrong_world_size_is_refused():
    with pytest.raises(PlanError, match="The plan is for 4 processes, but 2 are running"):
        PLAN.check(DESCRIPTION, 2)


def test_unknown_unit_is_named():
    with pytest.raises(PlanError, match=r"The plan names layers\.2, which the model does not have"):
        PLAN.check(transformer(layers=2), 4)


def test_missing_unit_is_named():
    with pytest.raises(PlanError, match=r"The plan says nothing about layers\.3"):
        PLAN.check(transformer(layers=4), 4)


def test_other_shapes_are_refused():
    with pytest.raises(PlanError, match="parameter names, shapes or dtypes differ"):
        PLAN.check(transformer(layers=3, hidden=128), 4)


def test_long_lists_of_units_are_cut():
    with pytest.raises(PlanError, match="and 4 more") as caught:
        PLAN.check(transformer(layers=13), 4)
    assert len(str(caught.value)) < 200


# damaged text


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.99])
def test_truncated_plan_is_refused(fraction):
    text = PLAN.to_json().rstrip()
    assert "p.json is not JSON" in refused(text[: int(len(text) * fraction)])


@pytest.mark.parametrize("text", ["not json", b"\xff\xfe\x00bad", b"\x80\x04pickle", ""])
def test_what_is_not_json_is_refused(text):
    assert "p.json is not JSON" in refused(text)


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("3", "int"), ('"plan"', "str"), ("null", "NoneType")])
def test_json_that_is_not_an_object_is_refused(text, kind):
    assert f"holds a {kind}, not a plan" in refused(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [("world_size", "4"), ("world_size", 4.0), ("proven_optimal", 1), ("units", {}), ("units", [1]), ("strategy", 5),
     ("step_s", "fast"), ("micro_batch_size", None), ("accumulation_steps", True)],
)  # fmt: skip
def test_wrong_type_is_named(field, value):
    assert f"p.json is not a valid plan: {field}" in refused(changed(**{field: value}))


@pytest.mark.parametrize("field", ["world_size", "strategy", "units", "micro_batch_size", "accumulation_steps", "model_fingerprint"])
def test_missing_field_is_named(field):
    assert f"p.json is not a valid plan: {field}" in refused(without(field))


def test_extra_field_is_named():
    assert "p.json is not a valid plan: offload" in refused(changed(offload=True))
    units = json.loads(PLAN.to_json())["units"]
    units[1]["checkpoint"] = True
    assert "p.json is not a valid plan: units.1.checkpoint" in refused(changed(units=units))


@pytest.mark.parametrize("change", [{"micro_batch_size": 4}, {"accumulation_steps": 1}, {"strategy": "ddp"}])
def test_changed_value_is_seen_by_the_fingerprint(change):
    message = refused(changed(**change))
    assert "p.json was changed or damaged" in message
    assert PLAN.fingerprint in message


def test_plan_written_by_hand_needs_no_fingerprint():
    assert Plan.from_json(without("fingerprint")) == PLAN


@pytest.mark.parametrize("field", ["world_size", "micro_batch_size", "accumulation_steps", "sequence_length"])
@pytest.mark.parametrize("value", [0, -2])
def test_counts_below_one_are_refused(field, value):
    assert f"{field}={value}" in refused(changed(**{field: value}))


def test_shard_size_that_does_not_divide_is_refused():
    assert "sharded over 4 ranks, which does not divide the world size 6" in refused(changed(world_size=6))


@pytest.mark.parametrize("shard_size", [0, -1])
def test_shard_size_below_one_is_refused(shard_size):
    units = json.loads(PLAN.to_json())["units"]
    units[0]["shard_size"] = shard_size
    assert f"shard_size={shard_size} must be at least 1" in refused(changed(units=units))


def test_unit_that_is_listed_twice_is_refused():
    units = json.loads(PLAN.to_json())["units"]
    assert "Unit 'layers.0' is listed twice" in refused(changed(units=[*units, units[2]]))


def test_other_version_is_refused():
    assert f"version 2; this hf_osdp reads version {PLAN_VERSION}" in refused(changed(version=2))


# damaged files


def load_refused(path) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_file_is_named(tmp_path):
    path = tmp_path / "plan.json"
    assert load_refused(path) == f"Cannot read the plan {path}: No such file or directory; give a file that can be read."


def test_folder_is_not_a_plan(tmp_path):
    assert f"Cannot read the plan {tmp_path}" in load_refused(tmp_path)


def test_huge_file_is_not_read(tmp_path):
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(2**30)  # sparse
    assert "it is not a plan" in load_refused(path)


def test_damaged_file_is_named(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json()[:-5])
    assert load_refused(path).startswith(f"{path} is not JSON")


def test_failed_save_leaves_the_plan_that_was_there(tmp_path, monkeypatch):
    PLAN.save(tmp_path / "plan.json")
    monkeypatch.setattr(Plan, "to_json", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace(PLAN, micro_batch_size=1).save(tmp_path / "plan.json")
    monkeypatch.undo()
    assert Plan.load(tmp_path / "plan.json") == PLAN


# values that JSON can hold and a plan cannot


@pytest.mark.parametrize(
    "text",
    [
        changed(step_s=float("nan")),
        changed(step_s=float("inf")),
        changed(step_s=-1.0),
        changed(peak_bytes=-1),
        changed(model_name="\ud800"),
        "[" * 100_000,
        '{"units": ' + "[" * 100_000,
        changed(world_size=10**4000),
        "9" * 5000,
        changed(fingerprint=["x"]),
    ],
    ids=[
        "nan",
        "inf",
        "negative time",
        "negative bytes",
        "lone surrogate",
        "deep",
        "deep inside",
        "huge count",
        "huge number",
        "fingerprint is a list",
    ],
)
def test_odd_json_is_refused_in_one_line(text):
    refused(text)


# two stages


def test_stages_divide_the_shards():
    for stage_size in (0, 3, 8):
        with pytest.raises(ValueError, match=f"Unit 'x': stage_size={stage_size} must be 1, or divide shard_size=8 and be less"):
            UnitDecision(fqn="x", shard_size=8, reshard_after_forward=True, stage_size=stage_size)


def test_stages_show_in_texts_and_differences():
    flat, four, two = (UnitDecision(fqn="x", shard_size=8, reshard_after_forward=False, stage_size=size) for size in (1, 4, 2))
    assert [unit.describe(8) for unit in (flat, four, two)] == [
        "shard 8, keep", "shard 8 in 2 stages (2 x 4), keep", "shard 8 in 2 stages (4 x 2), keep",
    ]  # fmt: skip
    assert four.describe(16) == "shard 8 x replicate 2 in 2 stages (2 x 4), keep"


# decisions beside the layout


def test_decisions_show_in_texts_in_one_order():
    plain = UnitDecision(fqn="x", shard_size=8, reshard_after_forward=False)
    everything = replace(plain, reduce_every_micro_step=False, activations=Activations.RECOMPUTE, on_host=True)
    assert plain.describe(8) == "shard 8, keep"
    assert everything.describe(8) == "shard 8, keep, hold gradients, recompute, on host"
    assert replace(everything, shard_size=1, reshard_after_forward=True).describe(8) == "replicate, hold gradients, recompute, on host"


def test_choices_become_decisions_unit_by_unit():
    plain = UnitLayout(shard_size=4, reshard_after_forward=True)
    choices = [
        plain, replace(plain, reshard_after_forward=False), replace(plain, reduce_every_micro_step=False),
        replace(plain, activations=Activations.RECOMPUTE),
        replace(plain, on_host=True, stage_size=2),
    ]  # fmt: skip
    plan = Plan.of(DESCRIPTION, choices, Batch(micro_batch_size=1, accumulation_steps=2), world_size=4)
    assert [u.describe(4) for u in plan.units] == [
        "shard 4", "shard 4, keep", "shard 4, hold gradients", "shard 4, recompute", "shard 4 in 2 stages (2 x 2), on host"
    ]  # fmt: skip
    assert [u.fqn for u in plan.units] == [u.fqn for u in DESCRIPTION.units]
    assert (plan.micro_batch_size, plan.accumulation_steps) == (1, 2)


def in_unit(index: int, **values) -> str:
    units = json.loads(PLAN.to_json())["units"]
    units[index] |= values
    return changed(units=units)


def test_decisions_are_in_the_json_form_by_unit():
    plan = unit_changed(3, reduce_every_micro_step=True, activations=Activations.RECOMPUTE, on_host=True)
    data = json.loads(plan.to_json())
    assert "reduce_every_micro_step" not in data
    assert {"reduce_every_micro_step": True, "activations": "recompute", "on_host": True}.items() <= data["units"][3].items()
    assert {"reduce_every_micro_step": False, "activations": "save", "on_host": False}.items() <= data["units"][0].items()
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.units[3].activations is Activations.RECOMPUTE


@pytest.mark.parametrize(
    ("field", "value"), [("activations", "forget"), ("activations", None), ("on_host", "yes"), ("reduce_every_micro_step", 1)]
)
def test_a_decision_that_is_none_is_named(field, value):
    assert f"p.json is not a valid plan: units.1.{field}" in refused(in_unit(1, **{field: value}))


@pytest.mark.parametrize("change", [{"activations": "recompute"}, {"on_host": True}, {"reduce_every_micro_step": True}])
def test_a_decision_changed_by_hand_is_seen_by_the_fingerprint(change):
    assert "p.json was changed or damaged" in refused(in_unit(1, **change))


def test_a_plan_of_the_version_before_says_to_plan_again():
    """It had one `reduce_every_micro_step` for all units, which is no reason to name that field."""
    assert "The plan has version 2; this hf_osdp reads version 4. Plan again" in refused(changed(version=2, reduce_every_micro_step=True))
