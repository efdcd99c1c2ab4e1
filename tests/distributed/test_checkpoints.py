"""Checkpoints go over between plans, numbers of ranks and ways of writing; in float64 against one process that is never interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_osdp.checkpoint.folders import last_checkpoint
from tests.helpers.checkpointed import Leg, folders, run_leg, uninterrupted, worst
from tests.helpers.distributed import run_ranks

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
