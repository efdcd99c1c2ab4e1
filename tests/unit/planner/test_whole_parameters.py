"""Optimizers that need whole parameters: what the planner offers, counts and says."""

from dataclasses import replace

import pytest

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.description import DType, ModelDescription, ParameterSpec
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.optimizers import ADAFACTOR
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.planner.search.search import search
from hf_osdp.planner.search.strategies import batches, search_spaces
from hf_osdp.planner.training_job import OptimizerSpec, TrainingJob
from tests.helpers.descriptions import transformer, with_frozen
from tests.helpers.hardware import toy_hardware
from tests.helpers.problems import problem

JOB = TrainingJob(global_batch_size=4, optimizer=ADAFACTOR)


def devices() -> Hardware:
    return toy_hardware(1, 4, intra=(1e-6, 1e8))


def partly_frozen() -> ModelDescription:
    """A decoder whose first two blocks are frozen."""
    whole = transformer()
    frozen = {f"layers.{i}" for i in range(2)}
    return replace(whole, units=tuple(with_frozen(unit) if unit.fqn in frozen else unit for unit in whole.units))


def test_search_offers_replicas_of_trained_every_layout_of_frozen():
    case = problem(partly_frozen(), devices(), JOB)
    for batch in batches(JOB, 4):
        for space in search_spaces(case, batch):
            for unit, layouts in zip(case.description.units, space, strict=True):
                sizes = {layout.shard_size for layout in layouts}
                assert sizes == ({1} if unit.trainable_numel else {1, 2, 4})


def test_strategies_that_shard_are_refused_and_have_no_figures():
    case = problem(transformer(), devices(), JOB)
    for strategy in (Strategy.FSDP, Strategy.ZERO2, Strategy.HSDP):
        with pytest.raises(ValueError, match=f"^strategy={strategy.value} shards parameters"):
            search(replace(case, strategy=strategy))
    rows = {row.label: row for row in compare_strategies(case)}
    assert rows["ddp"].result is not None and rows["fsdp"].reason == "adafactor needs whole parameters"
    alone = replace(case, hardware=toy_hardware(1, 1, intra=(1e-6, 1e8)), strategy=Strategy.FSDP)
    assert search(alone).plan.world_size == 1


def test_infeasible_error_names_element_wise_optimizers():
    job, model = JOB, transformer(layers=6, hidden=128)
    with pytest.raises(InfeasibleError) as sharded:
        search(problem(model, devices(), replace(job, optimizer=OptimizerSpec()), 1))
    limit = sharded.value.least_peak_bytes + 2**12
    with pytest.raises(InfeasibleError, match="an element-wise optimizer"):
        search(problem(model, devices(), job, limit))


@pytest.mark.parametrize(("shape", "dtype", "nbytes"), [
    ((8, 6), DType.FLOAT32, 4 * 14), ((8, 6, 4), DType.BFLOAT16, 4 * (48 + 32)), ((8, 6), DType.FLOAT64, 8 * 14),
    ((7,), DType.BFLOAT16, 4 * 7), ((), DType.FLOAT32, 4), ((0, 3), DType.FLOAT32, 0),
])  # fmt: skip
def test_factored_states_take_a_row_and_a_column(shape, dtype, nbytes):
    parameter = ParameterSpec(name="p", shape=shape, dtype=dtype)
    assert ADAFACTOR.state_bytes(parameter, 1) == ADAFACTOR.saved_bytes(parameter) == nbytes
