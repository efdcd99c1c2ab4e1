"""Read from a Trainer how it evaluates and generates, for the memory that this needs."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import replace
from typing import Any

from transformers import Trainer, TrainingArguments

from ..distributed.process_group import all_gather_objects
from ..planner.cost.evaluation import EvaluationLoop, Generation
from ..preparation.job import Evaluation
from ..preparation.samples import Batches, find_batches, row_tokens
from ..sharding.micro_batches import reason_against_cuts
from .trainer_loss import MicroBatchRule, parts_of_batch, traced_prediction

_KNOWN_STEPS = ("transformers", "trl", "hf_osdp")
"""Packages whose prediction steps are a forward, of which the loop keeps outputs."""


def evaluation_of(trainer: Any, rule: MicroBatchRule, dataset: Any, collator: Any) -> Evaluation | None:  # noqa: ANN401  a Trainer's own
    """Return what a Trainer's evaluation runs on a dataset, or several; None if it has none, or that is not known
    beforehand. Collective.
    """
    args, config = trainer.args, trainer.accelerator.config
    found = find_batches(dataset, collator)
    least = 0 if found is None or found.is_whole else config.sequence_length or 0
    length = row_tokens(0 if found is None else max(found.tokens or 1, least), None)
    own = next(cls for cls in type(trainer).__mro__ if "prediction_step" in vars(cls)).__module__
    known = own.partition(".")[0] in _KNOWN_STEPS and length is not None
    if not all(all_gather_objects(known and found is not None and isinstance(found(1), Mapping))):
        return None
    assert found is not None and length is not None
    batches = found.with_rows(length)
    keeps = (trainer.compute_metrics is not None or args.do_predict) and not args.prediction_loss_only
    generates = keeps and getattr(args, "predict_with_generate", False)
    generation = generation_of(trainer, length) if generates else None
    if generates and generation is None:
        return None
    sizes = [
        len(one) for one in (dataset.values() if isinstance(dataset, dict) else [dataset]) if isinstance(one, Sized)
    ]
    if trainer.eval_dataset is None and trainer.train_dataset is not None:
        # training samples for those to predict, which come later
        sizes = [args.eval_batch_size * args.world_size]
    return Evaluation(
        loop=replace(evaluation_loop(args, max(sizes, default=None), keeps=keeps), generation=generation),
        inputs=config.inputs or batches,
        sequence_length=length,
        outputs=traced_prediction(trainer, loss_alone=not keeps, generates=generates),
        against_cuts="they generate" if generates else _reason_against_cuts(trainer, rule, batches),
        averages=rule.averages,
        moves=args.eval_accumulation_steps is None and not args.batch_eval_metrics,
    )


def evaluation_loop(args: TrainingArguments, samples: int | None, *, keeps: bool) -> EvaluationLoop:
    """Return the loop over a number of samples, None if it is not known, as the arguments have it."""
    samples = 2**40 if samples is None else max(1, samples)
    size = min(args.eval_batch_size // parts_of_batch(args), samples)
    moved = 1 if args.batch_eval_metrics else args.eval_accumulation_steps
    return EvaluationLoop(
        batch_size=size, micro_batch_size=size, moved_after=moved, keeps_outputs=keeps, samples=samples
    )


def generation_of(trainer: Any, prompt: int, new_tokens: int | None = None) -> Generation | None:  # noqa: ANN401
    """Return what generating takes for a sample with a prompt of so many tokens; None if the size of its cache is not
    known. `new_tokens` are those of its longest completion, if the model's own settings do not say.
    """
    args, model, generation = trainer.args, trainer.model, getattr(trainer.model, "generation_config", None)
    if generation is None:
        return None
    text, crosses = model.config.get_text_config(decoder=True), getattr(model.config, "is_encoder_decoder", False)
    try:  # a state-space model has no heads, others have other sizes in each layer
        heads, kinds = text.num_attention_heads, getattr(text, "layer_types", None)
        layers = text.num_hidden_layers if kinds is None else kinds.count("full_attention")
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        width = kv_heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    except (AttributeError, TypeError):
        return None
    tokens = getattr(args, "generation_max_length", None) or generation.max_length or 20
    if (new_tokens := new_tokens or generation.max_new_tokens) is not None:
        tokens = new_tokens + (0 if crosses else prompt)
    beams = getattr(args, "generation_num_beams", None) or generation.num_beams or 1
    dtype = trainer.accelerator.precision.compute
    itemsize = model.dtype.itemsize if dtype is None else dtype.itemsize
    keys, repeats = width * itemsize * beams * tokens, 2 * (heads // kv_heads) if heads > kv_heads else 0
    encoded = text.hidden_size * itemsize * prompt * (beams + (beams > 1)) if crosses else 0
    return Generation(
        cache_bytes=2 * layers * width * itemsize * beams * (tokens + prompt * crosses) + encoded,
        growth_bytes=max(1, repeats) * keys,
        scores_bytes=4 * beams * text.vocab_size * (1 + (beams > 1)),
        logits_bytes=beams * text.vocab_size * (itemsize + 4 * (1 if beams == 1 else 3)),
        kept_bytes=8 * (tokens + prompt),
    )


def rollouts_of(trainer: Any, length: int) -> tuple[Generation, int] | None:  # noqa: ANN401
    """Return what TRL's trainers generate in a step for prompts and completions of so many tokens, and how many at
    once; None if they do not, or leave it to vLLM.
    """
    args = trainer.args
    new_tokens, samples = (getattr(args, name, None) for name in ("max_completion_length", "generation_batch_size"))
    if not new_tokens or not samples or getattr(args, "use_vllm", False):
        return None
    made = generation_of(trainer, max(0, length - new_tokens), new_tokens)
    return None if made is None else (made, -(-samples // args.world_size))


def _reason_against_cuts(trainer: Any, rule: MicroBatchRule, batches: Batches) -> str | None:  # noqa: ANN401
    if (reason := rule.kept or rule.differs) is not None:
        return reason.partition(", so micro-batches")[0].rstrip(".")
    if not rule.cuts or type(trainer).compute_loss is not Trainer.compute_loss:
        return "its loss may depend on which samples are in a batch"
    return reason_against_cuts(batches(2), samples=2)
