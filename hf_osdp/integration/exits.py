"""How a script ends when what it was given cannot be used: one line, once, on every number of processes."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from ..errors import OSDPError
from .launch import launched_rank

USER_ERROR = 2
"""Exit code for input that cannot be used, as argparse has it."""
_RANK_ZERO_FIRST_S = 5.0
"""How long other ranks leave it to rank 0 to speak; its exit makes the launcher end them."""

logger = logging.getLogger(__name__)


def run_script(main: Callable[[], None]) -> None:
    """Run `main`; where input is at fault, rank 0 prints `error: ...` in one line and the process exits with 2.

    Other errors are bugs or broken machines and keep their traceback.

    Args:
        main: the script.
    """
    try:
        main()
    except (ValueError, OSDPError, FileNotFoundError) as error:
        logger.debug("Input cannot be used", exc_info=True)
        if launched_rank() != 0:
            time.sleep(_RANK_ZERO_FIRST_S)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)
