"""A plan that a user gives, held against what else the user says."""

from __future__ import annotations

import logging

import torch.distributed as dist

from ..distributed.topology import find_topology
from ..errors import PlanError
from ..planner.plan import Plan
from ..quantities import format_bytes

_REMEDY = "Plan again, or change the arguments."
_log = logging.getLogger(__name__)


def check_given(
    plan: Plan,
    *,
    memory_limit_bytes: int | None = None,
    peak_bytes: int | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    reduce_every_micro_step: bool | None = None,
    sequence_length: int | None = None,
) -> None:
    """Refuse a plan that would run another training than was asked for, or not fit. None asks for nothing.

    Args:
        plan: the plan that was given.
        memory_limit_bytes: bytes that a rank may use.
        peak_bytes: the plan's peak where the caller has estimated it; None takes what the plan states.
        global_batch_size: samples of one optimizer step over all ranks.
        micro_batch_size: samples that a rank runs at once.
        reduce_every_micro_step: when gradients are reduced.
        sequence_length: tokens of the longest sample.

    Raises:
        PlanError: they differ, samples are longer than the plan's, or its peak is above the limit or not known.
    """
    if global_batch_size not in (None, plan.global_batch_size):
        raise PlanError(f"The plan takes {plan.global_batch_size} samples a step, but {global_batch_size} are asked for. {_REMEDY}")
    if micro_batch_size not in (None, plan.micro_batch_size):
        raise PlanError(f"The plan runs {plan.micro_batch_size} samples at once, but batches hold {micro_batch_size}. {_REMEDY}")
    if reduce_every_micro_step is not None and any(u.reduce_every_micro_step is not reduce_every_micro_step for u in plan.units):
        raise PlanError(
            f"The plan has units with reduce_every_micro_step={not reduce_every_micro_step}, the opposite is asked for. {_REMEDY}"
        )
    if sequence_length is not None and sequence_length > plan.sequence_length:
        raise PlanError(f"The plan is for {plan.sequence_length} tokens a sample, but samples have {sequence_length}. {_REMEDY}")
    if memory_limit_bytes is None:
        return
    peak = plan.peak_bytes if peak_bytes is None else peak_bytes
    if peak is None:
        limit = format_bytes(memory_limit_bytes)
        raise PlanError(f"The plan states no peak to hold against memory_limit={limit}. Plan again, or leave memory_limit out.")
    if peak > memory_limit_bytes:
        raise PlanError(f"The plan needs {format_bytes(peak)}, more than memory_limit={format_bytes(memory_limit_bytes)}. {_REMEDY}")


def warn_of_other_nodes(plan: Plan) -> None:
    """Tell where a plan's groups follow other nodes than these: it runs, but sends more between nodes. Collective."""
    here = find_topology().ranks_per_node
    if plan.devices_per_node not in (None, here) and not (dist.is_initialized() and dist.get_rank()):
        _log.warning("The plan was made for %d devices a node, here there are %d; plan again for these.", plan.devices_per_node, here)


def refuse_a_host_of_the_cpu(device_type: str, **asked: bool | None) -> None:
    """Refuse to move anything from the CPU to its own memory.

    Args:
        device_type: that trains, `"cpu"` or `"cuda"`.
        asked: options that move something to the host, by name.

    Raises:
        ValueError: one of them is True on the CPU.
    """
    if device_type == "cpu" and (name := next((name for name, value in asked.items() if value), None)):
        raise ValueError(f"{name}=True, but the CPU trains in the host's own memory; leave {name} out.")
