"""The entrants: the best plan of each strategy under each limit, each distinct plan once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.hardware import Collective, Hardware
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.compare import StrategyResult
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.quantities import format_bytes

STOCK, STOCK_BF16, ALONE, EXACT_PLAN = "stock", "stock, bf16", "alone", "osdp, exact"
TERMS = ("compute_s", "exposed_s", "copy_s", "optimizer_s")


class Sends(str, Enum):
    """What an entrant sends."""

    PLANNED = "planned"
    """The collectives that `apply_plan` installs."""
    STOCK = "stock"
    """The same, with FSDP2's own reduce-scatter."""
    STOCK_BF16 = "stock, bf16"
    """The same, with gradients reduced in bf16, as under Accelerate."""
    NOTHING = "nothing"
    """Nothing; each rank trains the plain model alone, to detect other load on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A plan that takes measured steps."""

    plan: Plan
    sends: Sends = Sends.PLANNED

    def estimate(self, description: ModelDescription, job: TrainingJob, hardware: Hardware) -> dict:
        """Return the estimated seconds of a step, their terms, and those of each collective, as plain values.

        Args:
            description: the model with measured times of blocks.
            job: batch and optimizer.
            hardware: measured hardware.
        """
        if self.sends is Sends.STOCK_BF16:
            job = replace(job, precision=Precision(reduce=DType.BFLOAT16))
        estimate = estimate_plan(self.plan, description, job, hardware)
        assert estimate.time is not None and estimate.streams is not None, "the hardware is known"
        terms = {term: estimate.time.total(term) for term in TERMS}
        collectives = {kind.value: estimate.streams[kind][0] for kind in Collective if estimate.streams[kind][0]}
        if self.sends is Sends.NOTHING:
            terms, collectives = {**terms, "exposed_s": 0.0, "copy_s": 0.0}, {}
        return {"estimated_s": sum(terms.values()), "terms": terms, "estimated_collectives": collectives}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineup:
    """Entrants by name, and the entrant of each strategy under each limit."""

    entrants: Mapping[str, Entrant]
    cells: tuple[Mapping[str, dict], ...]
    """One mapping per limit: strategy → `{"entrant": name}`, or `{"needs": bytes}` if it does not fit."""


def line_up(results: Sequence[Sequence[StrategyResult]], limits: Sequence[int]) -> Lineup:
    """Return all plans that fit under a limit, torch's own full shard, and the plain model.

    Args:
        results: the result of `compare_strategies` for each limit.
        limits: in bytes.

    Raises:
        ValueError: no limit leaves room for a full shard, with which the others are compared.
    """
    entrants: dict[str, Entrant] = {}
    cells = []
    for limit, rows in zip(limits, results, strict=True):
        cell: dict[str, dict] = {}
        shown = [row for row in rows if not row.variant or row.label == EXACT_PLAN]
        for row in sorted(
            shown, key=lambda row: row.strategy is Strategy.OSDP
        ):  # OSDP last: an equal plan keeps its strategy's name
            if row.result is None:
                cell[row.label] = {"needs": row.least_peak_bytes, "reason": row.reason}
            else:
                cell[row.label] = {"entrant": _entered(entrants, row.label, row.result.plan, limit)}
        cells.append(cell)
    full = next((cell["fsdp"]["entrant"] for cell in cells if "entrant" in cell["fsdp"]), None)
    if full is None:
        needs = min(cell["fsdp"]["needs"] for cell in cells)
        raise ValueError(
            f"No limit leaves room for a full shard, which needs {format_bytes(needs)}; give --limits above that."
        )
    entrants[STOCK] = replace(entrants[full], sends=Sends.STOCK)
    entrants[ALONE] = Entrant(plan=replicated(entrants[full].plan), sends=Sends.NOTHING)
    stocks = [STOCK]
    if any(EXACT_PLAN in cell for cell in cells):
        entrants[STOCK_BF16] = replace(entrants[full], sends=Sends.STOCK_BF16)
        stocks.append(STOCK_BF16)
    for cell in cells:
        cell.update({stock: {**cell["fsdp"]} if "needs" in cell["fsdp"] else {"entrant": stock} for stock in stocks})
    return Lineup(entrants=entrants, cells=tuple(cells))


def _entered(entrants: dict[str, Entrant], label: str, plan: Plan, limit: int) -> str:
    """Return the name of the entrant that runs like this plan; enter a new one if there is none."""
    for name, other in entrants.items():
        if _runs(plan) == _runs(other.plan):
            return name
    name = label if label not in entrants else f"{label} in {format_bytes(limit)}"
    entrants[name] = Entrant(plan=plan)
    return name


def _runs(plan: Plan) -> tuple[object, ...]:
    return plan.units, plan.accumulation_steps


def replicated(plan: Plan) -> Plan:
    """Return the plan with every unit replicated."""
    return replace(
        plan, units=tuple(UnitDecision(fqn=unit.fqn, shard_size=1, reshard_after_forward=True) for unit in plan.units)
    )


def layout(plan: Plan) -> str:
    """Return the number of units per layout: `8 shard 4, keep; 2 shard 4`."""
    kinds: dict[str, int] = {}
    for unit in plan.units:
        text = unit.describe(plan.world_size)
        kinds[text] = kinds.get(text, 0) + 1
    return "; ".join(f"{number} {text}" for text, number in kinds.items())
