"""Arguments of a training loop that is written out: names are those of `TrainingArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe_arguments import check_counts
from transformers import SchedulerType

_PRECISIONS = ("no", "bf16", "fp16")
_SCHEDULES = tuple(kind.value for kind in SchedulerType if kind.value in ("linear", "cosine", "constant", "constant_with_warmup"))


@dataclass
class LoopArguments:
    """How to train."""

    output_dir: str = field(default="runs/clm-no-trainer", metadata={"help": "Folder of the model, the log and the checkpoints."})
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Samples of a process; the planner cuts them into micro-batches."}
    )
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "So many times these samples make one optimizer step."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Samples that a process evaluates at once."})
    num_train_epochs: int = field(default=3, metadata={"help": "Times through the training text."})
    max_steps: int | None = field(default=None, metadata={"help": "Optimizer steps, in place of epochs."})
    learning_rate: float = field(default=5e-5, metadata={"help": "The greatest of the schedule."})
    lr_scheduler_type: str = field(default="linear", metadata={"help": f"One of {', '.join(_SCHEDULES)}."})
    warmup_steps: int = field(default=0, metadata={"help": "Optimizer steps in which the learning rate rises."})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW's, of matrices."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    mixed_precision: str | None = field(default=None, metadata={"help": "no, bf16 or fp16; by default what the accelerate file says."})
    logging_steps: int = field(default=10, metadata={"help": "Write a line to log.jsonl every so many optimizer steps."})
    eval_steps: int | None = field(default=None, metadata={"help": "Evaluate every so many optimizer steps, beside before and after."})
    save_steps: int | None = field(default=None, metadata={"help": "Write a checkpoint every so many optimizer steps."})
    resume_from_checkpoint: str | None = field(default=None, metadata={"help": "A checkpoint's folder, or true for the last one."})
    seed: int = field(default=42, metadata={"help": "Of the weights, the order of samples and dropout."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bar."})

    def __post_init__(self) -> None:
        check_counts(
            self, "per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "num_train_epochs",
            "max_steps", "logging_steps", "eval_steps", "save_steps",
        )  # fmt: skip
        for name in ("learning_rate", "max_grad_norm"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value} must be greater than 0.")
        for name in ("warmup_steps", "weight_decay"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name}={value} must be at least 0.")
        for name, known in (("lr_scheduler_type", _SCHEDULES), ("mixed_precision", (None, *_PRECISIONS))):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(filter(None, known))}.")
