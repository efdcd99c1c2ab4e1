"""The model of an entrant, which takes real steps and is measured."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from benchmarks.two_machines.counters import sent_bytes
from benchmarks.two_machines.emulate import INTERFACE
from benchmarks.two_machines.lineup import Entrant, Sends
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.batch import training_batch
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.sharding.apply import apply_plan
from tests.helpers.steps import make_optimizer, train_step

SETTLED_S = 0.2
"""Seconds after a barrier until no data is in transit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """Measurements of one optimizer step."""

    step_s: float
    """Seconds on the slowest rank."""
    sent_bytes: tuple[int, ...]
    """Bytes that left each node through its interface, including headers."""


class Contender:
    """A model sharded by an entrant's plan."""

    def __init__(
        self, model: nn.Module, entrant: Entrant, description: ModelDescription, job: TrainingJob, meshes: Meshes
    ) -> None:
        """Shard the model. Collective.

        Args:
            model: unsharded, with the same weights on every rank; it is modified.
            entrant: the plan, and what it sends.
            description: description of the model.
            job: has the optimizer.
            meshes: meshes of the process group.
        """
        self._plan, self._job = entrant.plan, job
        self._batch = training_batch(model, self._plan.sequence_length)(self._plan.micro_batch_size)
        if entrant.sends is not Sends.NOTHING:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if entrant.sends is Sends.STOCK_BF16 else None
            apply_plan(model, self._plan, description.units, meshes=meshes, mp_policy=policy, broadcast=False)
        self._model = model
        if entrant.sends in (Sends.STOCK, Sends.STOCK_BF16):
            restore_stock_collectives(self._model)
        self._optimizer = make_optimizer(self._model, job.optimizer, self._plan, description.units)

    def measure(self, ranks_per_node: int) -> StepMeasured:
        """Take one step. Collective."""
        before = count_sent_bytes()
        dist.barrier()
        began = time.perf_counter()
        train_step(self._model, self._optimizer, self._batch, self._plan, self._job)
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        sent = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        sent[dist.get_rank()] = count_sent_bytes() - before
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        dist.all_reduce(sent)
        return StepMeasured(step_s=seconds.item(), sent_bytes=tuple(sent.tolist()[::ranks_per_node]))


def restore_stock_collectives(model: nn.Module) -> None:
    """Restore FSDP2's own collectives, which `apply_plan` replaced."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(DefaultAllGather())
            module.set_custom_reduce_scatter(DefaultReduceScatter())


def count_sent_bytes() -> int:
    """Return this node's byte count when all ranks are here and no data is in transit. Collective."""
    dist.barrier()
    time.sleep(SETTLED_S)
    return sent_bytes(INTERFACE)
