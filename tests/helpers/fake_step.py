"""Run the real FSDP2 step of a plan on fake tensors, without memory, devices or other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.batch import Loss
from hf_osdp.modeling.build import build_on_meta, checkpoint_blocks
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import mp_policy
from hf_osdp.sharding.host import host_parameters
from hf_osdp.sharding.replicas import replicas_of
from hf_osdp.tracing.cuda_kernels import CudaKernels
from hf_osdp.tracing.fake_model import fake_copy
from hf_osdp.tracing.known_values import KnownValues, on_fake_tensors
from hf_osdp.tracing.memory_tracker import CUDA_BLOCK_BYTES
from hf_osdp.tracing.options import ModelRun
from hf_osdp.tracing.pictures import UsualBatch
from hf_osdp.tracing.tensors import tensors_in
from tests.helpers.host_tracker import HostTracker, Place
from tests.helpers.steps import make_optimizer, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Allocations of one optimizer step of a plan on rank 0, which has the largest shards."""

    peak_bytes: int
    """Most bytes of live tensors at once, without what the device reserves for itself."""
    host_bytes: int
    """Most bytes on the host at once, of units that are kept there."""


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
    """
    precision = {"compute_dtype": job.precision.compute, "autocast": job.precision.autocast}
    chosen = ModelRun(sequence_length=description.sequence_length, **precision, **options)  # type: ignore[arg-type]
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
        plan = replace(plan, compiled_classes=())  # no code is compiled for fake tensors
        apply_plan(fake, plan, description.units, meshes=meshes, mp_policy=mp_policy(job.precision), broadcast=False)
        fakes = known.fakes_of(batch, mode)
        memory = HostTracker(
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
    return Simulation(peak_bytes=memory.peak_bytes, host_bytes=memory.host_peak_bytes)


def _run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Any],
    plan: Plan,
    job: TrainingJob,
    memory: HostTracker,
    loss: Loss | None,
) -> None:
    """Run one optimizer step and track its memory, with the optimizer states of an earlier step in place."""
    host = host_parameters(model)
    if (replicas := replicas_of(model)) is not None:  # their copies have no bytes between steps
        memory.track(bucket._copies for bucket in replicas._buckets if bucket.of.dtype is not None)
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
    """Make a process group in which this process is rank 0 and nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
