"""Rows: options of transformers' Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

from .data import padded, tokens, uneven_tokens
from .models import gpt2, llama
from .row import Figures, Oracle, Verdict, row
from .side import Side, trained

_GROUP = "Trainer options"
_ROUNDED = {"oracle": Oracle.FSDP2, "loss_tolerance": 5e-3, "norm_tolerance": 3e-2}


def _with_options(side: Side, **options: Any) -> Figures:
    return trained(side, gpt2(), tokens(), **options)


def _option(name: str, *, about: dict[str, Any] | None = None, **options: Any) -> None:
    row(name, _GROUP, **(about or {}))(partial(_with_options, **options))


_option("float32", about={"daily": True})
_option("bf16", bf16=True, about=_ROUNDED)
