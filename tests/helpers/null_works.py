"""A process group on the CPU whose works are null where NCCL's are: a small C++ backend around gloo."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils import cpp_extension

BACKEND = "nullworks"
_SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def extension() -> str:
    """The backend, compiled once for a version of torch; skips the test where there is no compiler."""
    if shutil.which(cpp_extension.get_cxx_compiler()) is None or not cpp_extension.is_ninja_available():
        pytest.skip("the backend with null works is C++: it needs a compiler and ninja")
    folder = Path(cpp_extension.get_default_build_root()) / f"hf_osdp_null_works_{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "one_at_a_time").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own, which a process that was killed leaves behind
        return cpp_extension.load(
            "null_works", [str(_SOURCE)], extra_cflags=["-O0"], build_directory=str(folder)
        ).__file__


def form(path: str, *, timeout_s: float = 120.0, **where: object) -> None:
    """Form the process group with the backend compiled at `path` alone, as Accelerate does with NCCL; `where` is
    store, rank and world size, where the launcher's variables do not say.
    """
    spec = importlib.util.spec_from_file_location("null_works", path)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
        return extension.wrap(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=timeout_s), **where)
