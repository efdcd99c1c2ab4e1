"""Checkpoints of the Trainer and Accelerate under other plans and worlds, and plain Accelerate's; in float64."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import TrainingArguments

from hf_osdp.checkpoint.resume import last_checkpoint
from hf_osdp.checkpoint.states import load_model, load_optimizer, save_model, save_optimizer
from hf_osdp.distributed.launcher import launched_rank, launched_world_size
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.distributed.stop import EXIT_CODE
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.state import full_optimizer_state_dict, full_state_dict
from tests.distributed import test_integration_trainer as stock
from tests.helpers.architectures import tiny_vision
from tests.helpers.checkpointed import groups_of, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import mixed_plan, plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.models import tiny_model as core_model

SHARDED, WHOLE = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def trained(folder: str, resume: str | None, layout: str, strategy: str | None, options: dict) -> tuple:
    """A Trainer of any world: losses of its steps, whole weights, and its last step."""
    stop_at = options.pop("stop_at", None)
    world, model = launched_world_size(), stock.tiny_model(seed=launched_rank() + 7 * (resume is not None))
    if strategy is None and world > 1:
        plan = mixed_plan(
            model, world, sequence_length=stock.LENGTH, micro_batch_size=2, accumulation_steps=4 // world, reduce=True
        )
        osdp = OSDPConfig(plan=plan, **options)
    else:
        hardware = preset("cpu", devices_per_node=world)
        osdp = OSDPConfig(hardware=hardware, strategy=strategy or "osdp", **options)
    args = stock.arguments(
        folder, per_device_train_batch_size=stock.GLOBAL_BATCH // world, save_strategy="steps", save_steps=1,
        save_total_limit=4,
        fsdp_config={"state_dict_type": layout},
    )  # fmt: skip
    trainer = stock.PlannedTrainer(model=model, args=args, train_dataset=stock.tokens(), osdp=osdp)
    if stop_at is not None:
        trainer.add_callback(_Killed(stop_at))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as ended:
        assert ended.code == EXIT_CODE
    return stock.history(trainer)["loss"], trainer.accelerator.get_state_dict(trainer.model), trainer.state.global_step


class _Killed(stock.transformers.TrainerCallback):
    """SIGTERM on rank 1, in a step."""

    def __init__(self, step: int):
        self._step = step

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self._step and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_trainer_resumes_under_other_plans_and_numbers_of_ranks(tmp_path):
    one = stock.trained_by_stock(tmp_path / "stock", stock.tiny_model())
    want, weights = stock.history(one), one.model.state_dict()

    def on_two(name: str, resume: str | None, layout: str, *plan: str | None, **options: object) -> tuple:
        arguments = (str(tmp_path / name), resume and str(tmp_path / resume), layout, *(plan or (None,)), options)
        return run_ranks(trained, 2, *arguments, shared=True)[0]

    first = on_two("first", None, SHARDED, async_save=True)
    kept = {path.name for path in (tmp_path / "first").glob("checkpoint-*")}
    assert kept == {f"checkpoint-{step}" for step in (2, 3, 4, 5)}
    alone = trained(str(tmp_path / "alone"), str(tmp_path / "first" / "checkpoint-2"), WHOLE, None, {})
    again = on_two("again", "alone/checkpoint-3", WHOLE, "fsdp")
    stopped = on_two("stopped", "first/checkpoint-2", SHARDED, stop_at=2)
    after = on_two("after", "stopped/checkpoint-4", WHOLE)
    for (losses, got, _), steps in ((first, 5), (alone, 3), (again, 2), (after, 1)):
        assert losses == pytest.approx(want["loss"][-steps:], abs=1e-12)
        assert worst(got, weights) < 1e-12
    assert stopped[2] == 4 and last_checkpoint(tmp_path / "stopped").name == "checkpoint-4"


def exchanged(folder: str) -> dict[str, float]:
    """The worst differences where Accelerate's functions for FSDP2 read our checkpoints, and ours theirs."""
    errors, rank = {}, dist.get_rank()
    PartialState(cpu=True)  # Accelerate's logger asks for it
    for layout in (SHARDED, WHOLE):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=layout)
        accelerator = SimpleNamespace(
            process_index=rank, num_processes=2, is_fsdp2=True, is_main_process=rank == 0,
            wait_for_everyone=dist.barrier
        )  # fmt: skip
        ours, theirs = Path(folder) / f"ours-{layout}", Path(folder) / f"theirs-{layout}"
        if rank == 0:
            ours.mkdir(), theirs.mkdir()
        dist.barrier()
        model, optimizer = by_plan(0)
        save_model(ours, model, sharded=layout == SHARDED)
        save_optimizer(ours, model, optimizer, sharded=layout == SHARDED)
        other, its = by_stock(1)
        load_fsdp_model(plugin, accelerator, other, str(ours))
        load_fsdp_optimizer(plugin, accelerator, its, other, str(ours))
        errors[f"{layout} to Accelerate"] = difference(model, optimizer, other, its)
        if layout == SHARDED:
            merge_fsdp_weights(str(ours / "pytorch_model_fsdp_0"), folder)  # accelerate merge-weights
            if weights := full_state_dict(model):
                errors["merged"] = worst(load_file(f"{folder}/model.safetensors"), weights)
        other, its = by_stock(2)
        save_fsdp_model(plugin, accelerator, other, str(theirs))
        save_fsdp_optimizer(plugin, accelerator, its, other, str(theirs))
        model, optimizer = by_plan(3)
        load_model(theirs, model)
        load_optimizer(theirs, model, optimizer)
        errors[f"{layout} from Accelerate"] = difference(model, optimizer, other, its)
    return errors


def by_plan(seed: int):
    model = core_model("gpt2", seed=seed, layers=2)
    units = find_units(model)
    apply_plan(model, plan_of(units, 2, "mixed"), units, meshes=Meshes("cpu"))
    return model, stepped(model)


def by_stock(seed: int):
    model = core_model("gpt2", seed=seed, layers=2)
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model), stepped(model)


def stepped(model) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    tiny_loss(model, tiny_batch(0, part=dist.get_rank(), parts=2)).backward()
    optimizer.step()
    return optimizer


def difference(model, optimizer, other, its) -> float:
    """Of weights, and of the optimizers' states."""
    weights, others = full_state_dict(model), full_state_dict(other)
    state, states = full_optimizer_state_dict(model, optimizer), full_optimizer_state_dict(other, its)
    if dist.get_rank():
        return 0.0
    ours, theirs = ([group["params"] for group in one["param_groups"]] for one in (state, states))
    assert ours == theirs
    flat = [{f"{n}.{k}": v for n, own in each["state"].items() for k, v in own.items()} for each in (state, states)]
    return max(worst(weights, others), worst(*flat))


def test_states_go_from_and_to_plain_accelerate(tmp_path):
    errors = run_ranks(exchanged, 2, str(tmp_path), shared=True)[0]
    assert len(errors) == 5 and set(errors.values()) == {0.0}, errors


def fully_sharded(world: int) -> OSDPAccelerator:
    hardware = preset("cpu", devices_per_node=world)
    return OSDPAccelerator(osdp={"hardware": hardware, "strategy": "fsdp"}, cpu=True)


def losses_of(accelerator: Accelerator, model, optimizers, steps: range) -> list[float]:
    """Losses over all ranks."""
    found = []
    for step in steps:
        loss = tiny_loss(model, tiny_batch(step, part=launched_rank(), parts=launched_world_size()))
        accelerator.backward(loss)
        found.append(accelerator.reduce(loss.detach(), "mean").item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def from_plain(folder: str, ours: bool) -> list[float]:
    """Losses of steps: plain Accelerate's loop saves after the second, and ours goes on from there."""
    accelerator = fully_sharded(launched_world_size()) if ours else Accelerator(cpu=True)
    model = tiny_model("gpt2", layers=1, seed=int(ours))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if ours:
        accelerator.plan(model, sequence_length=8, global_batch_size=8, optimizer=optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    if ours:
        accelerator.load_state(folder)
    else:
        losses_of(accelerator, model, [optimizer], range(2))
        accelerator.save_state(folder)
    return losses_of(accelerator, model, [optimizer], range(2, 5))


def test_checkpoint_of_plain_accelerate_goes_on_under_a_plan(tmp_path):
    want = from_plain(str(tmp_path), False)
    for found in run_ranks(from_plain, 2, str(tmp_path), True, shared=True):
        assert found == pytest.approx(want, abs=1e-12)


def scheduled(folder: str, loads: str = "", save: str = "") -> None:
    """A loop with a scheduler, which Accelerate steps for each process."""
    accelerator = fully_sharded(launched_world_size())
    model = tiny_model("gpt2", layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    accelerator.plan(model, sequence_length=8, global_batch_size=4, optimizer=optimizer)
    accelerator.prepare(model, optimizer, scheduler)
    if loads:
        accelerator.load_state(f"{folder}/{loads}")
    if save:
        accelerator.save_state(f"{folder}/{save}")


def test_a_prepared_scheduler_on_another_number_of_ranks_is_told(tmp_path, caplog):
    folder = str(tmp_path)
    scheduled(folder, save="one")
    scheduled(folder, loads="one")
    assert "was written by" not in caplog.text
    run_ranks(scheduled, 2, folder, "", "two", shared=True)
    scheduled(folder, loads="two")
    told = "two was written by 2 processes, this run has 1, but the learning rate of CosineAnnealingLR continues from"
    assert told in caplog.text


def by_two_optimizers(folder: str) -> dict[str, list[float]]:
    """Losses after a checkpoint of each layout, and again once it is loaded; a block has its own optimizer."""
    world = launched_world_size()
    accelerator = fully_sharded(world)
    model = tiny_model("gpt2", layers=1, seed=world)
    block = list(model.transformer.h.parameters())
    rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in block)]
    optimizers = [torch.optim.AdamW(block, lr=1e-2), torch.optim.SGD(rest, lr=1e-1, momentum=0.9)]
    accelerator.plan(model, sequence_length=8, global_batch_size=4, optimizer=optimizers[0])
    model, *optimizers = accelerator.prepare(model, *optimizers)

    found, loop = {}, (accelerator, model, optimizers)
    for start, layout in ((0, SHARDED), (6, WHOLE)):
        if world > 1:
            losses_of(*loop, range(start, start + 3))
            accelerator.plugin.set_state_dict_type(layout)
            accelerator.save_state(f"{folder}/{layout}")
            found[layout] = losses_of(*loop, range(start + 3, start + 6))
        accelerator.load_state(f"{folder}/{layout}")
        found[f"{layout} again"] = losses_of(*loop, range(start + 3, start + 6))
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


def test_a_vision_language_model_resumes_from_names_that_transformers_writes(tmp_path):
    """The stock Trainer warns of missing weights and goes on with new ones (transformers 5.23)."""
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (16, 24), generator=dice)
    ids[:, 4:20] = 100
    pictures = torch.rand(16, 3, 32, 32, generator=dice)
    rows = [{"input_ids": row, "labels": row, "pixel_values": one} for row, one in zip(ids, pictures, strict=True)]

    def losses(steps: int, resumes: bool | None = None) -> list[float]:
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=steps, save_steps=2, logging_steps=1, report_to="none",
            per_device_train_batch_size=2, disable_tqdm=True, lr_scheduler_type="constant", learning_rate=1e-2,
        )  # fmt: skip
        model = tiny_vision("LlavaForConditionalGeneration").float()
        trainer = Trainer(model=model, args=args, train_dataset=rows, osdp={"hardware": "cpu", "report": False})
        trainer.train(resume_from_checkpoint=resumes)
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    losses(2)
    saved = json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())
    assert saved["text_config"]["use_cache"]  # as stock saves it
    resumed = losses(4, resumes=True)
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    assert resumed == pytest.approx(losses(4), rel=1e-5)
