"""Train a masked language model, such as BERT, under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_mlm.py recipes/bert_large/demo.yaml
    --output_dir out

The first argument may be a YAML or JSON file of arguments; flags override it. The arguments are those of the two
classes below, those of `TrainingArguments`, and every option of `hf_osdp.OSDPConfig`, such as `--memory_limit 8GiB`.
`--osdp false` runs the stock Trainer.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from itertools import chain

import numpy as np
import reporting
import shared
import torch
import transformers
from datasets import Dataset
from shared import StreamArguments as DataArguments
from shared import option
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments

from hf_osdp import Trainer
from hf_osdp.integrations.arguments import parse_arguments
from hf_osdp.integrations.launch import run_script

GROUPINGS = {"group_sharding": "hsdp", "communication_with_groups": "two_stage", "none": "fsdp"}


@dataclass
class ModelArguments(shared.ModelArguments):
    """The model: pretrained, or from scratch."""

    model_type: str = option("bert", "Architecture to train from scratch.")
    mlm_probability: float = option(0.15, "Fraction of the tokens that are masked.")
    grouping: str | None = option(None, f"How machines form groups, the same for every unit: {GROUPINGS}.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"mlm_probability={self.mlm_probability} must be between 0 and 1; BERT uses 0.15.")
        if self.grouping not in (None, *GROUPINGS):
            raise ValueError(f"grouping={self.grouping!r} is not known; use one of {', '.join(GROUPINGS)}.")


def main() -> None:
    """Load the text, tokenizer and model, train under a plan, evaluate, and save the model."""
    model_args, data_args, args, osdp = parse_arguments(
        (ModelArguments, DataArguments, TrainingArguments), sys.argv[1:]
    )
    osdp = with_grouping(model_args.grouping, osdp)
    # BERT's logits are a view, and torch warns about in-place operations on it; this recipe has none.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    resume = shared.begin_training(args, streaming=data_args.streaming)

    classes = transformers.MODEL_FOR_MASKED_LM_MAPPING
    config = shared.load_config(model_args, classes, "masked language model; use one such as bert or roberta")
    with args.main_process_first(desc="text"):
        text = shared.load_text(data_args)
        tokenizer = shared.load_tokenizer(model_args, config, shared.lines_of(text["train"]), masked=True)
    block_size = shared.length_of_samples(config, data_args.block_size, usual=1024)
    with args.main_process_first(desc="tokens"):
        cut = packing_with_special_tokens(tokenizer, block_size)
        train, validation = shared.make_blocks(text, cut, block_size, data_args, seed=args.seed, do_eval=args.do_eval)
        validation = validation and with_fixed_masks(validation, tokenizer, model_args.mlm_probability, args.seed)

    # Each rank draws its own masks; workers of a data loader add their number to the seed.
    seed = args.seed + 1000 * args.process_index
    model, _ = shared.load_model(transformers.AutoModelForMaskedLM, model_args, config, tokenizer)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train if args.do_train else None,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=MaskingCollator(tokenizer, mlm_probability=model_args.mlm_probability, seed=seed),
        compute_loss_func=mean_over_labels,
        osdp=osdp and {"sequence_length": block_size, **osdp},  # False is the stock Trainer
    )
    trainer.add_callback(reporting.JSONLog(trainer, block_size))
    reporting.train_and_save(trainer, resume, reporting.print_perplexity)


def with_grouping(grouping: str | None, osdp: dict | bool) -> dict | bool:
    """Return the options of OSDP, with the strategy for the paper's name of the grouping."""
    if grouping and (osdp is False or {"strategy", "plan"} & osdp.keys()):
        raise ValueError(
            f"grouping={grouping} is strategy {GROUPINGS[grouping]}; leave out strategy, plan and osdp false."
        )
    return {**osdp, "strategy": GROUPINGS[grouping]} if grouping else osdp


def packing_with_special_tokens(tokenizer, size: int):
    """Return a function that joins the tokens of a thousand rows and cuts them into blocks between special tokens.

    The remainder is dropped.
    """
    if missing := [name for name in ("cls_token", "sep_token", "mask_token") if getattr(tokenizer, name) is None]:
        raise ValueError(
            f"The tokenizer has no {missing[0]}; name one of a masked language model with tokenizer_name."
        )
    if size < 3:
        raise ValueError(f"block_size={size} leaves no room for text between two special tokens; use at least 3.")

    def cut(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(rows["text"], add_special_tokens=False, verbose=False)
        tokens = list(chain.from_iterable(encoded["input_ids"]))
        parts = [tokens[start : start + size - 2] for start in range(0, len(tokens) - size + 3, size - 2)]
        return {"input_ids": [[tokenizer.cls_token_id, *part, tokenizer.sep_token_id] for part in parts]}

    return cut


class MaskingCollator(transformers.DataCollatorForLanguageModeling):
    """Mask training samples anew in each batch; evaluation samples have their masks already."""

    def torch_call(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        return (
            transformers.default_data_collator(examples)
            if "labels" in examples[0]
            else dict(super().torch_call(examples))
        )


def with_fixed_masks(rows: Dataset, tokenizer, probability: float, seed: int) -> Dataset:
    """Return samples with fixed masks, so that evaluations before and after training can be compared."""
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability, seed=seed)

    def mask(rows: dict[str, list[list[int]]]) -> dict[str, np.ndarray]:
        batch = collator([{"input_ids": row} for row in rows["input_ids"]])
        return {name: batch[name].numpy() for name in ("input_ids", "labels")}

    return rows.map(mask, batched=True)


def mean_over_labels(outputs, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean cross-entropy over all masked tokens of an optimizer step, for any number of micro-batches."""
    losses = cross_entropy(outputs.logits.flatten(0, -2), labels.flatten(), reduction="none")
    # bf16 has too few digits for a sum of thousands
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


if __name__ == "__main__":
    run_script(main)
