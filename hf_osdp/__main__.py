"""The command line as `python -m hf_osdp` and `torchrun -m hf_osdp`."""

from __future__ import annotations

from .cli.app import main

if __name__ == "__main__":
    main()
