"""Tables fit a terminal of 100 columns whole, and say what the plan and the estimate say."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.evaluate import PlanEstimate, estimate_plan
from hf_osdp.planner.description import ModelDescription, Recomputation
from hf_osdp.planner.hardware import HostSpec
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.search.compare import compare_strategies, frontier
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.quantities import format_bytes, format_seconds
from hf_osdp.report import tables
from hf_osdp.report.content import answers_content, comparison_content
from hf_osdp.report.run_tables import outcome_table, trials_table
from hf_osdp.report.tables import Answer, plan_caption, plan_rows, plan_table
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

JOB = TrainingJob(global_batch_size=1024)
HARDWARE = bare_preset("a100-40", nodes=16, devices_per_node=8)
RATES = dict.fromkeys(("to_device_bytes_per_s", "to_host_bytes_per_s", "update_bytes_per_s"), 1e10)
HOST = HostSpec(memory_bytes=2**40, **RATES, source="made up")


def model(*names: str, class_name: str = "Block") -> ModelDescription:
    description = transformer(layers=len(names), hidden=128)
    root, tied, *blocks = description.units
    tied = replace(tied, fqn="model.embed_tokens+lm_head", class_name="Embedding+Linear")
    named = (replace(unit, fqn=name, class_name=class_name) for unit, name in zip(blocks, names, strict=True))
    return replace(description, units=(root, tied, *named))


def plan_for(description: ModelDescription, *shard_sizes: int) -> Plan:
    kept = {"reshard_after_forward": False, "reduce_every_micro_step": False}
    pairs = zip(description.units, shard_sizes, strict=True)
    units = tuple(UnitDecision(fqn=unit.fqn, shard_size=size, **kept) for unit, size in pairs)
    batch = {"world_size": 128, "micro_batch_size": 4, "accumulation_steps": 2}
    found = {"model_fingerprint": description.fingerprint, "memory_limit_bytes": 2**35, "proven_optimal": True}
    return Plan(strategy="osdp", units=units, **batch, **found)


SMALL = model("h.0", "h.1")
PLAN = plan_for(SMALL, 1, 1, 1, 1)


def estimated(description: ModelDescription, plan: Plan, hardware=HARDWARE) -> PlanEstimate:
    return estimate_plan(plan, description, JOB, hardware)


def rendered(table: Table, width: int = 100) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return [line.strip() for line in console.export_text().splitlines()]


def assert_whole(lines: list[str]) -> None:
    assert not [line for line in lines if "…" in line]
    assert max(map(len, lines)) <= 99


LONG = "Qwen2AudioEncoderDecoderLayerWithCrossAttention"


@pytest.mark.parametrize(
    ("prefix", "class_name"),
    [
        ("transformer.h", "GPT2Block"),
        ("model.decoder.layers", "WhisperDecoderLayer"),  # which is folded, as is the next
        ("model.audio_tower.vision_model.encoder.block_list.layers", LONG),
    ],
)
def test_plan_table_fits_100_columns_with_every_figure(prefix, class_name):
    description = model(*(f"{prefix}.{i}" for i in range(24)), class_name=class_name)
    plan = plan_for(description, 1, 128, *[8] * 12, *[128] * 11, 1)
    estimate = estimated(description, plan)
    lines = rendered(plan_table(plan, description, estimate))
    assert_whole(lines)
    text = "\n".join(lines)
    assert plan.fingerprint in text and "(root)" in text and text.count("replicate,") == 2
    rows = plan_rows(plan, description)
    assert [row.label for row in rows[2:]] == [f"{prefix}.0-11 (12)", f"{prefix}.12-22 (11)", f"{prefix}.23"]
    for row in rows:
        exposed = format_seconds(sum(estimate.time.units[i].exposed_s for i in row.units))
        assert any(line.endswith(f" {exposed}") for line in lines), row
        assert len(class_name) > 10 or (row.label in text and row.class_name in text)


def test_plan_table_names_saved_calls_of_recomputed_units_once():
    description = model("h.0", "h.1", "h.2")
    saves = Recomputation(saved_calls=("addmm#0",), names=("qkv", "attention"), share=0.4)
    plain = plan_for(description, 1, 1, 64, 64, 64)
    ways = (Activations(recomputation=saves), Activations.RECOMPUTE, Activations(recomputation=saves, offloads=True))
    units = (replace(unit, activations=way) for unit, way in zip(plain.units[2:], ways, strict=True))
    plan = replace(plain, units=(*plain.units[:2], *units))
    lines = rendered(plan_table(plan, description, estimated(description, plain)), width=200)
    assert [line for line in lines if "saves" in line] == ["recompute 0.4: saves qkv, attention."]
    assert [line.count("recompute 0.4") for line in lines if line.startswith(("h.0", "h.2"))] == [1, 1]
    assert "offload activations" in next(line for line in lines if line.startswith("h.2"))


@pytest.mark.parametrize(
    ("names", "sizes", "expected"),
    [
        ([f"h.{i}" for i in range(6)], [8, 8, 1, 8, 8, 8], ["h.0-1", "h.2", "h.3-5"]),
        ([f"model.layers2.{8 + i}.mlp" for i in range(3)], [1] * 3, ["model.layers2.8-10.mlp"]),
        (["encoder.0", "decoder.0"], [1] * 2, ["encoder.0 ... decoder.0"]),
    ],
)
def test_plan_rows_join_neighbours_with_one_layout(names, sizes, expected):
    description = model(*names)
    rows = plan_rows(plan_for(description, 1, 1, *sizes), description)
    assert [row.name for row in rows] == ["(root)", "model.embed_tokens+lm_head", *expected]
    assert [i for row in rows for i in row.units] == list(range(len(description.units)))
    assert rows[2].layout == ("replicate" if sizes[0] == 1 else "shard 8 x replicate 16") + ", keep, hold gradients"


@pytest.mark.parametrize(
    "change",
    [{"activations": Activations.RECOMPUTE}, {"on_host": True}, {"reduce_every_micro_step": True},
     {"reshard_after_forward": True}],
)  # fmt: skip
def test_plan_rows_part_units_of_other_decisions(change):
    description = model("h.0", "h.1", "h.2", "h.3")
    plan = plan_for(description, 1, 1, 64, 64, 64, 64)
    plan = replace(plan, units=(*plan.units[:4], *(replace(unit, **change) for unit in plan.units[4:])))
    first, second = plan_rows(plan, description)[2:]
    assert (first.name, second.name) == ("h.0-1", "h.2-3") and first.layout != second.layout
    assert_whole(rendered(plan_table(plan, description, estimated(description, plan, replace(HARDWARE, host=HOST)))))


def test_plan_table_shows_what_the_host_holds():
    description, hardware = model("h.0", "h.1"), replace(HARDWARE, host=HOST)
    plan = plan_for(description, 1, 1, 64, 64)
    assert "host" not in rendered(plan_table(plan, description, estimated(description, plan, hardware)))
    sent = tuple(replace(segment, sent_bytes=Affine(per_sample=1000)) for segment in description.segments)
    description = replace(description, segments=sent)
    changed = replace(plan.units[2], on_host=True), replace(plan.units[3], activations=Activations.OFFLOAD)
    plan = replace(plan, units=(*plan.units[:2], *changed))
    estimate = estimated(description, plan, hardware)
    by_unit = tables.host_bytes_of_units(description, estimate.memory)
    assert by_unit[2] == estimate.memory.units[2].host > 0 and by_unit[3] == 2 * 4 * 1000 and by_unit[:2] == [0, 0]
    assert sum(by_unit) + estimate.memory.units[2].host_moment == estimate.memory.host_bytes
    text = "\n".join(rendered(plan_table(plan, description, estimate)))
    assert "held      host" in text and all(format_bytes(nbytes) in text for nbytes in by_unit[2:])
    of_all = f"{format_bytes(8 * estimate.memory.host_bytes)} of 8.00 TiB per machine."
    said = f"On the host: {format_bytes(estimate.memory.host_bytes)} per rank, {of_all}"
    assert said in plan_caption(plan, estimate, hardware)


def test_plan_caption_says_peak_step_and_faster_plans():
    estimate = estimated(SMALL, PLAN)
    peak, step, reduced, proven = plan_caption(PLAN, estimate)
    assert peak.startswith("Peak ")
    assert f"of 32.0 GiB in {estimate.memory.peak.phase} of {estimate.memory.peak.unit}" in peak
    assert step.startswith("Step ") and "samples/s" in step
    assert "Gradients are reduced once per step" in reduced and proven.startswith("Proven")
    near = plan_caption(replace(PLAN, proven_optimal=False, gap=1.7e-4), estimate)[-1]
    assert near.startswith("Proven") and "is faster under this limit by more than 0.017 %" in near
    single = replace(PLAN, strategy="ddp", accumulation_steps=1)
    assert len(plan_caption(single, estimated(SMALL, single))) == 2
    for held, said in enumerate(("in every micro-step.", "in every micro-step, except for 1 of 4 units, whose whole")):
        units = tuple(replace(unit, reduce_every_micro_step=i >= held) for i, unit in enumerate(PLAN.units))
        assert said in plan_caption(replace(PLAN, units=units), estimated(SMALL, PLAN))[2]
    simplified = "0.35 % slower than the fastest plan found, which has 5 layouts instead of 4"
    plan = replace(PLAN, simplified=simplified, proven_simplest=True)
    *_, simpler, proven = plan_caption(plan, estimated(SMALL, plan))
    assert simpler == f"Simpler than the fastest plan: {simplified}." and "none as simple is faster" in proven
    *_, simpler, fastest, unproven = plan_caption(replace(plan, proven_simplest=False), estimated(SMALL, plan))
    assert simplified in simpler and "is faster than the fastest found, by the cost model" in fastest
    assert unproven.startswith("Not proven: that no plan near the fastest is simpler")


@pytest.mark.parametrize("limit", [1000, 3 * 2**20, 2**40])
def test_comparison_table_has_gain_or_reason_for_each_strategy(limit):
    asked = problem(transformer(), bare_preset("cpu", devices_per_node=4), TrainingJob(global_batch_size=8), limit)
    rows = list(compare_strategies(asked))
    lines = rendered(tables.comparison_table(rows, limit))
    assert_whole(lines)
    assert f"limit {format_bytes(limit)}" in lines[0]
    nothing = {1000: {"osdp", "fsdp", "ddp", "zero2", "hsdp"}, 3 * 2**20: {"ddp", "hsdp"}, 2**40: set()}
    assert {row.strategy.value for row in rows if row.result is None} == nothing[limit]
    for row in rows:
        (line,) = [line for line in lines if line.split()[:1] == [row.strategy.value]]
        if row.result is None:
            assert row.reason in line and row.reason.startswith("needs ")
        elif row.strategy.value != "osdp":
            assert line.endswith(f"{rows[0].result.plan.samples_per_s / row.result.plan.samples_per_s:.2f}x")


def test_frontier_table_marks_the_fastest_within_the_limit():
    description = model(*(f"bert.encoder.layer.{i}" for i in range(24)), class_name="BertLayer")
    asked = problem(description, HARDWARE, JOB, 2**30)
    limit = int(1.2 * least_memory(asked))
    front = frontier(asked, points=4, known={limit: search(replace(asked, memory_limit_bytes=limit))})
    lines = rendered(tables.frontier_table(front, limit))
    assert_whole(lines)
    rows = [line for line in lines if " x " in line]
    assert len(rows) == len(front) and len(lines) == len(rows) + 5, "a row is one line"
    for row, result in zip(rows, front, strict=True):
        replicated, kept, freed, *_ = (0 if count == "-" else int(count) for count in row.split()[-5:])
        assert replicated + kept + freed == len(result.plan.units)
    (marked,) = [line for line in lines if line.startswith("*")]
    best = max((r.plan for r in front if r.plan.peak_bytes <= limit), key=lambda plan: plan.samples_per_s)
    assert format_bytes(best.peak_bytes) in marked
    content = comparison_content(HARDWARE, limit, (), front)
    assert [point["peak_bytes"] for point in content["frontier"]] == [r.plan.peak_bytes for r in front]


def test_what_if_table_counts_gains_from_the_first_row():
    asked = problem(SMALL, HARDWARE, JOB)
    now, fsdp = search(asked), search(replace(asked, strategy="fsdp"))
    rows = [
        Answer(question="now", change="limit 12.0 MiB", problem=asked, plan=now.plan),
        Answer(question="twice the memory", change="limit 24.0 MiB", problem=asked, plan=fsdp.plan),
        Answer(question="longest sequence", change="", reason="not even 64 tokens fit"),
    ]
    lines = rendered(tables.what_if_table(rows))
    assert_whole(lines)
    assert any(line.endswith(f"{rows[1].tokens_per_s / rows[0].tokens_per_s:.2f}x") for line in lines)
    assert "not even 64" in " ".join(lines)
    content = answers_content(rows)["answers"]
    assert content[1]["result"]["samples_per_s"] == fsdp.plan.samples_per_s and content[2]["result"] is None


def test_outcome_table_sets_estimate_beside_measurement():
    nbytes = [("peak memory", 3 * 2**20, 2 * 2**20), ("peak reserved", None, 5 * 2**20)]
    lines = rendered(outcome_table(nbytes, [("step time", 0.5, None), ("first step", None, 3.0)]))
    assert_whole(lines)
    assert any(line.split() == ["first", "step", "-", "3.00", "s", "-"] for line in lines)
    cells = {line[:13].strip(): line[13:].split() for line in lines}
    assert cells["peak memory"] == ["3.0", "MiB", "2.0", "MiB", "1.50"]
    assert cells["peak reserved"] == ["-", "5.0", "MiB", "-"] and cells["step time"] == ["500.0", "ms", "-", "-"]


@pytest.mark.parametrize(
    ("peak", "extra", "fits", "runs", "said"),
    [
        (None, 2**20, False, False, "1.0 MiB / out of memory 500.0 ms / - +1.0 MiB, x1.50 over limit"),
        (2**21, -(2**20), True, False, "1.0 MiB / 2.0 MiB 500.0 ms / - -1.0 MiB, x1.50 fits"),
        (2**21, 0, True, True, "1.0 MiB / 2.0 MiB 500.0 ms / - +0 B, x1.50 runs"),
    ],
)
def test_trials_table_has_a_line_for_each_round(peak, extra, fits, runs, said):
    past = {"plan": "abc", "estimated": {"peak_bytes": 2**20, "step_s": 0.5}, "fits": fits, "runs": runs}
    past["measured"] = {"peak_bytes": peak, "median_step_s": None}
    past["correction"] = {"extra_bytes": extra, "compute_factor": 1.5}
    lines = rendered(trials_table([past, past]))
    assert_whole(lines)
    assert [" ".join(line.split()) for line in lines if "abc" in line] == [f"1 abc {said}", f"2 abc {said}"]
