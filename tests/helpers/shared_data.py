"""Real text, tokenizers and a trained model that lie beside a checkout, where there are any."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).parents[3] / "shared" / "data"
SHARED_DATA = Path(os.environ.get("OSDP_TEST_DATA", _BESIDE))
"""A folder with `wikitext-2`, `glue`, `tokenizers` and `models`; another one by OSDP_TEST_DATA."""

needs_shared_data = pytest.mark.skipif(
    not (SHARED_DATA / "README.md").is_file(),
    reason="there is no ../shared/data beside the checkout; OSDP_TEST_DATA names another folder",
)
"""Skips a test where the data is not there."""
