"""What a search gives: a plan with its estimates, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.memory import MemoryEstimate
from ..cost.timing import TimeEstimate
from ..plan import Plan
from ..problem import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A plan with what it is expected to need."""

    plan: Plan
    memory: MemoryEstimate
    time: TimeEstimate

    @property
    def peak_bytes(self) -> int:
        """The plan's peak, with what no tensor can have."""
        assert self.plan.peak_bytes is not None
        return self.plan.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """What one strategy can do at its own best batch, or why it cannot run."""

    strategy: Strategy
    result: SearchResult | None
    reason: str = ""
    least_peak_bytes: int | None = None
    """Where nothing fits: the tightest limit that it would meet."""
