"""What runs on a rank of a training that is killed and started again, with marks that tell its killer where it is.

Under torchrun it kills one of its ranks in its first start: `python -m tests.faults.training trainer FOLDER [STEP]`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import hf_osdp.checkpoint.states
import hf_osdp.checkpoint.writer
import hf_osdp.integrations.plain_loop
import hf_osdp.integrations.trainer_checkpoints
import hf_osdp.preparation.announce
from hf_osdp import OptimalShardedDataParallel, OSDPConfig, Trainer, preset
from hf_osdp.checkpoint.resume import last_checkpoint
from hf_osdp.distributed.launcher import restart_count
from hf_osdp.sharding.environment import form_process_group

STEPS, SAVE_EVERY, LENGTH, SAMPLES = 10, 2, 12, 8
PHASES = ("planning", "resume", "step", "save")
FINAL = "final.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How it is trained, and how its checkpoints are written."""

    loop: str
    """`trainer` or `plain`."""
    sharded: bool
    in_background: bool = False


def train(training: Training, folder: str) -> None:
    """Train to the end, from the last checkpoint if there is one, and write the final weights."""
    torch.use_deterministic_algorithms(True)
    mark = functools.partial(_mark, Path(folder) / "marks")
    _mark_phases(mark)
    weights = (_by_trainer if training.loop == "trainer" else _by_plain_loop)(training, folder, mark)
    if dist.get_rank() == 0:
        save_file({name: value.contiguous().clone() for name, value in weights.items()}, Path(folder) / FINAL)
    mark("done")


def _mark(file: Path, text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        with file.open("a") as lines:
            lines.write(f"{text}\n")


def marks(folder: Path) -> list[str]:
    """Return what rank 0 wrote so far."""
    return file.read_text().splitlines() if (file := folder / "marks").exists() else []


def _mark_phases(mark: Callable[[str], None]) -> None:
    """Have the package's own functions tell where they are."""
    _before(hf_osdp.preparation.announce, "plan_run", lambda *a: mark("planning"))
    for module in (hf_osdp.integrations.trainer_checkpoints, hf_osdp.checkpoint.states):
        _before(module, "load_model", lambda folder, *a: mark(f"resume {Path(folder).name}"))
    _before(hf_osdp.checkpoint.writer.CheckpointWriter, "new", lambda *a: mark("save"))


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return inner(*args, **kwargs)

    setattr(owner, name, outer)


def model() -> GPT2LMHeadModel:
    """With dropout: random states must go on, too."""
    set_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=61, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).double()


def _by_trainer(training: Training, folder: str, mark: Callable[[str], None]) -> dict[str, torch.Tensor]:
    rows = torch.randint(0, 61, (SAMPLES * STEPS, LENGTH), generator=torch.Generator().manual_seed(3))
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=SAMPLES // 2, max_steps=STEPS, save_steps=SAVE_EVERY, save_total_limit=2,
        use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-2, seed=1, logging_strategy="no",
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT" if training.sharded else "FULL_STATE_DICT"},
    )  # fmt: skip
    osdp = OSDPConfig(hardware=preset("cpu", devices_per_node=2), async_save=training.in_background)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model(), args=arguments, train_dataset=data, osdp=osdp)
    trainer.add_callback(_MarkSteps(mark))
    trainer.train()
    return trainer.accelerator.get_state_dict(trainer.model)


class _MarkSteps(transformers.TrainerCallback):
    def __init__(self, mark: Callable[[str], None]):
        self._mark = mark

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._mark("step")


def _by_plain_loop(training: Training, folder: str, mark: Callable[[str], None]) -> dict[str, torch.Tensor]:
    hardware = preset("cpu", devices_per_node=2)
    config = OSDPConfig(sequence_length=LENGTH, global_batch_size=SAMPLES, hardware=hardware)
    sharded = OptimalShardedDataParallel(model(), config)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    last = last_checkpoint(folder)
    start = 0 if last is None else sharded.load_checkpoint(last, optimizer)["step"]
    micro = sharded.plan.micro_batch_size
    for step in range(start, STEPS):
        mark("step")
        ids = torch.randint(0, 61, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
        batches = ids.chunk(dist.get_world_size())[dist.get_rank()].split(micro)
        for number, batch in enumerate(batches, start=1):
            with sharded.micro_step(is_last=number == len(batches)):
                (sharded(input_ids=batch, labels=batch).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            place, progress = f"{folder}/checkpoint-{step + 1}", {"step": step + 1}
            sharded.save_checkpoint(place, optimizer, progress=progress, sharded=training.sharded)
    return sharded.full_state_dict()


def main(loop: str, folder: str, step: str | None = None) -> None:
    """Train under torchrun; rank 1 is killed before the given update, unless this is a restart."""
    torch.set_num_threads(1)
    if step is not None and os.environ["RANK"] == "1" and not restart_count():
        steps = iter(range(1, int(step)))
        kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        _before(torch.optim.AdamW, "step", lambda *a: None if next(steps, None) else kill())
    if loop == "plain":
        form_process_group(needed=True)
    train(Training(loop=loop, sharded=True), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
