"""The options of OSDP in the environment that `accelerate launch` sets; scripts whose input cannot be used end with one line.

`accelerate launch` exports a fixed list of variables. One of them, the sharding strategy, is passed on word for word and
not used by FSDP2, so the options of OSDP travel in it:

    fsdp_config:
      fsdp_version: 2
      fsdp_sharding_strategy: {osdp: true, memory_limit: 8GiB}
"""

from __future__ import annotations

import ast
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from ..distributed.launcher import launched_rank, variables
from ..distributed.process_group import check_ranks
from ..errors import OSDPError

_REMEDY = "write `fsdp_sharding_strategy: {osdp: true, memory_limit: 8GiB}` under fsdp_config, with `fsdp_version: 2`"

_MOST_LETTERS = 16384
"""Of the exported text: options are a few names and numbers."""
USER_ERROR = 2
"""Exit code for input that cannot be used, as argparse has it."""
_RANK_ZERO_FIRST_S = 5.0
"""How long other ranks leave it to rank 0 to print; its exit makes the launcher end them."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """OSDP as the accelerate configuration file asks for it."""

    osdp: bool | None = None
    """Whether to plan where the script leaves it open; None where the file says nothing about OSDP."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of `OSDPConfig` by name; `fsdp_transformer_layer_cls_to_wrap` counts as `block_classes`."""
    use_cpu: bool = False
    """Run on the CPU though there is an accelerator: `accelerate launch` does not pass its own `use_cpu` on under FSDP."""


def launch_request(environment: Mapping[str, str] | None = None) -> LaunchRequest:
    """Return what `accelerate launch` was asked for, from the variables that it set; None takes this process's.

    Raises:
        ValueError: OSDP was asked for, but its options cannot be read, or the file also sets what a plan decides.
    """
    environment = variables() if environment is None else environment
    raw = environment.get("FSDP_SHARDING_STRATEGY", "").strip()
    asked = "osdp" in raw.lower() or raw.startswith("{")
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true" or not asked:
        return LaunchRequest()
    if environment.get("FSDP_VERSION", "1") != "2":
        raise ValueError(f"The options of OSDP were given with fsdp_version {environment.get('FSDP_VERSION', '1')}; {_REMEDY}.")
    options = _mapping(raw)
    osdp, use_cpu = (_switch(options, name) for name in ("osdp", "use_cpu"))
    if osdp and environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        raise ValueError("fsdp_reshard_after_forward: false is for the plan to decide; leave it out, or write strategy: zero2 beside osdp.")
    if classes := environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP", ""):
        options.setdefault("block_classes", classes)
    return LaunchRequest(osdp=osdp, options=options, use_cpu=use_cpu)


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


def _switch(options: dict[str, object], name: str) -> bool:
    """Take a switch out of the options; one that is not set is off."""
    value = options.pop(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"fsdp_sharding_strategy has {name}: {value!r}; write {name}: true or {name}: false.")
    return value


def run_script(main: Callable[[], None]) -> None:
    """Run a script once all launched ranks are there; where input is at fault, rank 0 prints `error: ...` in one line, exit code 2.

    Input is at fault where hf_osdp or the script's own folder says so. What other libraries raise is a bug or a broken machine,
    and keeps its traceback.
    """
    try:
        check_ranks()
        record(main)()
    except (ValueError, OSDPError) as error:
        if not isinstance(error, OSDPError) and not _is_ours(error, main):
            raise
        logger.debug("Input cannot be used", exc_info=True)
        if launched_rank():
            time.sleep(_RANK_ZERO_FIRST_S)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)


def _is_ours(error: BaseException, main: Callable[[], None]) -> bool:
    """Return whether the error was raised in hf_osdp, or in the folder of the script."""
    frames = traceback.extract_tb(error.__traceback__)
    raised = Path(frames[-1].filename).resolve()
    script = Path(main.__code__.co_filename).resolve()
    return raised.is_relative_to(Path(__file__).resolve().parents[1]) or raised.parent == script.parent
