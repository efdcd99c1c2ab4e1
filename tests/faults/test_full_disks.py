"""A disk that is full, or a file that one rank cannot write: one line on every rank, at once, and the checkpoint
before stays the last.
"""

from __future__ import annotations

import resource
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import transformers.modeling_utils
from torch.utils.data import DataLoader
from transformers import TrainerState

from hf_osdp import OSDPAccelerator, Trainer
from hf_osdp.checkpoint.resume import last_checkpoint
from hf_osdp.errors import CheckpointError
from tests.faults.test_ranks_that_differ import LENGTH, TrainingArguments, config, model, rows
from tests.helpers.distributed import run_ranks

OF_TRAINERS = {
    "model.safetensors": 0, "pytorch_model_fsdp.bin": 0, "optimizer.bin": 0, "scheduler.pt": 0, "rng_state_1.pth": 1,
    "trainer_state.json": 0,
}  # fmt: skip
"""Files of the Trainer's checkpoint of whole states, and which rank cannot write them."""
OF_LOOPS = {"scheduler.bin": 0, "random_states_1.pkl": 1, "random_states_0.pkl": 0}


@contextmanager
def full(name: str):
    """The disk is full when a file of this name is written."""
    with pytest.MonkeyPatch.context() as patched:

        def refuse_in(owner: object, writer: str, argument: int) -> None:
            write = getattr(owner, writer)

            def writing(*args, **kwargs):
                if name in str(args[argument]):
                    raise OSError(28, "No space left on device")
                return write(*args, **kwargs)

            patched.setattr(owner, writer, writing)

        refuse_in(torch, "save", 1)
        refuse_in(TrainerState, "save_to_json", 1)
        refuse_in(transformers.modeling_utils, "safe_save_file", 1)
        yield


def said_when_full(save, files: dict[str, int]) -> list[tuple[str, float]]:
    """The line of each file that cannot be written, and the seconds until it came."""
    said = []
    for name, of in files.items():
        began = time.monotonic()
        with full(name if dist.get_rank() == of else "no such file"), pytest.raises(CheckpointError) as raised:
            save()
        said.append((str(raised.value), time.monotonic() - began))
    return said


def by_trainer(folder: str) -> list[tuple[str, float]]:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1,
        save_strategy="no", fsdp_config={"state_dict_type": "FULL_STATE_DICT"},
    )  # fmt: skip
    trainer = Trainer(model=model(), args=arguments, train_dataset=rows(), osdp=config())
    trainer.train()

    def save() -> None:
        trainer._save_checkpoint(trainer.model, None)

    save()
    trainer.state.global_step = 2
    said = said_when_full(save, OF_TRAINERS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (100, 20_000):  # as the writers of torch and safetensors fail
        resource.setrlimit(resource.RLIMIT_FSIZE, (size if dist.get_rank() == 0 else soft, hard))
        with pytest.raises(CheckpointError) as raised:
            save()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        said.append((str(raised.value), 0.0))
    save()  # there is room again
    return said


def by_loop(folder: str) -> list[tuple[str, float]]:
    accelerator = OSDPAccelerator(cpu=True, osdp=config(sequence_length=LENGTH))
    one = model()
    optimizer = torch.optim.AdamW(one.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    accelerator.prepare(one, optimizer, DataLoader(rows(), batch_size=2), schedule)
    accelerator.save_state(f"{folder}/checkpoint-1")
    return said_when_full(lambda: accelerator.save_state(f"{folder}/checkpoint-2"), OF_LOOPS)


def by_both(folder: str) -> list[tuple[str, float]]:
    return by_trainer(f"{folder}/trainer") + by_loop(f"{folder}/loop")


def test_full_disk_is_said_in_one_line_on_every_rank(tmp_path):
    first, second = run_ranks(by_both, 2, str(tmp_path), init=False)
    assert [line for line, _ in first] == [line for line, _ in second]
    for (line, seconds), of in zip(first, [*OF_TRAINERS.values(), 0, 0, *OF_LOOPS.values()], strict=True):
        assert line.startswith(f"The checkpoint could not be written on rank {of} ("), line
        assert line.endswith("; the previous checkpoint is the last.") and line.isprintable() and seconds < 10
    assert last_checkpoint(tmp_path / "trainer").name == "checkpoint-2"
    assert sorted(path.name for path in (tmp_path / "trainer" / ".partial").iterdir()) == ["lock", "training.json"]
    assert [path.name for path in (tmp_path / "loop").glob("checkpoint-*")] == ["checkpoint-1"]
