"""Arguments of the recipes: a YAML or JSON file first, then flags, which win."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from arguments_file import SUFFIXES, read_defaults
from transformers import HfArgumentParser, TrainingArguments

from hf_osdp.integrations.launch import launch_request


@dataclass
class ModelArguments:
    """Which model: a pretrained one, or one from scratch."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Weights to start from: a folder, or a name on the hub."})
    model_type: str = field(default="gpt2", metadata={"help": "Architecture to train from scratch."})
    config_name: str | None = field(default=None, metadata={"help": "Configuration to train from scratch: a folder, or a name on the hub."})
    config_overrides: str | None = field(default=None, metadata={"help": "Changes to the configuration, such as n_layer=4,n_embd=128."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "A tokenizer's folder or name; by default one is trained on the text."}
    )
    vocab_size: int = field(default=2048, metadata={"help": "Entries of a tokenizer that is trained on the text."})
    lora_rank: int | None = field(default=None, metadata={"help": "Train LoRA adapters of this rank and freeze the rest (needs peft)."})
    lora_alpha: int | None = field(default=None, metadata={"help": "Their weight, as a multiple of 1 / rank; by default twice the rank."})
    lora_targets: str | None = field(
        default=None, metadata={"help": "Projections that get one, such as c_attn,c_fc; by default every linear one but the head."}
    )

    def __post_init__(self) -> None:
        check_counts(self, "lora_rank", "lora_alpha")
        if self.lora_rank is None and (self.lora_alpha or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets need lora_rank beside them.")
        if self.lora_rank and not self.model_name_or_path:
            raise ValueError(f"lora_rank={self.lora_rank} trains adapters of a model that was trained; give model_name_or_path.")
        if self.model_name_or_path and (self.config_name or self.config_overrides):
            raise ValueError("model_name_or_path brings its own configuration; leave out config_name and config_overrides.")
        if self.vocab_size < 257:
            raise ValueError(f"vocab_size={self.vocab_size} is too small for byte-level text; use at least 257.")


@dataclass
class MaskedModelArguments(ModelArguments):
    """Which masked language model, and how much of the text it has to guess."""

    model_type: str = field(default="bert", metadata={"help": "Architecture to train from scratch."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Part of the tokens that the model has to guess."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"mlm_probability={self.mlm_probability} must lie between 0 and 1; BERT has 0.15.")


GROUPINGS = {"group_sharding": "hsdp", "communication_with_groups": "two_stage", "none": "fsdp"}
"""What `grouping` may say, with the strategy that it is."""


@dataclass
class FileArguments:
    """Which local data, and how much of it."""

    train_file: str | None = field(default=None, metadata={"help": "Local text: .txt, or .json/.jsonl/.csv with a column `text`."})
    validation_file: str | None = field(default=None, metadata={"help": "Local text for evaluation."})
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Part of the training text to evaluate on where there is no other."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many samples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many samples."})

    def __post_init__(self) -> None:
        if self.validation_file and not self.train_file:
            raise ValueError("validation_file needs train_file beside it.")
        if not 0 < self.validation_split_percentage < 100:
            raise ValueError(f"validation_split_percentage={self.validation_split_percentage} must be between 1 and 99.")
        check_counts(self, "max_train_samples", "max_eval_samples")


def check_counts(arguments: object, *names: str) -> None:
    """Refuse numbers below 1; None is left alone."""
    for name in names:
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")


@dataclass
class DataArguments(FileArguments):
    """Which text; by default the English language reference that every Python carries."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the hub, such as Salesforce/wikitext."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration, such as wikitext-2-raw-v1."})
    block_size: int | None = field(default=None, metadata={"help": "Tokens of one sample; by default what the model takes, at most 1024."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name and self.train_file:
            raise ValueError("Both dataset_name and train_file were given; choose one.")
        check_counts(self, "block_size")


GLUE_TASKS = {
    "sst2": (("sentence",), "accuracy"),
    "rte": (("sentence1", "sentence2"), "accuracy"),
    "cola": (("sentence",), "matthews_correlation"),
}
"""Tasks of GLUE that a model can be fine-tuned on: columns of text, and the metric."""


@dataclass
class ClassifierArguments(ModelArguments):
    """Which classifier: from a pretrained model, or from scratch."""

    model_type: str = field(default="bert", metadata={"help": "Architecture to train from scratch."})


@dataclass
class ClassificationArguments(FileArguments):
    """Which labelled sentences; by default made ones."""

    train_file: str | None = field(
        default=None, metadata={"help": "Local .jsonl, .json or .csv with columns `sentence`, or `sentence1` and `sentence2`, and `label`."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "The same for evaluation."})
    task_name: str | None = field(
        default=None, metadata={"help": f"Task of GLUE: {', '.join(GLUE_TASKS)}; from the hub, unless there is a train_file."}
    )
    metric: str | None = field(
        default=None, metadata={"help": "accuracy, matthews_correlation, or a metric on the hub; by default the task's, else accuracy."}
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Tokens of one sample, longer ones are cut; by default 128, or what the model takes."}
    )
    pad_to_max_length: bool = field(
        default=True, metadata={"help": "Pad to max_seq_length, which the plan is made for; false pads to the longest of a batch."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without a better metric; needs load_best_model_at_end."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_name is not None and self.task_name not in GLUE_TASKS:
            raise ValueError(f"task_name={self.task_name!r} is not known; use one of {', '.join(GLUE_TASKS)}, or train_file.")
        check_counts(self, "max_seq_length", "early_stopping_patience")
        if self.metric is None:
            self.metric = GLUE_TASKS[self.task_name][1] if self.task_name else "accuracy"


@dataclass
class OSDPArguments:
    """How to shard. What stands here goes before what stands in the accelerate configuration file."""

    osdp: bool | None = field(
        default=None, metadata={"help": "False is the stock Trainer; by default the accelerate file decides, without one it is on."}
    )
    memory_limit: str | None = field(default=None, metadata={"help": "Memory of each device that training may use, such as 8GiB."})
    strategy: str | None = field(default=None, metadata={"help": "osdp (default), fsdp, ddp, zero2, hsdp or two_stage."})
    grouping: str | None = field(
        default=None,
        metadata={
            "help": "What machines do as groups, for every unit alike: group_sharding (sharded inside a group, replicated between"
            " them: strategy hsdp), communication_with_groups (sharded over all, collectives in two stages: two_stage) or none (sharded"
            " over all: fsdp). By default the planner decides for each unit."
        },
    )
    block_classes: str | None = field(default=None, metadata={"help": "Classes that become units, such as GPT2Block,BertLayer."})
    micro_batch_size: int | None = field(default=None, metadata={"help": "Samples to run at once; by default the planner chooses."})
    reduce_every_micro_step: bool | None = field(
        default=None,
        metadata={
            "help": "True reduce-scatters gradients in each micro-step, replicas all-reduce once, in the last; False: all in the last."
        },
    )
    recompute: bool | None = field(
        default=None, metadata={"help": "Recompute the activations of every block, or of none; by default the planner decides for each."}
    )
    host_offload: bool | None = field(
        default=None, metadata={"help": "Hold the states of every unit on the host, or of none; by default the planner decides for each."}
    )
    offload_activations: bool | None = field(
        default=None,
        metadata={"help": "Have what every block saves wait on the host, or of none; by default the planner decides for each."},
    )
    operator_splitting: bool | None = field(
        default=None, metadata={"help": "False keeps blocks and operators whole; by default they are cut where memory binds and it pays."}
    )
    split_vocabulary: bool | None = field(
        default=None, metadata={"help": "Whether the vocabulary projection may be cut, with its loss; by default it may."}
    )
    plan: str | None = field(default=None, metadata={"help": "File of a plan to run as it is."})
    hardware: str | None = field(default=None, metadata={"help": "Preset to plan for; by default this machine is measured."})
    nodes: int | None = field(default=None, metadata={"help": "Machines that the processes are spread over."})
    profile: str | None = field(default=None, metadata={"help": "File of hf-osdp profile for this machine; nothing is measured then."})
    recalibrate: bool | None = field(
        default=None, metadata={"help": "Try the plan on a throw-away copy first, correct the estimates, and plan again."}
    )
    compare: bool | None = field(default=None, metadata={"help": "Estimate the other strategies beside the plan."})

    def __post_init__(self) -> None:
        if self.grouping is None:
            return
        if self.grouping not in GROUPINGS:
            raise ValueError(f"grouping={self.grouping!r} is not known; use one of {', '.join(GROUPINGS)}.")
        for name in ("strategy", "plan"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"grouping={self.grouping} is strategy {GROUPINGS[self.grouping]}, so {name}={value} cannot stand beside it;"
                    " leave one of the two out."
                )

    def options(self, sequence_length: int) -> dict[str, object] | bool:
        """What was stated here, for the Trainer to lay over the accelerate file; False for the stock Trainer."""
        stated = self.stated()
        return stated if stated is False else {**stated, "sequence_length": sequence_length}

    def stated(self) -> dict[str, object] | bool:
        """The same without the length of a sample.

        Raises:
            ValueError: `grouping` was given for the stock Trainer, which has none.
        """
        if self.osdp is False or (self.osdp is None and launch_request().osdp is False):
            if self.grouping is not None:
                raise ValueError(f"grouping={self.grouping} has no effect with osdp false; leave one of the two out.")
            return False
        stated = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}
        stated = {name: value for name, value in stated.items() if name not in ("osdp", "grouping")}
        if self.grouping is not None:
            stated["strategy"] = GROUPINGS[self.grouping]
        return stated


class RecipeParser(HfArgumentParser):
    """A parser whose complaints are `ValueError`s, so that several processes complain once."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_arguments(types: Sequence[type], argv: Sequence[str]) -> tuple[Any, ...]:
    """Read a YAML or JSON file, where the first argument is one, and flags over it.

    Args:
        types: dataclasses, such as `TrainingArguments`.
        argv: the command line without the program's name.

    Returns:
        One instance of each.

    Raises:
        ValueError: a key, a flag or a value cannot be used.
    """
    parser = RecipeParser(types)
    if TrainingArguments in types and (not torch.accelerator.is_available() or launch_request().use_cpu):
        parser.set_defaults(use_cpu=True)
    argv = list(argv)
    if argv and Path(argv[0]).suffix in SUFFIXES:
        parser.set_defaults(**read_defaults(Path(argv.pop(0)), parser, types))
    try:
        return parser.parse_args_into_dataclasses(args=argv, look_for_args_file=False)
    except ValueError as error:  # TrainingArguments refuses some values itself
        raise ValueError(str(error)) from error
