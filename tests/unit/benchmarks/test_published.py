"""Models of published runs have as many parameters as their sources state."""

from __future__ import annotations

import pytest

from benchmarks.published.rows import read_rows
from benchmarks.published.runs import config_of
from hf_osdp.modeling.build import build_on_meta

ROWS = {row["model"]: row for row in read_rows() if row.file == "fms_memory.csv" and not row.why_not}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_config_of_row_has_published_number_of_parameters(row):
    text = row["parameters"]
    published = float(text.rstrip("b")) * (1e9 if text.endswith("b") else 1)
    assert build_on_meta(config_of(row)).num_parameters() == pytest.approx(published, rel=5e-3)
