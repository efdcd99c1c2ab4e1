"""Arguments of Accelerate's `Accelerator`, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

_REFUSED = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")
"""Others that decide how the model is laid out."""
_PARAMETERS = inspect.signature(Accelerator.__init__)


def accelerator_options(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `Accelerator`, all by name.

    Args:
        args: those given by position.
        kwargs: those given by name.

    Raises:
        TypeError: `Accelerator` has no such argument.
        ValueError: an argument lays the model out in another way than a plan.
    """
    options = dict(_PARAMETERS.bind(None, *args, **kwargs).arguments)
    del options["self"]
    if other := next((name for name in _REFUSED if options.get(name) is not None), None):
        raise ValueError(f"{other} and OSDP both decide how the model is laid out; leave {other} out, or use accelerate's Accelerator.")
    return options
