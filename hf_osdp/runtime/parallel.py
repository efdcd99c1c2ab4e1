"""A model trained by a plan in a plain PyTorch loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..planner.description import DType
from ..planner.hardware import Hardware
from ..planner.job import OptimizerSpec, Precision, TrainingJob
from ..planner.plan import Plan
from ..profiling.units import find_units
from ..quantities import parse_bytes
from .accumulation import micro_step
from .agree import broadcast_plan, on_rank_zero
from .apply import apply_plan, default_device_type
from .clip import clip_grad_norm_
from .mesh import world_size
from .state import free_gathered, full_state_dict, load_full_state_dict
from .verify import verify_applied

if TYPE_CHECKING:
    from ..planner.search import SearchResult


class OptimalShardedDataParallel(nn.Module):
    """Shards a model by the fastest plan that fits, and behaves like the model. Every rank makes it, from the same model.

    ```python
    model = OptimalShardedDataParallel(
        GPT2LMHeadModel(config), memory_limit="8GiB", sequence_length=512, global_batch_size=64
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for batches in loader:                       # model.plan.accumulation_steps micro-batches of model.plan.micro_batch_size
        for number, batch in enumerate(batches, start=1):
            with model.micro_step(is_last=number == len(batches)):
                (model(**batch).loss / len(batches)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("out")
    ```

    Under torchrun the process group is formed if there is none: NCCL with CUDA, else gloo. The optimizer is made afterwards,
    from `model.parameters()`. Parameters and state dicts have the model's own names.

    Attributes:
        module: the model, sharded in place.
        plan: what runs; the same on every rank.
        report: the search's result with its estimates, on rank 0; None elsewhere and where a plan was given.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str | Path | None = None,
        *,
        memory_limit: int | float | str | None = None,
        sequence_length: int | None = None,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        strategy: str = "osdp",
        block_classes: Sequence[str] | None = None,
        mixed_precision: str = "no",
        hardware: Hardware | None = None,
        optimizer: OptimizerSpec | None = None,
    ) -> None:
        """
        Args:
            model: unsharded, equal in structure on every rank; rank 0's weights count.
            plan: a plan or its file; None plans here, and then the arguments from `memory_limit` on count.
            memory_limit: bytes on each device, or text such as `"8GiB"`; None takes what the hardware has.
            sequence_length: tokens of one sample.
            global_batch_size: samples of one optimizer step over all ranks.
            micro_batch_size: samples a rank runs at once; None lets the planner choose.
            strategy: `"osdp"`, or the name of a single strategy.
            block_classes: class names of the blocks; None finds them. Counts for a given plan too.
            mixed_precision: `"no"`, `"bf16"` or `"fp16"`. Counts for a given plan too.
            hardware: what to plan for; None measures this machine.
            optimizer: what the optimizer will hold; None stands for fused AdamW.

        Raises:
            InfeasibleError: no plan meets the limit.
            PlanError: the given plan cannot be read, or is for another model or number of processes.
            ValueError: an argument is missing or out of range.
        """
        super().__init__()
        precision = Precision.named(mixed_precision)
        _form_process_group(needed=precision.compute is not None)
        _hold_master_weights(model, precision)
        units = find_units(model, block_classes)
        self.report: SearchResult | None = None
        if plan is None:
            job = _job(sequence_length, global_batch_size, micro_batch_size, precision, optimizer)
            self.plan, self.report = _plan(
                model, job, sequence_length, block_classes, strategy=strategy, memory_limit=memory_limit, hardware=hardware
            )
        else:
            self.plan = broadcast_plan(on_rank_zero(lambda: plan if isinstance(plan, Plan) else Plan.load(plan)))
        apply_plan(model, self.plan, units, mp_policy=_policy(precision))
        verify_applied(model, self.plan, units)
        self.module = model.to(_device())

    # ------------------------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        return self.module(*args, **kwargs)

    def micro_step(self, *, is_last: bool = True) -> AbstractContextManager[None]:
        """Forward and backward of one micro-batch go inside; `is_last` where the optimizer steps after it."""
        return micro_step(self.module, is_last=is_last, reduce_every_micro_step=self.plan.reduce_every_micro_step)

    def backward(self, loss: torch.Tensor, *, is_last: bool = True) -> None:
        """`loss.backward()` of one micro-batch, as `micro_step`. The loss is taken as it is: divide it by the number of micro-steps."""
        with self.micro_step(is_last=is_last):
            loss.backward()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients as one vector. Collective. Returns the norm before clipping."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    # ---------------------------------------------------------------------------------------------------------- state

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under its own names: this rank's shards, as DTensors, also right after an evaluation."""
        free_gathered(self.module)
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's buffers under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's state under its own names: shards, as torch.distributed.checkpoint takes them."""
        return self.module.state_dict(*args, **kwargs)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole weights on the CPU, on rank 0; an empty dict elsewhere. Collective."""
        return full_state_dict(self.module)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load shards, as `state_dict` gives them, or whole weights, of which rank 0's count. Collective.

        Raises:
            RuntimeError: names or shapes do not fit.
        """
        if any(isinstance(value, DTensor) for value in state_dict.values()):
            self.module.load_state_dict(state_dict, strict=strict)
        else:
            load_full_state_dict(self.module, state_dict, strict=strict)

    def save_pretrained(self, path: str | Path, **kwargs: Any) -> None:
        """Write the whole model as Hugging Face does; rank 0 writes. Collective.

        Args:
            path: a directory.
            **kwargs: for the model's own `save_pretrained`.

        Raises:
            ValueError: the model has no `save_pretrained`.
            OSDPError: rank 0 could not write; on every rank.
        """
        if not hasattr(self.module, "save_pretrained"):
            raise ValueError(f"{type(self.module).__name__} has no save_pretrained; save full_state_dict() with torch.save.")
        state = self.full_state_dict()
        on_rank_zero(lambda: self.module.save_pretrained(path, state_dict=state, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


# ------------------------------------------------------------------------------------------------------------ planning


def _job(
    sequence_length: int | None,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    precision: Precision,
    optimizer: OptimizerSpec | None,
) -> TrainingJob:
    if sequence_length is None or global_batch_size is None:
        missing = [
            name for name, value in (("sequence_length", sequence_length), ("global_batch_size", global_batch_size)) if value is None
        ]
        raise ValueError(f"Planning needs {' and '.join(missing)}; pass them, or give a plan.")
    job = TrainingJob(
        global_batch_size=global_batch_size,
        precision=precision,
        optimizer=optimizer or OptimizerSpec(),
        micro_batch_size=micro_batch_size,
    )
    job.micro_batch_sizes(world_size())
    return job


def _plan(
    model: nn.Module,
    job: TrainingJob,
    sequence_length: int | None,
    block_classes: Sequence[str] | None,
    *,
    strategy: str,
    memory_limit: int | float | str | None,
    hardware: Hardware | None,
) -> tuple[Plan, SearchResult | None]:
    """Measure together, describe and search on rank 0, and give every rank the plan."""
    from ..planner.search import search
    from ..profiling.describe import describe

    device_type = _device().type
    machine = hardware or _measured(device_type)
    if machine.world_size != world_size():
        raise ValueError(f"hardware has {machine.world_size} devices, but {world_size()} processes are running; use hardware.scaled.")
    limit = machine.device.memory_bytes - machine.device.reserved_bytes if memory_limit is None else parse_bytes(memory_limit)
    found: list[SearchResult] = []

    def find() -> Plan:
        description = describe(
            model,
            sequence_length=sequence_length,
            block_classes=block_classes,
            compute_dtype=job.precision.compute,
            device_type=device_type,
        )
        found.append(search(description, machine, job, limit, strategy=strategy))
        return found[0].plan

    plan = broadcast_plan(on_rank_zero(find))
    return plan, found[0] if found else None


def _measured(device_type: str) -> Hardware:
    from ..profiling.machine import measure_hardware

    return measure_hardware(device_type=device_type)


# --------------------------------------------------------------------------------------------------------- environment


def _form_process_group(*, needed: bool) -> None:
    """Form the process group that torchrun's variables describe; where they are not set, one of this process if `needed`."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    elif needed:
        # Mixed precision is FSDP2's, with one process as with many.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _device() -> torch.device:
    device_type = default_device_type() if dist.is_initialized() else ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")


def _hold_master_weights(model: nn.Module, precision: Precision) -> None:
    """Trainable parameters in float32 where training computes in less: the optimizer updates those."""
    if precision.compute in (DType.BFLOAT16, DType.FLOAT16):
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()


def _policy(precision: Precision) -> MixedPrecisionPolicy | None:
    if precision.compute is None:
        return None
    reduce = precision.reduce or precision.compute
    return MixedPrecisionPolicy(param_dtype=getattr(torch, precision.compute.value), reduce_dtype=getattr(torch, reduce.value))
