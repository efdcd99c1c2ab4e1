"""What-if questions: changed problems, longer configurations, and the bisection for the largest size."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from transformers import GPT2Config, RobertaConfig, ViTConfig

from hf_osdp.cli import what_if
from hf_osdp.cli.cases import Case
from hf_osdp.cli.options import Request
from hf_osdp.cli.output import Output
from hf_osdp.cli.what_if import OtherLengths, _asked, answered, largest, needed_bytes, one_more_device
from hf_osdp.planner.hardware import Collective, CollectiveTiming
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem, Strategy
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.report.tables import Answer, what_if_table
from hf_osdp.tracing.describe import describe
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

FOUR = bare_preset("titan-rtx", devices_per_node=4)
PROBLEM = problem(transformer(), FOUR, TrainingJob(global_batch_size=32))
PROBLEM = replace(PROBLEM, memory_limit_bytes=2 * least_memory(PROBLEM))
TIMING = CollectiveTiming(collective=Collective.ALL_GATHER, group_size=4, latency_s=1e-5, seconds_per_byte=1e-10)
CONFIGS = {
    "gpt2": GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=100, n_positions=16),
    "roberta": RobertaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=80,
                             vocab_size=100, max_position_embeddings=18),
    "vit": ViTConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=64, image_size=32),
}  # fmt: skip


GROWTHS = {
    "in proportion": lambda size: size, "slowly above much": lambda size: 10_000 + size,
    "by its square": lambda size: size**2 + 5 * size, "by its root": lambda size: size**0.5,
    "in pages": lambda size: size // 100 * 100, "as all or nothing": lambda size: 0,
}  # fmt: skip


@pytest.mark.parametrize("growth", GROWTHS)
def test_largest_is_within_its_precision_and_asks_few_sizes_once(growth):
    for target, start, step, most in itertools.product([0, 3, 64, 65, 1000, 5000], [1, 64, 1000], [1, 8], [40, 4000]):
        asked, bytes_of = [], GROWTHS[growth]

        def needed(size):
            asked.append(size)  # noqa: B023
            return bytes_of(size) if size <= target or growth == "in proportion" else math.inf  # noqa: B023

        found = largest(needed, bytes_of(target), max(step, start // step * step), step=step, most=most)
        best = min(target, most) // step * step
        assert (found or 0) <= best and best - (found or 0) <= max(step, (found or 0) // 16)
        assert (found is None) == (best == 0)
        assert all(size % step == 0 and 0 < size <= most for size in asked)
        assert len(set(asked)) == len(asked) <= 24


@pytest.mark.parametrize(("growth", "most"), [("in proportion", 3), ("slowly above much", 3), ("by its square", 7)])
def test_largest_asks_few_sizes_where_bytes_grow_smoothly(growth, most):
    asked, bytes_of = [], GROWTHS[growth]
    found = largest(lambda size: asked.append(size) or bytes_of(size), bytes_of(11800), 1024, step=64, most=2**20)
    assert 11800 * 15 / 16 <= found <= 11800 and len(asked) <= most


@pytest.mark.parametrize(
    ("hardware", "batch", "micro", "words", "raised"),
    [
        (FOUR, 32, None, "5 devices, global batch raised from 32 to 35", 35),
        (FOUR, 64, 16, "5 devices, global batch raised from 64 to 80", 80),
        (bare_preset("titan-rtx", nodes=3), 24, None, "4 nodes x 2 devices", 24),
        (replace(FOUR, timings=(TIMING,)), 30, None, "5 devices, links' rates in place of measured collectives", 30),
    ],
)
def test_one_more_device_fills_micro_steps_and_says_what_changes(hardware, batch, micro, words, raised):
    job = TrainingJob(global_batch_size=batch, micro_batch_size=micro)
    asked = one_more_device(replace(PROBLEM, hardware=hardware, job=job))
    changed = asked.problem
    assert asked.change == words and changed.job == replace(job, global_batch_size=raised)
    assert not changed.hardware.timings
    assert changed.job.micro_batch_sizes(changed.hardware.world_size)
    asked = replace(PROBLEM, hardware=preset("titan-rtx").with_margin(0.5))
    assert one_more_device(asked).problem.hardware == preset("titan-rtx", devices_per_node=2).with_margin(0.5)


def test_question_that_cannot_be_asked_is_a_row_with_the_reason():
    unknown = replace(FOUR.intra_node, assumed=True)  # as of a machine that one process measured
    alone = replace(FOUR, devices_per_node=1, intra_node=unknown, inter_node=unknown)
    row = answered(_asked(one_more_device, replace(PROBLEM, hardware=alone)))
    assert (row.question, row.plan) == ("one more device", None) and "is not known" in row.reason, row.reason


def test_answer_is_the_search_or_what_it_would_need():
    row = answered(Answer(question="now", change="", problem=PROBLEM))
    assert row.plan == search(PROBLEM).plan
    assert row.tokens_per_s == pytest.approx(row.plan.samples_per_s * PROBLEM.description.sequence_length)
    row = answered(Answer(question="now", change="", problem=replace(PROBLEM, memory_limit_bytes=1000)))
    assert row.plan is None and row.tokens_per_s is None and row.reason.startswith("needs ")
    assert "group size" in answered(one_more_device(replace(PROBLEM, strategy=Strategy.HSDP))).reason
    nothing = Answer(question="longest sequence", change="", reason="not even 64 tokens fit")
    assert answered(nothing) is nothing
    needed = int(needed_bytes(PROBLEM))
    assert search(replace(PROBLEM, memory_limit_bytes=needed)).peak_bytes <= needed <= 1.02 * least_memory(PROBLEM)
    five = bare_preset("titan-rtx", devices_per_node=5)
    assert needed_bytes(replace(PROBLEM, strategy=Strategy.HSDP, hardware=five)) == math.inf


def test_rows_appear_as_they_are_found(capsys):
    screen, seen = Output(), []

    def rows():
        for name in ("now", "one more device", "twice the memory"):
            yield answered(Answer(question=name, change="a change", problem=PROBLEM))
            seen.append(capsys.readouterr().out)

    assert len(screen.growing(what_if_table, rows())) == 3
    first, *others = seen
    assert first.splitlines()[-1].split()[0] == "now" and "change" in first
    assert [one.strip().split("  ")[0] for one in others] == ["one more device", "twice the memory"]
    with screen.console.capture() as whole:
        screen.print(what_if_table(list(rows())))
    assert "".join((first, *others)).split() == whole.get().split()


def test_with_positions_raises_and_never_lowers():
    config = CONFIGS["gpt2"]
    assert what_if.position_names(config) == ("n_positions",)
    assert what_if.with_positions(config, 64).n_positions == 64
    assert what_if.with_positions(config, 8).n_positions == 16 == config.n_positions


def lengths_of(config) -> tuple[OtherLengths, PlanningProblem]:
    sizes = {"sequence_length": 16, "global_batch_size": 2, "device": "titan-rtx", "memory_limit": "1GiB"}
    case = Case(Request.of(model="none", **sizes))
    case.model_config = config
    return OtherLengths(case), case.found.problem


@pytest.mark.slow
def test_longest_sequence_raises_positions_and_says_so(monkeypatch):
    monkeypatch.setattr(what_if, "_LONGEST", 64)
    lengths, problem = lengths_of(CONFIGS["roberta"])  # which counts positions from after its padding index
    row = answered(lengths.longest_sequence(problem))
    assert row.plan.sequence_length == 64
    assert row.change == "64 tokens or more, max_position_embeddings raised to it"
    with pytest.raises(ValueError, match="positions"):
        describe(CONFIGS["roberta"], sequence_length=64)


@pytest.mark.slow
def test_model_without_tokens_has_no_longest_sequence():
    lengths, problem = lengths_of(CONFIGS["vit"])
    row = answered(lengths.longest_sequence(problem))
    assert row.plan is None and "do not depend on it" in row.reason
