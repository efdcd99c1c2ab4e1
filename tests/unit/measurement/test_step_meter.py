"""Steps of a loop, found by hooks alone: what counts, and that nothing stays behind."""

import copy
import gc
import pickle
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_osdp.measurement.step_meter import Observation, StepMeter
from hf_osdp.modeling.compiled import compile_blocks
from hf_osdp.modeling.step_hooks import after_step
from hf_osdp.planner.block_forms import BlockForms
from tests.helpers.distributed import run_ranks

ELEMENTS = 100_000
NOW = "hf_osdp.measurement.step_meter.now"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, batch):
        return (self.weight * batch).sum()


def metered(steps=4) -> tuple[Model, torch.optim.Optimizer, StepMeter, list[Observation]]:
    told: list[Observation] = []
    model = Model()
    meter = StepMeter(model, torch.device("cpu"), told.append, SimpleNamespace(), may_skip=False, steps=steps)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False), meter, told


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(ELEMENTS)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_time_leaves_out_two_steps_and_gaps(monkeypatch):
    clock = iter([0.0, 100.0, 200.0, 300.0, 400.0, 405.0, 500.0, 501.0, 600.0, 602.0])
    monkeypatch.setattr(NOW, lambda device: next(clock))
    model, optimizer, _meter, told = metered(steps=5)
    for _ in range(5):
        step(model, optimizer)
    assert (told[0].steps, told[0].median_step_s, told[0].first_step_s) == (5, 2.0, 100.0)


def measure_on_each_rank():
    model, optimizer, _meter, told = metered()
    for _ in range(4):
        model(torch.ones(ELEMENTS)).backward()
        time.sleep(0.02 + 0.05 * dist.get_rank())
        held = torch.ones(ELEMENTS * (1 + 10 * dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
    return told[0], held.numel()


def test_measurements_are_the_worst_ranks():
    (first, _), (second, most) = run_ranks(measure_on_each_rank, 2)
    assert first == second and first.steps == 4
    assert first.peak_bytes >= 4 * most and first.median_step_s >= 0.07


def test_compiled_code_has_unknown_peak(monkeypatch):
    model, optimizer, _meter, told = metered()
    monkeypatch.setattr(torch, "compile", lambda forward: forward)  # it needs no code
    compile_blocks(model, BlockForms(compiled_classes=("Model",)))
    for _ in range(4):
        step(model, optimizer)
    assert told[0].peak_bytes is None


def test_meter_measures_steps_and_removes_its_hooks():
    before, data, batch = len(after_step), torch.zeros(50 * ELEMENTS), torch.zeros(ELEMENTS)
    model, optimizer, meter, told = metered()
    for number in range(6):
        for _ in range(2):
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch)
        model.eval()(batch)
        model.train()
        assert len(told) == (number >= 3)
    assert told[0].steps == 4 and told[0].median_step_s > 0
    # weight, momentum, batch, and in the second pass the gradient of the first beside the product or another gradient
    assert 5 * 4 * ELEMENTS <= told[0].peak_bytes < 6 * 4 * ELEMENTS, "the data in memory do not count"
    assert data.numel() > 0
    assert not model._forward_pre_hooks and len(after_step) == before
    meter.finish()
    assert len(told) == 1


def test_meter_finish_reports_short_loop_and_no_empty_one():
    model, optimizer, meter, told = metered()
    step(model, optimizer)
    meter.finish()
    assert told[0].steps == 1
    *_, meter, told = metered()
    meter.finish()
    assert not told


def test_measured_model_is_pickled_and_copied_without_its_meter():
    model, optimizer, meter, told = metered(steps=1)
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for one in (*copies, model):
        one(torch.ones(ELEMENTS)).backward()
    assert meter._passes == 1
    optimizer.step()
    assert len(told) == 1 and meter.model is None
    copied = copy.deepcopy(meter)
    for end in (copied.discard, copied.finish):
        end()


@pytest.mark.parametrize("reports", [True, False])
def test_meter_does_not_keep_its_model_alive(reports):
    gc.collect()  # meters of other tests take their hooks off when they go
    before = len(after_step)
    model, optimizer, meter, told = metered(steps=1)
    if reports:
        step(model, optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    if not reports:
        del meter
    gc.collect()
    assert gone() is None and len(after_step) == before and bool(told) is reports
