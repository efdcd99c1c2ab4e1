"""The stages of the zoo for one model, on two ranks: stock training, description, plan, training under a plan."""

from __future__ import annotations

import copy
import faulthandler
import json
import math
import re
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import DescriptionError
from hf_osdp.modeling.batch import loss_of
from hf_osdp.modeling.build import disable_cache
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import DType, GatherSpan, ModelDescription, UnitDescription
from hf_osdp.planner.plan import UnitDecision
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.tracing.describe import describe
from tests.helpers.small_models import SAMPLES, WAVE, InDouble, batch_with_loss, built, part_of
from tests.helpers.training import Case, Trained, train

TOLERANCE, STEPS, TOKENS = 1e-12, 2, 24
SECONDS = 60
"""Limit of a stage."""
FILLS_CACHES = ("PI0ForConditionalGeneration",)
"""Classes of which no plan recomputes a block: a second run would add to a cache once more."""
EQUAL, UNEQUAL, PLANNED, REFUSED, STOCK, NOT_MADE = OUTCOMES = (
    "trained equal", "trained unequal", "planned, not trained", "refused", "stock fails", "not shrunk",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    task: str
    model_type: str
    name: str
    parameters: int = 0
    stock: str = ""
    """`yes`, or why the stock steps failed."""
    described: str = ""
    """How the costs were found, or why not."""
    planned: str = ""
    """Layouts of the plan, or why there is none."""
    difference: float | None = None
    """Largest difference of a loss, gradient norm, parameter or buffer, as a share of values above 1."""
    reason: str = ""
    """Why the model was not made or not trained."""

    @property
    def is_described(self) -> bool:
        return self.described.startswith("fake tensors")

    @property
    def outcome(self) -> str:
        if not self.parameters:
            return NOT_MADE
        if self.difference is not None:
            return EQUAL if self.difference <= TOLERANCE else UNEQUAL
        if self.stock != "yes":
            return STOCK
        return PLANNED if self.is_described else REFUSED


def try_all(rows: Sequence[Row], out: str) -> None:
    """Try models one by one, appending a row for each; raise where one fails among the ranks."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    meshes = Meshes("cpu")
    for row in rows:
        faulthandler.dump_traceback_later(5 * SECONDS, exit=True)  # a rank may wait where signals do not reach it
        row = _tried(row, meshes, Path(out))
        if dist.get_rank() == 0:
            append(Path(out), row)


def _tried(row: Row, meshes: Meshes, out: Path) -> Row:
    """Return a model's row. Where a rank fails beside others, it appends the row and raises."""
    model, batches, problem = _made(row.name)
    row = replace(row, parameters=sum(parameter.numel() for parameter in model.parameters()))
    if not row.parameters:
        return replace(row, reason=problem)
    mine = _reference(model, batches) if dist.get_rank() == 1 and batches is not None else None
    row, reference = _exchanged(_on_paper(row) if dist.get_rank() == 0 else mine)
    if not isinstance(reference, Trained):
        why = reference or f"no batch: {problem}"
        return replace(row, stock=why, reason=why)
    has_loss = any(re.search("label|actions", name) for name in batches)
    row = replace(row, stock="yes", reason="" if has_loss else "the loss is the mean of the outputs")
    try:
        with limited(SECONDS):
            trained = _by_plan(model, row, batches, meshes)
    except Exception as error:  # a model can raise any exception
        append(out, replace(row, reason=line_of(error)))
        raise
    if dist.get_rank() == 0:
        row = replace(row, difference=_difference(trained, reference))
    if any(_exchanged((row.difference or 0.0) > TOLERANCE)):  # the stock steps may depend on rounding, too
        again = [_reference(_rounded(_made(row.name)[0], seed), batches) for seed in range(4 * dist.get_rank())]
        others = [each for each in _exchanged(again)[1] if isinstance(each, Trained)]
        by_rounding = max((_difference(each, reference) for each in others), default=0.0)
        if dist.get_rank() == 0 and (row.difference or 0.0) <= 10 * by_rounding:
            same = f"results differ by {by_rounding:.0e} with the weights' last bit"
            row = replace(row, stock=same, difference=None, reason=same)
    return row


def _made(name: str) -> tuple[nn.Module, Any, str]:
    """Return a small model and a batch with which it has a loss, as far as they can be made, and why not."""
    model: nn.Module = nn.Module()
    try:
        with limited(SECONDS), mock.patch.object(dist, "is_initialized", return_value=False):
            model = built(name)
            disable_cache(model)
            return model, batch_with_loss(model, SAMPLES), ""
    except Exception as error:  # a model can raise any exception
        return model, None, line_of(error)


def _rounded(model: nn.Module, seed: int) -> nn.Module:
    """Change each weight's last bit at random, as another order of a sum may."""
    made = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        last = torch.randint(-1, 2, weight.shape, generator=made, dtype=weight.dtype)
        weight.data *= 1 + torch.finfo(weight.dtype).eps * last
    return model


def _difference(one: Trained, other: Trained) -> float:
    pairs = [(one.losses, other.losses), (one.norms, other.norms)]
    pairs += [(one.parameters[name], value) for name, value in other.parameters.items() if value.numel()]
    tensors = ((torch.as_tensor(a).double(), torch.as_tensor(b).double()) for a, b in pairs)
    return torch.stack([((a - b).abs() / b.abs().clamp(min=1)).max() for a, b in tensors]).max().item()


def _exchanged(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _case(model: nn.Module, batches: Mapping[str, Any], **options: Any) -> Case:
    return Case(
        model=lambda: model, batches=lambda model: partial(_batch_of, batches), layout="everything", steps=STEPS,
        parts_alone=2, with_states=False, within=InDouble, **{"loss": _loss, **options},
    )  # fmt: skip


def _reference(model: nn.Module, batches: Mapping[str, Any]) -> Trained | str:
    """Train in one process with the two ranks' parts in turn; return why that shows nothing."""
    case = _case(copy.deepcopy(model), batches, loss=_with_buffers_of_the_first(2))
    try:
        # some losses average the number of boxes over ranks
        with limited(SECONDS), mock.patch.object(dist, "is_initialized", return_value=False):
            trained = train(case.alone)
    except Exception as error:  # a model can raise any exception
        return line_of(error)
    if not all(map(math.isfinite, (*trained.losses, *trained.norms))):
        return "losses or gradients are not finite"
    return trained if all(trained.norms) else "gradients are zero"


def _batch_of(batches: Mapping[str, Any], step: int, part: int, parts: int) -> dict[str, Any]:
    torch.manual_seed(1000 + 10 * step + part)
    return part_of(batches, part, parts)


def _loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    return loss_of(model(**batch))


def _with_buffers_of_the_first(parts: int) -> Any:
    """Return a loss under which only the first of `parts` batches changes buffers, such as running statistics: those
    of rank 0 are saved.
    """
    calls = iter(range(10**6))

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        before = [(module._buffers, copy.deepcopy(module._buffers)) for module in model.modules()]
        found = _loss(model, batch)
        if next(calls) % parts:
            for now, earlier in before:
                now.update(earlier)
        return found

    return loss


def _changing(model: nn.Module, batch: Mapping[str, Any]) -> list[nn.Module]:
    """Return batch norms, and the modules whose forward changes buffers: a second one in backward would change them
    twice.
    """
    tried = copy.deepcopy(model)
    tried(**batch)
    pairs = zip(model.modules(), tried.modules(), strict=True)
    return [
        module for module, other in pairs
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        or not all(map(torch.equal, module.buffers(recurse=False), other.buffers(recurse=False)))
    ]  # fmt: skip


def _by_plan(model: nn.Module, row: Row, batches: Mapping[str, Any], meshes: Meshes) -> Trained:
    found = re.search(r"whole step: (.*?)(?:;|$)", row.planned)
    in_step = set(found[1].split()) if found else set()
    units = tuple(replace(unit, span=GatherSpan.STEP) if unit.fqn in in_step else unit for unit in find_units(model))
    with InDouble():
        changing = set(_changing(model, _batch_of(batches, 0, dist.get_rank(), dist.get_world_size())))

    def left_out(number: int, decision: UnitDecision, unit: UnitDescription) -> dict[str, Any]:
        """Leave out the recomputation of a unit that cannot be recomputed."""
        parts = (part for name in decision.fqn.split("+") for part in model.get_submodule(name).modules())
        if changing.isdisjoint(parts) and row.name not in FILLS_CACHES:
            return {}
        return {"activations": replace(decision.activations, recomputation=None)}

    return train(_case(model, batches, units=lambda model: units, change=left_out), meshes=meshes)


def _on_paper(row: Row) -> Row:
    try:
        with limited(2 * SECONDS):
            model = built(row.name).float()
            description = _described(model)
    except Exception as error:  # a model can raise any exception
        return replace(row, described=line_of(error))
    row = replace(row, described=f"{description.trace}; in {description.compute_dtype.value}")
    try:
        with limited(SECONDS):
            return replace(row, planned=_planned(description))
    except Exception as error:
        return replace(row, planned=line_of(error))


def _described(model: nn.Module) -> ModelDescription:
    """Describe a model by its own batch, in samples long enough for pictures."""
    length = WAVE if getattr(model, "main_input_name", "") == "input_values" else TOKENS
    options: dict[str, Any] = {"device_type": "cuda", "recomputation": False}  # which takes five times as long
    dtype: DType | None = DType.BFLOAT16
    while True:
        try:
            return describe(model, sequence_length=length, compute_dtype=dtype, **options)
        except DescriptionError as error:
            needed = re.search(r"no room for .* use at least (\d+)", str(error))
            if needed and length < int(needed[1]):
                length = int(needed[1])
            elif "are not known; pass inputs" in str(error) and "inputs" not in options:
                options["inputs"] = partial(_samples_of, batch_with_loss(copy.deepcopy(model).double(), SAMPLES))
            elif dtype is not None and "bfloat16" in str(error):
                dtype = None
            else:
                raise


def _samples_of(batches: Mapping[str, Any], count: int) -> dict[str, Any]:
    return {name: (value.float() if value.is_floating_point() else value)[:count] for name, value in batches.items()}


def _planned(description: ModelDescription) -> str:
    """Plan for two H100 and return the layouts, and the units that are gathered for the whole step."""
    hardware = preset("h100", devices_per_node=2)
    problem = PlanningProblem(
        description=description, hardware=hardware, memory_limit_bytes=hardware.device.memory_bytes,
        job=TrainingJob(global_batch_size=16, precision=Precision.named("bf16")),
    )  # fmt: skip
    limit = (least_memory(problem) + least_memory(replace(problem, strategy="ddp"))) // 2
    plan = search(replace(problem, memory_limit_bytes=limit)).plan
    kinds = ("replicated" if u.shard_size == 1 else "freed" if u.reshard_after_forward else "kept" for u in plan.units)
    text = ", ".join(f"{number} {kind}" for kind, number in Counter(kinds).most_common())
    whole = (unit for unit in description.units if unit.span is GatherSpan.STEP and not unit.keeps_dtype)
    step = " ".join(unit.fqn for unit in whole if unit.fqn and "+" not in unit.fqn)
    return f"{text}; whole step: {step}" if step else text


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:220]


def append(file: Path, row: Row) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(asdict(row)) + "\n")
