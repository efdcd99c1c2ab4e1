"""Fine-tune BERT, or any other model for sentence classification, under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_glue.py recipes/glue/demo.yaml
    --output_dir out

The first argument may be a YAML or JSON file of arguments; flags override it. The arguments are those below, those of
`TrainingArguments`, and every option of `hf_osdp.OSDPConfig`, such as `--memory_limit 8GiB`. `--osdp false` runs the
stock Trainer.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import evaluate
import numpy as np
import psutil
import torch
import transformers
from datasets import ClassLabel, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoTokenizer, TrainerCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from hf_osdp import Trainer, checkpoint_to_resume
from hf_osdp.integrations.arguments import one_line_errors, parse_arguments
from hf_osdp.integrations.launch import run_script

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv"}
TASKS = {
    "sst2": (("sentence",), "accuracy"),
    "rte": (("sentence1", "sentence2"), "accuracy"),
    "cola": (("sentence",), "matthews_correlation"),
}
"""GLUE tasks: text columns and metric."""


@dataclass
class ModelArguments:
    """The model: pretrained, or from scratch."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pretrained weights: a folder, or a name on the hub."}
    )
    model_type: str = field(default="bert", metadata={"help": "Architecture to train from scratch."})
    config_name: str | None = field(
        default=None, metadata={"help": "Configuration to train from scratch: a folder, or a name on the hub."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes to the configuration, for example num_hidden_layers=4."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer; default: the model's, or one trained on the text."}
    )
    vocab_size: int = field(
        default=2048, metadata={"help": "Vocabulary size of a tokenizer that is trained on the text."}
    )
    lora_rank: int | None = field(
        default=None, metadata={"help": "Train LoRA adapters of this rank and freeze the rest (needs peft)."}
    )
    lora_alpha: int | None = field(
        default=None, metadata={"help": "LoRA updates are scaled by alpha / rank; default: twice the rank."}
    )
    lora_targets: str | None = field(
        default=None, metadata={"help": "Projections with an adapter, such as query,value; default: all."}
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path and (self.config_name or self.config_overrides):
            raise ValueError(
                "model_name_or_path has its own configuration; leave out config_name and config_overrides."
            )
        if self.vocab_size < 257:
            raise ValueError(f"vocab_size={self.vocab_size} is too small for byte-level text; use at least 257.")
        if self.lora_rank is None and (self.lora_alpha or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets need lora_rank.")
        if self.lora_rank is not None and not self.model_name_or_path:
            raise ValueError(
                f"lora_rank={self.lora_rank} trains adapters of a pretrained model; give model_name_or_path."
            )


@dataclass
class DataArguments:
    """The labelled sentences; default: generated ones."""

    task_name: str | None = field(
        default=None, metadata={"help": "GLUE task: sst2, rte or cola; from the hub, unless train_file is given."}
    )
    train_file: str | None = field(
        default=None,
        metadata={
            "help": "Local .jsonl, .json or .csv file with columns `sentence`, or `sentence1` and `sentence2`, and `label`."  # noqa: E501
        },
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "Local file in the same format, for evaluation."}
    )
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Percentage to hold out if there is no validation split."}
    )
    metric: str | None = field(
        default=None, metadata={"help": "Metric of `evaluate`; default: the task's, or accuracy."}
    )
    max_seq_length: int | None = field(default=None, metadata={"help": "Tokens per sample; default: at most 128."})
    pad_to_max_length: bool = field(
        default=True, metadata={"help": "Pad to the planned length; false: to the longest of a batch."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Number of training samples to use, from the start."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Number of evaluation samples to use, from the start."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Evaluations without a better metric before stopping."}
    )

    def __post_init__(self) -> None:
        if self.task_name is not None and self.task_name not in TASKS:
            raise ValueError(
                f"task_name={self.task_name!r} is not known; use one of {', '.join(TASKS)}, or train_file."
            )
        if self.validation_file and not self.train_file:
            raise ValueError("validation_file needs train_file.")
        if not 0 < self.validation_split_percentage < 100:
            raise ValueError(
                f"validation_split_percentage={self.validation_split_percentage} must be between 1 and 99."
            )
        for name in ("max_seq_length", "max_train_samples", "max_eval_samples", "early_stopping_patience"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.metric = self.metric or (TASKS[self.task_name][1] if self.task_name else "accuracy")


def main() -> None:
    """Load the sentences, tokenizer and model, train under a plan, evaluate, and save the model."""
    model_args, data_args, args, osdp = parse_arguments(
        (ModelArguments, DataArguments, TrainingArguments), sys.argv[1:]
    )
    check(data_args, args)
    if args.process_index:  # only rank 0 logs
        datasets.disable_progress_bars()
        logging.getLogger().setLevel(logging.ERROR)
    transformers.set_seed(args.seed)
    resume = {"true": True, "false": False}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise ValueError(f"Can't find a valid checkpoint at {resume}; give the path of a checkpoint.")

    config = load_config(model_args)
    with args.main_process_first(desc="data"):
        rows, columns = load_sentences(data_args)
        metric = load_metric(data_args.metric)
        tokenizer = load_tokenizer(model_args, config, [text for column in columns for text in rows["train"][column]])
    set_class_names(config, rows)
    positions = getattr(config, "max_position_embeddings", None) or 2**30
    length = data_args.max_seq_length or min(positions, 128)
    if length > positions:
        raise ValueError(
            f"max_seq_length={length} is longer than the model's {positions} positions; use at most {positions}."
        )

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        return dict(tokenizer(*(batch[column] for column in columns), truncation=True, max_length=length))

    with args.main_process_first(desc="tokens"):
        samples = rows.map(tokenize, batched=True, remove_columns=columns)

    padding = "max_length" if data_args.pad_to_max_length else "longest"
    patience = data_args.early_stopping_patience
    trainer = Trainer(
        model=load_model(model_args, config, tokenizer),
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
    trainer.add_callback(JSONLog(trainer))
    checkpoint = checkpoint_to_resume(args.output_dir, resume)
    if args.do_train and not checkpoint and args.process_index == 0:
        (Path(args.output_dir) / "log.jsonl").unlink(missing_ok=True)  # left by an earlier run
    if args.do_eval:
        score(trainer, data_args.metric, " before training" if args.do_train else "")
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        if args.do_eval:
            score(trainer, data_args.metric, " after training")
        if args.process_index == 0:
            print(f"model saved in {args.output_dir}", flush=True)
    trainer.accelerator.end_training()


def check(data_args: DataArguments, args: TrainingArguments) -> None:
    """Raise ValueError for arguments that would make the run fail later."""
    if not (args.do_train or args.do_eval):
        raise ValueError("Nothing to do; give do_train, do_eval or both.")
    known = get_available_reporting_integrations()
    if missing := [name for name in args.report_to if name not in known]:
        raise ValueError(
            f"report_to={','.join(missing)} is not installed here; install it, or use one of"
            f" {', '.join([*known, 'none'])}."
        )
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
    """Return the splits `train` and `validation`, from files, GLUE or `made_reviews`, and the names of their text
    columns.
    """
    source = data.train_file or (f"nyu-mll/glue, {data.task_name}" if data.task_name else "made_reviews")
    with one_line_errors(f"Cannot use {source}: ", DatasetGenerationError):
        if data.train_file:
            files = {
                "train": data.train_file,
                **({"validation": data.validation_file} if data.validation_file else {}),
            }
            formats = {FORMATS.get(Path(file).suffix.lower()) for file in files.values()}
            if None in formats or len(formats) > 1:
                raise ValueError(f"use files of one kind: {', '.join(FORMATS)}.")
            rows = load_dataset(formats.pop(), data_files=files)
        elif data.task_name:
            rows = load_dataset("nyu-mll/glue", data.task_name)
        else:
            from made_reviews import made_reviews  # in this folder; needed only without train_file and task_name

            rows = made_reviews(data.validation_split_percentage)
        if "validation" not in rows:
            parts = rows["train"].train_test_split(test_size=data.validation_split_percentage / 100, shuffle=False)
            rows = DatasetDict(train=parts["train"], validation=parts["test"])
        shapes = (TASKS[data.task_name][0],) if data.task_name else (("sentence",), ("sentence1", "sentence2"))
        features = rows["train"].features
        columns = next((list(shape) for shape in shapes if {*shape, "label"} <= features.keys()), None)
        if columns is None or any(not features[column].dtype.endswith("string") for column in columns):
            wanted = " or ".join(", ".join((*shape, "label")) for shape in shapes)
            raise ValueError(f"it needs {wanted}, and text in all but `label`; it has {', '.join(features)}.")
        limits = {"train": data.max_train_samples, "validation": data.max_eval_samples}
        rows = {split: rows[split].select_columns([*columns, "label"]) for split in limits}
        check_labels(rows["train"].features["label"], {split: part.unique("label") for split, part in rows.items()})
        return DatasetDict(
            {split: part.take(min(limits[split] or len(part), len(part))) for split, part in rows.items()}
        ), columns


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
    named = isinstance(feature, ClassLabel)
    names = (
        feature.names
        if named
        else [f"LABEL_{number}" for number in range(1 + max(max(part["label"]) for part in rows.values()))]
    )
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
    """Return the Matthews correlation, R_K of Gorodkin (2004) for more than two classes; 0 if only one class
    occurs.
    """
    x, y = (np.eye(1 + max(predicted.max(), true.max()))[classes] for classes in (predicted, true))
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    scale = math.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / scale) if scale > 0 else 0.0


def mean_over_samples(outputs, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean cross-entropy over all samples of an optimizer step, for any number of micro-batches."""
    losses = cross_entropy(outputs.logits, labels, reduction="none")
    total = losses.sum(
        dtype=torch.promote_types(losses.dtype, torch.float32)
    )  # bf16 has too few digits for a sum of thousands
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def load_config(model_args: ModelArguments):
    """Return the named configuration, or the default one of the model type."""
    name = model_args.model_name_or_path or model_args.config_name
    with one_line_errors(f"Cannot use {name or f'model_type={model_args.model_type!r}'}: "):
        config = AutoConfig.from_pretrained(name) if name else transformers.CONFIG_MAPPING[model_args.model_type]()
        if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ValueError(
                f"{config.model_type} is not a model for sentence classification; use one such as bert or roberta."
            )
    return config


def load_tokenizer(model_args: ModelArguments, config, texts: list[str]):
    """Return the named tokenizer, or train BERT's WordPiece or RoBERTa's BPE.

    A new model gets the size of its vocabulary.
    """
    if name := model_args.tokenizer_name or model_args.model_name_or_path:
        with one_line_errors(f"Cannot load the tokenizer {name}: "):
            tokenizer = AutoTokenizer.from_pretrained(name)
    elif transformers.TOKENIZER_MAPPING.get(type(config), None) is transformers.BertTokenizer:
        tokenizer = transformers.BertTokenizer(vocab=wordpiece_vocabulary(texts, model_args.vocab_size))
    else:
        tokenizer = transformers.RobertaTokenizer().train_new_from_iterator(
            texts, model_args.vocab_size, show_progress=False
        )
    if not model_args.model_name_or_path:
        numbers = {
            f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "cls", "sep")
        }
        config.update(
            {"vocab_size": len(tokenizer), **{name: n for name, n in numbers.items() if hasattr(config, name)}}
        )
    if model_args.config_overrides:
        with one_line_errors(f"Cannot use config_overrides={model_args.config_overrides}: "):
            config.update_from_string(model_args.config_overrides)
            if config.vocab_size < len(tokenizer):
                raise ValueError(
                    f"vocab_size={config.vocab_size} is less than the {len(tokenizer)} entries of the tokenizer."
                )
    if tokenizer.pad_token is None:
        raise ValueError(f"The tokenizer {name} has no pad_token; name one such as BERT's with tokenizer_name.")
    return tokenizer


def wordpiece_vocabulary(texts: list[str], size: int) -> dict[str, int]:
    """Train a WordPiece vocabulary that is the same in each run.

    The trainer numbers one-character pieces in the order of a hash map, so they are given to it in a fixed order, as
    special tokens.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    counts = Counter(char for text in texts for char in tokenizer.normalizer.normalize_str(text) if not char.isspace())
    pieces = sorted(f"##{char}" for char, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:1000])
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, limit_alphabet=1000, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def load_model(model_args: ModelArguments, config, tokenizer):
    """Return the model in float32, pretrained or new, with LoRA adapters if `lora_rank` is given; the new head is
    trained with them.
    """
    auto_class = transformers.AutoModelForSequenceClassification
    if not model_args.model_name_or_path:
        return auto_class.from_config(config, dtype=torch.float32)
    model, info = auto_class.from_pretrained(
        model_args.model_name_or_path, config=config, dtype=torch.float32, output_loading_info=True
    )
    if len(tokenizer) > (entries := model.get_input_embeddings().num_embeddings):
        if model_args.lora_rank:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} entries, the model {entries}; adapters cannot train new"
                " embeddings."
            )
        model.resize_token_embeddings(len(tokenizer))
    return with_adapters(model, model_args, info["missing_keys"]) if model_args.lora_rank else model


def with_adapters(model, model_args: ModelArguments, new: list[str]):
    """Return the model with LoRA adapters; modules with new parameters are trained and saved in full."""
    from peft import LoraConfig, get_peft_model

    modules = {key.rpartition(".")[0] for key in new if "." in key}
    known = {"classifier", "score"}  # peft trains these by default, and would copy modules inside them a second time
    heads = sorted(
        name for name in modules - known if not any(name.startswith(f"{outer}.") for outer in known | modules)
    )
    targets = model_args.lora_targets.split(",") if model_args.lora_targets else "all-linear"
    options = LoraConfig(
        r=model_args.lora_rank, lora_alpha=model_args.lora_alpha or 2 * model_args.lora_rank, target_modules=targets,
        task_type="SEQ_CLS", modules_to_save=heads or None,
    )  # fmt: skip
    with one_line_errors(f"Cannot use lora_targets={model_args.lora_targets}: "):
        return get_peft_model(model, options)


def score(trainer: Trainer, metric: str, when: str) -> None:
    """Print the metric on the validation data, and save all metrics."""
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        print(f"{metric}{when}: {metrics[f'eval_{metric}']:.4f}", flush=True)


class JSONLog(TrainerCallback):
    """Write `log.jsonl`: one line every `logging_steps` and one for each evaluation.

    Rates exclude evaluations and checkpoints.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.samples, self.seconds, self.last = trainer, 0, 0.0, 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.last = time.perf_counter()

    on_evaluate = on_save = on_train_begin

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        self.seconds, self.last = self.seconds + now - self.last, now
        self.samples += args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & logs.keys():
            return
        line = {"step": state.global_step, **logs}
        if "loss" in logs:
            scaler, cuda = self.trainer.accelerator.scaler, args.device.type == "cuda"
            line["samples_per_s"] = self.samples / self.seconds
            line["loss_scale"] = scaler.get_scale() if scaler and scaler.is_enabled() else 1.0
            line["free_device_memory_bytes"] = (
                torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
            )
            self.samples, self.seconds = 0, 0.0
        with (Path(args.output_dir) / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({name: value if math.isfinite(value) else None for name, value in line.items()}) + "\n"
            )


if __name__ == "__main__":
    run_script(main)
