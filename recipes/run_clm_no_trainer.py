"""Train a causal language model under a memory limit, in a loop of its own on Accelerate: run_clm.py without the Trainer.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_clm_no_trainer.py recipes/gpt2/no_trainer.yaml

The YAML file holds any of the arguments below; flags win over it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from loop_arguments import LoopArguments
from model_loading import choose_block_size, fit_config, load_config, load_model, load_tokenizer
from recipe_arguments import ModelArguments, OSDPArguments, parse_arguments
from run_clm import TASK, next_tokens
from step_log import LogFile, StepLog, perplexity
from streamed_text import Passes, StreamArguments, blocks_of, lines_of, text_of
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from trained_tokenizers import train_causal_tokenizer
from training import find_checkpoint, quiet_other_ranks
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler, set_seed

from hf_osdp import OSDPAccelerator, StopSignal
from hf_osdp.integrations.launch import run_script

PROGRESS_FILE = "custom_checkpoint_0.pkl"
"""What Accelerate calls the first registered object in a checkpoint."""


def main() -> None:
    """Text, tokenizer, model, plan, training, evaluation, saved model."""
    types = (ModelArguments, StreamArguments, OSDPArguments, LoopArguments)
    model_args, data_args, osdp_args, args = parse_arguments(types, sys.argv[1:])
    data_args.check_steps(args.max_steps)
    checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir, marker=PROGRESS_FILE)
    config = load_config(model_args, TASK)
    accelerator = make_accelerator(osdp_args, args)

    with accelerator.main_process_first():
        text = text_of(data_args)
    tokenizer = load_tokenizer(model_args, checkpoint, lambda: train_causal_tokenizer(lines_of(text), model_args.vocab_size))
    fit_config(config, model_args, tokenizer)
    block_size = choose_block_size(data_args.block_size, config)
    with accelerator.main_process_first():
        blocks = blocks_of(text, tokenizer, block_size, data_args, seed=args.seed, evaluates=True)

    model = load_model(model_args, TASK, config, tokenizer)
    log_file = LogFile(args.output_dir, is_rank_zero=accelerator.is_main_process, goes_on=checkpoint is not None)
    loop = Loop.prepare(accelerator, model, tokenizer, blocks, args, log_file, block_size=block_size)
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
    accelerator.print(f"perplexity before training: {loop.evaluate():.2f}")
    loop.train()
    accelerator.print(f"perplexity after training: {loop.evaluate():.2f}")
    loop.save_model()
    accelerator.print(f"model saved in {args.output_dir}")
    accelerator.end_training()


def make_accelerator(osdp_args: OSDPArguments, args: LoopArguments) -> OSDPAccelerator:
    """The accelerator that plans, with its report in the output folder.

    Raises:
        ValueError: OSDP was switched off, without which this loop has no batch size.
    """
    options = osdp_args.stated()
    if options is False:
        raise ValueError("osdp false was given, but this loop runs by a plan; use strategy ddp or fsdp, or run_clm.py with osdp false.")
    accelerator = OSDPAccelerator(
        osdp=options,
        mixed_precision=args.mixed_precision,
        project_dir=args.output_dir,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    quiet_other_ranks(accelerator.process_index)
    set_seed(args.seed)
    return accelerator


class Progress:
    """Optimizer steps that are done; part of every checkpoint."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@dataclass(slots=True, kw_only=True)
class Loop:
    """All that a training has, prepared."""

    accelerator: OSDPAccelerator
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    train_loader: DataLoader
    eval_loader: DataLoader
    args: LoopArguments
    log_file: LogFile
    progress: Progress
    tokens_per_step: int
    steps_per_epoch: int
    total_steps: int
    saved_step: int = 0

    @classmethod
    def prepare(
        cls, accelerator: OSDPAccelerator, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, blocks: dict[str, Dataset | Passes],
        args: LoopArguments, log_file: LogFile, *, block_size: int,
    ) -> Loop:  # fmt: skip
        """Plan, shard, and make loaders of the planner's micro-batches.

        Raises:
            ValueError: the training text is too short for one optimizer step.
            InfeasibleError: no plan meets the memory limit.
        """
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
        train, steps_per_epoch = whole_steps(blocks["train"], samples, block_size, args.max_steps)
        total_steps = args.max_steps or steps_per_epoch * args.num_train_epochs
        optimizer = torch.optim.AdamW(decayed(model, args.weight_decay), lr=args.learning_rate)
        # Not prepared: Accelerate would step it once for each process.
        scheduler = get_scheduler(args.lr_scheduler_type, optimizer, num_warmup_steps=args.warmup_steps, num_training_steps=total_steps)
        plan = accelerator.plan(model, sequence_length=block_size, global_batch_size=samples, optimizer=optimizer)
        train_loader = DataLoader(train, batch_size=plan.micro_batch_size, shuffle=isinstance(train, Dataset), collate_fn=next_tokens)
        eval_loader = DataLoader(blocks["validation"], batch_size=args.per_device_eval_batch_size, collate_fn=next_tokens)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
        progress = Progress()
        accelerator.register_for_checkpointing(progress, scheduler)
        if accelerator.is_main_process:
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: tokenizer.save_pretrained(folder))
        return cls(
            accelerator=accelerator, model=model, tokenizer=tokenizer, optimizer=optimizer, scheduler=scheduler, train_loader=train_loader,
            eval_loader=eval_loader, args=args, log_file=log_file, progress=progress, tokens_per_step=samples * block_size,
            steps_per_epoch=steps_per_epoch, total_steps=total_steps,
        )  # fmt: skip

    def train(self) -> None:
        """Go on from `progress` to the last step."""
        log = StepLog(
            self.accelerator, self.log_file, total=self.total_steps, done=self.progress.step, every=self.args.logging_steps,
            tokens_per_step=self.tokens_per_step, silent=self.args.disable_tqdm,
        )  # fmt: skip
        micro_steps = self.accelerator.gradient_accumulation_steps
        with StopSignal() as stop:
            while self.progress.step < self.total_steps and not stop.stopped:
                epoch, done = divmod(self.progress.step, self.steps_per_epoch)
                self.train_loader.set_epoch(epoch)
                left = self.accelerator.skip_first_batches(self.train_loader, done * micro_steps) if done else self.train_loader
                self._train_on(left, log, stop)
        log.close()
        if stop.stopped:
            self.save_checkpoint()
            self.accelerator.print(f"SIGTERM: checkpoint-{self.progress.step} saved")
            self.accelerator.end_training()
        stop.exit()

    def _train_on(self, batches: DataLoader, log: StepLog, stop: StopSignal) -> None:
        """One epoch, or what is left of it; SIGTERM on any rank ends it on all."""
        for batch in undisturbed(batches):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            log.micro_step(loss)
            if self.accelerator.sync_gradients:
                self._after_step(norm, log)
                if stop.agreed() or self.progress.step == self.total_steps:
                    return

    def _after_step(self, norm: torch.Tensor, log: StepLog) -> None:
        """Schedule, log, evaluate and save, as their turn comes."""
        rate = self.scheduler.get_last_lr()[0]
        if not self.accelerator.optimizer_step_was_skipped:  # by the loss scaler
            self.scheduler.step()
        self.progress.step += 1
        step, args = self.progress.step, self.args
        log.step(step, epoch=step / self.steps_per_epoch, learning_rate=rate, gradient_norm=norm)
        with log.outside():
            if args.eval_steps and step % args.eval_steps == 0:
                self._log_evaluation(step)
            if args.save_steps and step % args.save_steps == 0:
                self.save_checkpoint()

    def _log_evaluation(self, step: int) -> None:
        """Evaluate amid training."""
        score = self.evaluate()
        self.log_file.write(step=step, epoch=step / self.steps_per_epoch, eval_loss=math.log(score), eval_perplexity=score)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The perplexity on the validation text, in which each sample counts once on any number of processes."""
        self.model.eval()
        losses = []
        for batch in undisturbed(self.eval_loader):
            labels = batch.pop("labels")[:, 1:]
            logits = self.model(**batch).logits[:, :-1].float()
            each = cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(dim=1)
            losses.append(self.accelerator.gather_for_metrics(each))
        self.model.train()
        return perplexity(torch.cat(losses).mean().item())

    def save_checkpoint(self) -> None:
        """All that a run needs to go on, with the tokenizer; once after a step."""
        if self.saved_step != self.progress.step:
            self.saved_step = self.progress.step
            self.accelerator.save_state(str(Path(self.args.output_dir) / f"checkpoint-{self.progress.step}"))

    def save_model(self) -> None:
        """The whole model and its tokenizer, as `from_pretrained` reads them."""
        state = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            self.accelerator.unwrap_model(self.model).save_pretrained(self.args.output_dir, state_dict=state)
            self.tokenizer.save_pretrained(self.args.output_dir)


def whole_steps(train: Dataset | Passes, samples: int, block_size: int, max_steps: int | None) -> tuple[Dataset | Passes, int]:
    """The training text without what is left over of the last optimizer step, and the steps of an epoch; of a stream, all there are.

    Args:
        train: blocks of text.
        samples: those of one optimizer step, over all processes.
        block_size: tokens of a block.
        max_steps: of the training.

    Raises:
        ValueError: the text is too short for one step.
    """
    if isinstance(train, Passes):
        return train, max_steps
    if steps := len(train) // samples:
        return train.select(range(steps * samples)), steps
    raise ValueError(
        f"The training text has {len(train)} blocks of {block_size} tokens, less than the {samples} samples of one optimizer step;"
        " give more text, a smaller block_size or a smaller per_device_train_batch_size."
    )


def undisturbed(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Its batches. The start of a loader takes a number from the generator that dropout uses, which would show after resuming."""
    batches = iter(loader)
    with torch.random.fork_rng(devices=[]):
        first = next(batches, None)
    if first is not None:
        yield first
        yield from batches


def decayed(model: PreTrainedModel, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; biases and the weights of norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


if __name__ == "__main__":
    run_script(main)
