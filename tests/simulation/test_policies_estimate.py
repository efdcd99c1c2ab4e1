"""The estimate of plans that recompute, offload, split or freeze, against FSDP2's step on fake tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from hf_osdp.planner.description import GatherSpan
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.split import ModelSplit, OperatorSplit
from hf_osdp.planner.training_job import OptimizerStep
from tests.helpers.sampling import slow_but
from tests.helpers.simulation import Trial

SAVE, RECOMPUTE, OFFLOAD, RECOMPUTE_OFFLOAD = Activations.BASIC
GPT2 = Trial(model="small gpt2", length=64, samples=1)
LLAMA = replace(GPT2, model="small llama")
WHOLE = replace(GPT2, split=ModelSplit(operators=True))
MLPS = {
    "small gpt2": ("transformer.h", ("c_fc", "c_proj")),
    "small llama": ("model.layers", ("gate_proj", "up_proj", "down_proj")),
}


def mlp_slices(trial: Trial, slices: int, **more) -> Trial:
    """Operator units, with the operators of each MLP in slices, so that attention can still be recomputed."""
    block, operators = MLPS[trial.model]
    names = (f"{block}.{i}.mlp.{operator}" for i, operator in product(range(2), operators))
    mlps = tuple(OperatorSplit(fqn=fqn, slices=slices) for fqn in names)
    return replace(trial, split=ModelSplit(operators=True, sliced=mlps), **more)


def loss_chunks(trial: Trial, **more) -> Trial:
    return replace(trial, split=ModelSplit(loss_chunks=8), **more)


EVERY_WAY = {"samples": 4, "steps": 3, "activations": (RECOMPUTE,), "on_host": (False, True, False)}
DAILY = [
    replace(GPT2, layout="mixed", samples=8, activations=(RECOMPUTE, SAVE)),
    loss_chunks(replace(GPT2, model="bert"), samples=8, device_type="cpu"),  # the head's weight is read elsewhere, too
    # its blocks reduce little, so that the peak is where the next unit is gathered in forward
    replace(GPT2, model="frozen", length=8),
]
SLOW = [
    mlp_slices(LLAMA, 2, layout="mixed", hold=(False, True), **EVERY_WAY),
    mlp_slices(GPT2, 4, layout="mixed", samples=8),
    loss_chunks(LLAMA, samples=8, layout="mixed", precision="bf16"),
    loss_chunks(replace(GPT2, model="t5"), samples=8, precision="bf16"),
    replace(LLAMA, layout="mixed", precision="bf16", activations=(RECOMPUTE,)),
    replace(WHOLE, layout="mixed", samples=8, activations=(RECOMPUTE,)),
    replace(GPT2, model="frozen", length=8, layout="mixed", activations=(RECOMPUTE,)),
]


@pytest.mark.parametrize("trial", slow_but([*DAILY, *SLOW], daily=DAILY), ids=str)
def test_peak_of_each_way_to_fit(trial):
    trial.check(under=0.005, over=0.03)


JOINED = [
    Trial(model=model, layout=layout, length=32, precision=precision, split=ModelSplit(blocks_per_unit=blocks), **ways)
    for model, layout, precision, blocks, ways in (
        ("llama", "zero3", "bf16", 2, {"activations": (RECOMPUTE,)}),
        ("gpt2", "mixed", "no", 3, {}),
        ("llama", "zero3", "no", 4, {}),
        ("llama", "zero2", "bf16", 2, {"steps": 2}),
        ("bert", "hsdp", "bf16", 2, {"steps": 2}),
        ("bert", "ddp", "bf16", 3, {"steps": 2}),
        ("dropout", "zero3", "no", 3, {}),
        ("dropout", "mixed", "bf16", 2, {"activations": (SAVE, RECOMPUTE)}),
    )
]


@pytest.mark.parametrize("trial", slow_but(JOINED, daily=JOINED[:2]), ids=str)
def test_peak_of_several_blocks_in_a_unit(trial):
    assert any(len(unit.module_names) > 1 and unit.span is GatherSpan.USE for unit in trial.description.units)
    trial.check(under=0.005, over=0.03)


AWAY = [
    replace(LLAMA, layout="mixed", steps=3, precision="bf16", activations=(OFFLOAD, RECOMPUTE_OFFLOAD)),
    replace(GPT2, layout="mixed", steps=3, activations=(RECOMPUTE_OFFLOAD,)),
    replace(GPT2, layout="mixed", samples=8, precision="bf16", activations=(SAVE, OFFLOAD)),
]


@pytest.mark.parametrize("trial", slow_but(AWAY, daily=AWAY[:1]), ids=str)
def test_peaks_of_device_and_host_with_activations_there(trial):
    """Over by one hidden state, 1.2 % of a model as small: its forward holds the first block's input until it ends."""
    estimate, simulated = trial.check(under=0.005, over=0.015)
    if OFFLOAD in trial.activations:  # how many tensors share the bytes is not known, and each takes a power of two
        assert simulated.host_bytes <= estimate.host_bytes <= 2.1 * simulated.host_bytes
    else:
        assert estimate.host_bytes == simulated.host_bytes > 0


STATES = Trial(length=64, samples=1, on_host=(True,))
OF_STATES = [
    replace(STATES, model="llama", layout="ddp", world=1, precision="bf16"),
    replace(STATES, model="llama", layout="hsdp", on_host=(False, True)),
    replace(STATES, world=2, optimizer=OptimizerStep.FOREACH),  # the host takes the optimizer's scratch
]


@pytest.mark.parametrize("trial", slow_but(OF_STATES, daily=OF_STATES[1:2]), ids=str)
def test_peaks_of_device_and_host_with_states_there(trial):
    estimate, simulated = trial.check(under=0.005, over=0.01)
    assert -0.005 <= estimate.host_bytes / simulated.host_bytes - 1 <= 0.01


@pytest.mark.parametrize(("hold", "layout"), slow_but(product([True, False], ["ddp", "zero3"]), [(True, "zero3")]))
def test_peaks_with_accumulation_and_states_on_the_host(hold, layout):
    replace(STATES, layout=layout, world=4, steps=3, hold=(hold,)).check(under=0.005, over=0.03)


OPTIMIZER_AWAY = [
    replace(LLAMA, layout="mixed", precision="bf16", states_on_host=(True, False), optimizer=OptimizerStep.FOREACH),
    replace(LLAMA, states_on_host=(True, False, False), hold=(True,), **{**EVERY_WAY, "activations": (SAVE,)}),
]


@pytest.mark.parametrize("trial", slow_but(OPTIMIZER_AWAY, daily=OPTIMIZER_AWAY[:1]), ids=str)
def test_peak_where_optimizer_states_wait_on_the_host(trial):
    estimate, simulated = trial.check(under=0.005, over=0.03)
    assert estimate.host_bytes == pytest.approx(simulated.host_bytes, rel=0.01)
    assert simulated.peak_bytes < replace(trial, states_on_host=(False,)).run()[1].peak_bytes
