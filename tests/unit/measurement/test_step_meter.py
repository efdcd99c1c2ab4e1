"""Steps between calls, and those of a loop found by hooks alone: what counts, and that nothing stays behind."""

import copy
import gc
import pickle
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hf_osdp.measurement.step_meter import LoopMeter, Observation, StepMeter, training_tensors
from hf_osdp.measurement.timing import CollectiveTotal, timings_of, totals_of
from hf_osdp.modeling.replaced import setting
from hf_osdp.modeling.step_hooks import after_step
from hf_osdp.modeling.wrapping import SkippableMode
from hf_osdp.planner.block_forms import BlockForms
from hf_osdp.planner.hardware import Collective
from hf_osdp.tracing.block_forms import change_blocks
from hf_osdp.tracing.block_forms.compiled import COMPILER
from tests.helpers.distributed import run_ranks

ELEMENTS = 100_000
NOW = "hf_osdp.measurement.step_meter.now"


def measure(steps: int, seconds: float, elements: int) -> StepMeter:
    """Steps that hold a parameter, a momentum, and a product in forward or a gradient in backward."""
    model = torch.nn.ParameterList([torch.zeros(elements)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    meter = StepMeter("cpu", lambda: training_tensors(model, optimizer))
    for _ in range(steps):
        meter.step_begins()
        time.sleep(seconds)
        (model[0] * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step_ends()
        time.sleep(3 * seconds)
    return meter


def test_step_meter_time_leaves_out_two_steps_and_gaps(monkeypatch):
    clock = iter([0.0, 100.0, 200.0, 300.0, 400.0, 405.0, 500.0, 501.0, 600.0, 602.0])
    monkeypatch.setattr(NOW, lambda device: next(clock))
    meter = StepMeter("cpu", list)
    for _ in range(5):
        meter.step_begins()
        meter.step_ends()
    assert (meter.steps, meter.median_step_s, meter.summary().first_step_s) == (5, 2.0, 100.0)


def test_step_meter_gives_none_before_anything_is_measured():
    assert StepMeter("cpu", list).summary() == Observation(steps=0, median_step_s=None)
    summary = measure(1, 0.0, 10).summary()
    first_s = summary.first_step_s
    assert summary == Observation(steps=1, median_step_s=None, first_step_s=first_s) and first_s > 0


def test_step_meter_forgets_a_step_that_did_not_end():
    meter = measure(1, 0.0, 10)
    meter.step_begins()
    meter.step_begins()
    meter.step_ends()
    assert meter.steps == 2 and meter.peak_bytes is not None
    assert not _get_current_dispatch_mode_stack()
    with pytest.raises(ValueError, match="without step_begins"):
        meter.step_ends()


def test_step_meter_on_cuda_takes_largest_peak_without_workspaces(monkeypatch):
    """With the allocator's counters played by numbers: the most since the last reset."""
    played = SimpleNamespace(most=100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(played, "most", 100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: played.most)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * played.most)
    workspaces = [64, 0]
    monkeypatch.setattr("hf_osdp.measurement.step_meter.free_workspaces", lambda device: workspaces.pop(0))
    monkeypatch.setattr(NOW, lambda device: 0.0)
    meter = StepMeter("cuda", list)
    assert meter.peak_bytes is None
    for peak, between in ((300, 1000), (400, 2000), (200, 900)):
        meter.step_begins()
        played.most = max(played.most, peak)
        meter.step_ends()
        played.most = between  # an evaluation, a checkpoint
    meter.step_begins()
    played.most = 700  # a step that does not end
    meter.step_begins()
    meter.step_ends()
    for _ in range(2):  # the second finds none to free
        summary = meter.summary()
        assert (summary.steps, summary.peak_bytes, summary.reserved_bytes) == (4, 336, 800)


def measure_on_each_rank():
    rank = dist.get_rank()
    data = torch.zeros(50 * ELEMENTS)  # does not count
    meter = measure(4, 0.02 + 0.05 * rank, 10 * ELEMENTS * (rank + 1))
    return meter.peak_bytes / (40 * ELEMENTS), meter.summary(), data.numel()


def test_step_meter_summary_is_the_worst_ranks():
    found = run_ranks(measure_on_each_rank, 2)
    assert [peak for peak, *_ in found] == pytest.approx([3, 6], abs=0.1)
    summary = found[0][1]
    assert summary == found[1][1]
    assert (summary.steps, summary.peak_bytes / (40 * ELEMENTS)) == (4, found[1][0])
    assert summary.median_step_s >= 0.07


def test_collectives_inside_and_across_nodes_are_told_apart():
    def call(crosses: bool, seconds: float) -> CollectiveTotal:
        pair = {"collective": Collective.ALL_GATHER, "group_size": 2, "nbytes": 2**20}
        return CollectiveTotal(**pair, crosses_nodes=crosses, seconds=seconds)

    inside, across = timings_of([call(False, 1e-3), call(True, 1e-2), call(False, 1e-3)])
    assert (inside.crosses_nodes, across.crosses_nodes) == (False, True)
    assert across.seconds_per_byte == pytest.approx(10 * inside.seconds_per_byte)
    (total,) = totals_of([call(False, 1e-3), call(True, 1e-2)], steps=1)
    assert (total.calls, total.nbytes) == (2, 2**21)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, batch):
        return (self.weight * batch).sum()


def test_compiled_code_has_unknown_peak_and_one_clocked_step(monkeypatch):
    clocked = []

    class Clock(SkippableMode):
        def __init__(self, device):
            super().__init__()
            clocked.append(meter.steps)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("hf_osdp.measurement.step_meter.CollectiveClock", Clock)
    monkeypatch.setattr("hf_osdp.measurement.step_meter.world_size", lambda: 2)
    model = Model()
    with setting(COMPILER, lambda module, forward, budget: forward):
        change_blocks(model, BlockForms(compiled_classes=("Model",)))
    meter = StepMeter("cpu", lambda: [])
    for _ in range(4):
        meter.step_begins()
        model(torch.zeros(ELEMENTS)).backward()
        meter.step_ends()
    assert meter.peak_bytes is None and clocked == [2]


def metered(steps=4, micro_steps=None) -> tuple[Model, torch.optim.Optimizer, LoopMeter, list[Observation]]:
    told: list[Observation] = []
    model = Model()
    plan = SimpleNamespace(accumulation_steps=micro_steps)
    meter = LoopMeter(model, torch.device("cpu"), told.append, plan, may_skip=micro_steps is not None, steps=steps)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False), meter, told


def test_loop_meter_measures_steps_and_removes_its_hooks():
    before, data, batch = len(after_step), torch.zeros(50 * ELEMENTS), torch.zeros(ELEMENTS)
    model, optimizer, meter, told = metered()
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
    assert not model._forward_pre_hooks and len(after_step) == before
    meter.finish()
    assert len(told) == 1


def test_loop_meter_restarts_a_step_that_a_scaler_skipped():
    """Three passes beyond the plan's one: only the last belongs to the step."""
    model, optimizer, meter, told = metered(micro_steps=1)
    begun = []
    meter._meter.step_begins = lambda begins=meter._meter.step_begins: (begun.append(1), begins())
    for passes in (1, 3, 1, 1):
        for _ in range(passes):
            model(torch.ones(ELEMENTS)).backward()
        optimizer.step()
    assert len(begun) == 6 and told[0].steps == 4


def test_loop_meter_ignores_other_optimizers_and_steps_without_a_pass():
    model, optimizer, meter, told = metered(steps=2)
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
    meter.stop()


def test_loop_meter_finish_reports_short_loop_and_no_empty_one():
    model, optimizer, meter, told = metered()
    model(torch.ones(ELEMENTS)).backward()
    optimizer.step()
    meter.finish()
    assert told[0].steps == 1
    *_, meter, told = metered()
    meter.finish()
    assert not told


def test_loop_meter_leaves_users_dispatch_mode_in_place():
    """It is opened in one place and closed in another, around ours."""
    model, optimizer, _meter, told = metered(steps=3)
    for _ in range(3):
        loss = model(torch.ones(ELEMENTS))
        with Plain() as mine:
            loss.backward()
            optimizer.step()
            assert _get_current_dispatch_mode_stack() == [mine]
        optimizer.zero_grad()
    model(torch.ones(ELEMENTS))
    assert told and not _get_current_dispatch_mode_stack()


class Plain(TorchDispatchMode):
    operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def test_loop_meter_enters_no_mode_inside_one_ending_in_step():
    model, optimizer, meter, told = metered()
    for _ in range(3):
        with Plain() as users:
            loss = model(torch.ones(ELEMENTS))
        assert not _get_current_dispatch_mode_stack()
        of_forward = users.operators
        loss.backward()
        optimizer.step()
        assert users.operators == of_forward
    meter.finish()
    assert told[0].peak_bytes is None and told[0].steps == 3


def test_loop_meter_counts_no_forward_inside_backward():
    """Losses such as GradCache run the model again in backward, whose modes end with it."""
    model, optimizer, _meter, told = metered(steps=3)

    def run_again(gradient):
        with torch.enable_grad():
            model(torch.ones(ELEMENTS)).backward(gradient)

    for _ in range(4):
        with torch.no_grad():
            outputs = model(torch.ones(ELEMENTS))
        outputs.requires_grad_().register_hook(run_again)
        outputs.backward()
        optimizer.step()
        assert not _get_current_dispatch_mode_stack()
        optimizer.zero_grad()
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
    for end in (copied.discard, copied.stop, copied.finish):
        end()


def test_loop_meter_that_has_reported_does_not_keep_its_model_alive():
    model, optimizer, meter, told = metered(steps=1)
    model(torch.ones(ELEMENTS)).backward()
    optimizer.step()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert told and gone() is None and meter.model is None


def test_loop_meter_does_not_keep_a_deleted_model_alive():
    gc.collect()  # meters of other tests take their hooks off when they go
    before = len(after_step)
    model, optimizer, meter, _ = metered()
    gone = weakref.ref(model)
    del model, optimizer, meter
    gc.collect()
    assert gone() is None and len(after_step) == before
