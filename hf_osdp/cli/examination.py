"""What `hf-osdp doctor` looks at: one thing after the other, each as far as those before it allow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OSDPError
from ..planner.cost.evaluate import estimate_plan
from ..planner.description import ModelDescription
from ..planner.hardware import Hardware
from ..planner.job import OptimizerSpec, Precision
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem, Strategy
from ..planner.search.search import SearchResult, StrategyResult, search
from ..planner.split import WHOLE_BLOCKS
from ..planning.preflight.devices import native_bf16
from ..planning.preflight.findings import Check, Finding, Severity, error
from ..planning.preflight.folder import RunFolder, checkpoint_bytes
from ..planning.preflight.model import split_ties
from ..planning.preflight.run import KnownRun, findings_of
from ..quantities import format_bytes, format_count, format_seconds
from .cases import (
    OPTIMIZERS,
    case_of,
    cut_case,
    describer,
    device_type_of,
    hardware_of,
    job_of,
    load_config,
    memory_limit_of,
    model_of,
    names_in,
    timed,
)
from .here import memory_here
from .options import Request

T = TypeVar("T")
_LATER = {
    Check.PROCESSES: "what is free, and other processes on the devices: looked at when a run starts on them",
    Check.FOLDER: "give --output-dir to have it looked at",
}
"""What is said of checks that need more than there is."""


@dataclass(slots=True)
class Examination:
    """Findings, and what is to be said where there is none."""

    findings: list[Finding] = field(default_factory=list)
    sound: dict[Check, str] = field(default_factory=dict)
    """Of each check that was made, what was found in order."""

    def tried(self, check: Check, look: Callable[[], T]) -> T | None:
        """What `look` gives; None where it refuses, which is a finding then."""
        try:
            return look()
        except (OSDPError, ValueError, OSError) as problem:
            self.findings.append(error(check, " ".join(str(problem).split())))
            return None

    def rows(self) -> list[tuple[str, str, str]]:
        """A row for each finding, for each check without one, and one for all that could not be looked at."""
        rows, left = [], []
        for check in Check:
            found = [(check.value, f.severity.value, f.message) for f in self.findings if f.check is check]
            if not found and check in self.sound:
                found = [(check.value, "ok", self.sound[check])]
            if not found and check in _LATER:
                found = [(check.value, "later", _LATER[check])]
            rows += found
            left += [] if found else [check.value]
        if left:
            text = f"{', '.join(left)}: an error stands before them"
            rows.append(("the rest", "not done", text))
        return rows

    @property
    def has_errors(self) -> bool:
        """Whether a run would be stopped."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)


def examine(request: Request, optimizer: str, plan_file: Path | None, folder: RunFolder | None) -> Examination:
    """Look at all that can be looked at without a start.

    Args:
        request: what is to be trained, on what.
        optimizer: its name.
        plan_file: a plan that is to run; None searches for one.
        folder: where the run will write; None leaves that out.
    """
    seen = Examination()
    hardware = seen.tried(Check.DEVICES, lambda: hardware_of(request))
    config = seen.tried(Check.MODEL, lambda: load_config(request.model))
    spec = seen.tried(Check.OPTIMIZER, lambda: _optimizer(optimizer, "cuda" if hardware is None else device_type_of(hardware)))
    if spec is not None:
        seen.sound[Check.OPTIMIZER] = f"{spec.name} goes element by element, with {spec.states} states a parameter"
    if hardware is None:
        return seen
    request = _settled(request, hardware)
    seen.sound[Check.DEVICES] = f"{hardware.summary}, {format_bytes(hardware.device.memory_bytes)} each"
    description = None if config is None else _described(seen, request, hardware, config, plan_file)
    case = _case(seen, request, hardware, description, spec or OptimizerSpec())
    found = None if case is None else _plan(seen, case, request, config, plan_file)
    if description is not None:
        others = () if case is None or found is None or _is_chosen(request, plan_file) else _best(case)
        known = replace(
            _known(request, hardware, description, spec or OptimizerSpec(), found),
            chosen=_is_chosen(request, plan_file),
            others=others,
            folder=folder,
        )
        seen.findings += [*findings_of(known), *filter(None, [split_ties(model_of(request, config))])]
        seen.sound |= _sound(description, known)
    return seen


def _settled(request: Request, hardware: Hardware) -> Request:
    """The request as `hf-osdp plan` settles it; what it refuses is found later, one thing after the other."""
    if hardware.world_size == 1:
        with suppress(OSDPError, ValueError):
            return case_of(request)[2]
    return request


def _is_chosen(request: Request, plan_file: Path | None) -> bool:
    """Whether the search is free to choose."""
    return plan_file is None and request.strategy is Strategy.OSDP


def _plan(seen: Examination, case: PlanningProblem, request: Request, config: Any, plan_file: Path | None) -> SearchResult | None:
    """The plan that is to run."""
    found = seen.tried(Check.PLAN, lambda: _searched(case, request, config) if plan_file is None else _given(case, plan_file))
    if found is not None:
        peak, step = format_bytes(found.plan.peak_bytes), format_seconds(found.time.step_s)
        seen.sound[Check.PLAN] = f"{found.plan.fingerprint} ({found.plan.strategy}): peak {peak}, a step in {step}"
    return found


def _known(
    request: Request, hardware: Hardware, description: ModelDescription, spec: OptimizerSpec, found: SearchResult | None
) -> KnownRun:
    """What there is to check of the model, its plan and this machine."""
    return KnownRun(
        units=description.units,
        precision=Precision.named(request.precision),
        optimizer=spec,
        asked_classes=names_in(request.block_classes) or None,
        found_classes=description.block_classes,
        plan=None if found is None else found.plan,
        hardware=hardware,
        bf16_on=hardware.device.name if native_bf16(hardware.device) else None,
        time=None if found is None else found.time,
        needed_bytes=None if found is None else found.memory.peak_bytes,
        memory=memory_here(hardware),
    )


def _optimizer(name: str, device_type: str) -> OptimizerSpec:
    """An optimizer by the name that `plan` or the Trainer has for it.

    Raises:
        ValueError: it is not known to work on shards.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    from ..integrations.optimizers import spec_of_trainer_name

    return spec_of_trainer_name(name.lower(), device_type=device_type)


def _described(seen: Examination, request: Request, hardware: Hardware, config: Any, plan_file: Path | None) -> ModelDescription | None:
    """The model, cut as a given plan says."""
    cut = seen.tried(Check.PLAN, lambda: WHOLE_BLOCKS if plan_file is None else Plan.load(plan_file).cut)
    describe = describer(request, hardware)
    found = seen.tried(Check.MODEL, lambda: timed(request, describe(config, request.sequence_length, cut or WHOLE_BLOCKS)))
    if found is not None:
        seen.sound[Check.MODEL] = f"{found.model_class}, {format_count(found.numel)} parameters"
    return found


def _case(
    seen: Examination, request: Request, hardware: Hardware, description: ModelDescription | None, spec: OptimizerSpec
) -> PlanningProblem | None:
    """What is to be planned, where all of it is in order."""
    job = seen.tried(Check.BATCH, lambda: job_of(request, hardware))
    limit = seen.tried(Check.LIMIT, lambda: memory_limit_of(request, hardware))
    if job is not None:
        seen.sound[Check.BATCH] = f"{job.global_batch_size} samples a step over {hardware.world_size} devices"
    if limit is not None:
        seen.sound[Check.LIMIT] = _limit_text(hardware, limit)
    if job is None or limit is None or description is None or Check.PLAN in (finding.check for finding in seen.findings):
        return None
    job = replace(job, optimizer=spec)
    return PlanningProblem(description=description, hardware=hardware, job=job, memory_limit_bytes=limit, strategy=request.strategy)


def _limit_text(hardware: Hardware, limit: int) -> str:
    """What stays of the limit for the plan."""
    free = limit - hardware.room_bytes(limit)
    margin = f", and {format_bytes(free)} stay free as a margin" if free else ""
    return f"{format_bytes(limit)}, of which the device keeps {format_bytes(hardware.device.reserved_bytes)}{margin}"


def _searched(case: PlanningProblem, request: Request, config: Any) -> SearchResult:
    """The plan that `hf-osdp plan` finds."""
    return search(cut_case(case, request, config) if request.operator_splitting else case)


def _given(case: PlanningProblem, path: Path) -> SearchResult:
    """A plan from a file, held against the rest."""
    from ..planning.plan_run import check_given_plan

    plan = Plan.load(path)
    plan.check(case.description, case.hardware.world_size)
    estimate = estimate_plan(plan, case.description, case.job, case.hardware)
    peak = estimate.memory.on(case.hardware)
    check_given_plan(
        plan,
        memory_limit_bytes=case.memory_limit_bytes,
        peak_bytes=peak,
        global_batch_size=case.job.global_batch_size,
        micro_batch_size=case.job.micro_batch_size,
        sequence_length=case.description.sequence_length,
    )
    assert estimate.time is not None
    return SearchResult(plan=replace(plan, peak_bytes=peak), memory=estimate.memory, time=estimate.time)


def _best(case: PlanningProblem) -> tuple[StrategyResult, ...]:
    """What the planner itself would choose, where anything fits."""
    try:
        return (StrategyResult(strategy=Strategy.OSDP, result=search(replace(case, strategy=Strategy.OSDP))),)
    except OSDPError:
        return ()


def _sound(description: ModelDescription, known: KnownRun) -> dict[Check, str]:
    """What is to be said of checks that find nothing."""
    units, hardware, precision, memory = known.units, known.hardware, known.precision.compute, known.memory
    tied = [names for unit in units for names in unit.shared]
    texts = {
        Check.BLOCKS: f"{len(units)} units; blocks are {', '.join(description.block_classes)}",
        Check.TIES: "; ".join(" = ".join(names) for names in tied) if tied else "none",
        Check.MASTERS: f"parameters are {', '.join(sorted({dtype.value for unit in units for dtype in unit.dtypes}))}",
        Check.FP16: f"computes in {precision.value}" if precision else "no mixed precision",
        Check.FROZEN: "none",
    }
    if known.plan is not None:
        texts[Check.LINKS] = f"{format_bytes(hardware.inter_node.bytes_per_s)}/s between nodes" if hardware.nodes > 1 else "one node"
    if known.needed_bytes is not None and memory is not None:
        texts[Check.PROCESSES] = f"{format_bytes(memory.free_bytes)} of {memory.name} free here"
    if known.folder is not None:
        size = format_bytes(checkpoint_bytes(units, known.optimizer, adapters=known.folder.adapters))
        texts[Check.FOLDER] = f"{known.folder.path} can be written and has room; a checkpoint takes {size}"
    return texts
