"""Units on the host of a real GPU, or their optimizer states alone, in one process: equality with plain torch or with
states on the device, memory against the estimate.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from hf_osdp.measurement.rates import measure_host
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import OptimizerSpec, Precision, TrainingJob
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import form_process_group, move_to_device, mp_policy
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.host import host_parameters
from hf_osdp.tracing.describe import describe
from tests.helpers.steps import batch_on, make_optimizer, train_step
from tests.helpers.training import Case, Loop, adamw, alone, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
PICKS = {"all": 1, "some": 2}
"""Each so many-th unit is on the host."""


def apart(fn: Callable[..., Any], *args: Any) -> Any:
    """The function's result from a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *args).result()


def states_are_there(loop: Loop, units: object) -> None:
    states = (loop.optimizer.state[p] for p in host_parameters(loop.model))
    assert all(state[key].device.type == "cpu" for state in states for key in ("exp_avg", "exp_avg_sq"))


def on_host(every: int, **options: Any) -> Case:
    """Training in one process without a group, each so many-th unit on the host."""
    return Case(
        world=0, layout="zero3", change=lambda number, *_: {"on_host": number % every == 0},
        optimizer=partial(adamw, **options), check=states_are_there,
    )  # fmt: skip


def worst_difference(every: int, options: dict[str, Any]) -> float:
    case = on_host(every, **options)
    return max(train(case, device="cuda:0").worst_error(alone(case.alone, "cuda:0")).values())


@pytest.mark.parametrize("options", [{"fused": None}, {"fused": None, "foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("every", PICKS.values(), ids=PICKS)
def test_trains_as_plain_torch(every, options):
    assert apart(worst_difference, every, options) < 1e-11


def resumed(folder: str) -> tuple[float, float]:
    """Return the last losses of a training of which some units were on the host, then all, and of a plain one."""
    for number, every in enumerate((2, 1)):
        found = train(
            replace(on_host(every), steps=2), device="cuda:0", folder=folder, start=2 * number, sharded=False
        )
    return found.losses[-1], alone(replace(on_host(1), steps=4).alone, "cuda:0").losses[-1]


def test_whole_states_go_over_to_another_plan(tmp_path):
    ours, theirs = apart(resumed, str(tmp_path))
    assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


def estimated_and_measured(every: int, precision: str, way: str) -> tuple[int, int]:
    """Peaks of a step in bytes; `way` is what is decided for each so many-th unit."""
    from transformers import GPT2Config

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=6, n_embd=768, n_head=12, n_positions=256, **no_dropout)
    job = TrainingJob(global_batch_size=1, precision=Precision.named(precision), optimizer=OptimizerSpec())
    description = describe(config, sequence_length=256, compute_dtype=job.precision.compute, device_type="cuda")
    plain = UnitLayout(shard_size=1, reshard_after_forward=True)
    choices = [replace(plain, **{way: index % every == 0}) for index in range(len(description.units))]
    batch = Batch(micro_batch_size=1, accumulation_steps=1)
    plan = Plan.of(description, choices, batch, world_size=1)
    model = build_on_meta(config)
    form_process_group(needed=precision != "no")
    apply_plan(model, plan, description.units, mp_policy=mp_policy(job.precision))
    move_to_device(model, CUDA, empty=True)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = make_optimizer(model, job.optimizer, plan, description.units)
    inputs = batch_on(training_batch(model, 256), 1, CUDA)
    for _ in range(2):  # the first makes states and workspaces
        torch.cuda.reset_peak_memory_stats()
        train_step(model, optimizer, inputs, plan, job)
    workspaces = torch.cuda.memory_allocated() - sum(t.nbytes for t in _on_cuda(model, optimizer, inputs))
    measured = torch.cuda.max_memory_allocated() - max(0, workspaces)
    return estimate_memory(description, choices, 1, job, batch).peak_bytes, measured


def _on_cuda(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *model.buffers(), *states, *inputs.values()]
    return [t for t in (getattr(t, "_local_tensor", t) for t in held) if isinstance(t, torch.Tensor) and t.is_cuda]


WAYS = [(1, "on_host"), (2, "on_host"), (2, "states_on_host")]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(("every", "way"), WAYS, ids=["all", "some", "states_on_the_host"])
def test_the_estimate_is_what_the_allocator_counts(every, precision, way):
    estimate, measured = apart(estimated_and_measured, every, precision, way)
    assert -0.01 <= estimate / measured - 1 <= 0.03, (estimate, measured)


def test_the_host_is_measured():
    host = measure_host(CUDA, 0.5)
    assert 2**30 < host.memory_bytes < 2**50
    rates = (host.to_device_bytes_per_s, host.to_host_bytes_per_s, host.update_bytes_per_s)
    assert all(1e8 < rate < 1e13 for rate in rates)


def states_away(every: int) -> Case:
    """Replicas, whose states but those of unit 1 are on the host, or, `every` 0, none."""

    def step(loop: Loop, number: int) -> None:
        torch.cuda._sleep(20_000_000)  # copies and kernels that do not wait for each other would show
        loop.step(number)

    def places(loop: Loop, units: Any) -> None:
        named = dict(loop.model.named_parameters())
        away = [named[p.name] for u in units if loop.plan.decision(u.fqn).states_on_host for p in u.trainable]
        assert bool(away) == bool(every)
        assert {local(loop.optimizer.state[p]["exp_avg"]).device.type for p in away} <= {"cpu"}

    change = lambda number, *_: {"states_on_host": bool(every) and number != 1}  # noqa: E731
    return Case(world=0, layout="replicate", change=change, step=step, check=places, steps=6, max_norm=None)


def difference(precision: str, fused: bool) -> float:
    form_process_group(needed=precision != "no")
    optimizer = partial(adamw, lr=1e-2, fused=fused)
    plain, away = (
        train(replace(states_away(every), precision=precision, optimizer=optimizer), device="cuda:0")
        for every in (0, 1)
    )
    return max(plain.worst_error(away).values())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_weights_with_states_on_the_host_are_those_on_the_device(precision, fused):
    assert apart(difference, precision, fused) == 0.0
