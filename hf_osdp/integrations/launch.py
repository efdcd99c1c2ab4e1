"""Read OSDP's options from the environment that `accelerate launch` sets; end scripts with bad input in a one-line
error.

`accelerate launch` exports a fixed list of variables. One of them, the sharding strategy, is exported unchanged and
not used by FSDP2, so it carries the options of OSDP:

    fsdp_config:
      fsdp_version: 2
      fsdp_sharding_strategy: {osdp: true, memory_limit: 8GiB}
"""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from ..distributed.launcher import variables
from ..distributed.process_group import prepare_group
from ..distributed.said_once import is_ours, say_once
from ..errors import OSDPError, refuse_first, shown

_REMEDY = "write `fsdp_sharding_strategy: {osdp: true, memory_limit: 8GiB}` under fsdp_config, with `fsdp_version: 2`"

_MAX_CHARACTERS = 16384
"""Limit for the exported text; options are a few names and numbers."""
USER_ERROR = 2
"""Exit code for bad input, as in argparse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The accelerate configuration file's request for OSDP."""

    osdp: bool | None = None
    """Whether to plan if the script does not say; None if the file says nothing about OSDP."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of `OSDPConfig` by name."""
    use_cpu: bool = False
    """Run on the CPU even with an accelerator; `accelerate launch` does not pass on its own `use_cpu` under FSDP."""
    decided: Mapping[str, bool] = field(default_factory=dict)
    """Lines about what a plan decides, and whether the file sets it all the same."""

    @property
    def plan_options(self) -> Mapping[str, object]:
        """The options, for a run under a plan; raise ValueError if the file also sets something that it decides."""
        refuse_first(self.decided)
        return self.options


def launch_request(environment: Mapping[str, str] | None = None) -> LaunchRequest:
    """Return the request given to `accelerate launch`, from the environment variables that it set (default: this
    process's).

    Raises:
        ValueError: the options of OSDP cannot be read.
    """
    environment = variables() if environment is None else environment
    raw = environment.get("FSDP_SHARDING_STRATEGY", "").strip()
    requested = "osdp" in raw.lower() or raw.startswith("{")
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true" or not requested:
        return LaunchRequest()
    if environment.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            f"The options of OSDP were given with fsdp_version {environment.get('FSDP_VERSION', '1')}; {_REMEDY}."
        )
    options = _parse_options(raw)
    osdp, use_cpu = (_pop_bool(options, name) for name in ("osdp", "use_cpu"))
    classes = environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    decided = {
        "fsdp_reshard_after_forward: false is decided by the plan; leave it out, or write strategy: zero2 next to"
        " osdp.":
            environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false",
        f"fsdp_transformer_layer_cls_to_wrap: {classes} is decided by the plan; leave it out, or write block_classes"
        " next to osdp.": bool(classes),
    }  # fmt: skip
    return LaunchRequest(osdp=osdp, options=options, use_cpu=use_cpu, decided=decided)


def _parse_options(raw: str) -> dict[str, object]:
    """Parse the exported text, which is the YAML mapping printed as a Python dict."""
    try:
        options = (
            ast.literal_eval(raw) if len(raw) <= _MAX_CHARACTERS else None
        )  # evaluates literals only, without calls
    except (
        ValueError,
        SyntaxError,
        TypeError,
        RecursionError,
        MemoryError,
    ):  # the last two for deeply nested brackets
        options = None
    if not isinstance(options, dict) or "osdp" not in options or not all(isinstance(name, str) for name in options):
        shown = raw if len(raw) <= 80 else f"{raw[:77]}... ({len(raw)} characters, the limit is {_MAX_CHARACTERS})"
        raise ValueError(f"The options of OSDP cannot be read from fsdp_sharding_strategy: {shown}; {_REMEDY}.")
    return options


def _pop_bool(options: dict[str, object], name: str) -> bool:
    """Remove a bool from the options and return it; False if it is not set."""
    value = options.pop(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"fsdp_sharding_strategy has {name}: {shown(value)}; write {name}: true or {name}: false.")
    return value


def run_script(main: Callable[[], None]) -> None:
    """Run a script once torchrun's ranks have met; on bad input one rank prints `error: ...` in one line, and
    all exit with code 2.

    An error counts as bad input if hf_osdp or a file in the script's own folder raised it. Errors of other libraries
    are bugs or broken machines: they keep their traceback, which torchrun prints too.
    """

    @record  # sees only the exit on bad input, so that torchrun prints no tracebacks of it
    def run() -> None:
        try:
            prepare_group()
            main()
        except (ValueError, OSDPError) as error:
            raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
            if not is_ours(error) and raised.parent != Path(main.__code__.co_filename).resolve().parent:
                raise
            say_once(error)
            sys.exit(USER_ERROR)

    run()
