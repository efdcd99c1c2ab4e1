"""In site-packages of the device's environment: values for the device, as soon as torch is imported."""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

SITE = Path(__file__).parent


def watch() -> None:
    """Be there when torch is imported; no process pays for torch that does not import it."""
    sys.meta_path.insert(0, _Torch())


class _Torch:
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        _check()
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_load, spec.loader, spec.loader.exec_module)
        return spec


def _load(loader: Loader, execute: object, module: ModuleType) -> None:
    execute(module)
    compute("aten")


def compute(space: str) -> None:
    """Give operators of this namespace, which a package has registered by now, the values of the CPU's."""
    _values().cuda_software_install(space.encode())


@functools.cache
def _values() -> ctypes.CDLL:
    library = ctypes.CDLL(str(SITE / "cuda_software_values.so"))
    library.cuda_software_failures.restype = ctypes.c_char_p
    return library


def failures() -> str:
    """Operators whose values could not be computed since the process began, a line each."""
    return _values().cuda_software_failures().decode()


def _check() -> None:
    """Notice NVIDIA's libraries, which `pip install` without `--no-deps` puts over ours."""
    built = json.loads((SITE / "cuda_software.json").read_text())
    there = {str(path.relative_to(SITE)) for path in SITE.glob("nvidia/*/lib/*.so*")}
    wrong = sorted(there - set(built)) + [
        name for name, size in built.items() if not (SITE / name).exists() or (SITE / name).stat().st_size != size
    ]
    if wrong:
        raise ImportError(
            f"{SITE / wrong[0]} is not the library that was built as a device without a GPU: a `pip install` without "
            "`--no-deps` put NVIDIA's over it, or the build was cut off. Build again: "
            f"python -m tests.cuda_software build --into {sys.prefix}"
        )
