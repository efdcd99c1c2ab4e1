"""The options of OSDP in the environment that `accelerate launch` sets.

`accelerate launch` exports a fixed list of variables. One of them, the sharding strategy, is passed on word for word and
not used by FSDP2, so the options of OSDP travel in it:

    fsdp_config:
      fsdp_version: 2
      fsdp_sharding_strategy: {osdp: true, memory_limit: 8GiB}
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..quantities import whole_number

_REMEDY = "write `fsdp_sharding_strategy: {osdp: true, memory_limit: 8GiB}` under fsdp_config, with `fsdp_version: 2`"

_MOST_LETTERS = 16384
"""Of the exported text: options are a few names and numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """OSDP as the accelerate configuration file asks for it."""

    osdp: bool = True
    """Whether to plan where the script leaves it open."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of `OSDPConfig` by name; `fsdp_transformer_layer_cls_to_wrap` counts as `block_classes`."""
    use_cpu: bool = False
    """Run on the CPU though there is an accelerator: `accelerate launch` does not pass its own `use_cpu` on under FSDP."""


def launch_request(environment: Mapping[str, str] | None = None) -> LaunchRequest | None:
    """Return what `accelerate launch` was asked for.

    Args:
        environment: variables to read; None reads this process's.

    Returns:
        The request, which may be `osdp: false`; None where the file says nothing about OSDP.

    Raises:
        ValueError: OSDP was asked for, but its options cannot be read, or the file also sets what a plan decides.
    """
    environment = os.environ if environment is None else environment
    raw = environment.get("FSDP_SHARDING_STRATEGY", "").strip()
    asked = "osdp" in raw.lower() or raw.startswith("{")
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true" or not asked:
        return None
    if environment.get("FSDP_VERSION", "1") != "2":
        raise ValueError(f"The options of OSDP were given with fsdp_version {environment.get('FSDP_VERSION', '1')}; {_REMEDY}.")
    options = _mapping(raw)
    wanted = options.pop("osdp")
    if not isinstance(wanted, bool):
        raise ValueError(f"fsdp_sharding_strategy has osdp: {wanted!r}; write osdp: true or osdp: false.")
    use_cpu = options.pop("use_cpu", False)
    if not isinstance(use_cpu, bool):
        raise ValueError(f"fsdp_sharding_strategy has use_cpu: {use_cpu!r}; write use_cpu: true or use_cpu: false.")
    if wanted and environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        raise ValueError("fsdp_reshard_after_forward: false is for the plan to decide; leave it out, or write strategy: zero2 beside osdp.")
    classes = environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    if classes and "block_classes" not in options:
        options["block_classes"] = classes
    return LaunchRequest(osdp=wanted, options=options, use_cpu=use_cpu)


def _mapping(raw: str) -> dict[str, object]:
    """Read the exported text, which is the Python form of the YAML mapping."""
    try:
        options = ast.literal_eval(raw) if len(raw) <= _MOST_LETTERS else None  # it makes values and calls nothing
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # the last two where brackets nest without end
        options = None
    if not isinstance(options, dict) or "osdp" not in options or not all(isinstance(name, str) for name in options):
        shown = raw if len(raw) <= 80 else f"{raw[:77]}... ({len(raw)} letters, the most are {_MOST_LETTERS})"
        raise ValueError(f"OSDP was asked for, but its options cannot be read from fsdp_sharding_strategy: {shown}; {_REMEDY}.")
    return options


def launched_rank(environment: Mapping[str, str] | None = None) -> int:
    """Return this process's rank as the launcher set it, before any process group exists; 0 without a launcher."""
    return whole_number(os.environ if environment is None else environment, "RANK", 0)


def launched_world_size(environment: Mapping[str, str] | None = None) -> int:
    """Return how many processes the launcher started; 1 without a launcher."""
    return whole_number(os.environ if environment is None else environment, "WORLD_SIZE", 1)


def state_dict_type(environment: Mapping[str, str] | None = None, *, default: str = "FULL_STATE_DICT") -> str:
    """Return the checkpoint layout that the launcher asks for; `default` where it says nothing."""
    return (os.environ if environment is None else environment).get("FSDP_STATE_DICT_TYPE", default)
