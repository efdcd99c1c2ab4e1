"""Train a causal language model under a memory limit, in a training loop on Accelerate: run_clm.py without the
Trainer.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_clm_no_trainer.py
    recipes/gpt2/no_trainer.yaml

The first argument may be a YAML or JSON file of arguments; flags override it. The arguments are those below, and every
option of `hf_osdp.OSDPConfig`, such as `--memory_limit 8GiB`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from pydoc_data import topics
from typing import Literal

import datasets
import numpy as np
import psutil
import torch
import transformers
from accelerate.utils import DataLoaderConfiguration, tqdm
from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator

from hf_osdp import OSDPAccelerator, StopSignal, checkpoint_to_resume
from hf_osdp.integrations.arguments import one_line_errors, parse_arguments
from hf_osdp.integrations.launch import run_script

FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


@dataclass
class ModelArguments:
    """The model: pretrained, or from scratch."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pretrained weights: a folder, or a name on the hub."}
    )
    model_type: str = field(default="gpt2", metadata={"help": "Architecture to train from scratch."})
    config_name: str | None = field(
        default=None, metadata={"help": "Configuration to train from scratch: a folder, or a name on the hub."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes to the configuration, for example n_layer=4,n_embd=128."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer; default: the model's, or one trained on the text."}
    )
    vocab_size: int = field(
        default=2048, metadata={"help": "Vocabulary size of a tokenizer that is trained on the text."}
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path and (self.config_name or self.config_overrides):
            raise ValueError(
                "model_name_or_path has its own configuration; leave out config_name and config_overrides."
            )
        if self.vocab_size < 257:
            raise ValueError(f"vocab_size={self.vocab_size} is too small for byte-level text; use at least 257.")


@dataclass
class DataArguments:
    """The text; default: the language reference that is part of every Python installation."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset on the hub, for example Salesforce/wikitext."}
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the dataset, for example wikitext-2-raw-v1."}
    )
    train_file: str | None = field(
        default=None, metadata={"help": "Local text: .txt, or .json/.jsonl/.csv with a column `text`."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "Local text in the same format, for evaluation."}
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens per sample; default: the model's positions, at most 1024."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Number of training samples to use, from the start."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Number of evaluation samples to use, from the start."}
    )

    def __post_init__(self) -> None:
        if self.dataset_name and self.train_file:
            raise ValueError("Both dataset_name and train_file were given; choose one.")
        if self.validation_file and not self.train_file:
            raise ValueError("validation_file needs train_file.")
        for name in ("block_size", "max_train_samples", "max_eval_samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")


@dataclass
class LoopArguments:
    """The training loop; the names are those of `TrainingArguments`."""

    output_dir: str = field(
        default="runs/clm-no-trainer", metadata={"help": "Folder for the model, the log and the checkpoints."}
    )
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Samples per process; the planner splits them into micro-batches."}
    )
    gradient_accumulation_steps: int = field(
        default=1, metadata={"help": "Multiplies the samples of an optimizer step."}
    )
    per_device_eval_batch_size: int = field(
        default=8, metadata={"help": "Samples that each process evaluates at once."}
    )
    num_train_epochs: int = field(default=3, metadata={"help": "Passes over the training text."})
    max_steps: int | None = field(
        default=None, metadata={"help": "Number of optimizer steps; overrides num_train_epochs."}
    )
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate of the schedule."})
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = field(default="linear")
    warmup_steps: int = field(default=0, metadata={"help": "Optimizer steps during which the learning rate rises."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of AdamW, for matrices only."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Maximum norm of the gradients, for clipping."})
    mixed_precision: Literal["no", "bf16", "fp16"] | None = field(
        default=None, metadata={"help": "Default: as in the accelerate file."}
    )
    logging_steps: int = field(default=10, metadata={"help": "Optimizer steps between two lines of log.jsonl."})
    eval_steps: int | None = field(
        default=None, metadata={"help": "Optimizer steps between two evaluations during training."}
    )
    save_steps: int | None = field(default=None, metadata={"help": "Optimizer steps between two checkpoints."})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Folder of a checkpoint, or true for the last one."}
    )
    seed: int = field(default=42, metadata={"help": "Seed for the weights, the order of samples and dropout."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bar."})

    def __post_init__(self) -> None:
        counts = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "per_device_eval_batch_size",
            "num_train_epochs",
        )
        for name in (*counts, "max_steps", "logging_steps", "eval_steps", "save_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        for name in ("learning_rate", "max_grad_norm"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value} must be greater than 0.")


def main() -> None:
    """Load the text, tokenizer and model, train under a plan, evaluate, and save the model."""
    model_args, data_args, args, osdp = parse_arguments((ModelArguments, DataArguments, LoopArguments), sys.argv[1:])
    config = load_config(model_args)
    accelerator = OSDPAccelerator(
        osdp=osdp or None,
        mixed_precision=args.mixed_precision,
        project_dir=args.output_dir,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    # transformers cannot derive the loss from GPT-2's class name and logs a note about it; the note is harmless.
    logging.getLogger("transformers.modeling_utils").addFilter(
        lambda record: "`loss_type=None`" not in record.getMessage()
    )
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
    transformers.set_seed(args.seed)

    with accelerator.main_process_first():
        text = load_text(data_args)
        tokenizer = load_tokenizer(model_args, config, text["train"])
    positions = getattr(config, "max_position_embeddings", None) or 2**30
    block_size = data_args.block_size or min(positions, 1024)
    if block_size > positions:
        raise ValueError(
            f"block_size={block_size} is longer than the model's {positions} positions; use at most {positions}."
        )
    with accelerator.main_process_first():
        train, validation = make_blocks(text, tokenizer, block_size, data_args)
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
    steps_per_epoch = len(train) // samples
    if steps_per_epoch == 0:
        what = f"The training text has {len(train)} blocks of {block_size} tokens, less than the {samples} samples of one optimizer step"  # noqa: E501
        raise ValueError(f"{what}; give more text, or a smaller block_size or per_device_train_batch_size.")
    train = train.take(steps_per_epoch * samples)  # whole optimizer steps
    steps = args.max_steps or steps_per_epoch * args.num_train_epochs

    model = load_model(model_args, config, tokenizer)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.learning_rate)
    # The scheduler is not prepared, because Accelerate would then step it once for each process.
    scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, steps)
    plan = accelerator.plan(model, sequence_length=block_size, global_batch_size=samples, optimizer=optimizer)
    train_loader = DataLoader(train, plan.micro_batch_size, shuffle=True, collate_fn=default_data_collator)
    eval_loader = DataLoader(validation, args.per_device_eval_batch_size, collate_fn=default_data_collator)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    accelerator.register_for_checkpointing(scheduler)

    loop = Loop(
        accelerator,
        model,
        optimizer,
        scheduler,
        train_loader,
        eval_loader,
        args,
        samples * block_size,
        steps_per_epoch,
        steps,
    )
    resume = {"true": True, "false": False}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    checkpoint = checkpoint_to_resume(args.output_dir, resume)
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
    tokens_per_step: int
    steps_per_epoch: int
    steps: int
    step: int = 0
    """Completed optimizer steps."""

    def train(self) -> None:
        """Train from `step` to the last step. SIGTERM on any rank saves a checkpoint and ends the run on all ranks."""
        micro_steps = self.accelerator.gradient_accumulation_steps
        self.losses, self.since, self.logged = [], time.perf_counter(), self.step
        self.bar = tqdm(
            total=self.steps, initial=self.step, desc="Training", unit="step", disable=self.args.disable_tqdm
        )
        with StopSignal() as stop:
            while self.step < self.steps and not stop.stopped:
                epoch, done = divmod(self.step, self.steps_per_epoch)
                self.train_loader.set_epoch(epoch)
                left = (
                    self.accelerator.skip_first_batches(self.train_loader, done * micro_steps)
                    if done
                    else self.train_loader
                )
                for batch in batches_keeping_rng(left):
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
            scaler, cuda = self.accelerator.scaler, self.accelerator.device.type == "cuda"
            self.log(
                loss=loss,
                perplexity=np.exp(loss),
                learning_rate=rate,
                grad_norm=float(norm),
                tokens_per_s=self.tokens_per_step * (self.step - self.logged) / (time.perf_counter() - self.since),
                loss_scale=scaler.get_scale() if scaler and scaler.is_enabled() else 1.0,
                free_device_memory_bytes=torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available,
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
        """Append a line to `log.jsonl`; values that are not finite become null."""
        if self.accelerator.is_main_process:
            line = {"step": self.step, "epoch": self.step / self.steps_per_epoch, **figures}
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            with (Path(self.args.output_dir) / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({name: value if math.isfinite(value) else None for name, value in line.items()}) + "\n"
                )

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
    """Yield the batches.

    Starting a loader draws from the generator that dropout uses, so a resumed run would differ; undo that draw.
    """
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


def load_text(data: DataArguments) -> DatasetDict:
    """Return the splits `train` and `validation` with a column `text`; without a validation split, every 20th row
    is held out for it.
    """
    source = data.dataset_name or data.train_file
    with one_line_errors(f"Cannot read {source}: ", DatasetGenerationError):
        if data.dataset_name:
            text = load_dataset(data.dataset_name, data.dataset_config_name)
        elif data.train_file:
            files = {
                "train": data.train_file,
                **({"validation": data.validation_file} if data.validation_file else {}),
            }
            formats = {FORMATS.get(Path(file).suffix.lower()) for file in files.values()}
            if None in formats or len(formats) > 1:
                raise ValueError(f"use files of one kind: {', '.join(FORMATS)}.")
            options = {"keep_linebreaks": True} if formats == {"text"} else {}
            text = load_dataset(formats.pop(), data_files=files, **options)
        else:  # the distinct paragraphs of Python's language reference
            paragraphs = (
                part
                for _, text in sorted(topics.topics.items())
                for part in re.split(r"\n\s*\n", text)
                if part.strip()
            )
            text = DatasetDict(
                train=Dataset.from_dict({"text": [f"{part}\n\n" for part in dict.fromkeys(paragraphs)]})
            )
        rows = text["train"]
        if rows.num_rows < 20 or not isinstance(rows[0].get("text"), str):
            raise ValueError(
                f"it needs 20 rows with text in a column `text`; it has {rows.num_rows}, first {str(rows[:1])[:200]}."
            )
    if "validation" not in text:
        kept = [row for row in range(len(rows)) if row % 20 != 19]
        text = DatasetDict(train=rows.select(kept), validation=rows.select(range(19, len(rows), 20)))
    return DatasetDict({split: text[split].select_columns("text") for split in ("train", "validation")})


def make_blocks(text: DatasetDict, tokenizer, size: int, data: DataArguments) -> tuple[Dataset, Dataset]:
    """Return samples of `size` tokens for training and for evaluation."""

    def cut(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        """Join the tokens of a thousand rows and cut them into blocks; the remainder is dropped."""
        tokens = list(chain.from_iterable(tokenizer(rows["text"], verbose=False)["input_ids"]))
        blocks = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": blocks, "labels": blocks}

    blocks = text.map(cut, batched=True, remove_columns="text")
    limits = {"train": data.max_train_samples, "validation": data.max_eval_samples}
    for split, rows in blocks.items():
        if not rows.num_rows:
            raise ValueError(
                f"{data.train_file or 'The data set'}: the {split} text has less than one block of {size} tokens; give"
                " more."
            )
    return tuple(rows.take(min(limits[split] or len(rows), len(rows))) for split, rows in blocks.items())


def load_config(model_args: ModelArguments):
    """Return the named configuration, or the default one of the model type."""
    name = model_args.model_name_or_path or model_args.config_name
    with one_line_errors(f"Cannot use {name or f'model_type={model_args.model_type!r}'}: "):
        config = AutoConfig.from_pretrained(name) if name else transformers.CONFIG_MAPPING[model_args.model_type]()
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{config.model_type} is not a causal language model; use one such as gpt2 or llama.")
    return config


def load_tokenizer(model_args: ModelArguments, config, text: Dataset):
    """Return the named tokenizer, or train a byte-level BPE like GPT-2's.

    A new model gets the size of its vocabulary.
    """
    if name := model_args.tokenizer_name or model_args.model_name_or_path:
        with one_line_errors(f"Cannot load the tokenizer {name}: "):
            tokenizer = AutoTokenizer.from_pretrained(name)
    else:
        tokenizer = transformers.GPT2Tokenizer().train_new_from_iterator(
            text["text"], model_args.vocab_size, show_progress=False
        )
    if not model_args.model_name_or_path:
        config.vocab_size, config.bos_token_id, config.eos_token_id = (
            len(tokenizer),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
        )
    if model_args.config_overrides:
        with one_line_errors(f"Cannot use config_overrides={model_args.config_overrides}: "):
            config.update_from_string(model_args.config_overrides)
            if config.vocab_size < len(tokenizer):
                raise ValueError(
                    f"vocab_size={config.vocab_size} is less than the {len(tokenizer)} entries of the tokenizer."
                )
    return tokenizer


def load_model(model_args: ModelArguments, config, tokenizer):
    """Return the model in float32, pretrained or new."""
    if not model_args.model_name_or_path:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config, dtype=torch.float32)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    return model


if __name__ == "__main__":
    run_script(main)
