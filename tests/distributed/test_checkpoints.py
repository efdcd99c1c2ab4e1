"""Checkpoints go over between plans, numbers of ranks, ways of writing, slices and optimizers, in float64."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_osdp.checkpoint.resume import checkpoint_to_resume
from hf_osdp.checkpoint.states import load_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import CheckpointError
from hf_osdp.modeling.units import find_units
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.state import full_state_dict
from tests.helpers.checkpointed import groups_of, save_loop, trained_step, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model
from tests.helpers.sampling import slow_but
from tests.helpers.training import Case, Trained, alone, train

from .cases import CASES, optimizers
from .cases.architectures import EXPERTS
from .cases.layouts import cut, halved, of, on_host, sliced


def groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A case that is saved and goes on, with other weights and learning rates until it is loaded."""

    case: Case
    legs: tuple[Mapping[str, Any], ...] = (
        {"layout": "mixed"}, {"layout": "replicate", "world": 1, "sharded": False}, {"layout": "zero3"},
    )  # fmt: skip
    """What of the case is different, whether it is saved in shards, and whether in the background."""
    exact: str = ""
    """The optimizer of 32 bits, for states that a checkpoint rounds once more: less than quantizing itself changes."""
    share: float = 0.5
    """Of that change."""
    slow: bool = True


def low_bit(package: str, kind: str, share: float = 0.5, **options: Any) -> Chain:
    exact = "" if kind in ("AdamWFp8", "AdEMAMix", "RMSprop") else kind.removesuffix("8bit").removesuffix("4bit")
    tolerance = 1e-9 if package == "bitsandbytes" and kind != "RMSprop" else 1e-6  # of kernels in float32
    return Chain(case=optimizers.quantized(package, kind, tolerance=tolerance), exact=exact, share=share, **options)


HALF, ON_2 = {"prepare": None}, {"world": 2, "layout": "mixed"}
WHOLE = ({}, {"world": 1, "change": None, "sharded": False}, {})
GROUPS = Case(model=of("gpt2", layers=2), optimizer=groups, schedule=halved, steps=1)
IN_SLICES = {slices: {"prepare": partial(cut, slices=slices)} for slices in (2, 4)}
CHAINS = {
    "4 replicated, 2 sharded, 1 alone, 4 of every kind": Chain(
        case=replace(GROUPS, steps=2), slow=False, legs=(
            {"layout": "replicate", "world": 4, "in_background": True}, {"layout": "zero3", "sharded": False},
            {"world": 0, "layout": None}, {"layout": "everything", "world": 4},
        ),
    ),
    "4 in groups, 2 in slices, 1 in slices, 2 on the host": Chain(case=GROUPS, legs=(
        {"layout": "hsdp", "world": 4, "sharded": False}, {**IN_SLICES[4]},
        {"layout": "replicate", "world": 0, "sharded": False, **IN_SLICES[2]}, {"layout": "everything"},
    )),
    "host": Chain(
        case=replace(CASES["host, every unit"], steps=1), slow=False,
        legs=({}, {"layout": "zero3", "change": on_host(3), "sharded": False}, {"world": 1}),
    ),
    "states on host": Chain(case=replace(CASES["states on host, mixed, AdamW"], steps=2, check=None), slow=False),
    "muon": Chain(case=CASES["muon, mixed"]),
    **{name: Chain(case=replace(CASES[name], check=None, steps=2), legs=WHOLE, slow=name != "adafactor")
       for name in ("adafactor", "torch's adafactor", "global norm")},
    "slices": Chain(
        case=sliced("gpt2", 4, steps=1),
        legs=({}, {"prepare": sliced("gpt2", 2).prepare, "layout": "zero3", "sharded": False}, HALF),
    ),
    "few experts": Chain(
        case=replace(EXPERTS, steps=1), legs=({}, {"layout": "hsdp", "sharded": False}, ON_2)
    ),
    "AdamWFp8": low_bit("torchao", "AdamWFp8"),
    "AdamW8bit of torchao": low_bit("torchao", "AdamW8bit", share=1.0),
    "AdamW4bit": low_bit("torchao", "AdamW4bit", share=1.0),
    **{f"{kind} of bitsandbytes": low_bit("bitsandbytes", kind)
       for kind in ("AdamW8bit", "AdEMAMix8bit", "RMSprop8bit", "AdEMAMix", "RMSprop")},
}  # fmt: skip
for _package in ("torchao", "bitsandbytes"):
    _case = optimizers.quantized(_package, "AdamW8bit", width=72, steps=6)
    CHAINS[f"other blocks of {_package}"] = Chain(
        case=_case, legs=({"layout": "zero3"},), exact="AdamW", share=1.5, slow=_package == "torchao"
    )


def leg_of(name: str, number: int) -> tuple[Case, dict[str, bool]]:
    """Return what a leg trains, and how it is saved."""
    changes, ways = dict(CHAINS[name].legs[number]), ("sharded", "in_background")
    how = {way: changes.pop(way) for way in ways if way in changes}
    return replace(CHAINS[name].case, **changes), how


def go_on(name: str, number: int, folder: str) -> Trained:
    """Train a leg on this rank."""
    case, how = leg_of(name, number)
    return train(case, folder=folder, start=number * case.steps, **how)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * chain.slow) for name, chain in CHAINS.items()]
)
def test_training_goes_on_as_in_one_process(tmp_path, name):
    chain, losses = CHAINS[name], []
    if chain.case.needs:
        pytest.importorskip(chain.case.needs)
    for number in range(len(chain.legs)):
        world, arguments = leg_of(name, number)[0].world, (name, number, str(tmp_path))
        ranks = run_ranks(go_on, world, *arguments, timeout_s=200, shared=True) if world else [go_on(*arguments)]
        losses += ranks[0].losses
        manifest = json.loads((tmp_path / f"{len(losses)}" / "osdp_checkpoint.json").read_text())
        assert manifest["world_size"] == max(1, world) and {one.losses for one in ranks} == {ranks[0].losses}
    wanted, by_exact = (
        alone(replace(chain.case, steps=len(losses), optimizer=make).alone)
        for make in (chain.case.optimizer, exact_of(chain))
    )
    if not chain.exact:
        tolerance = max(chain.case.tolerance, 1e-12)
        assert losses == pytest.approx(wanted.losses, abs=tolerance)
        assert worst(ranks[0].parameters, wanted.parameters) < tolerance
    else:
        found = [apart(each.parameters, wanted.parameters) for each in (ranks[0], by_exact)]
        assert 0 < found[0] < chain.share * found[1]


def exact_of(chain: Chain) -> Any:
    return optimizers.low_bit(chain.case.needs, chain.exact) if chain.exact else chain.case.optimizer


def apart(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return sum(float((weights[name] - value).norm()) for name, value in others.items())


@pytest.mark.parametrize("package", slow_but(("torchao", "bitsandbytes"), daily=("bitsandbytes",)))
def test_states_of_32_bits_go_on_from_8(tmp_path, package):
    pytest.importorskip(package)
    arguments = (package, str(tmp_path))
    own = torch.float32 if package == "bitsandbytes" else torch.float64  # torchao leaves AdamW to torch
    assert run_ranks(of_32_bits, 2, *arguments, timeout_s=200, shared=True)[0] == {own: True}


def of_32_bits(package: str, folder: str) -> dict[torch.dtype, bool]:
    """Train 8 bits, and AdamW from their checkpoint; the dtypes of its states."""
    eight = replace(optimizers.quantized(package, "AdamW8bit"), layout="mixed")
    train(eight, folder=folder)
    exact = replace(eight, optimizer=optimizers.low_bit(package, "AdamW"), layout="zero2", with_states=True)
    states = train(exact, folder=folder, start=2).states
    found = [v.dtype for name, v in states.items() if torch.is_tensor(v) and v.dim() and "gpt2" not in name]
    return dict.fromkeys(found, True) if states else {}


# ---- absent states, restarts, full disks


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
