"""Rows: options of transformers' Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from .data import OneShotStream, Stream, masked, padded, tokens, uneven_tokens
from .models import OneSample, gpt2, llama, tiny
from .row import Figures, Oracle, Verdict, row
from .side import Side, trained

_GROUP = "Trainer: options"
_ROUNDED = {"oracle": Oracle.FSDP2, "loss_tolerance": 5e-3, "norm_tolerance": 3e-2}
"""Options of rows in low precision; DDP rounds elsewhere (autocast), so FSDP2 is the stock side."""
_REFUSED = {"expected": Verdict.REFUSED}


def _even(side: Side, **options: Any) -> Figures:
    return trained(side, gpt2(), tokens(), **options)


def _uneven(side: Side, **options: Any) -> Figures:
    return trained(side, gpt2(), uneven_tokens(), given={"data_collator": padded}, **options)


def _streamed(side: Side, *, stream: type[IterableDataset], **options: Any) -> Figures:
    return trained(side, gpt2(), stream(), **options)


def _option(name: str, train: Any = _even, *, about: dict[str, Any] | None = None, **options: Any) -> None:
    row(name, _GROUP, **(about or {}))(partial(train, **options))


_option("none, float32")
_option("bf16", about=_ROUNDED, bf16=True)
_option("fp16", about={**_ROUNDED, "config": {"hardware": None}}, fp16=True)
_option(
    "gradient_checkpointing, not reentrant",
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
)
_option(
    "gradient_checkpointing, reentrant", about={"oracle": Oracle.ALONE},
    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True},
)  # fmt: skip
_option("gradient_accumulation_steps=2", gradient_accumulation_steps=2)
row("a model that runs one sample at once", _GROUP, config={"micro_batch_size": 1})(
    lambda side: trained(
        side, OneSample(), tokens(), per_device_train_batch_size=1, gradient_accumulation_steps=2,
        average_tokens_across_devices=False,
    )
)  # fmt: skip
_option("gradient_accumulation_steps=2, uneven samples", _uneven, gradient_accumulation_steps=2)
_option(
    "the last step of an epoch has fewer micro-steps", gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=2
)
_option("max_grad_norm=0", max_grad_norm=0.0)
_option("max_grad_norm=0.1", max_grad_norm=0.1)
_option("label_smoothing_factor, causal", label_smoothing_factor=0.1)
_option("label_smoothing_factor, causal, uneven", _uneven, label_smoothing_factor=0.1)
_option("samples of uneven length", _uneven)
_option("average_tokens_across_devices=False", _uneven, average_tokens_across_devices=False)
_option("train_sampling_strategy=group_by_length", _uneven, train_sampling_strategy="group_by_length")
_option("train_sampling_strategy=sequential", _uneven, train_sampling_strategy="sequential")
_option(
    "accelerator_config: split_batches", about={"daily": True},
    accelerator_config={"split_batches": True}, per_device_train_batch_size=4,
)  # fmt: skip
_option(
    "accelerator_config: num_steps=2", about={"daily": True},
    accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}},
)  # fmt: skip
_option(
    "accelerator_config: sync_each_batch", gradient_accumulation_steps=2,
    accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
)  # fmt: skip
_option(
    "accelerator_config: dispatch_batches", _streamed, stream=Stream, accelerator_config={"dispatch_batches": True}
)
_option(
    "accelerator_config: even_batches=False",
    accelerator_config={"even_batches": False},
    max_steps=-1,
    num_train_epochs=1,
)
_option(
    "accelerator_config: use_seedable_sampler=False",
    about={"oracle": Oracle.DDP},
    accelerator_config={"use_seedable_sampler": False},
)
_option("iterable dataset", _streamed, stream=Stream)
_option("stream that can be read once", _streamed, about={"daily": True}, stream=OneShotStream)
_option("auto_find_batch_size", about={"daily": True}, auto_find_batch_size=True)
_option("torch_compile", torch_compile=True)
_option("neftune_noise_alpha", neftune_noise_alpha=5.0)
_option("include_num_input_tokens_seen", include_num_input_tokens_seen="all")
_option("dataloader_num_workers=1", dataloader_num_workers=1)
_option("dataloader_drop_last, 2 epochs", dataloader_drop_last=True, max_steps=-1, num_train_epochs=1.5)
_option("data_seed", data_seed=11)
_option("full_determinism", full_determinism=True)
_option("logging_steps=2, logging_first_step", logging_steps=2, logging_first_step=True)
_option("remove_unused_columns=False", remove_unused_columns=False)
_option("use_cache=True", use_cache=True)
_option("torch_empty_cache_steps", torch_empty_cache_steps=1)
_option("use_liger_kernel", about={"expected": Verdict.NOT_APPLICABLE}, use_liger_kernel=True)
_option("deepspeed", about={"expected": Verdict.NOT_APPLICABLE}, deepspeed={"zero_optimization": {"stage": 2}})


@row("average_tokens_across_devices, a model that ignores the count", _GROUP)
def _ignored_count(side: Side) -> Figures:
    """The stock Trainer multiplies such a model's loss by the number of processes."""
    return trained(side, tiny("BertForMaskedLM"), masked(evenly=True))


@row("dropout", _GROUP)
def _dropout(side: Side) -> Figures:
    """Train with dropout; figures are equal only if nothing else draws from the random state."""
    return trained(side, gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1), tokens())


@row("model_init", _GROUP, **_REFUSED)
def _model_init(side: Side) -> Figures:
    return trained(side, None, tokens(), given={"model_init": lambda: gpt2()})


@row("fsdp=True beside OSDP", _GROUP, oracle=Oracle.FSDP2)
def _fsdp_beside(side: Side) -> Figures:
    return trained(side, gpt2(), tokens(), fsdp=True)


def _attention(side: Side, *, kind: str) -> Figures:
    model = llama()
    model.set_attn_implementation(kind)
    return trained(side, model, uneven_tokens(), given={"data_collator": padded})


for _kind in ("eager", "sdpa"):
    row(f"attention: {_kind}", _GROUP)(partial(_attention, kind=_kind))


def _with_rows(side: Side, *, packed: bool) -> Figures:
    """Train on rows with two texts each, separated by position ids that start again."""
    samples = tokens()
    if packed:
        positions = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
        samples = [{**sample, "position_ids": sample["input_ids"].new_tensor(positions)} for sample in samples]
    return trained(side, llama(), samples)


row("packed rows with position_ids", _GROUP)(partial(_with_rows, packed=True))
