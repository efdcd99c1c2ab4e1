"""Gradients of replicas on several machines are reduced beside backward over gloo: the same training, and nothing is read too early."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.distributed.replicas import Background, Replicas
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import assert_trained_alike, train_sharded

NAME = "reduce between replicas"


@contextmanager
def late_reductions() -> Iterator[list[str]]:
    """Yield the names of the threads that reduced, each 20 ms late, so that what is read too early is wrong."""
    ran: list[str] = []
    stock = Replicas._reduce

    def reduce(replicas, tensor, operation):
        time.sleep(0.02)
        stock(replicas, tensor, operation)
        ran.append(threading.current_thread().name)

    Replicas._reduce = reduce
    try:
        yield ran
    finally:
        Replicas._reduce = stock


def test_background_runs_in_order_and_raises_what_was_raised_first():
    background, ran = Background(), []

    def fail() -> None:
        raise ValueError("first")

    background.wait()
    for function in (lambda: time.sleep(0.05), lambda: ran.append(1), fail, lambda: ran.append(2)):
        background.run(function)
    with pytest.raises(ValueError, match="first"):
        background.wait()
    assert ran == [1, 2]
    background.run(lambda: ran.append(3))
    background.wait()
    assert ran == [1, 2, 3]


def laid_out(layout: str, *, steps: int = 1, beside: bool = True) -> tuple[torch.nn.Module, Plan]:
    """A model in float32: FSDP2 divides float64 after the reduction, which therefore ends at once."""
    model, meshes = tiny_model("gpt2").float(), Meshes("cpu")
    meshes.__dict__["reduces_beside"] = beside
    units = find_units(model)
    plan = plan_of(units, 4, layout, accumulation_steps=steps)
    apply_plan(model, plan, units, meshes=meshes)
    return model, plan


def test_wait_after_an_interrupted_one_waits_for_the_same_functions():
    background, ran = Background(), []
    background.run(lambda: (time.sleep(0.5), ran.append(1)))
    threading.Timer(0.1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    background.wait()
    assert ran == [1]


@pytest.mark.on_ranks(4, nodes=2)
def test_training_with_reductions_beside_backward_is_the_same_to_the_bit():
    for layout, steps in (("replicate", 1), ("hsdp", 2), ("mixed", 1)):
        with late_reductions() as threads:
            found = train_sharded(*laid_out(layout, steps=steps), steps=3)
        assert set(threads) == {NAME}
        at_once = train_sharded(*laid_out(layout, steps=steps, beside=False), steps=3)
        assert_trained_alike(found, lambda at_once=at_once: at_once, tolerance=1e-300)
        assert len(set(found.losses)) > 1


@pytest.mark.on_ranks(4, nodes=2)
def test_gradients_that_are_added_up_are_not_read_before_they_are_reduced():
    """Two backwards without `no_sync`: FSDP2 adds the second's gradients to the first's, so those are reduced at once."""

    def gradients(*, beside: bool) -> list[torch.Tensor]:
        model, _ = laid_out("hsdp", beside=beside)
        for step in range(2):
            tiny_loss(model, tiny_batch(step, part=dist.get_rank(), parts=4)).backward()
        return [parameter.grad.to_local() for parameter in model.parameters()]

    with late_reductions() as threads:
        found = gradients(beside=True)
    assert len(threads) == 2 * threads.count(NAME) > 0
    assert all(torch.equal(*pair) for pair in zip(found, gradients(beside=False), strict=True))


@pytest.mark.on_ranks(4, nodes=2)
def test_error_of_a_reduction_is_raised_by_backward():
    def fail(replicas, tensor, operation):
        raise RuntimeError("the link is gone")

    model, _ = laid_out("replicate")
    stock, Replicas._reduce = Replicas._reduce, fail
    try:
        with pytest.raises(RuntimeError, match="the link is gone"):
            tiny_loss(model, tiny_batch(0, part=dist.get_rank(), parts=4)).backward()
    finally:
        Replicas._reduce = stock
