"""Steps of a loop found by hooks alone: what counts, what does not, and that nothing stays behind."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_osdp.measurement.step_meter import LoopMeter, Observation
from hf_osdp.tracing.memory_tracker import MemoryTracker

ELEMENTS = 100_000


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, batch):
        return (self.weight * batch).sum()


def watched(steps: int = 4, micro_steps: int | None = None) -> tuple[Model, torch.optim.Optimizer, LoopMeter, list[Observation]]:
    told: list[Observation] = []
    model = Model()
    watch = LoopMeter(model, torch.device("cpu"), told.append, steps=steps, micro_steps=micro_steps)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False), watch, told


def global_hooks() -> int:
    return len(torch_optimizer._global_optimizer_post_hooks)


def test_loop_meter_measures_steps_and_removes_its_hooks():
    before, data, batch = global_hooks(), torch.zeros(50 * ELEMENTS), torch.zeros(ELEMENTS)
    model, optimizer, watch, told = watched()
    for step in range(6):
        for _ in range(2):
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch)
        model.eval()(batch)
        model.train()
        assert len(told) == (step >= 3)
    assert told[0].steps == 4 and told[0].median_step_s > 0
    # weight, momentum, batch, and in the second pass the gradient of the first beside the product or another gradient
    assert 5 * 4 * ELEMENTS <= told[0].peak_bytes < 6 * 4 * ELEMENTS, "the data in memory do not count"
    assert data.numel() > 0
    assert not model._forward_pre_hooks and global_hooks() == before
    watch.finish()
    assert len(told) == 1


def test_loop_meter_restarts_a_step_that_a_scaler_skipped():
    """Three passes beyond the plan's one: only the last belongs to the step."""
    model, optimizer, watch, told = watched(micro_steps=1)
    begun = []
    watch._meter.step_begins = lambda begins=watch._meter.step_begins: (begun.append(1), begins())
    for passes in (1, 3, 1, 1):
        for _ in range(passes):
            model(torch.ones(ELEMENTS)).backward()
        optimizer.step()
    assert len(begun) == 6 and told[0].steps == 4


def test_loop_meter_ignores_other_optimizers_and_steps_without_a_pass():
    model, optimizer, watch, told = watched(steps=2)
    other = torch.nn.Parameter(torch.zeros(3, requires_grad=True))
    other.grad = torch.zeros(3)
    stranger = torch.optim.SGD([other], lr=0.1)
    optimizer.step()
    for _ in range(2):
        model(torch.ones(ELEMENTS)).backward()
        stranger.step()
        assert not told
        optimizer.step()
    assert told[0].steps == 2
    watch.stop()


def test_finish_reports_a_short_loop_and_nothing_of_one_without_steps():
    model, optimizer, watch, told = watched()
    model(torch.ones(ELEMENTS)).backward()
    optimizer.step()
    watch.finish()
    assert told[0].steps == 1
    *_, watch, told = watched()
    watch.finish()
    assert not told


def test_loop_meter_leaves_a_dispatch_mode_of_the_user_in_place():
    """It is opened in one place and closed in another, around ours."""
    model, optimizer, _, told = watched(steps=3)
    for step in range(3):
        loss = model(torch.ones(ELEMENTS))
        mine = MemoryTracker(block_bytes=1)
        with mine:
            loss.backward()
            optimizer.step()
            if step == 1:
                assert _get_current_dispatch_mode_stack()[-1] is mine
        optimizer.zero_grad()
    model(torch.ones(ELEMENTS))
    assert told and not _get_current_dispatch_mode_stack()


def test_loop_meter_does_not_keep_a_deleted_model_alive():
    before = global_hooks()
    model, optimizer, watch, _ = watched()
    gone = weakref.ref(model)
    del model, optimizer, watch
    gc.collect()
    assert gone() is None and global_hooks() == before
