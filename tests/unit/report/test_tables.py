"""Tables fit a terminal of 100 columns whole, and say what the plan and the estimate say."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from hf_osdp.planner.allocator.replay import Reserved
from hf_osdp.planner.cost.evaluate import PlanEstimate, estimate_plan
from hf_osdp.planner.description import Activations, ModelDescription
from hf_osdp.planner.hardware import HostSpec
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.quantities import format_seconds
from hf_osdp.report.run_tables import outcome_table
from hf_osdp.report.tables import comparison_table, describe_moment, plan_caption, plan_rows, plan_table, reserved_text
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

JOB = TrainingJob(global_batch_size=1024)
HARDWARE = bare_preset("a100-40", nodes=16, devices_per_node=8)
WIDTH = 100


def named_like(prefix: str, class_name: str, layers: int = 24) -> ModelDescription:
    """A model whose units have the names of one on the hub."""
    description = transformer(layers=layers, hidden=128)
    root, tied, *blocks = description.units
    return replace(
        description,
        units=(
            root,
            replace(tied, fqn="model.embed_tokens+lm_head", class_name="Embedding+Linear"),
            *(replace(unit, fqn=f"{prefix}.{i}", class_name=class_name) for i, unit in enumerate(blocks)),
        ),
    )


def plan_for(description: ModelDescription, shard_sizes: list[int], world_size: int = 128, *, keep: bool = True) -> Plan:
    return Plan(
        world_size=world_size,
        strategy="osdp",
        units=tuple(
            UnitDecision(fqn=u.fqn, shard_size=g, reshard_after_forward=not keep, reduce_every_micro_step=False)
            for u, g in zip(description.units, shard_sizes, strict=True)
        ),
        micro_batch_size=4,
        accumulation_steps=2,
        model_fingerprint=description.fingerprint,
        memory_limit_bytes=2**35,
        proven_optimal=True,
    )


def estimated(description: ModelDescription, plan: Plan, *, hardware=HARDWARE) -> PlanEstimate:
    return estimate_plan(plan, description, JOB, hardware)


def rendered(table: Table, width: int = WIDTH) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return [line.strip() for line in console.export_text().splitlines()]


def assert_whole(lines: list[str]) -> None:
    """Nothing was cut, and nothing is wider than the terminal."""
    assert not [line for line in lines if "…" in line]
    assert max(map(len, lines)) <= WIDTH - 1


@pytest.mark.parametrize(
    ("prefix", "class_name"),
    [("transformer.h", "GPT2Block"), ("model.layers", "LlamaDecoderLayer"), ("bert.encoder.layer", "BertLayer")],
)
def test_plan_table_fits_100_columns(prefix, class_name):
    description = named_like(prefix, class_name)
    plan = plan_for(description, [1, 128, *[8] * 12, *[128] * 11, 1])
    lines = rendered(plan_table(plan, description, estimated(description, plan)))
    assert_whole(lines)
    text = "\n".join(lines)
    assert plan.fingerprint in text
    for expected in (f"{prefix}.0-11 (12)", f"{prefix}.12-22 (11)", f"{prefix}.23 ", "(root)", "model.embed_tokens+lm_head", class_name):
        assert expected in text
    assert text.count("replicate,") == 2
    assert "exposed" in text


@pytest.mark.parametrize(
    ("prefix", "class_name"),
    [
        ("model.decoder.layers", "WhisperDecoderLayer"),
        ("model.audio_tower.vision_model.encoder.block_list.layers", "Qwen2AudioEncoderDecoderLayerWithCrossAttention"),
    ],
)
def test_plan_table_folds_long_names_and_keeps_every_figure(prefix, class_name):
    description = named_like(prefix, class_name)
    plan = plan_for(description, [1, 128, *[8] * 12, *[128] * 11, 1])
    estimate = estimated(description, plan)
    lines = rendered(plan_table(plan, description, estimate))
    assert_whole(lines)
    assert any(line.endswith("exposed") for line in lines)
    for row in plan_rows(plan, description):
        exposed = format_seconds(sum(estimate.time.units[i].exposed_s for i in row.units))
        assert any(line.endswith(f" {exposed}") for line in lines), row


def test_plan_table_without_hardware_has_dashes_for_seconds():
    description = named_like("h", "Block", layers=2)
    plan = plan_for(description, [1] * 4)
    text = "\n".join(rendered(plan_table(plan, description, estimated(description, plan, hardware=None))))
    assert " - " in text
    assert " ms" not in text and " us" not in text


def test_neighbours_with_one_layout_are_one_row():
    description = named_like("h", "Block", layers=6)
    rows = plan_rows(plan_for(description, [1, 1, 8, 8, 1, 8, 8, 8]), description)
    assert [row.name for row in rows] == ["(root)", "model.embed_tokens+lm_head", "h.0-1", "h.2", "h.3-5"]
    assert [row.units for row in rows] == [(0,), (1,), (2, 3), (4,), (5, 6, 7)]
    assert rows[2].layout == "shard 8 x replicate 16, keep, hold gradients"


def test_keeping_or_not_makes_another_row():
    description = named_like("h", "Block", layers=2)
    plan = plan_for(description, [8] * 4)
    units = (*plan.units[:3], replace(plan.units[3], reshard_after_forward=True))
    assert [row.name for row in plan_rows(replace(plan, units=units), description)][2:] == ["h.0", "h.1"]


@pytest.mark.parametrize("values", [{"activations": Activations.RECOMPUTE}, {"on_host": True}, {"reduce_every_micro_step": True}])
def test_each_decision_makes_another_row_that_fits(values):
    description = named_like("transformer.h", "GPT2Block", layers=4)
    plan = plan_for(description, [1, 1, 64, 64, 64, 64])
    units = (*plan.units[:4], *(replace(unit, **values) for unit in plan.units[4:]))
    plan = replace(plan, units=units)
    first, second = plan_rows(plan, description)[2:]
    assert (first.name, second.name) == ("transformer.h.0-1", "transformer.h.2-3")
    assert first.layout != second.layout
    hardware = replace(HARDWARE, host=HostSpec(memory_bytes=2**40, to_device_bytes_per_s=1e10, to_host_bytes_per_s=1e10,
                                               update_bytes_per_s=1e10, source="made up"))  # fmt: skip
    assert_whole(rendered(plan_table(plan, description, estimated(description, plan, hardware=hardware))))


def test_range_keeps_what_stands_after_the_number():
    description = named_like("h", "Block", layers=3)
    root, tied, *blocks = description.units
    inner = tuple(replace(unit, fqn=f"model.layers2.{8 + i}.mlp") for i, unit in enumerate(blocks))
    description = replace(description, units=(root, tied, *inner))
    assert plan_rows(plan_for(description, [1] * 5), description)[2].name == "model.layers2.8-10.mlp"


def test_range_of_different_names_shows_both_ends():
    description = named_like("h", "Block", layers=2)
    root, tied, one, two = description.units
    description = replace(description, units=(root, tied, replace(one, fqn="encoder.0"), replace(two, fqn="decoder.0")))
    assert plan_rows(plan_for(description, [1] * 4), description)[2].name == "encoder.0 ... decoder.0"


def test_caption_says_where_the_peak_is_and_how_gradients_are_reduced():
    description = named_like("h", "Block", layers=2)
    plan = plan_for(description, [1] * 4)
    estimate = estimated(description, plan)
    lines = plan_caption(plan, estimate)
    assert lines[0].startswith("Peak ") and "of 32.0 GiB" in lines[0]
    assert f"in {estimate.memory.peak.phase} of {estimate.memory.peak.unit}" in lines[0]
    assert lines[1].startswith("Peak allocated / reserved by torch: ")
    assert lines[2].startswith("Step ") and "samples/s" in lines[2]
    assert "Gradients are reduced once a step" in lines[3]
    assert lines[4].startswith("Proven")
    reduced = replace(plan, units=tuple(replace(unit, reduce_every_micro_step=True) for unit in plan.units))
    mixed = replace(plan, units=(*reduced.units[:3], plan.units[3]))
    assert plan_caption(reduced, estimated(description, reduced))[3] == "Gradients are reduced in every micro-step."
    assert (
        "in every micro-step, but for 1 of 4 units, whose whole gradients are held" in plan_caption(mixed, estimated(description, mixed))[3]
    )
    single = replace(plan, strategy="ddp", accumulation_steps=1)
    assert len(plan_caption(single, estimated(description, single))) == 3


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, "3.0 MiB / 20.0 MiB."),
        ({"alloc_retries": 4}, "the cache is emptied 4 times in two steps."),
        ({"alloc_retries": 4, "fits": False}, "more than the limit, however often"),
        ({"traced": False}, "20.0 MiB; what was not traced counts as one tensor a term."),
    ],
)
def test_reserved_memory_is_said_in_one_line_beside_allocated(found, said):
    text = reserved_text(Reserved(peak_allocated_bytes=3 * 2**20, peak_reserved_bytes=20 * 2**20, **found))
    assert said in text and len(text) <= 150


def test_no_reserved_memory_where_the_device_has_no_such_allocator():
    description = named_like("h", "Block", layers=2)
    plan = plan_for(description, [1] * 4)
    assert not [line for line in plan_caption(plan, estimated(description, plan, hardware=None)) if "reserved by torch" in line]


def test_moment_lists_the_largest_bytes_first():
    description = named_like("h", "Block", layers=2)
    plan = plan_for(description, [1] * 4)
    peak = estimated(description, plan).memory.peak
    listed = describe_moment(peak).split(", ")
    amounts = sorted((getattr(peak.breakdown, name) for name in peak.breakdown.__slots__), reverse=True)
    assert len(listed) == sum(1 for amount in amounts if amount)
    assert listed[0].startswith(max(peak.breakdown.__slots__, key=lambda name: getattr(peak.breakdown, name)).replace("_", " "))


def comparison(limit: int, nodes: int = 1):
    return compare_strategies(
        problem(transformer(), bare_preset("cpu", nodes=nodes, devices_per_node=4), TrainingJob(global_batch_size=8), limit)
    )


def test_comparison_has_a_row_for_each_strategy_and_says_what_does_not_fit():
    rows = comparison(3 * 2**20)
    assert {row.strategy.value for row in rows if row.result is None} >= {"ddp"}
    lines = rendered(comparison_table(rows, 3 * 2**20))
    assert_whole(lines)
    text = "\n".join(lines)
    for row in rows:
        (line,) = [line for line in lines if line.split()[:1] == [row.strategy.value]]
        assert (row.reason in line) if row.result is None else (f"{row.result.plan.samples_per_s:.1f}" in line)
    assert "limit 3.0 MiB" in text


def test_comparison_gives_the_gain_of_osdp_over_each_that_fits():
    rows = comparison(2**40)
    lines = rendered(comparison_table(rows, 2**40))
    osdp = rows[0].result.plan.samples_per_s
    for row in rows[1:]:
        (line,) = [line for line in lines if line.split()[:1] == [row.strategy.value]]
        assert line.rstrip().endswith(f"{osdp / row.result.plan.samples_per_s:.2f}x")


def test_comparison_where_nothing_fits_has_no_numbers():
    rows = comparison(1000)
    assert all(row.result is None and row.reason.startswith("needs ") for row in rows)
    lines = rendered(comparison_table(rows, 1000))
    assert_whole(lines)
    assert not [line for line in lines if line.rstrip().endswith("x")]


def test_outcome_sets_estimate_beside_measurement():
    table = outcome_table(estimated_peak=3 * 2**20, measured_peak=2 * 2**20, estimated_step_s=0.5, measured_step_s=None)
    lines = rendered(table)
    assert_whole(lines)
    peak, step = (next(line for line in lines if line.startswith(name)).split() for name in ("peak memory", "step time"))
    assert peak[2:] == ["3.0", "MiB", "2.0", "MiB", "1.50"]
    assert step[2:] == ["500.0", "ms", "-", "-"]
    assert not [line for line in lines if line.startswith("peak reserved")]


def test_outcome_has_reserved_memory_where_it_is_known():
    table = outcome_table(
        estimated_peak=1, measured_peak=1, estimated_step_s=None, measured_step_s=None,
        estimated_reserved=4 * 2**20, measured_reserved=5 * 2**20,
    )  # fmt: skip
    (row,) = (line.split() for line in rendered(table) if line.startswith("peak reserved"))
    assert row[2:] == ["4.0", "MiB", "5.0", "MiB", "0.80"]
