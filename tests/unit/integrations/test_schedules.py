"""Prepared schedulers that go on on another number of processes: as a run of that number that was never interrupted, to the bit."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import lr_scheduler as schedulers
from transformers import get_cosine_schedule_with_warmup

from hf_osdp.integrations.schedules import StepSize, own_schedule, position_factor, rescale_schedules

STEPS, BREAK = 12, 5

KINDS = {
    "lambda": lambda optimizer, ranks: schedulers.LambdaLR(optimizer, lambda position: 1 - position / (STEPS * ranks)),
    "transformers": lambda optimizer, ranks: get_cosine_schedule_with_warmup(optimizer, 3 * ranks, STEPS * ranks),
    "multiplicative": lambda optimizer, ranks: schedulers.MultiplicativeLR(optimizer, lambda position: 0.9 ** (1 / ranks)),
    "step": lambda optimizer, ranks: schedulers.StepLR(optimizer, 2 * ranks, 0.7),
    "milestones": lambda optimizer, ranks: schedulers.MultiStepLR(optimizer, [3 * ranks, 6 * ranks], 0.7),
    "exponential": lambda optimizer, ranks: schedulers.ExponentialLR(optimizer, 0.9 ** (1 / ranks)),
    "cosine": lambda optimizer, ranks: schedulers.CosineAnnealingLR(optimizer, STEPS * ranks, 1e-3),
    "restarts": lambda optimizer, ranks: schedulers.CosineAnnealingWarmRestarts(optimizer, 2 * ranks, 2),
    "polynomial": lambda optimizer, ranks: schedulers.PolynomialLR(optimizer, STEPS * ranks, 2.0),
    "one cycle": lambda optimizer, ranks: schedulers.OneCycleLR(optimizer, 0.3, STEPS * ranks),
    "cyclic": lambda optimizer, ranks: schedulers.CyclicLR(optimizer, 0.01, 0.1, 4 * ranks, cycle_momentum=False),
    "in turn": lambda optimizer, ranks: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=3 * ranks), schedulers.CosineAnnealingLR(optimizer, STEPS * ranks)],
        [3 * ranks],
    ),
    "chained": lambda optimizer, ranks: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 4 * ranks), schedulers.ExponentialLR(optimizer, 0.9 ** (1 / ranks))]
    ),
}


def made(make, ranks: int):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [parameters[0]], "lr": 0.1}, {"params": [parameters[1]], "lr": 0.2}])
    return optimizer, make(optimizer, ranks)


def own(scheduler, **options):
    return own_schedule(AcceleratedScheduler(scheduler, [], **options))


def stepped(optimizer, scheduler, times: int) -> list[tuple]:
    """Rates and first betas after each of the steps."""
    seen = []
    for _ in range(times):
        optimizer.step()
        scheduler.step()
        seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("was, now", [(2, 1), (1, 3), (4, 6)])
def test_goes_on_as_if_it_had_never_stopped(kind, was, now):
    optimizer, scheduler = made(KINDS[kind], was)
    stepped(optimizer, scheduler, BREAK * was)
    saved = optimizer.state_dict(), scheduler.state_dict()
    want = stepped(*made(KINDS[kind], now), STEPS * now)
    optimizer, scheduler = made(KINDS[kind], now)
    before = [own(scheduler)]
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    factor = position_factor(StepSize(ranks=was, samples=24), StepSize(ranks=now, samples=24))
    assert rescale_schedules(before, factor, ranks=now, uncounted=0) == []
    assert scheduler.get_last_lr() == [rate for rate, _ in want[BREAK * now - 1]]
    assert [(group["lr"], group["betas"]) for group in optimizer.param_groups] == want[BREAK * now - 1]
    assert stepped(optimizer, scheduler, (STEPS - BREAK) * now) == want[BREAK * now :]


@pytest.mark.filterwarnings("ignore")
def test_two_on_one_optimizer():
    def both(ranks):
        optimizer, first = made(KINDS["step"], ranks)
        return optimizer, [first, KINDS["exponential"](optimizer, ranks)]

    def run(optimizer, both, ranks, times):
        optimizer.step()
        for _ in range(times):
            for scheduler in both:
                for _ in range(ranks):
                    scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    optimizer, of_old = both(2)
    run(optimizer, of_old, 2, BREAK)
    want = run(*both(1), 1, BREAK)
    fresh, of_new = both(1)
    before = [own(scheduler) for scheduler in of_new]
    fresh.load_state_dict(optimizer.state_dict())
    for old, new in zip(of_old, of_new, strict=True):
        new.load_state_dict(old.state_dict())
    assert rescale_schedules(before, Fraction(1, 2), ranks=1, uncounted=0) == []
    assert [group["lr"] for group in fresh.param_groups] == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize(
    "was, now, factor",
    [
        ((2, 8), (1, 8), Fraction(1, 2)),
        ((2, 8), (4, 8), 2),
        ((2, 8), (4, 16), 1),  # batches of one process stay: Accelerate's own way
        ((2, 8), (2, 4), 2),
        ((2, None), (2, 8), 1),
        ((2, None), (1, 8), None),
        ((2, 8), (1, None), None),
    ],
)
def test_the_factor_of_positions(was, now, factor):
    assert position_factor(*(StepSize(ranks=ranks, samples=samples) for ranks, samples in (was, now))) == factor


def test_what_goes_by_the_loop_alone_is_left_out():
    scheduler = made(KINDS["step"], 1)[1]
    assert own(scheduler, split_batches=True) is own(scheduler, step_with_optimizer=False) is own_schedule(SimpleNamespace()) is None


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_carried_over_is_said_and_stays():
    plateau = schedulers.ReduceLROnPlateau
    optimizer, scheduler = made(lambda optimizer, _: plateau(optimizer, patience=3), 1)
    assert rescale_schedules([own(scheduler)], Fraction(1, 2), ranks=1, uncounted=0) == [
        "ReduceLROnPlateau (it goes by metrics or calls, not by a position)"
    ]
    optimizer, scheduler = made(KINDS["step"], 1)
    stepped(optimizer, scheduler, 6)
    before = [own(scheduler)]
    rates = scheduler.get_last_lr()
    assert rescale_schedules(before, Fraction(1, 2), ranks=1, uncounted=0) == ["StepLR (it begins at 6, past 3)"]
    assert rescale_schedules(before, None, ranks=1, uncounted=0) == ["StepLR (the samples of an optimizer step are not known)"]
    assert scheduler.get_last_lr() == rates and scheduler.last_epoch == 6


@pytest.mark.filterwarnings("ignore")
def test_calls_that_accelerate_counts_and_the_end_of_one_cycle():
    optimizer, scheduler = made(KINDS["one cycle"], 2)
    before = [own(scheduler)]
    stepped(optimizer, scheduler, 20)
    assert rescale_schedules(before, Fraction(1, 2), ranks=2, uncounted=3) == []
    assert (scheduler.last_epoch, scheduler._step_count) == (10, 1 + 10 + 5 * 3)
    assert rescale_schedules(before, Fraction(10), ranks=2, uncounted=0) == []
    assert scheduler.last_epoch == STEPS * 2
