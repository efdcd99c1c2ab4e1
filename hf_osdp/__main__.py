"""`python -m hf_osdp`, and so `torchrun -m hf_osdp`: the command line."""

from __future__ import annotations

from .cli.app import main

if __name__ == "__main__":
    main()
