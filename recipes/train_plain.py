"""Train a small GPT-2 under a memory limit in a plain PyTorch loop: what `OptimalShardedDataParallel` needs, and no more.

    torchrun --nproc-per-node 2 recipes/train_plain.py recipes/gpt2/plain.yaml

The YAML file holds any of the arguments below; flags win over it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from math import exp

import torch
import torch.distributed as dist
from datasets import Dataset
from model_loading import choose_block_size, fit_config, load_config, load_model, load_tokenizer
from recipe_arguments import DataArguments, ModelArguments, check_counts, parse_arguments
from run_clm import TASK, next_tokens
from run_clm_no_trainer import undisturbed
from text_data import load_text, to_blocks
from torch.utils.data import DataLoader, DistributedSampler
from trained_tokenizers import train_causal_tokenizer
from training import find_checkpoint, quiet_other_ranks
from transformers import get_scheduler, set_seed

from hf_osdp import OptimalShardedDataParallel, OSDPConfig, StopSignal
from hf_osdp.checkpoint.states import PROGRESS_NAME
from hf_osdp.integrations.launch import run_script

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Batch = dict[str, torch.Tensor]


@dataclass
class PlainArguments:
    """How to train."""

    output_dir: str = field(default="runs/plain", metadata={"help": "Folder of the model."})
    memory_limit: str | None = field(default=None, metadata={"help": "Memory of each device, such as 8GiB; by default all of it."})
    strategy: str = field(default="osdp", metadata={"help": "osdp (default), fsdp, ddp, zero2, hsdp or two_stage."})
    hardware: str | None = field(default=None, metadata={"help": "Preset to plan for; by default this machine is measured."})
    mixed_precision: str = field(default="no", metadata={"help": "no, bf16 or fp16."})
    global_batch_size: int = field(default=8, metadata={"help": "Samples of an optimizer step, over all processes."})
    micro_batch_size: int | None = field(default=None, metadata={"help": "Those that run at once; by default the planner chooses."})
    steps: int = field(default=300, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=2e-3, metadata={"help": "The greatest; it rises for a twentieth of the steps, then falls."})
    logging_steps: int = field(default=20, metadata={"help": "Print a line every so many steps."})
    save_steps: int | None = field(default=None, metadata={"help": "Write a checkpoint every so many steps."})
    resume_from_checkpoint: str | None = field(default=None, metadata={"help": "A checkpoint's folder, or true for the last one."})
    seed: int = field(default=1, metadata={"help": "Of the weights and the order of samples."})

    def __post_init__(self) -> None:
        check_counts(self, "global_batch_size", "micro_batch_size", "steps", "logging_steps", "save_steps")


def main() -> None:
    """Data, model, plan, training, evaluation, saved model."""
    model_args, data_args, args = parse_arguments((ModelArguments, DataArguments, PlainArguments), sys.argv[1:])
    quiet_other_ranks(RANK)
    set_seed(args.seed)
    config, text = load_config(model_args, TASK), load_text(data_args)
    tokenizer = load_tokenizer(model_args, None, lambda: train_causal_tokenizer(text["train"]["text"], model_args.vocab_size))
    fit_config(config, model_args, tokenizer)
    block_size = choose_block_size(data_args.block_size, config)
    blocks = to_blocks(text, tokenizer, block_size, data_args)
    for split, needed in (("train", args.global_batch_size), ("validation", WORLD_SIZE)):
        if len(blocks[split]) < needed:
            raise ValueError(f"The {split} text has {len(blocks[split])} blocks of {block_size} tokens; give text for {needed} or more.")

    osdp = OSDPConfig(
        memory_limit=args.memory_limit,
        strategy=args.strategy,
        hardware=args.hardware,
        sequence_length=block_size,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
    )
    model = OptimalShardedDataParallel(load_model(model_args, TASK, config, tokenizer), osdp, mixed_precision=args.mixed_precision)
    plan = model.plan
    say(f"plan {plan.fingerprint}: {WORLD_SIZE} x {plan.micro_batch_size} samples x {plan.accumulation_steps} micro-steps")
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
    """The loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=args.steps // 20, num_training_steps=args.steps)
    scaler = model.grad_scaler()  # does something in fp16 only
    states = {"optimizer": optimizer, "scheduler": schedule, "scaler": scaler}
    checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir, marker=PROGRESS_NAME)
    done = 0 if checkpoint is None else model.load_checkpoint(checkpoint, **states)["step"]
    losses, since = [], time.perf_counter()
    stop = StopSignal()
    stop.start()
    for step, batches in enumerate(islice(steps_of(blocks, model, args.seed), done, args.steps), start=done + 1):
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
            tokens = args.global_batch_size * len(blocks[0]["input_ids"]) * args.logging_steps
            say(f"step {step}: loss {mean:.3f}, gradient norm {float(norm):.3f}, {tokens / seconds:.0f} tokens/s")
            losses, since = [], time.perf_counter()
        if stop.agreed() or (args.save_steps and step % args.save_steps == 0):
            model.save_checkpoint(f"{args.output_dir}/checkpoint-{step}", **states, progress={"step": step})
        if stop.stopped:
            break
    stop.finish()
    stop.exit()


def steps_of(blocks: Dataset, model: OptimalShardedDataParallel, seed: int) -> Iterator[list[Batch]]:
    """This rank's micro-batches of one optimizer step after the other, shuffled anew in each epoch, without end."""
    sampler = DistributedSampler(blocks, WORLD_SIZE, RANK, seed=seed, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        batches = batches_of(blocks, sampler, model.plan.micro_batch_size)
        while len(step := list(islice(batches, model.plan.accumulation_steps))) == model.plan.accumulation_steps:
            yield step


@torch.no_grad()
def evaluate(model: OptimalShardedDataParallel, blocks: Dataset) -> float:
    """The mean loss; samples that do not divide by the number of ranks are left out at the end."""
    sampler = DistributedSampler(blocks, WORLD_SIZE, RANK, shuffle=False, drop_last=True)
    model.eval()
    losses = [model(**batch).loss * len(batch["input_ids"]) for batch in batches_of(blocks, sampler, 8, drop_last=False)]
    model.train()
    return average(torch.stack(losses).sum() / len(sampler))


def batches_of(blocks: Dataset, sampler: DistributedSampler, size: int, *, drop_last: bool = True) -> Iterator[Batch]:
    """Batches on this rank's device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for batch in undisturbed(DataLoader(blocks, batch_size=size, sampler=sampler, collate_fn=next_tokens, drop_last=drop_last)):
        yield {name: value.to(device) for name, value in batch.items()}


def average(value: torch.Tensor) -> float:
    """The mean over all ranks. Collective."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value.item() / WORLD_SIZE


def say(text: str) -> None:
    """Print on rank 0."""
    if RANK == 0:
        print(text, flush=True)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_osdp").setLevel(logging.INFO if RANK == 0 else logging.ERROR)  # the estimate beside the first steps
    run_script(main)
