"""Fine-tune BERT, or any other model for sentence classification, under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_glue.py recipes/glue/demo.yaml --output_dir out

The YAML file holds any of the arguments below and those of `TrainingArguments`; flags win over it.
"""

from __future__ import annotations

import sys

from classification_data import LabelledText, load_labelled, tokenize
from losses import mean_over_labels
from metric_loading import load_metric
from model_loading import Task, choose_block_size, fit_config, load_config, load_model, load_tokenizer
from recipe_arguments import ClassificationArguments, ClassifierArguments, OSDPArguments, parse_arguments
from trained_tokenizers import train_masked_tokenizer
from training import Score, begin, train_and_evaluate
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedConfig,
    TrainingArguments,
)

from hf_osdp import Trainer
from hf_osdp.integrations.launch import run_script

TASK = Task(
    kind="model for sentence classification",
    examples="bert or roberta",
    model_class=AutoModelForSequenceClassification,
    configs=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    adapter_type="SEQ_CLS",
)
LONGEST_DEFAULT = 128


def main() -> None:
    """Labelled sentences, tokenizer, model, plan, training, evaluation, saved model."""
    types = (ClassifierArguments, ClassificationArguments, OSDPArguments, TrainingArguments)
    model_args, data_args, osdp_args, args = parse_arguments(types, sys.argv[1:])
    checkpoint = begin(args)
    check_best_model(data_args, args)
    config = load_config(model_args, TASK)

    with args.main_process_first(desc="data"):
        text, metric = load_labelled(data_args), load_metric(data_args.metric)
    tokenizer = load_tokenizer(model_args, checkpoint, lambda: train_masked_tokenizer(text.texts(), model_args.vocab_size, config))
    fit_config(config, model_args, tokenizer)
    fit_labels(config, text)
    length = choose_block_size(data_args.max_seq_length, config, name="max_seq_length", longest=LONGEST_DEFAULT)
    with args.main_process_first(desc="tokens"):
        samples = tokenize(text, tokenizer, length)

    patience = data_args.early_stopping_patience
    trainer = Trainer(
        model=load_model(model_args, TASK, config, tokenizer),
        args=args,
        train_dataset=samples["train"] if args.do_train else None,
        eval_dataset=samples["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, "max_length" if data_args.pad_to_max_length else "longest", max_length=length),
        compute_loss_func=mean_over_labels,
        compute_metrics=metric,
        callbacks=[EarlyStoppingCallback(patience)] if patience else None,
        osdp=osdp_args.options(length),
    )
    train_and_evaluate(trainer, checkpoint, Score(name=data_args.metric, measure=lambda t: evaluate(t, data_args.metric), decimals=4))


def evaluate(trainer: Trainer, name: str) -> float:
    """The metric on the validation data; also saved with the others."""
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    return metrics[f"eval_{name}"]


def check_best_model(data_args: ClassificationArguments, args: TrainingArguments) -> None:
    """Refuse early stopping without a best model to go back to, a best model that FSDP cannot load, and one by a metric not computed.

    Raises:
        ValueError: one of these.
    """
    if data_args.early_stopping_patience and not args.load_best_model_at_end:
        raise ValueError(
            f"early_stopping_patience={data_args.early_stopping_patience} needs load_best_model_at_end: true,"
            " and eval_strategy and save_strategy of one kind, such as epoch."
        )
    if args.load_best_model_at_end and args.save_only_model and args.world_size > 1:
        raise ValueError("save_only_model cannot stand beside load_best_model_at_end under FSDP; leave one of the two out.")
    wanted = (args.metric_for_best_model or "loss").removeprefix("eval_")
    if wanted not in ("loss", data_args.metric):
        raise ValueError(f"metric_for_best_model={args.metric_for_best_model} is not computed; use {data_args.metric} or loss.")


def fit_labels(config: PreTrainedConfig, text: LabelledText) -> None:
    """As many classes as the data has, under its names.

    Raises:
        ValueError: the model is a classifier already, with another number of classes.
    """
    names = text.label_names
    trained = any("SequenceClassification" in name for name in config.architectures or ())
    if trained and config.num_labels != len(names):
        raise ValueError(f"The model tells {config.num_labels} classes apart, but the data has {len(names)}; use a model for {len(names)}.")
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}


if __name__ == "__main__":
    run_script(main)
