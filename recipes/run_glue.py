"""Fine-tune BERT, or any other model for sentence classification, under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_glue.py recipes/glue/demo.yaml
    --output_dir out

The first argument may be a YAML or JSON file of arguments; flags override it. The arguments are those below, those of
`TrainingArguments`, and every option of `hf_osdp.OSDPConfig`, such as `--memory_limit 8GiB`. `--osdp false` runs the
stock Trainer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import evaluate
import numpy as np
import reporting
import shared
import torch
import transformers
from datasets import ClassLabel, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from made_reviews import made_reviews
from shared import option
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments

from hf_osdp import Trainer
from hf_osdp.integrations.arguments import one_line_errors, parse_arguments
from hf_osdp.integrations.launch import run_script

TASKS = {
    "sst2": (("sentence",), "accuracy"),
    "rte": (("sentence1", "sentence2"), "accuracy"),
    "cola": (("sentence",), "matthews_correlation"),
}
"""GLUE tasks: text columns and metric."""


@dataclass
class ModelArguments(shared.AdapterArguments):
    """The model: pretrained, or from scratch."""

    model_type: str = option("bert", "Architecture to train from scratch.")


@dataclass
class DataArguments(shared.FileArguments):
    """The labelled sentences; default: generated ones."""

    task_name: str | None = option(None, "GLUE task: sst2, rte or cola; from the hub, unless train_file is given.")
    train_file: str | None = option(
        None, "Local .jsonl, .json or .csv file with `sentence`, or `sentence1` and `sentence2`, and `label`."
    )
    validation_split_percentage: int = option(5, "Percentage to hold out if there is no validation split.")
    metric: str | None = option(None, "Metric of `evaluate`; default: the task's, or accuracy.")
    max_seq_length: int | None = option(None, "Tokens per sample; default: at most 128.")
    pad_to_max_length: bool = option(True, "Pad to the planned length; false: to the longest of a batch.")
    early_stopping_patience: int | None = option(None, "Evaluations without a better metric before stopping.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_name is not None and self.task_name not in TASKS:
            raise ValueError(
                f"task_name={self.task_name!r} is not known; use one of {', '.join(TASKS)}, or train_file."
            )
        shared.check_percentage(self.validation_split_percentage)
        shared.check_at_least_one(self, "max_seq_length", "early_stopping_patience")
        self.metric = self.metric or (TASKS[self.task_name][1] if self.task_name else "accuracy")


def main() -> None:
    """Load the sentences, tokenizer and model, train under a plan, evaluate, and save the model."""
    model_args, data_args, args, osdp = parse_arguments(
        (ModelArguments, DataArguments, TrainingArguments), sys.argv[1:]
    )
    check(data_args, args)
    resume = shared.begin_training(args)

    classes = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    wanted = "model for sentence classification; use one such as bert or roberta"
    config = shared.load_config(model_args, classes, wanted)
    with args.main_process_first(desc="data"):
        rows, columns = load_sentences(data_args)
        metric = load_metric(data_args.metric)
        texts = [text for column in columns for text in rows["train"][column]]
        tokenizer = shared.load_tokenizer(model_args, config, texts, masked=True)
    if tokenizer.pad_token is None:
        name = model_args.tokenizer_name or model_args.model_name_or_path
        raise ValueError(f"The tokenizer {name} has no pad_token; name one such as BERT's with tokenizer_name.")
    set_class_names(config, rows)
    length = shared.length_of_samples(config, data_args.max_seq_length, usual=128, name="max_seq_length")

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        return dict(tokenizer(*(batch[column] for column in columns), truncation=True, max_length=length))

    with args.main_process_first(desc="tokens"):
        samples = rows.map(tokenize, batched=True, remove_columns=columns)

    padding = "max_length" if data_args.pad_to_max_length else "longest"
    patience = data_args.early_stopping_patience
    model, new = shared.load_model(transformers.AutoModelForSequenceClassification, model_args, config, tokenizer)
    trainer = Trainer(
        model=shared.with_adapters(model, model_args, "SEQ_CLS", new_heads(new)),
        args=args,
        train_dataset=samples["train"] if args.do_train else None,
        eval_dataset=samples["validation"],
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer, padding, max_length=length),
        compute_loss_func=mean_over_samples,
        compute_metrics=metric,
        callbacks=[transformers.EarlyStoppingCallback(patience)] if patience else None,
        osdp=osdp and {"sequence_length": length, **osdp},  # False is the stock Trainer
    )
    trainer.add_callback(reporting.JSONLog(trainer))
    reporting.train_and_save(trainer, resume, partial(score, metric=data_args.metric))


def check(data_args: DataArguments, args: TrainingArguments) -> None:
    """Raise ValueError for arguments that would make the run fail later."""
    if (patience := data_args.early_stopping_patience) and not args.load_best_model_at_end:
        raise ValueError(
            f"early_stopping_patience={patience} needs load_best_model_at_end: true, with eval_strategy and"
            " save_strategy."
        )
    if args.load_best_model_at_end and args.save_only_model and args.world_size > 1:
        raise ValueError(
            "save_only_model and load_best_model_at_end cannot be combined under FSDP; leave out one of them."
        )
    if (args.metric_for_best_model or "loss").removeprefix("eval_") not in ("loss", data_args.metric):
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model} is not computed; use {data_args.metric} or loss."
        )


def load_sentences(data: DataArguments) -> tuple[DatasetDict, list[str]]:
    """Return the splits `train` and `validation`, of files, GLUE or `made_reviews`, and their columns of text."""
    source = data.train_file or (f"nyu-mll/glue, {data.task_name}" if data.task_name else "made_reviews")
    with one_line_errors(f"Cannot use {source}: ", DatasetGenerationError):
        if data.train_file:
            rows = shared.read_rows(data, {".json": "json", ".jsonl": "json", ".csv": "csv"})
        elif data.task_name:
            rows = load_dataset("nyu-mll/glue", data.task_name)
        else:
            rows = made_reviews(data.validation_split_percentage)
        if "validation" not in rows:
            rows = shared.split_end(rows["train"], data.validation_split_percentage)
        shapes = (TASKS[data.task_name][0],) if data.task_name else (("sentence",), ("sentence1", "sentence2"))
        features = rows["train"].features
        columns = next((list(shape) for shape in shapes if {*shape, "label"} <= features.keys()), None)
        if columns is None or any(not features[column].dtype.endswith("string") for column in columns):
            wanted = " or ".join(", ".join((*shape, "label")) for shape in shapes)
            raise ValueError(f"it needs {wanted}, and text in all but `label`; it has {', '.join(features)}.")
        limits = {"train": data.max_train_samples, "validation": data.max_eval_samples}
        rows = {split: rows[split].select_columns([*columns, "label"]) for split in limits}
        check_labels(rows["train"].features["label"], {split: part.unique("label") for split, part in rows.items()})
    return DatasetDict({split: shared.take_first(part, limits[split]) for split, part in rows.items()}), columns


def check_labels(feature, seen: dict[str, list]) -> None:
    """Raise ValueError for labels from which nothing can be learned."""
    if not isinstance(feature, ClassLabel) and not feature.dtype.startswith("int"):
        raise ValueError(f"its labels are {feature.dtype}; they must be integers from 0 up.")
    if None in (numbers := {number for labels in seen.values() for number in labels}) or min(numbers) < 0:
        raise ValueError("it has rows without a label; give each row an integer from 0 up.")
    if len(seen["train"]) < 2:
        raise ValueError(f"all training labels are {seen['train'][0]}; give samples of two classes or more.")


def set_class_names(config, rows: DatasetDict) -> None:
    """Set the number and names of the classes from the data; a pretrained classifier must have the same number."""
    feature = rows["train"].features["label"]
    if isinstance(feature, ClassLabel):
        names = feature.names
    else:
        names = [f"LABEL_{number}" for number in range(1 + max(max(part["label"]) for part in rows.values()))]
    is_classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if is_classifier and config.num_labels != len(names):
        raise ValueError(
            f"The model has {config.num_labels} classes, but the data has {len(names)}; use a model for {len(names)}"
            " classes."
        )
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}


def load_metric(name: str) -> Callable[[transformers.EvalPrediction], dict[str, float]]:
    """Return `compute_metrics` for the Trainer.

    Accuracy and Matthews correlation need no network; others come from the hub.
    """
    known = {
        "accuracy": lambda predicted, true: float(np.mean(predicted == true)),
        "matthews_correlation": matthews_correlation,
    }
    if name not in known:
        if Path(name).exists():  # `evaluate` would run it as code
            raise ValueError(f"metric={name!r} must be the name of a metric, such as accuracy, not a file or folder.")
        with one_line_errors(f"Cannot load the metric {name} (available without a network: {', '.join(known)}): "):
            metric = evaluate.load(name)

    def compute(prediction: transformers.EvalPrediction) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        predicted, true = np.argmax(logits, axis=-1), prediction.label_ids
        return (
            {name: known[name](predicted, true)}
            if name in known
            else metric.compute(predictions=predicted, references=true)
        )

    return compute


def matthews_correlation(predicted: np.ndarray, true: np.ndarray) -> float:
    """Return the Matthews correlation, R_K of Gorodkin (2004) for more than two classes; 0 for one class alone."""
    x, y = (np.eye(1 + max(predicted.max(), true.max()))[classes] for classes in (predicted, true))
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    scale = math.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / scale) if scale > 0 else 0.0


def mean_over_samples(outputs, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean cross-entropy over all samples of an optimizer step, for any number of micro-batches."""
    losses = cross_entropy(outputs.logits, labels, reduction="none")
    # bf16 has too few digits for a sum of thousands
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def new_heads(new: list[str]) -> list[str] | None:
    """Return the modules of new parameters, which are trained and saved in full beside adapters."""
    modules = {key.rpartition(".")[0] for key in new if "." in key}
    known = {"classifier", "score"}  # peft trains these by default, and would copy modules inside them a second time
    heads = {name for name in modules - known if not any(name.startswith(f"{outer}.") for outer in known | modules)}
    return sorted(heads) or None


def score(trainer: Trainer, when: str, metric: str) -> None:
    """Print the metric on the validation data, and save all metrics."""
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        print(f"{metric}{when}: {metrics[f'eval_{metric}']:.4f}", flush=True)


if __name__ == "__main__":
    run_script(main)
