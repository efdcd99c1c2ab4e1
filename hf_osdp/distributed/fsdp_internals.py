"""FSDP2's insides: no other module imports what `torch.distributed.fsdp` does not export, or names its private parts.

No public call gathers or reduces a unit at another time than FSDP2 does, or says whether it is gathered, so its groups
and states get subclasses. Read in torch 2.11 to 2.13; `test_fsdp_internals.py` names what another version has changed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from operator import is_not
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    AllGatherResult,
    DefaultAllGather,
    DefaultReduceScatter,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.profiler import record_function

__all__ = ["AllGather", "DefaultAllGather", "DefaultReduceScatter", "FSDPParam", "ReduceScatter", "TrainingState"]


JOINS_BLOCKS = hasattr(FSDPState, "_force_complete_incomplete_states")
"""Whether FSDP2 casts inputs of each module of a unit, and ends a forward that called only some: from torch 2.13."""


class _Parameters(list[FSDPParam]):
    """Parameters of a unit under a plan, which are gathered with fewer operators than FSDP2 takes; it gets the same
    values in the same buffers. Whatever is not an ordinary shard of one dtype is left to FSDP2.
    """

    _outputs: list[torch.Tensor] | None = None
    """Storages of whole parameters, which are freed and allocated again."""
    _rows: tuple[torch.Tensor, ...] = ()
    """The same, one row for each rank."""

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """What is sent; None if FSDP2 gathers these parameters."""
        is_ordinary = all(
            not parameter.offload_to_cpu
            and parameter.fsdp_placement.dim == 0
            and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
            and parameter.post_forward_mesh_info in (None, parameter.mesh_info)
            for parameter in self
        )
        dtypes = {parameter.param_dtype or parameter.orig_dtype for parameter in self}
        return dtypes.pop() if is_ordinary and len(dtypes) == 1 else None

    @torch.no_grad()
    def gather(
        self,
        group: dist.ProcessGroup,
        async_op: bool,
        copy_stream: torch.Stream,
        stream: torch.Stream,
        device: torch.device,
        transport: AllGather,
    ) -> AllGatherResult:
        """Cast shards into their place in the buffer; FSDP2 casts them into another, from which it copies them."""
        shards = [parameter._sharded_param_data for parameter in self]
        sizes = [shard.numel() for shard in shards]
        size, dtype, on = sum(sizes), self.dtype, torch.get_device_module(device).stream
        assert dtype is not None
        with on(copy_stream):
            buffer = transport.allocate((size * group.size(),), dtype=dtype, device=device)
            own = buffer.narrow(0, size * group.rank(), size)
            torch._foreach_copy_(own.split(sizes), shards)
        stream.wait_stream(copy_stream)
        with on(stream):
            work = transport(output_tensor=buffer, input_tensor=own, group=group, async_op=async_op)
            event = stream.record_event()
        return AllGatherResult(buffer, event, work, [[dtype]] * len(self), [[size] for size in sizes], sizes)

    def copy_out(self, result: AllGatherResult, group: dist.ProcessGroup) -> None:
        """Copy whole parameters out of the buffer, into views that are made once."""
        if self._outputs is None or any(map(is_not, self._outputs, self._found_outputs())):
            foreach_all_gather_copy_out(result, self, group)
            outputs = self._found_outputs()
            if self.dtype is not None and not any(map(torch.is_inference, outputs)):
                with torch.inference_mode(False):
                    self._outputs, self._rows = outputs, tuple(output.view(group.size(), -1) for output in outputs)
            return
        buffer, event, work, *_, sizes = result
        if event is not None:
            torch.get_device_module(buffer.device).current_stream().wait_event(event)
        if isinstance(work, dist.Work):
            work.wait()
        for parameter in self:
            parameter.alloc_all_gather_outputs()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self._rows):
            torch.split_with_sizes_copy(buffer.view(group.size(), -1), sizes, dim=1, out=self._rows)

    def _found_outputs(self) -> list[torch.Tensor]:
        return [output for parameter in self for output in parameter.all_gather_outputs]


def _all_gather(parameters: list[FSDPParam], *args: Any) -> AllGatherResult | None:
    if isinstance(parameters, _Parameters) and parameters.dtype is not None:
        return parameters.gather(*args)
    return foreach_all_gather(parameters, *args)


def _copy_out(result: AllGatherResult, parameters: list[FSDPParam], group: dist.ProcessGroup) -> None:
    if isinstance(parameters, _Parameters):
        parameters.copy_out(result, group)
    else:
        foreach_all_gather_copy_out(result, parameters, group)


class _PostBackward(torch.autograd.Function):
    """Ends a unit's backward. FSDP2's own gives zeros to what made an input that the unit does not use, and AdamW then
    decays its weights; here it gets no gradient, as without FSDP2.
    """

    @staticmethod
    def forward(ctx: Any, group: FSDPParamGroup, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        ctx.group = group
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        ctx.group.post_backward()
        return None, *gradients


def _recorded(name: str) -> AbstractContextManager[object]:
    """Name a part of a step for a profiler or a dispatch mode (`modeling/selective.py`), if there is one: FSDP2 names
    a dozen for each unit.
    """
    listens = torch._C._autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() > 0
    return record_function(name) if listens else nullcontext()


class ParameterGroup(FSDPParamGroup):
    """A unit's parameters, which FSDP2 gathers and reduces at once."""

    label, number = "", 0
    reduces_always = False
    """Whether each micro-step reduces its gradients, not the last alone."""
    order: Any = None
    """The model's `UnitOrder`: its `gather` is called instead of each gather, which `gather` here issues; its `reduce`
    instead of each end of backward, which `end_backward` brings about; its `may_prefetch` before prefetches.
    """
    is_pinned = False

    def unshard(self, async_op: bool = False) -> None:
        self.gather(async_op) if self.order is None else self.order.gather(self, async_op)

    def reshard(self) -> None:
        if not self.is_pinned:
            super().reshard()

    def free(self) -> None:
        """Free whole weights, also those that a backward would need."""
        self.is_pinned = False
        self._to_sharded()

    def post_backward(self, *unused: object) -> None:
        self.end_backward() if self.order is None else self.order.reduce(self)

    @staticmethod
    def _prefetch_unshard(target: FSDPParamGroup, pass_type: str) -> None:
        order = getattr(target, "order", None)
        if order is None or order.may_prefetch(target):
            FSDPParamGroup._prefetch_unshard(target, pass_type)

    def gather(self, async_op: bool = False) -> None:
        super().unshard(async_op)

    def end_backward(self, *, lends: bool = False) -> None:
        """Reduce and free as FSDP2 does; a rank that only `lends` keeps the weights for its own backward."""
        if not lends or self.is_sharded:
            super().post_backward()
            return
        frees, self.reshard_after_backward = self.reshard_after_backward, False
        with self.use_training_state(self._training_state):
            super().post_backward()
        self.reshard_after_backward = frees

    def lend_shard(self, *, may_need: bool) -> None:
        """Gather for other ranks, on the current stream; keep what this rank holds or, if it `may_need`, will use."""
        pending, is_held = self._all_gather_result, self.is_unsharded
        self._all_gather_result = None
        with self.use_training_state(TrainingState.IDLE):
            self._to_sharded()
            self.gather()
            if pending is not None:
                self._all_gather_result = pending
            elif is_held or not self.was_gathered:  # its reduction needs the whole parameters' shapes
                self.wait_for_unshard()
                if not is_held:
                    self._to_sharded()
            elif not may_need or not self._post_forward_indices:
                self._all_gather_result = None

    def drop_gradients(self) -> None:
        """Drop what earlier micro-steps left."""
        self._partial_reduce_output = None
        for parameter in self.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (whole := whole_parameter(parameter)) is not None:
                whole.grad = None

    state = property(lambda self: self._training_state)
    is_gathering = property(lambda self: self._all_gather_result is not None)
    was_gathered = property(lambda self: all(whole_parameter(p) is not None for p in self.fsdp_params))
    """Whether whole parameters have been made, without which there are no gradients."""
    holds_sums = property(lambda self: self._partial_reduce_output is not None)
    """Whether sums of earlier micro-steps wait to be all-reduced."""
    ranks = property(lambda self: self.mesh_info.mesh.size(self.mesh_info.mesh.ndim - 1))
    """Over how many ranks it is sharded."""


class UnitState(FSDPState):
    """What FSDP2 knows of a unit's modules."""

    order: Any
    """The model's `UnitOrder`: its `backward_begins` is called when the unit's backward begins, its `backward_ends` is
    the context for the end of the whole backward.
    """
    begin = FSDPState._lazy_init
    """Sets up FSDP2, which does so only when the root is called first."""
    end_later = FSDPState._register_root_post_backward_final_callback
    """Lets FSDP2 end this backward, which it does only for units that were called."""

    def forward_raised(self) -> None:
        """End a forward that has raised: FSDP2 would take its units for running, and not wait for the optimizer before
        it gathers them again. Its own `reset_iter_state`, from torch 2.13, would drop gradients.
        """
        self._state_ctx.iter_forward_root = None
        for state in self._state_ctx.all_states:
            state._training_state = TrainingState.IDLE
            state._modules_to_run_forward.clear()
            for group in parameter_groups(state._modules[0]):
                group._training_state = TrainingState.IDLE

    def begin_backward(self, gradient: torch.Tensor) -> None:
        """Begin the unit's backward, if that has not happened."""
        if any(group.state is not TrainingState.PRE_BACKWARD for group in parameter_groups(self._modules[0])):
            self._pre_backward(gradient)

    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        self.order.backward_begins()
        return super()._pre_backward(grad)

    def _root_post_backward_final_callback(self) -> None:
        with self.order.backward_ends():
            super()._root_post_backward_final_callback()


def unit_state(module: Any) -> UnitState:  # noqa: ANN401
    state: UnitState = module._get_fsdp_state()
    state.__class__ = UnitState
    return state


def parameter_groups(module: nn.Module) -> list[ParameterGroup]:
    """Return FSDP2's parameter groups of a module; torch up to 2.11 stores one, later versions a list."""
    state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in filter(None, groups):
        if not isinstance(group, ParameterGroup):
            group.__class__, group.fsdp_params = ParameterGroup, _Parameters(group.fsdp_params)
            vars(_fsdp_param_group).update(
                foreach_all_gather=_all_gather, foreach_all_gather_copy_out=_copy_out, record_function=_recorded,
                RegisterPostBackwardFunction=_PostBackward,
            )  # fmt: skip
    return [group for group in groups if isinstance(group, ParameterGroup)]


def stays_gathered(root: nn.Module) -> bool:
    """Return whether a root stays gathered after forward because FSDP2 has the choice."""
    return isinstance(root, FSDPModule) and root._get_fsdp_state()._auto_reshard_after_forward is not False


def whole_parameter(parameter: FSDPParam) -> nn.Parameter | None:
    """Return a whole parameter, which exists once it was gathered."""
    return getattr(parameter, "_unsharded_param", None)


def owners(parameter: FSDPParam) -> list[tuple[nn.Module, str]]:
    """Return the modules that have a parameter, each with its name there."""
    info = parameter._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
