"""Run the real FSDP2 step of a plan on fake tensors, without memory, devices or other ranks, and search by its
allocations.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from ..distributed.mesh import Meshes
from ..errors import OSDPError
from ..modeling.batch import Loss
from ..modeling.build import build_on_meta, checkpoint_blocks
from ..planner.cost.correction import Correction
from ..planner.description import ModelDescription
from ..planner.hardware import Hardware
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem
from ..planner.search.search import SearchResult, search
from ..planner.training_job import TrainingJob
from ..quantities import format_bytes
from ..sharding.apply import apply_plan
from ..sharding.environment import mp_policy
from ..sharding.host import host_parameters
from ..sharding.steps import make_optimizer, train_step
from ..tracing.block_forms import forms_in_trace
from ..tracing.cuda_kernels import CudaKernels
from ..tracing.fake_model import fake_copy
from ..tracing.known_values import KnownValues, on_fake_tensors
from ..tracing.memory_tracker import CUDA_BLOCK_BYTES, MemoryTracker, Place
from ..tracing.options import ModelRun
from ..tracing.pictures import UsualBatch
from ..tracing.tensors import tensors_in

_OPTIONS = {"device_type", "capability", "auto_class", "inputs", "images", "activation_checkpointing", "loss"}
"""Accepted fields of `ModelRun`; the description contains the others."""
_MAX_ROUNDS = 4
"""The second round corrects the first one's estimate, so that a third is needed only if the new plan has a
different error.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Allocations of one optimizer step of a plan on rank 0, which has the largest shards."""

    peak_bytes: int
    """Most bytes of live tensors at once, without what the device reserves for itself."""
    host_bytes: int
    """Most bytes on the host at once, of units that are kept there."""
    seconds: float
    """Duration of the simulation."""


def simulate(
    model_or_config: object, plan: Plan, *, description: ModelDescription, job: TrainingJob, **options: Any
) -> Simulation:
    """Run one real optimizer step of a plan on fake tensors, in a fake process group of the plan's world size.

    Layout, gathers, prefetch, reductions and the optimizer are FSDP2's and torch's own; no weight is touched and
    nothing is sent. This process must not have a process group.

    Args:
        model_or_config: as for `describe`; it is not changed.
        plan: the plan to run.
        description: the model's description, for its units and sequence length.
        job: precision, optimizer, and whether the loop holds outputs.
        options: the options given to `describe`: `device_type`, `capability`, `auto_class`, `inputs`, `images`,
            `activation_checkpointing`, `loss`.

    Raises:
        TypeError: an option is not one of these.
        ValueError: `device_type` is neither `cpu` nor `cuda`, or the optimizer has more than three states.
        PlanError: the plan is for another model.
        OSDPError: this process has a process group.
    """
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"simulate() has no option {min(unknown)}; its options are {', '.join(sorted(_OPTIONS))}.")
    precision = {"compute_dtype": job.precision.compute, "autocast": job.precision.autocast}
    chosen = ModelRun(sequence_length=description.sequence_length, **precision, **options)  # type: ignore[arg-type]
    started = time.perf_counter()
    model = (
        model_or_config
        if isinstance(model_or_config, nn.Module)
        else build_on_meta(model_or_config, chosen.auto_class)
    )
    batch = (chosen.inputs or UsualBatch(model, description.sequence_length, chosen.images))(plan.micro_batch_size)
    on_cuda = chosen.device_type == "cuda"
    with fake_process_group(plan.world_size), ExitStack() as stack:
        meshes = Meshes("cpu")
        meshes.prepare(plan)  # ranks cannot be read from fake tensors
        mode, known = FakeTensorMode(allow_non_fake_inputs=True), KnownValues(alone=False)
        stack.enter_context(on_fake_tensors(mode, known))
        fake = fake_copy(model, mode)
        if chosen.activation_checkpointing:
            checkpoint_blocks(fake, description.block_classes)
        cuda = CudaKernels(chosen.capability) if on_cuda else None
        forms = stack.enter_context(forms_in_trace(mode, cuda))
        apply_plan(fake, plan, description.units, meshes=meshes, mp_policy=mp_policy(job.precision), broadcast=False)
        fakes = known.fakes_of(batch, mode)
        forms.memory = memory = MemoryTracker(
            block_bytes=CUDA_BLOCK_BYTES if on_cuda else 1,
            locks_pages=on_cuda,
            processors=None if cuda is None else cuda.processors,
        )
        stack.enter_context(memory)
        stack.enter_context(memory.host_copies())
        stack.enter_context(separate_shapes())
        if cuda is not None:
            stack.enter_context(cuda)
        stack.enter_context(chosen.running(fake, model))
        optimizer = make_optimizer(fake, job.optimizer, plan, description.units)
        _run_step(fake, optimizer, fakes, plan, job, memory, chosen.loss)
    return Simulation(
        peak_bytes=memory.peak_bytes,
        host_bytes=memory.host_peak_bytes,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRound:
    """One plan with its estimate and its simulation."""

    found: SearchResult
    simulation: Simulation
    job: TrainingJob
    """The job of the search, with the corrections of earlier rounds."""

    def peak_on(self, hardware: Hardware) -> int:
        """Return the simulated peak with the memory outside of tensors."""
        return self.simulation.peak_bytes + hardware.outside_bytes(self.found.plan.communicators)


def search_and_simulate(
    model_or_config: object, problem: PlanningProblem, **options: Any
) -> tuple[SimulatedRound, ...]:
    """Find the fastest plan whose simulated peak is within the limit.

    Arguments are as for `simulate` and `search`; `capability` is that of the problem's hardware.

    Returns:
        The rounds; the last one has the plan. There is only one round if the first plan's simulation fits.

    Raises:
        InfeasibleError: no plan fits, by the estimate or by the estimate corrected by simulations.
        OSDPError: the simulations still exceed the limit after four rounds.
    """
    hardware, limit = problem.hardware, problem.memory_limit_bytes
    rounds: list[SimulatedRound] = []
    while len(rounds) < _MAX_ROUNDS:
        found = search(problem)
        simulation = simulate(
            model_or_config,
            found.plan,
            description=problem.description,
            job=problem.job,
            capability=hardware.device.capability,
            **options,
        )
        rounds.append(SimulatedRound(found=found, simulation=simulation, job=problem.job))
        if rounds[-1].peak_on(hardware) <= hardware.room_bytes(limit):
            return tuple(rounds)
        short_bytes = simulation.peak_bytes - found.memory.peak_bytes
        problem = replace(problem, job=Correction(extra_bytes=short_bytes).of_job(problem.job))
    least = hardware.limit_for(min(r.peak_on(hardware) for r in rounds))
    raise OSDPError(
        f"No plan's simulated peak is within {format_bytes(limit)} after {_MAX_ROUNDS} rounds (the least was"
        f" {format_bytes(least)}); give a limit of {format_bytes(least)}, or plan without simulation."
    )


def _run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Any],
    plan: Plan,
    job: TrainingJob,
    memory: MemoryTracker,
    loss: Loss | None,
) -> None:
    """Run one optimizer step and track its memory, with the optimizer states of an earlier step in place."""
    host = host_parameters(model)
    memory.track(host, Place.PINNED)
    memory.track(model.parameters())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    memory.track(_states_of(optimizer, host), Place.HOST)
    memory.track([*_states_of(optimizer, optimizer.state), *model.buffers(), *tensors_in(dict(batch))])
    memory.reset_peak()
    # the norm takes a few bytes, and its value cannot be read from a fake tensor
    train_step(model, optimizer, batch, plan, replace(job, clips_gradients=False), loss)


def _states_of(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [
        value for p in parameters for value in optimizer.state.get(p, {}).values() if isinstance(value, torch.Tensor)
    ]


def separate_shapes() -> AbstractContextManager[object]:
    """Let DTensor propagate shapes in its own fake mode.

    DTensor runs operators on whole fake tensors to find shapes, in torch 2.11 to 2.13 in the active mode: each counts
    as allocated. A tracing context has another mode, which DTensor takes first.
    """
    return tracing(TracingContext(FakeTensorMode()))


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Make a process group in which this process is rank 0 and nothing is sent; raise OSDPError if a process group
    exists.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise OSDPError(
            "This process already has a process group, so it cannot simulate another; simulate in a separate process."
        )
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
