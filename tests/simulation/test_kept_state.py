"""Modules that store tensors in themselves: what recomputation leaves alive is in the estimate; scalars, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.tracing.describe import describe
from tests.helpers.simulation import choices_of_layout, estimate_and_simulation

WORLD, WIDTH, ROWS = 8, 64, 128
BATCH = Batch(micro_batch_size=4, accumulation_steps=1)
JOB = TrainingJob(global_batch_size=4 * WORLD, micro_batch_size=4)


class Block(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.keeps, self.state = keeps, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh().exp()
        if self.keeps:
            self.state = y.square().sum(-1).sqrt()
        return x + self.outer(y)


def rows(samples: int) -> dict[str, torch.Tensor]:
    return {"input": torch.zeros(samples, ROWS, WIDTH)}


@pytest.mark.parametrize("keeps", [False, True])
def test_state_that_keeps_the_recomputed_graph_is_in_the_estimate(keeps):
    model = nn.Sequential(*(Block(keeps) for _ in range(5)))
    description = describe(model, sequence_length=ROWS, inputs=rows, partial_recomputation=False)
    choices = choices_of_layout("zero3", description, WORLD)
    for index in description.recomputable:
        choices[index] = replace(choices[index], activations=Activations.RECOMPUTE)
    again = [segment.recomputed[0].costs for segment in description.segments if segment.recomputed]
    grows = again[0].gradient_bytes(4) > again[-1].gradient_bytes(4) + 4 * ROWS * WIDTH * 4
    assert grows is keeps
    more = {"job": JOB, "batch": BATCH, "world": WORLD, "inputs": rows}
    estimate, simulated = estimate_and_simulation(model, description, choices, **more)
    assert -0.01 <= estimate.peak_bytes / simulated.peak_bytes - 1 <= 0.03


class Scaled(nn.Module):
    """No repeated blocks, and a parameter without dimensions, as CLIP's `logit_scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(input).tanh() * self.scale.exp()


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_parameter_without_dimensions_has_an_estimate(layout):
    description = describe(Scaled(), sequence_length=ROWS, inputs=rows)
    estimate = estimate_memory(description, choices_of_layout(layout, description, WORLD), WORLD, JOB, BATCH)
    assert [unit.fqn for unit in description.units] == [""] and description.numel == WIDTH * WIDTH + WIDTH + 1
    assert estimate.peak_bytes > 4 * 4 * ROWS * WIDTH
