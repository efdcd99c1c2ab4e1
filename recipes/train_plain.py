"""Train a small GPT-2 under a memory limit in a plain PyTorch loop with `OptimalShardedDataParallel`.

    torchrun --nproc-per-node 2 recipes/train_plain.py recipes/gpt2/plain.yaml

The first argument may be a YAML or JSON file of arguments; flags override it. The arguments are those of
`PlainArguments`, and every option of `hf_osdp.OSDPConfig`, such as `--memory_limit 8GiB`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from math import exp
from typing import Literal

import shared
import torch
import torch.distributed as dist
from datasets import Dataset, DatasetDict, load_dataset
from shared import option
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    default_data_collator,
    get_scheduler,
)

from hf_osdp import OptimalShardedDataParallel, OSDPConfig, StopSignal, checkpoint_to_resume
from hf_osdp.integrations.arguments import parse_arguments
from hf_osdp.integrations.launch import run_script

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Batch = dict[str, torch.Tensor]


@dataclass
class PlainArguments:
    """The model, the text and the training loop."""

    config_overrides: str | None = option(None, "Changes to GPT-2's configuration, such as n_layer=4,n_embd=128.")
    tokenizer_name: str | None = option(None, "Tokenizer to load; default: one is trained on the text.")
    vocab_size: int = option(2048, "Vocabulary size of a tokenizer that is trained on the text.")
    train_file: str | None = option(None, "Local text file; default: Python's language reference.")
    block_size: int = option(128, "Tokens per sample.")
    max_train_samples: int | None = option(None, "Number of training samples to use, from the start.")
    max_eval_samples: int | None = option(None, "Number of evaluation samples to use, from the start.")
    output_dir: str = option("runs/plain", "Folder for the model and the checkpoints.")
    mixed_precision: Literal["no", "bf16", "fp16"] = option("no", "Precision of compute: no, bf16 or fp16.")
    global_batch_size: int = option(8, "Samples of an optimizer step, on all processes together.")
    steps: int = option(300, "Number of optimizer steps.")
    learning_rate: float = option(2e-3, "Peak learning rate; it rises for a twentieth of the steps, then falls.")
    logging_steps: int = option(20, "Optimizer steps between two printed lines.")
    save_steps: int | None = option(None, "Optimizer steps between two checkpoints.")
    resume_from_checkpoint: str | None = option(None, "Folder of a checkpoint, or true for the last one.")
    seed: int = option(1, "Seed for the weights and the order of samples.")

    def __post_init__(self) -> None:
        counts = "block_size max_train_samples max_eval_samples global_batch_size steps logging_steps save_steps"
        shared.check_at_least_one(self, *counts.split())


def main() -> None:
    """Load the data and the model, train under a plan, evaluate, and save the model."""
    args, options = parse_arguments((PlainArguments,), sys.argv[1:])
    shared.begin(args.seed, is_main=RANK == 0)
    text = load_text(args.train_file)
    if args.tokenizer_name:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name)
    else:  # a byte-level BPE like GPT-2's
        tokenizer = GPT2Tokenizer().train_new_from_iterator(
            text["train"]["text"], args.vocab_size, show_progress=False
        )
    blocks = make_blocks(text, tokenizer, args)
    config = GPT2Config(
        vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    if args.config_overrides:
        config.update_from_string(args.config_overrides)
    shared.length_of_samples(config, args.block_size, usual=args.block_size)

    osdp = OSDPConfig.from_options(
        {"sequence_length": args.block_size, "global_batch_size": args.global_batch_size, **options}
    )
    model = OptimalShardedDataParallel(GPT2LMHeadModel(config), osdp, mixed_precision=args.mixed_precision)
    plan = model.plan
    say(
        f"plan {plan.fingerprint}: {WORLD_SIZE} x {plan.micro_batch_size} samples x {plan.accumulation_steps}"
        " micro-steps"
    )
    say(f"perplexity before training: {exp(evaluate(model, blocks['validation'])):.2f}")
    train(model, blocks["train"], args)
    say(f"perplexity after training: {exp(evaluate(model, blocks['validation'])):.2f}")
    model.save_pretrained(args.output_dir)
    if RANK == 0:
        tokenizer.save_pretrained(args.output_dir)
    say(f"model saved in {args.output_dir}")
    if dist.is_initialized():
        dist.destroy_process_group()


def train(model: OptimalShardedDataParallel, blocks: Dataset, args: PlainArguments) -> None:
    """Train, print a line every `logging_steps`, and save checkpoints.

    SIGTERM on any rank saves a checkpoint and ends the run.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=args.steps // 20, num_training_steps=args.steps)
    scaler = model.grad_scaler()  # has an effect in fp16 only
    states = {"optimizer": optimizer, "scheduler": schedule, "scaler": scaler}
    checkpoint = checkpoint_to_resume(args.output_dir, shared.wanted_checkpoint(args.resume_from_checkpoint))
    done = 0 if checkpoint is None else model.load_checkpoint(checkpoint, **states)["step"]
    losses, since = [], time.perf_counter()
    stop = StopSignal()
    stop.start()
    for step, batches in enumerate(
        islice(micro_batches_of_steps(blocks, model, args.seed), done, args.steps), start=done + 1
    ):
        for number, batch in enumerate(batches, start=1):
            with model.micro_step(is_last=number == len(batches)):
                loss = model(**batch).loss
                scaler.scale(loss / len(batches)).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        if step % args.logging_steps == 0:
            mean, seconds = average(torch.stack(losses).mean()), time.perf_counter() - since
            tokens = args.global_batch_size * args.block_size * args.logging_steps
            say(f"step {step}: loss {mean:.3f}, gradient norm {float(norm):.3f}, {tokens / seconds:.0f} tokens/s")
            losses, since = [], time.perf_counter()
        if stop.agreed() or (args.save_steps and step % args.save_steps == 0):
            model.save_checkpoint(f"{args.output_dir}/checkpoint-{step}", **states, progress={"step": step})
        if stop.stopped:
            break
    stop.finish()
    stop.exit()


def micro_batches_of_steps(blocks: Dataset, model: OptimalShardedDataParallel, seed: int) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each optimizer step, without end and shuffled again in each epoch."""
    sampler = DistributedSampler(blocks, WORLD_SIZE, RANK, seed=seed, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        batches = device_batches(blocks, sampler, model.plan.micro_batch_size)
        while len(step := list(islice(batches, model.plan.accumulation_steps))) == model.plan.accumulation_steps:
            yield step


@torch.no_grad()
def evaluate(model: OptimalShardedDataParallel, blocks: Dataset) -> float:
    """Return the mean loss; the last samples are left out if the number of ranks does not divide their number."""
    sampler = DistributedSampler(blocks, WORLD_SIZE, RANK, shuffle=False, drop_last=True)
    model.eval()
    losses = [
        model(**batch).loss * len(batch["input_ids"]) for batch in device_batches(blocks, sampler, 8, drop_last=False)
    ]
    model.train()
    return average(torch.stack(losses).sum() / len(sampler))


def device_batches(
    blocks: Dataset, sampler: DistributedSampler, size: int, *, drop_last: bool = True
) -> Iterator[Batch]:
    """Yield batches on this rank's device.

    The loader's own generator leaves dropout's alone, so a resumed run is bit-identical.
    """
    device, own = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator()
    for batch in DataLoader(
        blocks, size, sampler=sampler, collate_fn=default_data_collator, drop_last=drop_last, generator=own
    ):
        yield {name: value.to(device) for name, value in batch.items()}


def average(value: torch.Tensor) -> float:
    """Return the mean over all ranks; all ranks must call it."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value.item() / WORLD_SIZE


def say(text: str) -> None:
    """Print on rank 0."""
    if RANK == 0:
        print(text, flush=True)


def load_text(train_file: str | None) -> DatasetDict:
    """Return the splits `train` and `validation` with a column `text`: lines of a file, or paragraphs of Python's
    language reference.
    """
    if not train_file:
        return shared.language_reference()
    return shared.hold_out(load_dataset("text", data_files=train_file, split="train", keep_linebreaks=True))


def make_blocks(text: DatasetDict, tokenizer, args: PlainArguments) -> dict[str, Dataset]:
    """Return samples of `block_size` tokens, at most `max_train_samples` and `max_eval_samples` of them."""
    cut = shared.packing(tokenizer, args.block_size)
    blocks = dict(zip(("train", "validation"), shared.make_blocks(text, cut, args.block_size, args), strict=True))
    for split, needed in (("train", args.global_batch_size), ("validation", WORLD_SIZE)):
        if len(blocks[split]) < needed:
            what = f"The {split} text has {len(blocks[split])} blocks of {args.block_size} tokens"
            raise ValueError(f"{what}; give text for {needed} or more blocks.")
    return blocks


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    # INFO shows the estimate next to the measured first steps.
    logging.getLogger("hf_osdp").setLevel(logging.INFO if RANK == 0 else logging.ERROR)
    run_script(main)
