"""What must be true of searches on a transformer: extremes, monotony, known strategies found again, true errors."""

import itertools
import re
from dataclasses import replace
from functools import cache

import pytest

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.hardware import Backend, Hardware
from hf_osdp.planner.optimizers import LOW_BIT
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.planner.search.search import SearchResult, least_memory, search
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.quantities import parse_bytes
from tests.helpers.descriptions import linear_envelope, transformer
from tests.helpers.hardware import toy_hardware
from tests.helpers.problems import problem
from tests.helpers.sampling import slow_but

AMPLE = 10**12
JOB = TrainingJob(global_batch_size=8)
MODEL = transformer(layers=6)


def machine(backend, nodes=1, devices_per_node=4, *, flops_per_s=1e12, inter=1e7, hop_s=1e-6):
    """Devices whose copies and updates cost next to nothing, so that links and overlap decide."""
    return toy_hardware(
        nodes, devices_per_node, memory_bytes=AMPLE, flops_per_s=flops_per_s, memory_bytes_per_s=1e12,
        intra=(hop_s, 1e8), inter=(10 * hop_s, inter), backend=backend, margin=0.0,
    )  # fmt: skip


MACHINES = {
    "4 x gloo": machine(Backend.GLOO), "4 x nccl": machine(Backend.NCCL), "2 x 2 gloo": machine(Backend.GLOO, 2, 2),
    "2 x 2 nccl": machine(Backend.NCCL, 2, 2),
    "2 x 2 nccl, slow compute": machine(Backend.NCCL, 2, 2, flops_per_s=1e10),
}  # fmt: skip
NAMES = tuple(MACHINES)


@cache
def infeasible(name: str, strategy: Strategy = Strategy.OSDP, limit: int = 1) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        search(problem(MODEL, MACHINES[name], JOB, limit, strategy=strategy))
    return caught.value


@pytest.mark.slow
def test_more_memory_gives_a_deep_model_a_faster_plan():
    """Rows are counts there: what OR-tools' implied bounds once called infeasible was not."""
    from transformers import GPT2Config

    from hf_osdp.tracing.describe import describe

    config = GPT2Config(n_layer=128, n_embd=25600, n_head=160, n_positions=2048)
    options = {"compute_dtype": DType.BFLOAT16, "device_type": "cuda", "recomputation": True}
    model = describe(config, sequence_length=2048, **options)
    hardware = preset("h100", nodes=128, devices_per_node=8)
    job = TrainingJob(global_batch_size=2048, precision=Precision.named("bf16"))
    least = least_memory(problem(model, hardware, job))
    factors = (1.05, 1.2, 1.5, 2, 3, 5, 10)
    times = [search(problem(model, hardware, job, int(least * factor))).plan.step_s for factor in factors]
    assert all(after < before for before, after in itertools.pairwise(times)), times


def with_costly_loss() -> ModelDescription:
    """The model with a forward peak at the head: there, every unit that is kept or replicated counts in full."""
    *segments, head = MODEL.segments
    forward = replace(head.forward, peak_bytes=linear_envelope(per_sample=4 * 10**6))
    return replace(MODEL, segments=(*segments, replace(head, forward=forward)))


MICRO_STEPS = TrainingJob(global_batch_size=64, micro_batch_size=1, reduce_every_micro_step=True)
SINGLE = {
    # what is sharded is gathered in each of 16 micro-steps, which nothing hides; replicas are reduced once
    Strategy.DDP: machine(Backend.NCCL, flops_per_s=1e18),
    # hops cost nothing, so that an all-gather with a reduce-scatter sends what an all-reduce does, and the update is
    # cut in 4
    Strategy.ZERO2: machine(Backend.NCCL, flops_per_s=1e18, hop_s=0.0),
    # the memory for it is the least that will do
    Strategy.FSDP: machine(Backend.NCCL),
    # the same micro-steps, and not enough memory for replicas: between nodes only the all-reduce of a half, once
    Strategy.HSDP: machine(Backend.NCCL, 2, 2, inter=1e6),
}


def job_where(strategy: Strategy) -> TrainingJob:
    """The job for which the strategy is the best on its machine."""
    return MICRO_STEPS if strategy in (Strategy.DDP, Strategy.HSDP) else TrainingJob(global_batch_size=4)


@pytest.mark.parametrize("strategy", SINGLE)
def test_single_strategy_is_found_again_where_it_is_best(strategy):
    description, hardware, job = with_costly_loss(), SINGLE[strategy], job_where(strategy)
    single = search(problem(description, hardware, job, AMPLE, strategy=strategy))
    found = search(problem(description, hardware, job, single.plan.peak_bytes))
    assert found.plan.units == single.plan.units
    assert found.plan.step_s == pytest.approx(single.plan.step_s, rel=1e-12)
    assert found.plan.peak_bytes == single.plan.peak_bytes
    rows = list(compare_strategies(problem(description, hardware, job, single.plan.peak_bytes)))[1:]
    others = [row for row in rows if row.strategy is not strategy]
    assert all(row.result is None or row.result.plan.step_s > single.plan.step_s for row in others)


PAIRS = [(s, n) for s in Strategy for n in NAMES if s is not Strategy.TWO_STAGE or n.startswith("2 x")]
RUNNING = slow_but(
    PAIRS, daily=[(s, n) for s, n in PAIRS if n == "2 x 2 nccl" or (s, n) == (Strategy.OSDP, "4 x gloo")]
)
"""Two stages need several nodes."""


def apply_remedy(remedy: str, limit: int, hardware: Hardware, strategy: Strategy) -> SearchResult | None:
    """Search with the one change; None where it is to the model or its precision, which need another trace."""
    if remedy.startswith("strategy osdp"):
        return search(problem(MODEL, hardware, JOB, limit))
    if match := re.fullmatch(r"(\d+) devices(?: with a global batch of (\d+))?", remedy):
        more = hardware.scaled(nodes=int(match.group(1)) // hardware.devices_per_node)
        job = replace(JOB, global_batch_size=int(match.group(2) or JOB.global_batch_size))
        return search(problem(MODEL, more, job, limit, strategy=strategy))
    if match := re.fullmatch(r"a memory limit of (.*)", remedy):
        return search(problem(MODEL, hardware, JOB, parse_bytes(match.group(1)), strategy=strategy))
    if remedy == "states of 8 bits (optim='adamw_torch_8bit')":
        return search(problem(MODEL, hardware, replace(JOB, optimizer=LOW_BIT["adamw8bit"]), limit, strategy=strategy))
    assert re.match(r"mixed_precision bf16|sequence length \d+", remedy), remedy
    return None


@pytest.mark.parametrize("strategy, name", RUNNING)
def test_infeasible_error_gives_the_tightest_limit_and_true_remedies(name, strategy):
    least = infeasible(name, strategy).least_peak_bytes
    assert search(problem(MODEL, MACHINES[name], JOB, least, strategy=strategy)).plan.peak_bytes == least
    limit, error = least - 1, infeasible(name, strategy, least - 1)
    assert (error.least_peak_bytes, error.memory_limit_bytes) == (least, limit)
    assert any([apply_remedy(remedy, limit, MACHINES[name], strategy) for remedy in error.remedies])  # none raises
    assert all(remedy in str(error) for remedy in error.remedies)
    assert "\n" not in str(error)
    if strategy is not Strategy.OSDP and limit >= infeasible(name).least_peak_bytes:
        assert error.remedies[0].startswith("strategy osdp")
