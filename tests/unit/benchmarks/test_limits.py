"""The picture of the README: its figures are found, drawn, and quoted as they are."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.limits import FSDP, HSDP, PLANNED, RECOMPUTED

ROOT = Path(__file__).parents[3]
DATA = ROOT / "docs" / "data" / "limits.csv"


def rates() -> dict[tuple[str, str, int], int]:
    """Tokens a second by case, strategy and limit, from the committed figures."""
    with DATA.open(encoding="utf-8", newline="") as file:
        return {
            (row["case"][:5], row["strategy"], int(row["limit_gib"])): int(row["tokens_per_s"])
            for row in csv.DictReader(file)
        }


QUOTED = [
    ("README.md", "{two_machines:.1f} times FSDP2 with all recomputed on two machines"),
    ("README.md", "({recomputed:.2f} times, Llama-3-8B"),
    ("README.md", "{as_it_comes:.2f} times FSDP2 as it comes"),
    ("README.md", "where that fits ({hsdp:.2f})"),
    ("README.md", "{least[0]} GiB; FSDP2 with all recomputed {least[1]}, as it comes {least[2]}"),
    (
        "docs/when_it_pays.md",
        (
            "{two_machines:.1f} times FSDP2 with all recomputed, {full:.1f} times FSDP2 as it comes, {hsdp:.2f} times"
            " HSDP"
        ),
    ),
    (
        "docs/when_it_pays.md",
        "{least[0]} GiB of each device, where FSDP2 with all recomputed needs {least[1]}, as it comes {least[2]}",
    ),
]
"""Page → what it says, with places for figures."""


@pytest.mark.parametrize(("page", "words"), QUOTED)
def test_figures_that_pages_quote_are_those_of_the_data(page, words):
    found = rates()

    def gain(case: str, other: str, limit: int) -> float:
        return found[case, PLANNED, limit] / found[case, other, limit]

    figures = {
        "two_machines": gain("Qwen3", RECOMPUTED, 24),
        "full": gain("Qwen3", FSDP, 24),
        "hsdp": gain("Qwen3", HSDP, 24),
        "recomputed": gain("Llama", RECOMPUTED, 80),
        "as_it_comes": gain("Llama", FSDP, 80),
        "least": [
            min(n for case, one, n in found if (case, one) == ("Llama", name)) for name in (PLANNED, RECOMPUTED, FSDP)
        ],
    }
    assert words.format(**figures) in " ".join((ROOT / page).read_text(encoding="utf-8").split())
