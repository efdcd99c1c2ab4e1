"""`python -m tests.cuda_software build --into DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .build import Unavailable, build

NOT_HERE = 3
"""Exit code where the device's wheels or compiler cannot be had."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_software", description=__doc__)
    command = parser.add_subparsers(required=True).add_parser(
        "build", help="make the environment, or bring it up to date"
    )
    command.add_argument("--into", type=Path, required=True, metavar="DIR", help="the virtual environment")
    into = parser.parse_args().into.resolve()
    try:
        build(into)
    except Unavailable as reason:
        print(f"CUDA's software without a GPU: skipped, {reason}", file=sys.stderr)
        return NOT_HERE
    print(f"built: {into}/bin/python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
