"""Explain a plan: the cost of other layouts, and the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import InfeasibleError, PlanError
from ..planner.cost.memory import bytes_needed
from ..planner.cost.timing import UnitTimer, step_seconds
from ..planner.decision import UnitLayout
from ..planner.files import plain
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem, Strategy
from ..planner.search.search import bounds, search
from ..planner.space import search_spaces
from ..quantities import MOST_BYTES, format_bytes
from .content import Content, report_content, unit_rows
from .plan_file import PlanInputs, plan_file_content

_GAIN = 1.001
"""Throughput ratio above which a change counts as a gain; smaller gains are rounding errors of the objective."""
BINDING = 3
"""Moments of a proof."""


def explain(plan: Plan, inputs: PlanInputs) -> Content:
    """Return the report of a plan, with the layouts that were not chosen for its units and the bottleneck under its
    memory limit.

    Each row of units has `faster`, the fastest other layout that would save time, and `next_fitting`, the layout with
    the least time among the others that fit; None if there is none. The plan must be for the inputs' description
    (`Plan.check`); without hardware there are no seconds and no other layouts.
    """
    content, limit = report_content(plan, inputs), plan.memory_limit_bytes
    if inputs.hardware is None:
        return {**content, "bottleneck": None}
    problem = inputs.problem(limit or MOST_BYTES, plan.strategy)
    layouts = plan.layouts(inputs.description)
    timer = UnitTimer(inputs.description, inputs.hardware, inputs.job, plan.batch)
    times = [timer(i, own) for i, own in enumerate(layouts)]
    *_, space = search_spaces(replace(problem, strategy=Strategy.OSDP), plan.batch)
    for row, units in zip(content["estimated"]["units"], unit_rows(plan, inputs.description), strict=True):
        rest = [time for i, time in enumerate(times) if i not in units]
        added = {
            other: step_seconds([*rest, *(timer(i, other) for i in units)]) - step_seconds(times)
            for other in space[units[0]]
            if other != layouts[units[0]]
        }
        ranked = sorted(added, key=added.__getitem__)
        faster = next((other for other in ranked if added[other] < 0), None)
        row["faster"] = None if faster is None else _changed(plan, problem, units, faster, added[faster])
        others = (_changed(plan, problem, units, other, added[other]) for other in ranked if other != faster)
        row["next_fitting"] = next((other for other in others if other["fits"]), None)
    now = plan.global_batch_size / content["estimated"]["step_s"]
    return {**content, "bottleneck": None if limit is None else _find_bottleneck(now, problem)}


def prove(plan: Plan, inputs: PlanInputs) -> Content:
    """Return what is proven of a plan: limit, seconds, the bound on those of every plan, in all and by batch (None
    where none fits), and the `BINDING` moments with the least memory free.

    The plan is estimated and the bound searched again; hardware and limit must be known. Raise InfeasibleError if no
    plan fits, and PlanError if this one does not.
    """
    assert inputs.hardware is not None and plan.memory_limit_bytes is not None
    problem, estimate = inputs.problem(plan.memory_limit_bytes, plan.strategy), inputs.estimate(plan)
    search(problem)  # or say why not
    bound_s, by_batch = bounds(problem)
    memory, peak = estimate.memory, estimate.memory.on(inputs.hardware)
    assert estimate.time is not None
    if peak > problem.room_bytes:
        raise PlanError(
            f"The plan needs {format_bytes(peak)} of {format_bytes(problem.room_bytes)} by this version's estimate, so"
            " that nothing is proven of it; plan again."
        )
    step_s = estimate.time.step_s
    outside = sum(memory.outside(inputs.hardware).values())
    highest = sorted(memory.moments, key=lambda moment: -moment.total_bytes)[:BINDING]
    return {
        "plan": plan_file_content(plan, inputs)["plan"],
        "step_s": step_s,
        "peak_bytes": peak,
        "bound_s": bound_s,
        "gap": max(0.0, 1 - bound_s / step_s),
        "margin_bytes": plan.memory_limit_bytes - problem.room_bytes,
        "batches": [
            {
                "micro_batch_size": batch.micro_batch_size, "accumulation_steps": batch.accumulation_steps,
                "bound_s": None if least_s == math.inf else least_s,
            }
            for batch, least_s in by_batch.items()
        ],
        "binding": [
            {"phase": one.phase, "unit": one.unit, "free_bytes": problem.room_bytes - outside - one.total_bytes}
            for one in highest
        ],
    }  # fmt: skip


def _changed(
    plan: Plan, problem: PlanningProblem, units: Sequence[int], choice: UnitLayout, added_s: float
) -> Content:
    """Return another layout of a row of units, which changes as a whole: what it adds to a step (less than 0 if it is
    faster), its peak, and the peak minus the limit.
    """
    layouts = [choice if i in units else own for i, own in enumerate(plan.layouts(problem.description))]
    peak, used, *_ = bytes_needed(problem.description, layouts, problem.hardware, problem.job, plan.batch)
    over, host = peak - problem.room_bytes if plan.memory_limit_bytes else 0, problem.hardware.host
    return {
        "layout": choice.describe(plan.world_size), "choice": plain(choice), "added_s": added_s, "peak_bytes": peak,
        "over_bytes": over, "fits": over <= 0 and (host is None or used <= host.memory_bytes),
    }  # fmt: skip


def _find_bottleneck(samples_per_s: float, problem: PlanningProblem) -> Content:
    """Return the first limit on the strategy's throughput with the gain without it: memory, a fixed micro-batch size,
    or the global batch, which would share the step's communication and update among more samples.

    Each is relaxed alone: no memory limit; any micro-batch size; twice the global batch under the same limit.
    """
    job = problem.job
    relaxed = {"memory": replace(problem, memory_limit_bytes=MOST_BYTES)}
    if job.micro_batch_size is not None:
        relaxed["micro-batch"] = replace(problem, job=replace(job, micro_batch_size=None))
    relaxed["batch"] = replace(problem, job=replace(job, global_batch_size=2 * job.global_batch_size))
    for kind, other in relaxed.items():
        with suppress(InfeasibleError):
            plan = search(other).plan
            assert plan.samples_per_s is not None
            if (gain := plan.samples_per_s / samples_per_s) > _GAIN:
                size = plan.micro_batch_size if kind == "micro-batch" else plan.global_batch_size
                return {"kind": kind, "gain": gain, "peak_bytes": plan.peak_bytes, "batch_size": size}
    return {"kind": "nothing", "gain": 1.0}
