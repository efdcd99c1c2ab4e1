"""End a script whose input cannot be used with one line, printed once, on any number of processes."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from ..distributed.process_group import check_ranks
from ..errors import OSDPError
from .launch import launched_rank

USER_ERROR = 2
"""Exit code for input that cannot be used, as argparse has it."""
_RANK_ZERO_FIRST_S = 5.0
"""How long other ranks leave it to rank 0 to print; its exit makes the launcher end them."""

logger = logging.getLogger(__name__)


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
