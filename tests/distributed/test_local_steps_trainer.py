"""Local steps of the Trainer: it equals one process where it should, resumes exactly, and synchronises before what reads the model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback, set_seed

from hf_osdp import OptimalShardedDataParallel
from hf_osdp.distributed.launcher import launched_rank
from hf_osdp.errors import PlanError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.local_steps import LocalSteps
from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import OSDPConfig
from tests.helpers.local_steps import (
    MACHINES,
    WORLD,
    Recorded,
    are_equal_between_machines,
    local_plan,
)

from . import test_integration_trainer as trainers


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
    again = ["A save after 1 of 2 local steps: the machines synchronise first."] * 2  # at step 3, and one step after that at step 4
    assert lines == ([] if dist.get_rank() else again)
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
            predicted = super().prediction_step(model, *args, **kwargs)
            seen.append(are_equal_between_machines(self.model))
            return predicted

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
    for _ in range(2):
        given.train()
        assert are_equal_between_machines(given.model)


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
