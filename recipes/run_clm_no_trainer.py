"""Train a causal language model in a training loop on Accelerate: run_clm.py without the Trainer.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_clm_no_trainer.py
    recipes/gpt2/no_trainer.yaml

The first argument may be a YAML or JSON file of arguments; flags override it. The arguments are those of the classes
below, and every option of `hf_osdp.OSDPConfig`, such as `--memory_limit 8GiB`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import reporting
import shared
import torch
import transformers
from accelerate.utils import DataLoaderConfiguration, tqdm
from shared import ModelArguments, option
from shared import TextArguments as DataArguments
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_osdp import OSDPAccelerator, StopSignal, checkpoint_to_resume
from hf_osdp.integrations.arguments import parse_arguments
from hf_osdp.integrations.launch import run_script


@dataclass
class LoopArguments:
    """The training loop; the names are those of `TrainingArguments`."""

    output_dir: str = option("runs/clm-no-trainer", "Folder for the model, the log and the checkpoints.")
    per_device_train_batch_size: int = option(8, "Samples per process; the planner splits them into micro-batches.")
    gradient_accumulation_steps: int = option(1, "Multiplies the samples of an optimizer step.")
    per_device_eval_batch_size: int = option(8, "Samples that each process evaluates at once.")
    num_train_epochs: int = option(3, "Passes over the training text.")
    max_steps: int | None = option(None, "Number of optimizer steps; overrides num_train_epochs.")
    learning_rate: float = option(5e-5, "Peak learning rate of the schedule.")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_steps: int = option(0, "Optimizer steps during which the learning rate rises.")
    weight_decay: float = option(0.0, "Weight decay of AdamW, for matrices only.")
    max_grad_norm: float = option(1.0, "Maximum norm of the gradients, for clipping.")
    mixed_precision: Literal["no", "bf16", "fp16"] | None = option(None, "Default: as in the accelerate file.")
    logging_steps: int = option(10, "Optimizer steps between two lines of log.jsonl.")
    eval_steps: int | None = option(None, "Optimizer steps between two evaluations during training.")
    save_steps: int | None = option(None, "Optimizer steps between two checkpoints.")
    resume_from_checkpoint: str | None = option(None, "Folder of a checkpoint, or true for the last one.")
    seed: int = option(42, "Seed for the weights, the order of samples and dropout.")
    disable_tqdm: bool = option(False, "Show no progress bar.")

    def __post_init__(self) -> None:
        counts = "gradient_accumulation_steps num_train_epochs max_steps logging_steps eval_steps save_steps"
        sizes = "per_device_train_batch_size per_device_eval_batch_size"
        shared.check_at_least_one(self, *counts.split(), *sizes.split())
        for name in ("learning_rate", "max_grad_norm"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value} must be greater than 0.")


def main() -> None:
    """Load the text, tokenizer and model, train under a plan, evaluate, and save the model."""
    model_args, data_args, args, osdp = parse_arguments((ModelArguments, DataArguments, LoopArguments), sys.argv[1:])
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    config = shared.load_config(model_args, classes, "causal language model; use one such as gpt2 or llama")
    accelerator = OSDPAccelerator(
        osdp=osdp or None,
        mixed_precision=args.mixed_precision,
        project_dir=args.output_dir,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    shared.begin(args.seed, is_main=accelerator.is_main_process)

    with accelerator.main_process_first():
        text = shared.load_text_evenly_split(data_args)
        tokenizer = shared.load_tokenizer(model_args, config, text["train"]["text"], masked=False)
    block_size = shared.length_of_samples(config, data_args.block_size, usual=1024)
    with accelerator.main_process_first():
        cut = shared.packing(tokenizer, block_size)
        train, validation = shared.make_blocks(text, cut, block_size, data_args)
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
    if (steps_per_epoch := len(train) // samples) == 0:
        raise ValueError(
            f"The training text has {len(train)} blocks of {block_size} tokens, less than the {samples} samples of one"
            " optimizer step; give more text, or a smaller block_size or per_device_train_batch_size."
        )
    train = train.take(steps_per_epoch * samples)  # whole optimizer steps
    steps = args.max_steps or steps_per_epoch * args.num_train_epochs

    model, _ = shared.load_model(transformers.AutoModelForCausalLM, model_args, config, tokenizer)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.learning_rate)
    # The scheduler is not prepared, because Accelerate would then step it once for each process.
    scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, steps)
    plan = accelerator.plan(model, sequence_length=block_size, global_batch_size=samples, optimizer=optimizer)
    train_loader = DataLoader(train, plan.micro_batch_size, shuffle=True, collate_fn=default_data_collator)
    eval_loader = DataLoader(validation, args.per_device_eval_batch_size, collate_fn=default_data_collator)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    accelerator.register_for_checkpointing(scheduler)

    loaders, counts = (train_loader, eval_loader), (steps_per_epoch, steps, samples * block_size)
    loop = Loop(accelerator, model, optimizer, scheduler, *loaders, args, *counts)
    checkpoint = checkpoint_to_resume(args.output_dir, shared.wanted_checkpoint(args.resume_from_checkpoint))
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        loop.step = int(checkpoint.name.rpartition("-")[2])
    elif accelerator.is_main_process:
        (Path(args.output_dir) / "log.jsonl").unlink(missing_ok=True)  # left by an earlier run
    accelerator.print(f"perplexity before training: {loop.evaluate():.2f}", flush=True)
    loop.train()
    accelerator.print(f"perplexity after training: {loop.evaluate():.2f}", flush=True)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=state)
        tokenizer.save_pretrained(args.output_dir)
    accelerator.print(f"model saved in {args.output_dir}")
    accelerator.end_training()


@dataclass
class Loop:
    """The training loop and its state."""

    accelerator: OSDPAccelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    train_loader: DataLoader
    eval_loader: DataLoader
    args: LoopArguments
    steps_per_epoch: int
    steps: int
    tokens_per_step: int
    step: int = 0
    """Completed optimizer steps."""

    def train(self) -> None:
        """Train from `step` to the last step. SIGTERM on any rank saves a checkpoint and ends the run on all ranks."""
        self.losses, self.since, self.logged = [], time.perf_counter(), self.step
        hidden = self.args.disable_tqdm
        self.bar = tqdm(total=self.steps, initial=self.step, desc="Training", unit="step", disable=hidden)
        with StopSignal() as stop:
            while self.step < self.steps and not stop.stopped:
                epoch, done = divmod(self.step, self.steps_per_epoch)
                self.train_loader.set_epoch(epoch)
                loader = self.train_loader
                if done:
                    batches = done * self.accelerator.gradient_accumulation_steps
                    loader = self.accelerator.skip_first_batches(loader, batches)
                for batch in batches_keeping_rng(loader):
                    if self.micro_step(batch) and (stop.agreed() or self.step == self.steps):
                        break
        self.bar.close()
        if stop.stopped:
            self.save_checkpoint()
            self.accelerator.print(f"SIGTERM: checkpoint-{self.step} saved")
            self.accelerator.end_training()
        stop.exit()

    def micro_step(self, batch: dict[str, torch.Tensor]) -> bool:
        """Run forward and backward, and the optimizer after the last micro-step; return whether it was the last."""
        with self.accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            self.losses.append(loss.detach())
            if ends := self.accelerator.sync_gradients:
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if ends:
            self.after_step(norm)
        return ends

    def after_step(self, norm: torch.Tensor) -> None:
        """Advance the schedule; log, evaluate and save if this step is due."""
        rate, args = self.scheduler.get_last_lr()[0], self.args
        if not self.accelerator.optimizer_step_was_skipped:  # by the fp16 loss scaler
            self.scheduler.step()
        self.step += 1
        self.bar.update(1)
        if self.step % args.logging_steps == 0:
            loss = self.accelerator.reduce(torch.stack(self.losses).mean(), reduction="mean").item()
            self.log(
                loss=loss,
                perplexity=np.exp(loss),
                learning_rate=rate,
                grad_norm=float(norm),
                tokens_per_s=self.tokens_per_step * (self.step - self.logged) / (time.perf_counter() - self.since),
                loss_scale=reporting.loss_scale(self.accelerator.scaler),
                free_device_memory_bytes=reporting.free_memory(self.accelerator.device),
            )
            self.losses, self.since, self.logged = [], time.perf_counter(), self.step
        began = time.perf_counter()
        if args.eval_steps and self.step % args.eval_steps == 0:
            score = self.evaluate()
            self.log(eval_loss=np.log(score), eval_perplexity=score)
        if args.save_steps and self.step % args.save_steps == 0:
            self.save_checkpoint()
        self.since += time.perf_counter() - began  # evaluations and checkpoints are not training time

    def log(self, **figures: float) -> None:
        """Append a line to `log.jsonl`."""
        if self.accelerator.is_main_process:
            epoch = self.step / self.steps_per_epoch
            reporting.append_to_log(self.args.output_dir, {"step": self.step, "epoch": epoch, **figures})

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the perplexity on the validation text; each sample counts once on any number of processes."""
        self.model.eval()
        losses = []
        for batch in batches_keeping_rng(self.eval_loader):
            labels = batch.pop("labels")[:, 1:]
            logits = self.model(**batch).logits[:, :-1].float()
            each = cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(dim=1)
            losses.append(self.accelerator.gather_for_metrics(each))
        self.model.train()
        return float(np.exp(torch.cat(losses).mean().item()))

    def save_checkpoint(self) -> None:
        """Save everything that a run needs to resume."""
        self.accelerator.save_state(str(Path(self.args.output_dir) / f"checkpoint-{self.step}"))


def batches_keeping_rng(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches; starting a loader draws nothing from dropout's generator, so that a resumed run is equal."""
    batches = iter(loader)
    with torch.random.fork_rng(devices=[]):
        first_batch = next(batches, None)
    if first_batch is not None:
        yield first_batch
        yield from batches


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the parameter groups of the optimizer: weight decay for matrices, none for biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


if __name__ == "__main__":
    run_script(main)
