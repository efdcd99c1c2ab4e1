"""Checkpoints go over between plans, numbers of ranks and ways of writing; in float64 against one process that is never interrupted."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from hf_osdp.checkpoint.finding import last_checkpoint
from hf_osdp.checkpoint.loop import load_loop, save_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.errors import CheckpointError
from hf_osdp.profiling.units import find_units
from hf_osdp.runtime.apply import apply_plan
from hf_osdp.runtime.mesh import Meshes
from hf_osdp.runtime.state import full_state_dict
from tests.helpers.checkpointed import Leg, folders, run_leg, trained_step, uninterrupted, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model

CHAINS = {
    "4 replicated, 2 sharded, 1 alone, 4 of every kind": [
        (4, Leg(steps=2, layout="replicate", in_background=True)),
        (2, Leg(steps=2, layout="zero3", sharded=False)),
        (1, Leg(steps=1, layout=None)),
        (4, Leg(steps=2, layout="everything")),
    ],
    "4 in groups, 2 in slices, 1 in slices, 2 on the host": [
        (4, Leg(steps=1, layout="hsdp", sharded=False)),
        (2, Leg(steps=2, layout="mixed", slices=4)),
        (1, Leg(steps=1, layout=None, slices=2, sharded=False)),
        (2, Leg(steps=1, layout="everything", slices=2)),
    ],
}


def run_chain(parent: Path, chain: list[tuple[int, Leg]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One leg after the other, each in processes of its own."""
    losses, weights = [], {}
    places = folders(parent, [leg for _, leg in chain])
    for number, (world, leg) in enumerate(chain):
        arguments = (leg, places[number], places[number + 1], number)
        ranks = [run_leg(*arguments)] if leg.layout is None else run_ranks(run_leg, world, *arguments)
        assert len({tuple(each) for each, _ in ranks}) == 1, "ranks disagree"
        losses += ranks[0][0]
        weights = ranks[0][1]
        manifest = json.loads((Path(places[number + 1]) / "osdp_checkpoint.json").read_text())
        assert manifest["world_size"] == (1 if leg.layout is None else world)
    assert last_checkpoint(parent) == Path(places[-1])
    assert not [path for path in parent.iterdir() if path.name.startswith(".")]
    return losses, weights


@pytest.mark.parametrize("name", CHAINS)
def test_a_trajectory_goes_on_as_in_one_process(tmp_path, name):
    losses, weights = run_chain(tmp_path, CHAINS[name])
    want, want_weights = uninterrupted(len(losses))
    assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-12
    assert worst(weights, want_weights) < 1e-12


# ------------------------------------------------------------------------------------------------- states that are not there


def odd_states(folder: str) -> dict[str, object]:
    """A parameter that never has a gradient; a checkpoint before the first step; another optimizer's state."""
    errors: dict[str, object] = {}
    kinds = {
        "AdamW": torch.optim.AdamW, "momentum": partial(torch.optim.SGD, momentum=0.9), "plain": torch.optim.SGD,
        "AMSGrad": partial(torch.optim.AdamW, amsgrad=True),
    }  # fmt: skip
    for (name, kind), sharded in product(kinds.items(), (True, False)):
        model, plan = unused_in(0)
        optimizer = kind(model.parameters(), lr=0.1)
        place = Path(folder) / f"{name}-{sharded}"
        save_loop(CheckpointWriter(), f"{place}-0", model, optimizer, others={}, progress={}, sharded=sharded, plan=None)
        errors[f"{name}, nothing is saved"] = len(optimizer.state)
        stepped_in(model, optimizer, plan, 0)
        save_loop(CheckpointWriter(), f"{place}-1", model, optimizer, others={}, progress={}, sharded=sharded, plan=None)
        stepped_in(model, optimizer, plan, 1)
        for start in (0, 1):
            other, _ = unused_in(1)
            its = kind(other.parameters(), lr=0.3)
            load_loop(f"{place}-{start}", other, its, others={})
            for step in range(start, 2):
                stepped_in(other, its, plan, step)
            ours, theirs = full_state_dict(model), full_state_dict(other)
            errors[f"{name} {sharded} from {start}"] = worst(theirs, ours) if ours else 0.0
    with pytest.raises(CheckpointError) as raised:
        load_loop(f"{folder}/AdamW-False-1", other, its, others={})
    return {**errors, "line": str(raised.value)}


def unused_in(seed: int):
    """A model with a projection that forward does not use."""
    model = tiny_model("gpt2", seed=seed, layers=1)
    model.transformer.unused = torch.nn.Linear(3, 5).double()
    units = find_units(model)
    plan = plan_of(units, 2, "mixed")
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    return model, plan


def stepped_in(model, optimizer, plan, step: int) -> None:
    trained_step(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0), step, plan)


def test_what_has_no_state_gets_none(tmp_path):
    found = run_ranks(odd_states, 2, str(tmp_path))
    for rank in found:
        assert "is not of this model (The optimizer's state of " in rank["line"] and "this optimizer's is" in rank["line"]
        assert {name: error for name, error in rank.items() if name != "line" and error != 0} == {}
