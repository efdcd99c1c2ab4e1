"""Which split of a model gives the fastest plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...errors import DescriptionError
from ..description import ModelDescription
from ..problem import PlanningProblem, Strategy
from ..split import ModelSplit
from .search import fastest_without_limit, search_or_floor

_log = logging.getLogger(__name__)

NEAR = 1.01
"""Where no plan at all could be faster than this, whatever the memory, nothing else is tried: tracing a split takes seconds."""


def choose_description(
    problem: PlanningProblem, splits: Callable[[], Sequence[ModelSplit]], describe: Callable[[ModelSplit], ModelDescription]
) -> ModelDescription:
    """Return the description, out of those of the plain and the split model, whose best plan is fastest.

    Splits are for memory: they are tried only where the limit keeps the plain model from running as fast as without one. Where
    nothing fits, the one that needs least.

    Args:
        problem: of the model as it is; single strategies take the plain model.
        splits: ways to split it.
        describe: from a split to the description of the model that is split so; a DescriptionError leaves the split out.

    Returns:
        The description to search.
    """

    def rank(description: ModelDescription) -> tuple[bool, float]:
        """Rank what fits first, by its time; then what needs least, by a bound."""
        found = search_or_floor(replace(problem, description=description))
        return (True, float(found)) if isinstance(found, int) else (False, found.time.step_s)

    plain = problem.description
    if problem.strategy is not Strategy.OSDP:
        return plain
    over, step_s = rank(plain)
    if not over and step_s <= NEAR * fastest_without_limit(problem):
        return plain
    ranked = [((over, step_s), plain)]
    for split in splits():
        try:
            description = describe(split)
        except DescriptionError as error:
            _log.debug("%s", error)
            continue
        ranked.append((rank(description), description))
    return min(ranked, key=lambda pair: pair[0])[1]
