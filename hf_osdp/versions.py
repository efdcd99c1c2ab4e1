"""Versions of the packages on which estimates and checkpoints depend."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version

_PACKAGES = ("hf_osdp", "torch", "accelerate", "transformers")


def package_versions() -> dict[str, str]:
    """Return the version of Python (major.minor) and of each package, as imported or else as installed."""
    found = {name: str(getattr(sys.modules.get(name), "__version__", None) or version(name)) for name in _PACKAGES}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **found}
