"""Checkpoints go over between plans, numbers of ranks and ways of writing, in float64."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_osdp.checkpoint.resume import checkpoint_to_resume, last_checkpoint
from hf_osdp.checkpoint.states import load_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import CheckpointError
from hf_osdp.modeling.units import find_units
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.state import full_state_dict
from tests.helpers.checkpointed import Leg, folders, run_leg, save_loop, trained_step, uninterrupted, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model
from tests.helpers.sampling import slow_but

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
        ranks = [run_leg(*arguments)] if leg.layout is None else run_ranks(run_leg, world, *arguments, shared=True)
        assert len({tuple(each) for each, _ in ranks}) == 1, "ranks disagree"
        losses += ranks[0][0]
        weights = ranks[0][1]
        manifest = json.loads((Path(places[number + 1]) / "osdp_checkpoint.json").read_text())
        assert manifest["world_size"] == (1 if leg.layout is None else world)
    assert last_checkpoint(parent) == Path(places[-1])
    assert [path.name for path in parent.glob(".*/*")] == ["training.json"]
    return losses, weights


@pytest.mark.parametrize("name", slow_but(CHAINS, daily=list(CHAINS)[:1]))
def test_trajectory_goes_on_as_in_one_process(tmp_path, name):
    losses, weights = run_chain(tmp_path, CHAINS[name])
    want, want_weights = uninterrupted(len(losses))
    assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-12
    assert worst(weights, want_weights) < 1e-12


def odd_states(folder: str) -> dict[str, object]:
    """A parameter that never has a gradient; a checkpoint before the first step; another optimizer's state."""
    found: dict[str, object] = {}
    kinds = {
        "AdamW": torch.optim.AdamW, "momentum": partial(torch.optim.SGD, momentum=0.9), "plain": torch.optim.SGD,
        "AMSGrad": partial(torch.optim.AdamW, amsgrad=True),
    }  # fmt: skip
    ways = (("AdamW", True), ("AdamW", False), ("momentum", True), ("plain", False), ("AMSGrad", True))
    for name, sharded in ways:
        kind, (model, plan) = kinds[name], partly_used(0)
        optimizer = kind(model.parameters(), lr=0.1)
        place = Path(folder) / f"{name}-{sharded}"
        save_loop(CheckpointWriter(), f"{place}-0", model, optimizer, others={}, progress={}, sharded=sharded)
        found[f"{name}, nothing is saved"] = len(optimizer.state)
        stepped(model, optimizer, plan, 0)
        save_loop(CheckpointWriter(), f"{place}-1", model, optimizer, others={}, progress={}, sharded=sharded)
        stepped(model, optimizer, plan, 1)
        for start in (0, 1):
            other, _ = partly_used(1)
            its = kind(other.parameters(), lr=0.3)
            load_loop(f"{place}-{start}", other, its, others={})
            for step in range(start, 2):
                stepped(other, its, plan, step)
            ours, theirs = full_state_dict(model), full_state_dict(other)
            found[f"{name} {sharded} from {start}"] = worst(theirs, ours) if ours else 0.0
    lines, (fresh, _) = {}, partly_used(2)
    for saved, sharded in ways[:4]:
        now = kinds["AMSGrad" if saved == "AdamW" else "AdamW"]
        with pytest.raises(CheckpointError) as raised:
            load_loop(f"{folder}/{saved}-{sharded}-1", fresh, now(fresh.parameters(), lr=0.1), others={})
        lines[saved, sharded] = str(raised.value)
    return {**found, "lines": lines}


def partly_used(seed: int):
    """A model with a projection that forward does not use."""
    model = tiny_model("gpt2", seed=seed, layers=1)
    model.transformer.unused = torch.nn.Linear(3, 5).double()
    units = find_units(model)
    plan = plan_of(units, 2, "mixed")
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    return model, plan


def stepped(model, optimizer, plan, step: int) -> None:
    trained_step(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0), step, plan)


def test_absent_states_stay_absent_and_another_optimizers_are_refused(tmp_path):
    for rank in run_ranks(odd_states, 2, str(tmp_path), shared=True):
        for (saved, _), line in rank.pop("lines").items():
            assert "cannot be loaded (it is the state of another optimizer: it holds " in line, saved
            assert "but this run's AdamW holds " in line and "make the model and the optimizer that were saved" in line
            assert {
                "AdamW": "exp_avg, exp_avg_sq, but",
                "momentum": "holds momentum_buffer, but",
                "plain": "nesterov",
            }[saved] in line
        assert {name: error for name, error in rank.items() if error != 0} == {}


def resumed(folder: str) -> list[str | None]:
    """What ranks resume from where torchrun's two agents count restarts each for itself."""
    found = []
    for counts in (("0", "0"), ("0", "1"), ("2", "0"), ("0", "0"), ("0", "1")):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = counts[dist.get_rank()]
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"/logs/none_{dist.get_rank()}/attempt_0/0/error.json"
        last = checkpoint_to_resume(folder)
        found.append(None if last is None else last.name)
        if len(found) == 1:
            with CheckpointWriter().new(f"{folder}/checkpoint-3") as staging:
                for name in ("model.safetensors", "optimizer.bin"):
                    (staging.path / name).touch()
    return found


def test_restart_counted_on_one_machine_is_a_restart_on_all(tmp_path):
    # the fourth start is a new training, and the fifth does not take what an earlier one wrote
    assert run_ranks(resumed, 2, str(tmp_path)) == [[None, "checkpoint-3", "checkpoint-3", None, None]] * 2


def filled(folder: str) -> tuple[str, float]:
    """The disk has no room for what rank 1 writes in the background."""
    model, plan = partly_used(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    writes = Path.write_bytes

    def full(path: Path, content) -> int:
        writes(path, bytes(content)[:10])
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter(in_background=True)
    stepped(model, optimizer, plan, 0)
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patched, pytest.raises(CheckpointError) as raised:
        if dist.get_rank() == 1:
            patched.setattr(Path, "write_bytes", full)
        save_loop(writer, f"{folder}/checkpoint-1", model, optimizer, others={}, progress={}, sharded=True)
        writer.wait()
    return str(raised.value), time.monotonic() - began


def test_full_disk_of_one_rank_raises_on_all_at_once(tmp_path):
    (line, waited), (other, _) = run_ranks(filled, 2, str(tmp_path))
    assert line == other and "could not be written on rank 1 (OSError: [Errno 28] No space left on device)" in line
    assert waited < 60 and sorted(path.name for path in tmp_path.glob(".partial/*")) == ["lock", "training.json"], (
        "free again"
    )
