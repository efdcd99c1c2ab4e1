"""Counts, sizes and rates that nobody has are refused where values are made, before anything is as large."""

import time
from dataclasses import replace

import pytest

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.split import ModelSplit, OperatorSplit
from hf_osdp.planner.training_job import TrainingJob, divisors
from tests.helpers.descriptions import at_random
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

JOB = TrainingJob(global_batch_size=4)


def test_large_numbers_take_no_time():
    start = time.monotonic()
    assert len(divisors(2**40)) == 41 and divisors(2**40 - 87)[-1] == 2**40 - 87
    assert TrainingJob(global_batch_size=2**40).micro_batch_sizes(8)[0] == 2**37
    names = [OperatorSplit(fqn=f"m{i}", slices=2) for i in range(20_000)]
    with pytest.raises(ValueError, match="'m7' is split 2 times"):
        ModelSplit(sliced=(*names, names[7]))
    assert time.monotonic() - start < 5


def test_search_never_solves_for_options_that_no_device_holds():
    """The solver's whole numbers have 63 bits."""
    model, hardware = at_random(3, kinds=1, blocks=3, recomputable=True), bare_preset("v100-16")
    huge = tuple(replace(s, saved_bytes=Affine(per_sample=1e30)) if s.recomputed else s for s in model.segments)
    least = least_memory(problem(model, hardware, JOB))
    found = search(problem(replace(model, segments=huge), hardware, JOB, 2 * least))
    blocks = [unit for unit in found.plan.units if unit.fqn.startswith("b")]
    assert blocks and all(unit.activations == Activations.RECOMPUTE for unit in blocks)
