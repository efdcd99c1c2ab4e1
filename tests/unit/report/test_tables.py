"""Tables fit a terminal of 100 columns whole, and say what the plan and the estimate say."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.quantities import format_bytes, format_seconds
from hf_osdp.report.content import Content, comparison_content, report_content
from hf_osdp.report.plan_file import PlanInputs
from hf_osdp.report.tables import _broken, comparison_table, plan_lines, plan_table
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

JOB = TrainingJob(global_batch_size=1024)
HARDWARE = bare_preset("a100-40", nodes=16, devices_per_node=8)


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


def report(description: ModelDescription, plan: Plan, hardware=HARDWARE) -> Content:
    return report_content(plan, PlanInputs(description=description, job=JOB, hardware=hardware))


def rendered(table: Table) -> list[str]:
    """Lines of a terminal of 100 columns, which hold all that the table says."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert not [line for line in lines if "…" in line] and max(map(len, lines)) <= 99
    return lines


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
    content = report(description, plan)
    text = "\n".join(lines := rendered(plan_table(content)))
    assert plan.fingerprint in text and "(root)" in text
    rows = content["estimated"]["units"]
    assert [row["layout"] for row in rows].count("replicate") == 2
    assert [row["label"] for row in rows[2:]] == [f"{prefix}.0-11 (12)", f"{prefix}.12-22 (11)", f"{prefix}.23"]
    for row in rows:
        exposed = format_seconds(row["seconds"]["exposed_s"])
        assert any(line.endswith(f" {exposed}") for line in lines), row
        assert len(class_name) > 10 or (row["label"] in text and row["class"] in text)


@pytest.mark.parametrize(
    ("names", "sizes", "expected"),
    [
        ([f"h.{i}" for i in range(6)], [8, 8, 1, 8, 8, 8], ["h.0-1 (2)", "h.2", "h.3-5 (3)"]),
        (
            [f"model.layers2.{8 + i}.mlp" for i in range(3)],
            [1] * 3,
            ["model.layers2.8.mlp ... model.layers2.10.mlp (3)"],
        ),
        (["encoder.0", "decoder.0"], [1] * 2, ["encoder.0 ... decoder.0 (2)"]),
    ],
)
def test_plan_rows_join_neighbours_with_one_layout(names, sizes, expected):
    description = model(*names)
    rows = report(description, plan_for(description, 1, 1, *sizes))["estimated"]["units"]
    assert [row["label"] for row in rows] == ["(root)", "model.embed_tokens+lm_head", *expected]
    assert [fqn for row in rows for fqn in row["units"]] == [unit.fqn for unit in description.units]
    shown = "replicate" if sizes[0] == 1 else "shard 8 x replicate 16, keep, hold gradients"
    assert rows[2]["layout"] == shown


@pytest.mark.parametrize("limit", [1000, 3 * 2**20, 2**40])
def test_comparison_table_has_gain_or_reason_for_each_strategy(limit):
    asked = problem(transformer(), bare_preset("cpu", devices_per_node=4), TrainingJob(global_batch_size=8), limit)
    rows = list(compare_strategies(asked))
    lines = rendered(comparison_table(comparison_content(asked, rows)))
    assert f"limit {format_bytes(limit)}" in lines[0]
    nothing = {1000: {"osdp", "fsdp", "ddp", "zero2", "hsdp"}, 3 * 2**20: {"ddp", "hsdp"}, 2**40: set()}
    assert {row.strategy.value for row in rows if row.result is None} == nothing[limit]
    for row in rows:
        (line,) = [line for line in lines if line.split()[:1] == [row.strategy.value]]
        if row.result is None:
            assert row.reason in line and row.reason.startswith("needs ")
        elif row.strategy.value != "osdp":
            assert line.endswith(f"{rows[0].result.plan.samples_per_s / row.result.plan.samples_per_s:.2f}x")


@pytest.mark.parametrize(("changes", "helps"), [
    ({}, "a larger micro-batch or compiled blocks or replicated units, where they fit"),
    (dict(accumulation_steps=1, compiled_classes=("Block",)), "a larger batch or replicated units, where they fit"),
])  # fmt: skip
def test_plan_says_what_helps_where_gpus_wait_for_the_cpu(changes, helps):
    """Not what the plan has already."""
    slow = replace(HARDWARE, device=replace(HARDWARE.device, operator_s=1.0))
    description = model("h.0", "h.1")
    plan = replace(plan_for(description, 1, 1, 8, 8), **changes)
    content = report(description, plan, slow)
    (line,) = [line for line in plan_lines(content) if "for the CPU" in line]
    share = content["estimated"]["step_breakdown"]["waits_s"] / content["estimated"]["step_s"]
    assert line == f"The GPUs wait for the CPU for {share:.0%} of the step: {helps} would help." and share > 0.9
    (stream,) = [one for one in content["estimated"]["streams"] if one["name"] == "waits for the CPU"]
    assert stream["exposed_s"] == pytest.approx(share * content["estimated"]["step_s"])
    assert not [line for line in plan_lines(report(description, plan)) if "for the CPU" in line]


def test_plan_says_how_little_devices_gain_where_they_wait_for_each_other():
    description = model("h.0", "h.1")
    content = report(description, plan_for(description, 1, 4, 8, 1))
    terms, step_s = content["estimated"]["step_breakdown"], content["estimated"]["step_s"]
    for exposed_s, said in ((step_s, True), (0.0, False)):
        content["estimated"]["step_breakdown"] = {**terms, "compute_s": 0.1 * step_s, "exposed_s": exposed_s}
        lines = [line for line in plan_lines(content) if "train 12.8x as fast as one" in line]
        assert bool(lines) is said


@pytest.mark.parametrize(("name", "lines"), [
    ("model.layers.0", ["model.layers.0"]),
    ("bert.embeddings.word_embeddings", ["bert.embeddings.word_", "embeddings"]),
    ("Embedding+BertLMPredictionHead", ["Embedding+Bert", "LMPredictionHead"]),
    ("a" * 30, ["a" * 24, "a" * 6]),
])  # fmt: skip
def test_names_are_broken_between_words(name, lines):
    assert _broken(name, 24).splitlines() == lines
