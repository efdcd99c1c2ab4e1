"""Start a benchmark program again under torchrun, as ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def start_ranks(
    program: str, world_size: int, *words: str, as_rank: tuple[str, ...] = ("--as-rank",)
) -> list[dict[str, Any]]:
    """Run `program --as-rank RESULT WORDS` on gloo ranks of this machine; `as_rank` replaces the first word.

    Returns:
        The JSON rows that rank 0 wrote to the file RESULT.
    """
    with tempfile.TemporaryDirectory(prefix="hf_osdp_benchmark_") as folder:
        result = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world_size}",
            program,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*command, *as_rank, str(result), *words], env=environment, check=True)
        return json.loads(result.read_text(encoding="utf-8"))
