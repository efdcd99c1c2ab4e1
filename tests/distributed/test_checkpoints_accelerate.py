"""Schedulers and several optimizers that Accelerate prepares go on on other numbers of ranks, in float64."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from hf_osdp.checkpoint.folders import MANIFEST_NAME
from hf_osdp.distributed.launcher import launched_rank, launched_world_size
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.planner.presets import preset
from tests.helpers.distributed import run_ranks
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model

SHARDED, WHOLE = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
RATE_STEPS = 6


def scheduled(folder: str, loads: tuple[str, ...], save: str, steps: int) -> list[float]:
    """The rates after each load and step of a loop with a scheduler, which Accelerate steps for each process."""
    world = launched_world_size()
    accelerator = OSDPAccelerator(
        osdp={"hardware": preset("cpu", devices_per_node=world), "strategy": "fsdp", "compare": False}, cpu=True
    )
    model = tiny_model("gpt2", layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, RATE_STEPS * world)
    plan = accelerator.plan(model, sequence_length=8, global_batch_size=4, optimizer=optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for load in loads:
        accelerator.load_state(f"{folder}/{load}")
        rates.append(optimizer.param_groups[0]["lr"])
    for _ in range(steps):
        for _ in range(plan.accumulation_steps):
            with accelerator.accumulate(model):
                accelerator.backward(tiny_loss(model, tiny_batch(0, part=launched_rank(), parts=world)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert scheduler.get_last_lr() == rates[-1:]
    accelerator.save_state(f"{folder}/{save}")
    return rates


def test_a_prepared_scheduler_goes_on_on_other_numbers_of_ranks(tmp_path, caplog):
    folder = str(tmp_path)
    first = scheduled(folder, (), "one", 2)
    two = run_ranks(scheduled, 2, folder, ("one",), "two", 2, shared=True)
    old = shutil.copytree(tmp_path / "two", tmp_path / "old") / MANIFEST_NAME
    old.write_text(json.dumps(json.loads(old.read_text()) | {"global_batch_size": None}))
    again = scheduled(folder, ("old", "two"), "again", 1)
    want = [0.5e-2 * (1 + math.cos(math.pi * step / RATE_STEPS)) for step in range(RATE_STEPS)]
    for rates, start in ((first, 1), (two[0], 2), (two[1], 2), (again[1:], 4)):
        assert rates == pytest.approx(want[start : start + len(rates)], abs=1e-15)
    assert (
        "old was written by 2 processes, this run has 1, but the learning rate of CosineAnnealingLR continues from"
        in caplog.text
    )
    assert caplog.text.count("was written by") == 1


def by_two_optimizers(folder: str) -> dict[str, list[float]]:
    """Losses after a checkpoint of each layout, and again once it is loaded; a block has its own optimizer."""
    world = launched_world_size()
    accelerator = OSDPAccelerator(
        osdp={"hardware": preset("cpu", devices_per_node=world), "strategy": "fsdp", "compare": False}, cpu=True
    )
    model = tiny_model("gpt2", layers=1, seed=world)
    block = list(model.transformer.h.parameters())
    rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in block)]
    optimizers = [torch.optim.AdamW(block, lr=1e-2), torch.optim.SGD(rest, lr=1e-1, momentum=0.9)]
    accelerator.plan(model, sequence_length=8, global_batch_size=4, optimizer=optimizers[0])
    model, *optimizers = accelerator.prepare(model, *optimizers)

    def losses(steps: range) -> list[float]:
        found = []
        for step in steps:
            loss = tiny_loss(model, tiny_batch(step, part=launched_rank(), parts=world))
            accelerator.backward(loss)
            found.append(accelerator.reduce(loss.detach(), "mean").item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return found

    found = {}
    for start, layout in ((0, SHARDED), (6, WHOLE)):
        if world > 1:
            losses(range(start, start + 3))
            accelerator.plugin.set_state_dict_type(layout)
            accelerator.save_state(f"{folder}/{layout}")
            found[layout] = losses(range(start + 3, start + 6))
        accelerator.load_state(f"{folder}/{layout}")
        found[f"{layout} again"] = losses(range(start + 3, start + 6))
    return found


def test_two_optimizers_of_one_model_resume_in_both_layouts(tmp_path):
    for found in run_ranks(by_two_optimizers, 2, str(tmp_path), shared=True):
        want = {layout: found[layout] for layout in (SHARDED, WHOLE)}
        assert {layout: found[f"{layout} again"] for layout in want} == want
    assert by_two_optimizers(str(tmp_path)) == {
        f"{layout} again": pytest.approx(losses, abs=1e-12) for layout, losses in want.items()
    }
    for names in (("optimizer_0", "optimizer_1"), ("optimizer.bin", "optimizer_1.bin")):
        layout = tmp_path / (SHARDED if names[0].endswith("0") else WHOLE)
        assert all((layout / name).exists() for name in names)
