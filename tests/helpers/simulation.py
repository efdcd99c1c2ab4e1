"""The real FSDP2 step on fake tensors in a fake process group: what it allocates, without memory, devices or peers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.job import OptimizerStep
from hf_osdp.planner.plan import Plan
from hf_osdp.profiling.live_bytes import LiveBytes
from hf_osdp.runtime.accumulation import micro_step
from hf_osdp.runtime.apply import apply_plan
from hf_osdp.runtime.mesh import Meshes

_STEPS = 2
"""The first makes the optimizer states, the second is measured."""


def simulated_peak(
    build: Callable[[], nn.Module],
    plan: Plan,
    description: ModelDescription,
    batch: Callable[[int], dict],
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    step: OptimizerStep = OptimizerStep.FUSED,
    hold_outputs: bool = False,
) -> int:
    """Peak live bytes of rank 0 in one optimizer step under the plan.

    Args:
        build: makes the model.
        plan: what runs.
        description: the model's, for its units.
        batch: keyword arguments of forward for a number of samples.
        mp_policy: FSDP2's mixed precision.
        step: how AdamW steps.
        hold_outputs: keep what forward returns until the next forward, as a loop does that names it.
    """
    dist.init_process_group("fake", rank=0, world_size=plan.world_size, store=FakeStore())
    try:
        meshes = Meshes("cpu")
        meshes.prepare([plan.world_size, *(unit.shard_size for unit in plan.units)])  # ranks cannot be read from fake tensors
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build().train()
            apply_plan(model, plan, description.units, meshes=meshes, mp_policy=mp_policy, broadcast=False)
            return _peak_of_steps(model, plan, batch, step, hold_outputs)
    finally:
        dist.destroy_process_group()


def _peak_of_steps(model: nn.Module, plan: Plan, batch: Callable[[int], dict], step: OptimizerStep, hold_outputs: bool) -> int:
    options = {OptimizerStep.FUSED: {"fused": True}, OptimizerStep.FOREACH: {"foreach": True}, OptimizerStep.FOR_LOOP: {"foreach": False}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options[step])
    inputs = batch(plan.micro_batch_size)
    with LiveBytes(block_bytes=1) as live:
        live.track([*model.parameters(), *model.buffers(), *inputs.values()])
        for _ in range(_STEPS):
            live.reset_peak()
            for number in range(plan.accumulation_steps):
                last = number == plan.accumulation_steps - 1
                with micro_step(model, is_last=last, reduce_every_micro_step=plan.reduce_every_micro_step):
                    output = model(**inputs)
                    loss = output.loss
                    if not hold_outputs:
                        del output
                    loss.backward()
                    del loss
            optimizer.step()
            optimizer.zero_grad()
        return live.peak_bytes
