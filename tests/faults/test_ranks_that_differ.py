"""Ranks that are about to train differently stop with one line, the same on each, before the first update; so they do
where a loss diverges, and where the disk of one is full, with the checkpoint before as the last.
"""

from __future__ import annotations

import resource
import time
from contextlib import contextmanager

import peft
import pytest
import torch
import torch.distributed as dist
import transformers.modeling_utils
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    TrainerState,
    TrainingArguments,
    get_linear_schedule_with_warmup,
    set_seed,
)

from hf_osdp import OptimalShardedDataParallel, OSDPAccelerator, OSDPConfig, Trainer, preset
from hf_osdp.checkpoint.resume import last_checkpoint
from hf_osdp.distributed.consensus import require_same_run
from hf_osdp.errors import CheckpointError, OSDPError, PlanMismatchError
from hf_osdp.modeling.identity import dataset_text
from tests.helpers.distributed import run_ranks

LENGTH, ROWS = 8, 16
OF_ARGUMENTS = {
    "learning_rate": 2e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "adam_beta2": 0.9,
    "save_steps": 7, "eval_steps": 7, "logging_steps": 7, "max_steps": 2, "save_only_model": True,
    "load_best_model_at_end": True,
}  # fmt: skip
"""Of updates, and of what ranks do together."""
OF_MODELS = {"n_head": 4, "activation_function": "relu", "attn_pdrop": 0.2}
OF_ADAPTERS = {"lora_alpha": 16, "lora_dropout": 0.1, "use_dora": True}
OF_TRAINERS = {
    "model.safetensors": 0, "pytorch_model_fsdp.bin": 0, "optimizer.bin": 0, "scheduler.pt": 0, "rng_state_1.pth": 1,
    "trainer_state.json": 0,
}  # fmt: skip
"""Files of the Trainer's checkpoint of whole states, and which rank cannot write them."""
OF_LOOPS = {"scheduler.bin": 0, "random_states_1.pkl": 1, "random_states_0.pkl": 0}


def model(**changes: object) -> GPT2LMHeadModel:
    set_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 61, "n_positions": 16, "bos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, "eos_token_id": 0, **changes}))


def rows(number: int = ROWS, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 61, (number, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def config(**more: object) -> OSDPConfig:
    return OSDPConfig(hardware=preset("cpu", devices_per_node=2), **more)


def trainer(folder: str, data: object = None, kind: type = Trainer, **options: object) -> Trainer:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True,
        **{"max_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", **options},
    )  # fmt: skip
    return kind(model=model(), args=arguments, train_dataset=data or rows(), osdp=config())


def accelerated(rate: float = 1e-2, warmup: int = 1, data: object = None) -> OSDPAccelerator:
    accelerator, one = OSDPAccelerator(cpu=True, osdp=config(sequence_length=LENGTH)), model()
    optimizer = torch.optim.AdamW(one.parameters(), lr=rate)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, 9)
    accelerator.prepare(one, optimizer, DataLoader(data or rows(), batch_size=2), schedule)
    return accelerator


def plain(**options: float) -> tuple[OptimalShardedDataParallel, torch.optim.Optimizer]:
    sharded = OptimalShardedDataParallel(model(), config(sequence_length=LENGTH, global_batch_size=4))
    return sharded, torch.optim.SGD(sharded.parameters(), **{"lr": 0.1, **options})


def said_by(act) -> str:
    try:
        act()
        return "trained"
    except PlanMismatchError as error:
        return str(error)


def of_trainers(folder: str) -> dict[str, str]:
    """The line of each change on rank 1."""
    one, lines = trainer(folder), {}
    odd, arguments = dist.get_rank() == 1, one.args
    for name, value in OF_ARGUMENTS.items():
        before = getattr(arguments, name)
        setattr(arguments, name, value if odd else before)
        lines[name] = said_by(one.train)
        setattr(arguments, name, before)
    data, one.train_dataset = one.train_dataset, rows(ROWS + odd)
    lines["dataset"] = said_by(one.train)
    one.train_dataset = data
    one.eval_dataset = rows(2 if odd else 4)
    lines["eval_dataset"] = said_by(one.train)
    one.eval_dataset = None
    for name, value in OF_MODELS.items():
        other = model(**({name: value} if odd else {}))
        lines[name] = said_by(lambda other=other: require_same_run(other))
    for name, value in OF_ADAPTERS.items():
        given = peft.LoraConfig(
            **{"target_modules": ["c_attn"], "fan_in_fan_out": True, **({name: value} if odd else {})}
        )
        other = peft.get_peft_model(model(), given)
        lines[name] = said_by(lambda other=other: require_same_run(other))
    return {**lines, "alike": said_by(one.train)}


def of_half_the_rows(folder: str) -> str:
    with pytest.raises((PlanMismatchError, OSDPError)) as raised:
        trainer(folder, rows(ROWS // (1 + dist.get_rank())), num_train_epochs=1, max_steps=-1).train()
    return str(raised.value)


class Stream(IterableDataset):
    """Other rows on each rank, as of streams that are read in parts."""

    def __iter__(self):
        yield from rows(8 + dist.get_rank(), seed=dist.get_rank())


def of_loops(folder: str) -> list[str]:
    """Of loops on Accelerate and of plain ones, the last of each kind alike."""
    odd = dist.get_rank() == 1

    def stepped(**options: float) -> None:
        sharded, optimizer = plain(**options)
        ids = torch.stack([row["input_ids"] for row in rows(2)])
        with sharded.micro_step():
            sharded(input_ids=ids, labels=ids).loss.backward()
        before = [p.detach().clone() for p in sharded.parameters()]
        try:
            optimizer.step()
        except PlanMismatchError:
            pairs = zip(before, sharded.parameters(), strict=True)
            assert all(torch.equal(was.to_local(), now.to_local()) for was, now in pairs)
            raise

    return [
        said_by(lambda: accelerated(rate=1e-3 if odd else 1e-2)),
        said_by(lambda: accelerated(warmup=2 if odd else 1)),
        said_by(lambda: accelerated(data=rows(ROWS // 2) if odd else None)),
        said_by(lambda: accelerated(data=Stream())),
        said_by(lambda: stepped(lr=0.2 if odd else 0.1)),
        said_by(lambda: stepped(momentum=0.9 if odd else 0.0)),
        said_by(stepped),
    ]


def of_diverged(folder: str) -> list[str]:
    """Of a loss that is not a number on rank 1, in a Trainer and a plain loop that save."""

    class Diverging(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.args.process_index and self.state.global_step == 1 else loss

    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    with pytest.raises(CheckpointError) as of_trainer:
        trainer(f"{folder}/trainer", kind=Diverging, max_steps=3, max_grad_norm=0, **saves).train()
    sharded, optimizer = plain()
    sharded.save_checkpoint(f"{folder}/plain/checkpoint-1", optimizer)
    if dist.get_rank():
        next(sharded.parameters()).data.to_local().fill_(float("inf"))
    with pytest.raises(CheckpointError) as of_loop:
        sharded.save_checkpoint(f"{folder}/plain/checkpoint-2", optimizer)
    return [str(of_trainer.value), str(of_loop.value)]


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


def said_when_full(save, files: dict[str, int]) -> list[str]:
    """The line of each file that cannot be written, which comes at once."""
    said = []
    for name, of in files.items():
        began = time.monotonic()
        with full(name if dist.get_rank() == of else "no such file"), pytest.raises(CheckpointError) as raised:
            save()
        assert time.monotonic() - began < 10
        said.append(str(raised.value))
    return said


def of_full_disks(folder: str) -> list[str]:
    """In a Trainer and a loop on Accelerate."""
    one = trainer(f"{folder}/trainer", fsdp_config={"state_dict_type": "FULL_STATE_DICT"})
    one.train()

    def save() -> None:
        one._save_checkpoint(one.model, None)

    save()
    one.state.global_step = 2
    said = said_when_full(save, OF_TRAINERS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (100, 20_000):  # as the writers of torch and safetensors fail
        resource.setrlimit(resource.RLIMIT_FSIZE, (size if dist.get_rank() == 0 else soft, hard))
        with pytest.raises(CheckpointError) as raised:
            save()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        said.append(str(raised.value))
    save()  # there is room again
    loop = accelerated()
    loop.save_state(f"{folder}/loop/checkpoint-1")
    return said + said_when_full(lambda: loop.save_state(f"{folder}/loop/checkpoint-2"), OF_LOOPS)


def all_of_it(folder: str) -> dict[str, object]:
    acts = (of_trainers, of_half_the_rows, of_loops, of_diverged, of_full_disks)
    return {act.__name__: act(f"{folder}/{act.__name__}") for act in acts}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Where the ranks ran, and what they said, which is the same on both."""
    folder = tmp_path_factory.mktemp("ran")
    said, other = run_ranks(all_of_it, 2, str(folder), init=False)
    assert said == other
    return folder, said


@pytest.mark.slow
def test_trainers_that_differ_on_one_rank_stop_before_training(ran):
    lines = ran[1]["of_trainers"]
    assert (
        lines.keys() == {*OF_ARGUMENTS, "dataset", "eval_dataset", *OF_MODELS, *OF_ADAPTERS, "alike"}
        and lines.pop("alike") == "trained"
    )
    for name, line in lines.items():
        assert line.startswith("Ranks are about to run different things: ") and f"{name} is " in line, line
        assert " on rank 0, " in line and "Run the same program with the same arguments on every rank." in line


def test_half_of_the_rows_on_one_rank_is_refused(ran):
    said = ran[1]["of_half_the_rows"]
    assert "dataset is of 16 rows" in said and "of 8 rows" in said


def test_loops_that_differ_on_one_rank_stop_before_updates(ran):
    parts = ["lr is 0.01 on rank 0, 0.001", "schedule is LambdaLR", "dataset is of 16 rows", "trained"]
    parts += ["lr is 0.1 on rank 0, 0.2", "momentum is 0.0 on rank 0, 0.9", "trained"]
    for line, part in zip(ran[1]["of_loops"], parts, strict=True):
        assert part in line, (part, line)


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(ran):
    folder, said = ran
    for line in said["of_diverged"]:
        assert "that are not finite, so checkpoint-2 is not written: training has diverged" in line
    for kind in ("trainer", "plain"):
        assert [path.name for path in (folder / "of_diverged" / kind).glob("checkpoint-*")] == ["checkpoint-1"]


def test_full_disk_is_said_in_one_line_on_every_rank(ran):
    folder, said = ran[0] / "of_full_disks", ran[1]["of_full_disks"]
    for line, of in zip(said, [*OF_TRAINERS.values(), 0, 0, *OF_LOOPS.values()], strict=True):
        assert line.startswith(f"The checkpoint could not be written on rank {of} ("), line
        assert line.endswith("; the previous checkpoint is the last.") and line.isprintable()
    assert last_checkpoint(folder / "trainer").name == "checkpoint-2"
    assert sorted(path.name for path in (folder / "trainer" / ".partial").iterdir()) == ["lock", "training.json"]
    assert [path.name for path in (folder / "loop").glob("checkpoint-*")] == ["checkpoint-1"]


def test_datasets_are_told_apart_by_their_sizes():
    assert dataset_text(range(7)) == "of 7 rows" and dataset_text(iter(())) == ""
