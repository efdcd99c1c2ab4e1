"""Options of FSDP beside those of OSDP: names of blocks are taken over, what a plan decides is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..planning.config import OSDPConfig, stated_options

_STRATEGY = "use OSDPConfig(strategy=...)"
_BLOCKS = "use OSDPConfig(block_classes=...)"
_NOTHING = "leave it out, FSDP2 under a plan has no such choice"
DECIDED = {
    "reshard_after_forward": _STRATEGY,
    "sharding_strategy": _STRATEGY,
    "auto_wrap_policy": _BLOCKS,
    "min_num_params": _BLOCKS,
    "ignored_modules": _BLOCKS,
    "backward_prefetch": _NOTHING,
    "forward_prefetch": _NOTHING,
    "limit_all_gathers": _NOTHING,
    "use_orig_params": _NOTHING,
    "sync_module_states": _NOTHING,
    "param_init_fn": _NOTHING,
}
"""Options of FSDP that have no effect under a plan → what to use instead."""
_WITHOUT_EFFECT = {"limit_all_gathers": True}
"""Defaults other than None."""


def refuse_decided(options: Mapping[str, Any]) -> None:
    """Refuse an option that would be accepted and ignored.

    Args:
        options: by FSDP's names; None is left out, and wrapping by class is what OSDP does anyway.

    Raises:
        ValueError: the plan decides it.
    """
    for name, remedy in DECIDED.items():
        value = options.get(name)
        by_class = name == "auto_wrap_policy" and str(value).lower() == "transformer_based_wrap"
        if value is not None and value is not _WITHOUT_EFFECT.get(name) and not by_class:
            raise ValueError(f"{name}={value!r} is for the plan to decide; {remedy}.")


def with_block_classes(asked: OSDPConfig | Mapping[str, object] | None, names: Any, *, option: str) -> dict[str, object]:
    """What was asked for, with FSDP's class names as `block_classes`.

    Args:
        asked: options of OSDP.
        names: class names as FSDP takes them, or None.
        option: what FSDP calls them.

    Raises:
        ValueError: `block_classes` are set as well.
    """
    stated = stated_options(asked)
    if not names:
        return stated
    if stated.get("block_classes") is not None:
        raise ValueError(
            f"{option}={names!r} was given beside block_classes={stated['block_classes']!r}; use OSDPConfig(block_classes=...) only."
        )
    return {**stated, "block_classes": names if isinstance(names, str) else tuple(names)}
