"""Local steps between two machines of two ranks: the algorithm is DiLoCo's, machines are equal to the bit, and the Trainer resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainerCallback, set_seed

from hf_osdp import OptimalShardedDataParallel, OSDPAccelerator
from hf_osdp.distributed.collectives import listening
from hf_osdp.distributed.launcher import launched_rank
from hf_osdp.distributed.mesh import apart, sharing_ranks
from hf_osdp.errors import OSDPError, PlanError
from hf_osdp.integrations.plugin import OSDPPlugin
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.cost.local_steps import outer_tensors
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.local_steps import LocalSteps
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.wire import WireFormat
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.sharding.apply import apply_plan, verify_applied
from hf_osdp.sharding.gradients import clip_grad_norm_, local
from hf_osdp.sharding.local_steps import OuterOptimizer
from hf_osdp.sharding.state import full_state_dict
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import train_alone, train_sharded

from . import test_integration_trainer as trainers

WORLD, MACHINES, H, STEPS = 4, 2, 3, 11
LOCAL = LocalSteps(steps=H, machines=MACHINES)
MAX_NORM = 0.5
"""Below the norms that occur."""
Optimizer = Callable[..., torch.optim.Optimizer]


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def local_plan(units, layout: str = "mixed", local: LocalSteps = LOCAL) -> Plan:
    return replace(plan_of(units, WORLD // MACHINES, layout), local_steps=local)


def sharded(name: str, layout: str = "mixed", local: LocalSteps = LOCAL) -> nn.Module:
    model = tiny_model(name)
    units = find_units(model)
    plan = local_plan(units, layout, local)
    apply_plan(model, plan, units)
    verify_applied(model, plan, units)
    return model


def train(
    model: nn.Module, *, local: LocalSteps = LOCAL, steps: int = STEPS, make: Optimizer = adamw, max_norm: float | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Whole weights on rank 0, and the norms that were clipped."""
    outer, optimizer, norms, rank = OuterOptimizer(model, local), make(model.parameters()), [], dist.get_rank()
    for step in range(1, steps + 1):
        tiny_loss(model, tiny_batch(step, part=rank, parts=WORLD)).backward()
        if max_norm is not None:
            norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        if step % local.steps == 0:
            outer.step()
            assert are_equal_between_machines(model)
    return full_state_dict(model), norms


def are_equal_between_machines(model: nn.Module) -> bool:
    """Whether ranks of the same place hold the same bits."""
    mine = torch.cat([local(parameter).detach().flatten() for parameter in model.parameters()])
    groups = apart()
    others = [torch.empty_like(mine) for _ in range(MACHINES)]
    dist.all_gather(others, mine, group=groups.between)
    return all(torch.equal(other, others[0]) for other in others)


def diloco(
    name: str, *, local: LocalSteps = LOCAL, steps: int = STEPS, make: Optimizer = adamw, max_norm: float | None = None,
    synchronised: tuple[int, ...] | None = None,
) -> tuple[dict[str, torch.Tensor], list[list[float]]]:  # fmt: skip
    """The algorithm in one process, machine by machine, synchronised after these steps, None for every H-th.

    After the last step the first machine's weights, and all norms.
    """
    models = [tiny_model(name) for _ in range(local.machines)]
    optimizers = [make(model.parameters()) for model in models]
    norms: list[list[float]] = [[] for _ in models]
    before = [parameter.detach().clone() for parameter in models[0].parameters()]
    outer = torch.optim.SGD(before, lr=local.outer_learning_rate, momentum=local.outer_momentum, nesterov=local.outer_momentum > 0)
    for step in range(1, steps + 1):
        for machine, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            tiny_loss(model, tiny_batch(step, part=machine, parts=local.machines)).backward()
            if max_norm is not None:
                norms[machine].append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
        if step % local.steps == 0 if synchronised is None else step in synchronised:
            with torch.no_grad():
                for start, *ended in zip(before, *(model.parameters() for model in models), strict=True):
                    start.grad = sum(start - parameter for parameter in ended) / len(ended)
                outer.step()
                for start, *ended in zip(before, *(model.parameters() for model in models), strict=True):
                    for parameter in ended:
                        parameter.copy_(start)
    return models[0].state_dict(), norms


def assert_close(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    if dist.get_rank() == 0:
        assert found.keys() == reference.keys()
        errors = {name: (found[name] - reference[name]).abs().max().item() for name in found}
        assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("layout", ["mixed", "replicate", "zero3"])
@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_three_outer_rounds_are_those_of_diloco(layout):
    """Eleven steps: three synchronisations, and two steps apart after them."""
    for name in ("gpt2", "bert") if layout == "mixed" else ("llama",):
        found, _ = train(sharded(name, layout))
        assert_close(found, diloco(name)[0])


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_each_machine_clips_by_the_norm_of_its_own_gradients():
    found, norms = train(sharded("gpt2"), max_norm=MAX_NORM)
    expected, of_machines = diloco("gpt2", max_norm=MAX_NORM)
    assert norms == pytest.approx(of_machines[dist.get_rank() // 2], abs=1e-12) and min(norms) > MAX_NORM
    assert of_machines[0] != pytest.approx(of_machines[1], abs=1e-6)
    assert_close(found, expected)


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_one_local_step_of_plain_sgd_is_data_parallel_training():
    local = LocalSteps(steps=1, machines=MACHINES, outer_learning_rate=1.0, outer_momentum=0.0)
    found, _ = train(sharded("gpt2", local=local), local=local, make=sgd)
    alone = tiny_model("gpt2")
    optimizer = sgd(alone.parameters())
    for step in range(1, STEPS + 1):
        tiny_loss(alone, tiny_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(found, alone.state_dict())


@pytest.mark.parametrize("wire", [None, *WireFormat])
@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_machines_are_equal_to_the_bit_at_each_synchronisation_over_50_steps(wire):
    """`train` compares at each; in float32, where sums round."""
    local = replace(LOCAL, wire=wire, steps=2)
    model = tiny_model("gpt2", dtype=torch.float32)
    units = find_units(model)
    apply_plan(model, local_plan(units, local=local), units)
    start = full_state_dict(model)
    found, _ = train(model, local=local, steps=50)
    if dist.get_rank() == 0:
        exact = diloco("gpt2", local=replace(local, wire=None), steps=50)[0]
        moved = sum((found[name] - start[name]).norm() for name in found)
        error = sum((found[name] - exact[name]).norm() for name in found)
        assert error < {None: 0.001, WireFormat.BF16: 0.02, WireFormat.INT8: 0.05, WireFormat.INT4: 0.6}[wire] * moved


@pytest.mark.on_ranks(2, nodes=2)
def test_machines_of_one_rank_take_local_steps():
    model = tiny_model("gpt2")
    units = find_units(model)
    plan = replace(plan_of(units, 1, "replicate"), local_steps=LOCAL)
    apply_plan(model, plan, units)
    verify_applied(model, plan, units)
    outer, optimizer = OuterOptimizer(model, LOCAL), adamw(model.parameters())
    for step in range(1, STEPS + 1):
        tiny_loss(model, tiny_batch(step, part=dist.get_rank(), parts=2)).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step % H == 0:
            outer.step()
    assert_close(full_state_dict(model), diloco("gpt2", max_norm=MAX_NORM)[0])


@pytest.mark.parametrize("layout", ["mixed", "replicate", "zero3"])
@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_outer_state_is_as_estimated_and_each_element_crosses_the_link_once(layout):
    model, job = tiny_model("gpt2"), TrainingJob(global_batch_size=WORLD, local_steps=LOCAL)
    units = find_units(model)
    plan = local_plan(units, layout)
    apply_plan(model, plan, units)
    outer, groups, sent = OuterOptimizer(model, LOCAL), apart(), []

    @contextmanager
    def counted(kind, group, nbytes: int) -> Iterator[None]:
        sent.append(nbytes if group is groups.between else 0)
        yield

    with listening(counted):
        outer.step()
    sizes = {unit.fqn: plan.decision(unit.fqn).shard_size for unit in units}
    estimated = sum(sum(outer_tensors(p, sizes[unit.fqn], 2, job)) for unit in units for p in unit.trainable)
    fullest = torch.tensor(sum(message.before.nbytes + message.momentum.nbytes for message in outer._messages))
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    assert 0.97 * estimated <= fullest <= 1.01 * estimated
    crossed, numel = torch.tensor(sum(sent)), sum(unit.numel for unit in units)
    dist.all_reduce(crossed, group=groups.machine)
    assert 8 * numel <= crossed <= 1.01 * 8 * numel


class WithScalar(nn.Module):
    """A model with a parameter without dimensions, which FSDP2 does not take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.linear(rows) * self.scale).square().mean()


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_parameters_without_dimensions_are_averaged_in_a_machine_and_synchronised():
    def rows(step: int) -> torch.Tensor:
        return torch.randn(WORLD, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))

    model, replicas = WithScalar(), [WithScalar() for _ in range(MACHINES)]
    units = find_units(model, block_classes=("Linear",))
    apply_plan(model, local_plan(units, "zero3"), units)
    outer, optimizer, rank = OuterOptimizer(model, LOCAL), sgd(model.parameters()), dist.get_rank()
    start = replicas[0].scale.detach().clone()
    optimizers = [sgd(one.parameters()) for one in replicas]
    for step in range(H):
        model(rows(step)[rank : rank + 1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for machine, (one, own) in enumerate(zip(replicas, optimizers, strict=True)):
            one(rows(step)[2 * machine : 2 * machine + 2]).backward()
            own.step()
            own.zero_grad()
    assert model.scale.item() == pytest.approx(replicas[rank // 2].scale.item(), abs=1e-12)
    outer.step()
    difference = start - sum(one.scale.detach() for one in replicas) / MACHINES
    expected = start - LOCAL.outer_learning_rate * (1 + LOCAL.outer_momentum) * difference
    assert model.scale.item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_a_plan_after_one_of_local_steps_trains_all_ranks_together():
    train(sharded("gpt2"), steps=1)
    assert sharing_ranks() == 2
    model = tiny_model("gpt2")
    units = find_units(model)
    plan = plan_of(units, WORLD, "mixed")
    apply_plan(model, plan, units)
    assert sharing_ranks() == WORLD
    with pytest.raises(OSDPError, match="Local steps need a model"):
        OuterOptimizer(model, LOCAL)
    trained = train_sharded(model, plan)
    if dist.get_rank() == 0:
        assert max(trained.worst_error(train_alone("gpt2")).values()) < 1e-12


@pytest.mark.on_ranks(2)
def test_a_plan_of_other_machines_is_refused():
    model = tiny_model("gpt2")
    units = find_units(model)
    with pytest.raises(PlanError, match=r"2 machines of 2 processes that take local steps, but 2 processes are running. Start 4"):
        apply_plan(model, local_plan(units), units)


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_the_outer_state_goes_on():
    """Momentum and each machine's own states, over a second optimizer."""
    model = sharded("gpt2")
    outer, optimizer, rank = OuterOptimizer(model, LOCAL), adamw(model.parameters()), dist.get_rank()
    for step in range(1, 3 * H + 1):
        if step == H + 1:
            state = {name: [*map(torch.clone, value)] if name == "momentum" else value for name, value in outer.state(optimizer).items()}
            state["states"] = [{name: value.clone() for name, value in one.items()} for one in state["states"]]
            groups = optimizer.state_dict()
            optimizer = adamw(model.parameters())
            optimizer.load_state_dict(groups)
            for one in optimizer.state.values():  # as if they were the first machine's
                local(one["exp_avg"]).fill_(7)
            outer = OuterOptimizer(model, LOCAL)
            outer.load({**state, "optimizer": "Lion"}, optimizer)
            assert all((local(one["exp_avg"]) == 7).all() for one in optimizer.state.values()), "states of another optimizer"
            outer.load(state, optimizer)
        tiny_loss(model, tiny_batch(step, part=rank, parts=WORLD)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % H == 0:
            outer.step()
    assert_close(full_state_dict(model), diloco("gpt2", steps=3 * H)[0])


def uneven_tokens() -> list[dict[str, torch.Tensor]]:
    """Samples of which some count few tokens, so that machines have different numbers of them."""
    rows = trainers.tokens()
    return [{**row, "labels": row["labels"].where(torch.arange(trainers.LENGTH) < 3 + 2 * (i % 5), -100)} for i, row in enumerate(rows)]


def trainer_of(folder: Path, *, config: dict[str, object], kind: type = trainers.PlannedTrainer, **options: object):
    """A Trainer of two machines, planned for a slow link between them."""
    hardware = preset("cpu", nodes=MACHINES, devices_per_node=2)
    osdp = OSDPConfig(hardware=hardware, **config)
    model = trainers.tiny_model(seed=launched_rank())
    set_seed(0)
    args = trainers.arguments(str(folder), per_device_train_batch_size=2, **options)
    return kind(model=model, args=args, train_dataset=uneven_tokens(), eval_dataset=uneven_tokens()[:8], osdp=osdp)


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return trainer.accelerator.get_state_dict(trainer.model)


class Records(trainers.PlannedTrainer):
    """Keeps each micro-batch, and the tokens that its loss is divided by."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        kept = {name: value.clone() for name, value in inputs.items()}
        self.__dict__.setdefault("seen", []).append((self.state.global_step, kept, int(num_items_in_batch)))
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.on_ranks(WORLD, init=False, nodes=MACHINES)
def test_the_trainer_with_one_local_step_of_plain_sgd_is_one_process(tmp_path):
    """Each token counts the same, whichever machine has it."""
    plain = {"optim": "sgd", "max_grad_norm": 0.0, "weight_decay": 0.0, "learning_rate": 0.1}
    config = {"local_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    trainer = trainer_of(tmp_path, config=config, kind=Records, **plain)
    assert trainer.plan.local_steps == LocalSteps(steps=1, machines=2, outer_learning_rate=1.0, outer_momentum=0.0)
    assert (trainer.plan.world_size, trainer.plan.global_batch_size) == (2, 8)
    trainer.train()
    found, seen = weights_of(trainer), [None] * WORLD
    dist.all_gather_object(seen, trainer.seen)
    model = trainers.tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(trainers.STEPS):
        batches = [(batch, items) for rank in seen for number, batch, items in rank if number == step]
        rows = [row.tolist() for batch, _ in batches for row in batch["input_ids"]]
        assert len({items for _, items in batches}) == 1 and len(rows) == 8 and len({*map(tuple, rows)}) == 8
        tokens = [sum((batch["labels"] != -100).sum().item() for batch, _ in batches[: len(batches) // 2 * half]) for half in (1, 2)]
        assert 2 * tokens[0] != tokens[1], "the machines have as many tokens"
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / trainers.STEPS)
        for batch, items in batches:
            trainers.exact_loss(model(input_ids=batch["input_ids"]), batch["labels"], items).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dist.get_rank() or trainers.worst(found, model.state_dict()) < 1e-12


class Recorded(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Saves(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_save or state.global_step == 3


@pytest.mark.on_ranks(WORLD, init=False, nodes=MACHINES)
def test_the_trainer_resumes_exactly_at_a_synchronisation_and_saves_elsewhere_after_one(tmp_path):
    log = Recorded()
    logging.getLogger("hf_osdp").addHandler(log)
    config, options = {"local_steps": 2}, {"max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    whole = trainer_of(tmp_path / "whole", config=config, **options)
    whole.train()
    expected = weights_of(whole)
    assert not [line for line in log.lines if "synchronise first" in line]
    again = trainer_of(tmp_path / "again", config=config, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert not [line for line in log.lines if "first machine" in line]
    found = weights_of(again)
    assert dist.get_rank() or all(torch.equal(found[name], expected[name]) for name in expected)

    saves = trainer_of(tmp_path / "saves", config=config, **options)
    saves.add_callback(Saves())
    saves.train()
    lines = [line for line in log.lines if "synchronise first" in line]
    assert lines == ([] if dist.get_rank() else ["A save after 1 of 2 local steps: the machines synchronise first."])
    other = trainer_of(tmp_path / "other", config={"local_steps": 1}, **options)
    other.train(resume_from_checkpoint=str(tmp_path / "saves" / "checkpoint-3"))
    if dist.get_rank() == 0:
        told = [line for line in log.lines if "first machine's optimizer states" in line]
        assert len(told) == 1 and "the outer momentum begins at zero" in told[0]
        assert any("local steps 2 machines synchronise every 2 steps; this run has" in line for line in log.lines)


@pytest.mark.on_ranks(WORLD, init=False, nodes=MACHINES)
def test_sigterm_synchronises_before_the_last_save(tmp_path):
    class Terminates(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1 and launched_rank() == 3:
                trainer._stop.received = True

    trainer = trainer_of(tmp_path, config={"local_steps": 100}, max_steps=50)
    trainer.add_callback(Terminates())
    with pytest.raises(SystemExit):
        trainer.train()
    assert are_equal_between_machines(trainer.model) and 2 <= trainer.state.global_step <= 4
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}" / "local_steps_3.pt").is_file()


@pytest.mark.on_ranks(WORLD, init=False, nodes=MACHINES)
def test_evaluations_and_the_end_see_equal_machines(tmp_path):
    seen = []

    class Evaluates(trainers.PlannedTrainer):
        def prediction_step(self, model, *args, **kwargs):
            seen.append(are_equal_between_machines(self.model))
            return torch.zeros(()), None, None

    trainer = trainer_of(tmp_path, config={"local_steps": 2}, kind=Evaluates, max_steps=3, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert are_equal_between_machines(trainer.model)
    trainer.evaluate()
    assert seen and all(seen)


@pytest.mark.on_ranks(WORLD, init=False, nodes=MACHINES)
def test_what_local_steps_cannot_run_beside_is_refused_in_one_line(tmp_path):
    def refused(error: type[Exception], text: str, config: dict[str, object], **options: object) -> None:
        with pytest.raises(error, match=text) as caught:
            trainer_of(tmp_path, config={"local_steps": 10, **config}, **options)
        assert "\n" not in str(caught.value)

    refused(ValueError, "save_steps=25 is no multiple of it.*use 20", {}, save_strategy="steps", save_steps=25)
    refused(ValueError, "eval_steps=4 is no multiple of it.*use 10", {}, eval_strategy="steps", eval_steps=4)
    refused(ValueError, "would mix the machines' optimizer states", {}, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"})
    refused(ValueError, "cpu_offload moves states to the host", {}, fsdp_config={"cpu_offload": True})
    model = trainers.tiny_model()
    plan = replace(local_plan(find_units(model), "zero3"), micro_batch_size=2, sequence_length=trainers.LENGTH)
    for config, text in (
        ({"local_steps": 10}, "local_steps=3, but local_steps=10 is asked for"),
        ({}, "local_steps=3, but local_steps=None is asked for"),
        ({"local_steps": 3, "outer_momentum": 0.5}, "outer_momentum=0.9, but outer_momentum=0.5 is asked for"),
    ):
        args = trainers.arguments(str(tmp_path), per_device_train_batch_size=2)
        with pytest.raises(PlanError, match=text):
            trainers.PlannedTrainer(model=model, args=args, train_dataset=trainers.tokens(), osdp=OSDPConfig(plan=plan, **config))
    args = trainers.arguments(str(tmp_path), per_device_train_batch_size=2, max_steps=4)
    given = trainers.PlannedTrainer(model=model, args=args, train_dataset=trainers.tokens(), osdp=OSDPConfig(plan=plan, local_steps=3))
    given.train()
    assert are_equal_between_machines(given.model)


IN_A_LOOP, SAVED = (3, 4, 5, 8, 11, 12), 5
"""When the loops below synchronise: three steps after they last did, before an evaluation, a save, and at the end."""
SAID = ["An evaluation after 1", "A save after 1", "A save after 1"]


@contextmanager
def recorded() -> Iterator[Callable[[], list[str]]]:
    """What is said of synchronisations, and of states that do not go on."""
    log = Recorded()
    logging.getLogger("hf_osdp").addHandler(log)
    yield lambda: [line for line in log.lines if "synchronise first" in line or "first machine" in line]
    logging.getLogger("hf_osdp").removeHandler(log)


def evaluate(model: nn.Module, rank: int) -> None:
    model.eval()
    with torch.inference_mode():
        tiny_loss(model, tiny_batch(0, part=rank, parts=dist.get_world_size()))
    model.train()


def accelerated(folder: Path, steps: range, *, load: bool = False) -> dict[str, torch.Tensor]:
    """An Accelerate loop, saved after step `SAVED` or gone on with from there; whole weights on rank 0."""
    model = tiny_model("gpt2", seed=launched_rank())
    plan = replace(local_plan(find_units(model)), sequence_length=8)
    osdp = OSDPConfig(plan=plan, local_steps=H, sequence_length=8, global_batch_size=WORLD)
    accelerator = OSDPAccelerator(osdp=osdp, cpu=True)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    if load:
        accelerator.load_state(str(folder))
        accelerator.save_state(str(folder.with_name("again")))  # before a step: what was loaded goes on
        accelerator.load_state(str(folder.with_name("again")))
    for step in steps:
        with accelerator.accumulate(model):
            accelerator.backward(tiny_loss(model, tiny_batch(step, part=launched_rank(), parts=WORLD)))
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if step == 4:
            evaluate(model, launched_rank())
        if step == SAVED:
            accelerator.save_state(str(folder))
        assert are_equal_between_machines(model) == (step in IN_A_LOOP[:-1])
    if not load:
        return accelerator.get_state_dict(model)
    weights: dict[str, torch.Tensor] = {}
    accelerator.trackers = [SimpleNamespace(finish=lambda: weights.update(full_state_dict(model)))]  # then the process group is gone
    accelerator.end_training()
    return weights


@pytest.mark.on_ranks(WORLD, init=False, nodes=MACHINES)
def test_an_accelerate_loop_takes_local_steps_and_resumes_exactly(tmp_path):
    with recorded() as said:
        found = accelerated(tmp_path / "saved", range(1, 13))
        assert said() == ([] if dist.get_rank() else [f"{what} of 3 local steps: the machines synchronise first." for what in SAID])
        assert_close(found, diloco("gpt2", steps=12, max_norm=MAX_NORM, synchronised=IN_A_LOOP)[0])
        again = accelerated(tmp_path / "saved", range(SAVED + 1, 13), load=True)
        assert [line.partition(" after")[0] for line in said()[len(SAID) :]] == ([] if launched_rank() else ["The end of training"])
    assert launched_rank() or all(torch.equal(again[name], found[name]) for name in found)


def plain(folder: Path, steps: range, *, load: bool = False) -> dict[str, torch.Tensor]:
    """A plain loop on machines of one rank, planned."""
    hardware = preset("cpu", nodes=MACHINES, devices_per_node=1)
    config = OSDPConfig(hardware=hardware, local_steps=H, sequence_length=8, global_batch_size=4)
    model = OptimalShardedDataParallel(tiny_model("gpt2", seed=launched_rank()), config)
    optimizer, rank = adamw(model.parameters()), dist.get_rank()
    if load:
        assert model.load_checkpoint(folder, optimizer) == {"step": SAVED}
        model.save_checkpoint(folder.with_name("again"), optimizer, sharded=False)
        model.load_checkpoint(folder.with_name("again"), optimizer)
    for step in steps:
        model.backward(tiny_loss(model, tiny_batch(step, part=rank, parts=MACHINES)))
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            block = model.eval().module.transformer.h[0]
            with torch.no_grad():
                block(torch.zeros(1, 8, model.config.n_embd, dtype=torch.float64))  # a part that is called alone
            model.train()
        if step == SAVED:
            with pytest.raises(ValueError, match="local_steps=3: sharded=True would mix the machines' optimizer states"):
                model.save_checkpoint(folder, optimizer)
            model.save_checkpoint(folder, optimizer, progress={"step": step}, sharded=False)
        assert are_equal_between_machines(model) == (step in IN_A_LOOP[:-1])
    with pytest.raises(OSDPError, match="count the steps of one optimizer"):
        sgd(model.parameters()).step()
    return model.full_state_dict()


@pytest.mark.on_ranks(MACHINES, init=False, nodes=MACHINES)
def test_a_plain_loop_takes_local_steps_and_resumes_exactly(tmp_path):
    with recorded() as said:
        found = plain(tmp_path / "saved", range(1, 13))
        assert len(said()) == (0 if dist.get_rank() else len(SAID))
        again = plain(tmp_path / "saved", range(SAVED + 1, 13), load=True)
    assert_close(found, diloco("gpt2", steps=12, max_norm=MAX_NORM, synchronised=IN_A_LOOP)[0])
    assert dist.get_rank() or all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.on_ranks(MACHINES, init=False, nodes=MACHINES)
def test_loaded_weights_begin_anew_frozen_ones_are_refused_and_a_save_of_no_states_is_no_step(tmp_path):
    hardware = preset("cpu", nodes=MACHINES, devices_per_node=1)
    config = OSDPConfig(hardware=hardware, local_steps=1, sequence_length=8, global_batch_size=4)
    model = OptimalShardedDataParallel(tiny_model("gpt2", seed=5), config)
    optimizer = sgd(model.parameters())
    for load in (None, tiny_model("gpt2").state_dict()):
        model.save_checkpoint(tmp_path / str(load is None), optimizer, sharded=False)
        if load is not None:
            model.load_state_dict(load)
        model.backward(tiny_loss(model, tiny_batch(1, part=dist.get_rank(), parts=MACHINES)))
        optimizer.step()
        optimizer.zero_grad()
    model.save_checkpoint(tmp_path / "last", optimizer, sharded=False)  # SGD has no states, and torch steps to make them
    assert_close(model.full_state_dict(), diloco("gpt2", local=replace(LOCAL, steps=1), steps=1, make=sgd)[0])
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(OSDPError, match="frozen or unfrozen after local steps began"):
        optimizer.step()


@pytest.mark.on_ranks(2, init=False, nodes=2)
def test_loops_refuse_what_local_steps_cannot_run_beside():
    osdp = OSDPConfig(hardware=preset("cpu", nodes=2, devices_per_node=1), local_steps=5, sequence_length=12, global_batch_size=4)
    with pytest.raises(ValueError, match="local_steps=5: with mixed_precision='fp16' a scaler of your own may skip a step"):
        OptimalShardedDataParallel(trainers.tiny_model(), osdp, mixed_precision="fp16")
    with pytest.raises(ValueError, match="local_steps=5: step_in_backward=True steps before"):
        OSDPAccelerator(osdp=replace(osdp, step_in_backward=True), cpu=True).plan(trainers.tiny_model())
    AcceleratorState._reset_state(True)
    plugin = OSDPPlugin(osdp=osdp, state_dict_type="SHARDED_STATE_DICT")
    with pytest.raises(ValueError, match="local_steps=5: state_dict_type='SHARDED_STATE_DICT' would mix"):
        OSDPAccelerator(osdp_plugin=plugin, cpu=True).plan(trainers.tiny_model())
    AcceleratorState._reset_state(True)
    accelerator, model = OSDPAccelerator(osdp=osdp, cpu=True), trainers.tiny_model()
    half = len(parameters := list(model.parameters())) // 2
    with pytest.raises(OSDPError, match="count the steps of one optimizer, and a second one was made"):
        accelerator.prepare(model, sgd(parameters[:half]), sgd(parameters[half:]))


@pytest.mark.on_ranks(2, init=False)
def test_one_machine_is_refused(tmp_path):
    hardware = preset("cpu", devices_per_node=2)
    args = trainers.arguments(str(tmp_path), per_device_train_batch_size=2)
    with pytest.raises(ValueError, match="local_steps=5 is for several machines, and the processes are on one"):
        osdp = OSDPConfig(hardware=hardware, local_steps=5)
        trainers.PlannedTrainer(model=trainers.tiny_model(), args=args, train_dataset=trainers.tokens(), osdp=osdp)
    osdp = OSDPConfig(hardware=hardware, local_steps=5, sequence_length=12, global_batch_size=4)
    with pytest.raises(ValueError, match="local_steps=5 is for several machines, and the processes are on one"):
        OptimalShardedDataParallel(trainers.tiny_model(), osdp)
