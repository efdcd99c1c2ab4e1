"""torch's element-wise optimizers, which step DTensors."""

from __future__ import annotations

import torch

from ...planner.optimizers import TORCH_STATES, step_of
from ...planner.training_job import OptimizerSpec
from .kind import Kind

ELEMENT_WISE = tuple(
    getattr(torch.optim, name)
    for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD")
)
"""They train on shards as on whole parameters; a subclass may do something else."""


class ElementWise(Kind):
    steps_shards = False

    @classmethod
    def includes(cls, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) in ELEMENT_WISE

    def known(self, device_type: str = "cuda") -> OptimizerSpec:
        name, options = self.name.lower(), self.optimizer.defaults
        more = sum(bool(options.get(option)) for option in ("amsgrad", "momentum", "centered"))
        step = step_of(options.get("fused"), options.get("foreach"), device_type)
        return OptimizerSpec(name=name, states=TORCH_STATES[name] + more, step=step)
