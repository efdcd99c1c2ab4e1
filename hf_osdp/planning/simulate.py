"""The real FSDP2 step of a plan on fake tensors: what it allocates, without memory, devices or peers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..distributed.mesh import Meshes
from ..errors import OSDPError
from ..modeling.batch import Inputs, Loss, same_random_numbers, training_batch, without_packing
from ..modeling.build import build_on_meta, checkpoint_blocks
from ..modeling.wrapping import forward_replaced, under_autocast
from ..planner.allocator.replay import StepEvents, replay_steps
from ..planner.cost.memory import MemoryBreakdown
from ..planner.description import ModelDescription
from ..planner.job import TrainingJob
from ..planner.plan import Plan
from ..sharding.apply import apply_plan
from ..sharding.environment import mp_policy
from ..sharding.host_offload import host_parameters
from ..sharding.steps import make_optimizer, train_step
from ..tracing.allocation_log import AllocationLog
from ..tracing.attention import Capability
from ..tracing.cuda_kernels import FusedKernels
from ..tracing.fake_copy import fake_copy
from ..tracing.host_ledger import HostLedger
from ..tracing.known_values import KnownValues
from ..tracing.ledger import Kind
from ..tracing.live_bytes import CUDA_BLOCK_BYTES, plain_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What one optimizer step of a plan allocates on rank 0, the fullest."""

    peak_bytes: int
    """Most bytes of live tensors at once; what the device reserves for itself is not among them."""
    breakdown: MemoryBreakdown
    """The same by kind, at the highest moment."""
    host_bytes: int
    """Most bytes on the host at once, of units that live there."""
    reserved_bytes: int | None
    """Most bytes that torch's caching allocator would take from the device in the first two steps; None for the CPU, which has no
    such allocator."""
    seconds: float
    """How long the simulation took."""


def simulate(
    model_or_config: Any,
    plan: Plan,
    *,
    description: ModelDescription,
    job: TrainingJob,
    device_type: str = "cpu",
    capability: Capability | None = None,
    auto_class: Any = None,
    inputs: Inputs | None = None,
    activation_checkpointing: bool = False,
    loss: Loss | None = None,
) -> Simulation:
    """Run one optimizer step of a plan for real, in a fake process group of its world size, on fake tensors.

    Layout, gathers, prefetch, reductions and the optimizer are FSDP2's and torch's own; no weight is touched and nothing is
    sent. This process must not have a process group.

    Args:
        model_or_config: as `describe` takes it; left as it is.
        plan: what runs.
        description: the model's, for its units and sequence length.
        job: precision, optimizer, and whether the loop holds outputs.
        device_type: `"cpu"` or `"cuda"`: whose attention, dropout and allocation granularity count.
        capability: of the CUDA device, as `describe` takes it.
        auto_class: for a configuration, which class to build, see `build_on_meta`.
        inputs: from a number of samples to forward's keyword arguments; None makes a training batch for a transformers model.
        activation_checkpointing, loss: as `describe` takes them.

    Returns:
        Peak bytes with their breakdown, the host's beside them, and the seconds that it took.

    Raises:
        ValueError: `device_type` is neither of the two, or the optimizer has more than three states.
        PlanError: the plan is for another model.
        OSDPError: this process has a process group.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r} is not known; use cpu or cuda.")
    started = time.perf_counter()
    model = model_or_config if isinstance(model_or_config, nn.Module) else build_on_meta(model_or_config, auto_class)
    batch = (inputs or training_batch(model, description.sequence_length))(plan.micro_batch_size)
    with fake_process_group(plan.world_size), ExitStack() as stack:
        meshes = Meshes("cpu")
        meshes.prepare(plan)  # ranks cannot be read from fake tensors
        stack.enter_context(without_packing())
        stack.enter_context(same_random_numbers())
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        known = stack.enter_context(KnownValues(alone=False))
        twin = fake_copy(model, mode)
        if activation_checkpointing:
            checkpoint_blocks(twin, description.block_classes)
        apply_plan(twin, plan, description.units, meshes=meshes, mp_policy=mp_policy(job.precision), broadcast=False)
        fakes = known.fakes_of(batch, mode)
        on_cuda = device_type == "cuda"
        log = AllocationLog(_Streams().current) if on_cuda else None
        ledger = stack.enter_context(HostLedger(block_bytes=CUDA_BLOCK_BYTES if on_cuda else 1, locks_pages=on_cuda, log=log))
        stack.enter_context(ledger.copies())
        stack.enter_context(_shapes_apart())
        if on_cuda:
            stack.enter_context(FusedKernels(lambda flops: None, capability))
        if job.precision.autocast:
            autocast = under_autocast(twin.forward, getattr(torch, job.precision.compute.value))
            stack.enter_context(forward_replaced(twin, autocast))
        events = _run_step(twin, fakes, plan, job, ledger, loss)
        at_peak = {kind.value: nbytes for kind, nbytes in ledger.at_peak.items()}
        return Simulation(
            peak_bytes=ledger.peak_bytes,
            breakdown=MemoryBreakdown(**at_peak),
            host_bytes=ledger.host_peak_bytes,
            reserved_bytes=None if events is None else _reserved_bytes(events, job),
            seconds=time.perf_counter() - started,
        )


def _reserved_bytes(events: StepEvents, job: TrainingJob) -> int:
    return replay_steps(events, expandable_segments=job.expandable_segments).peak_reserved_bytes


class _Streams:
    """Numbers of FSDP2's streams. On the CPU they do nothing, but the current one is known."""

    def __init__(self) -> None:
        self._seen: list[Any] = [torch.cpu.current_stream()]

    def current(self) -> int:
        """The number of the current stream; 0 is the one that computes."""
        stream = torch.cpu.current_stream()
        if stream not in self._seen:
            self._seen.append(stream)
        return self._seen.index(stream)


def _run_step(
    model: nn.Module, batch: Mapping[str, Any], plan: Plan, job: TrainingJob, ledger: HostLedger, loss: Loss | None
) -> StepEvents | None:
    """One optimizer step under the ledger, with optimizer states as after an earlier one; what it allocates, where that is logged."""
    optimizer = make_optimizer(model, job.optimizer)
    host = host_parameters(model)
    ledger.track_on_host(host, pinned=True)
    ledger.track_as(Kind.PARAMETERS, model.parameters())
    _make_states(model, optimizer)
    ledger.relabel(Kind.OPTIMIZER, _states_of(optimizer, optimizer.state))
    ledger.track_on_host(_states_of(optimizer, host))
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    ledger.track_as(Kind.MODEL_BUFFERS, [*model.buffers(), *tensors])
    ledger.reset_peak()
    job = replace(job, clips_gradients=False)  # norms are a few bytes, and cannot be read from fakes
    log = ledger.log
    if log is None:
        train_step(model, optimizer, batch, plan, job, loss)
        return None
    states = frozenset(number for state in _states_of(optimizer, optimizer.state) if (number := _allocation(log, state)) is not None)
    before, started, stepping = log.live, len(log.events), []
    optimizer.register_step_pre_hook(lambda *_: stepping.append(len(log.events)))
    train_step(model, optimizer, batch, plan, job, loss)
    made = [event for event in log.events[:started] if event.nbytes > 0 and event.key in before]
    return StepEvents(
        held=[event for event in made if event.key not in states],
        before_optimizer=log.events[started : stepping[0]],
        states=[event for event in made if event.key in states],
        optimizer=log.events[stepping[0] :],
    )


def _allocation(log: AllocationLog, tensor: torch.Tensor) -> int | None:
    return next((log.number_of(local.untyped_storage()._cdata) for local in plain_tensors(tensor)), None)


@contextmanager
def _shapes_apart() -> Iterator[None]:
    """DTensor finds out shapes of results by running operators on whole fake tensors. In torch 2.11 it does so in the fake mode that
    is active, where they would count as if they were there; here it is sent to one of its own."""
    stock = ShardingPropagator._propagate_tensor_meta_non_cached

    def apart(propagator: ShardingPropagator, op_schema: Any) -> Any:
        with _disable_current_modes():
            return stock(propagator, op_schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = apart
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = stock


def _states_of(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [value for p in parameters for value in optimizer.state.get(p, {}).values() if isinstance(value, torch.Tensor)]


def _make_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """A process group in which this is rank 0 and nothing is sent.

    Raises:
        OSDPError: there is a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise OSDPError("This process has a process group already, so no other can be simulated here; simulate in a process of its own.")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
