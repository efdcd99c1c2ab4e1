"""A disk that is full, or a file that one rank cannot write: one line on every rank, at once, and the checkpoint
before stays the last.
"""

from __future__ import annotations

import resource
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import TrainerState

from hf_osdp import OSDPAccelerator, Trainer
from hf_osdp.checkpoint.resume import last_checkpoint
from hf_osdp.errors import CheckpointError
from tests.faults.test_ranks_that_differ import LENGTH, TrainingArguments, config, model, rows
from tests.helpers.distributed import run_ranks

WHOLE = {"state_dict_type": "FULL_STATE_DICT"}
FILES = {
    "model.safetensors": 0,
    "pytorch_model_fsdp.bin": 0,
    "optimizer.bin": 0,
    "scheduler.pt": 0,
    "rng_state_1.pth": 1,
    "trainer_state.json": 0,
}
"""Files of the Trainer's checkpoint of whole states, and which rank cannot write them."""


@contextmanager
def full(name: str):
    """The disk is full when a file of this name is written."""
    with pytest.MonkeyPatch.context() as patched:

        def refusing(write, argument: int):
            def writing(*args, **kwargs):
                if name in str(args[argument]):
                    raise OSError(28, "No space left on device")
                return write(*args, **kwargs)

            return writing

        patched.setattr(torch, "save", refusing(torch.save, 1))
        patched.setattr(TrainerState, "save_to_json", refusing(TrainerState.save_to_json, 1))
        import transformers.modeling_utils as modeling

        patched.setattr(modeling, "safe_save_file", refusing(modeling.safe_save_file, 1))
        yield


def trainers(folder: str) -> list[tuple[str, float]]:
    """The line of each case, and the seconds until it came."""
    said = []
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1,
        save_strategy="no", fsdp_config=WHOLE,
    )  # fmt: skip
    trainer = Trainer(model=model(), args=arguments, train_dataset=rows(), osdp=config())
    trainer.train()
    trainer._save_checkpoint(trainer.model, None)
    trainer.state.global_step = 2
    for name, of in FILES.items():
        began = time.monotonic()
        with full(name if dist.get_rank() == of else "no such file"), pytest.raises(CheckpointError) as raised:
            trainer._save_checkpoint(trainer.model, None)
        said.append((str(raised.value), time.monotonic() - began))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (100, 20_000):  # as the writers of torch and safetensors fail
        resource.setrlimit(resource.RLIMIT_FSIZE, (size if dist.get_rank() == 0 else soft, hard))
        with pytest.raises(CheckpointError) as raised:
            trainer._save_checkpoint(trainer.model, None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        said.append((str(raised.value), 0.0))
    trainer._save_checkpoint(trainer.model, None)  # there is room again
    return said


def test_trainer_of_whole_states_says_one_line_on_every_rank(tmp_path):
    first, second = run_ranks(trainers, 2, str(tmp_path))
    assert [line for line, _ in first] == [line for line, _ in second]
    ranks = [*FILES.values(), 0, 0]
    for (line, seconds), of in zip(first, ranks, strict=True):
        assert line.startswith(f"The checkpoint could not be written on rank {of} ("), line
        assert line.endswith("; the previous checkpoint is the last.") and line.isprintable() and seconds < 10
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    assert sorted(path.name for path in (tmp_path / ".partial").iterdir()) == ["lock", "training.json"]


def loops(folder: str) -> list[str]:
    said = []
    accelerator = OSDPAccelerator(cpu=True, osdp=config(sequence_length=LENGTH))
    one = model()
    optimizer = torch.optim.AdamW(one.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    accelerator.prepare(one, optimizer, DataLoader(rows(), batch_size=2), schedule)
    accelerator.save_state(f"{folder}/checkpoint-1")
    for name, of in (("scheduler.bin", 0), ("random_states_1.pkl", 1), ("random_states_0.pkl", 0)):
        with full(name if dist.get_rank() == of else "no such file"), pytest.raises(CheckpointError) as raised:
            accelerator.save_state(f"{folder}/checkpoint-2")
        said.append(str(raised.value))
    return said


def test_loop_on_accelerate_says_one_line_on_every_rank(tmp_path):
    lines, others = run_ranks(loops, 2, str(tmp_path))
    assert lines == others
    assert [f"on rank {of} (OSError" in line for of, line in zip((0, 1, 0), lines, strict=True)] == [True] * 3, lines
    assert [path.name for path in Path(tmp_path).glob("checkpoint-*")] == ["checkpoint-1"]
