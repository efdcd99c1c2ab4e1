"""Arguments of the Trainer that mean something else to FSDP2 or the planner."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch.distributed as dist

from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
from tests.distributed.test_integration_trainer import GLOBAL_BATCH, arguments, tiny_model, tokens

SPLIT = {"accelerator_config": {"split_batches": True}}
STEPS_OF_2 = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}


def trainer(folder: object, osdp: dict[str, Any], **changes: Any) -> Trainer:
    config = OSDPConfig(hardware=preset("cpu", devices_per_node=2), operator_splitting=False, **osdp)
    return Trainer(model=tiny_model(), args=arguments(str(folder), **changes), train_dataset=tokens(), osdp=config)


def said_by(name: str) -> list[str]:
    """What a logger says from here on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    return said


@pytest.mark.on_ranks(2, shared=True)
def test_batch_is_what_the_arguments_mean_for_all_ranks(tmp_path):
    said = said_by("hf_osdp")
    for batch, osdp, changes in (
        (GLOBAL_BATCH // 4, {}, STEPS_OF_2),
        (GLOBAL_BATCH, {"micro_batch_size": 2}, SPLIT),
        (GLOBAL_BATCH // 2, {}, {"auto_find_batch_size": True}),
    ):
        plan = trainer(tmp_path, osdp, per_device_train_batch_size=batch, **changes).plan
        assert plan.global_batch_size == GLOBAL_BATCH, changes
    switched_off = [line for line in said if line.startswith("auto_find_batch_size=True was switched off")]
    assert bool(switched_off) == (dist.get_rank() == 0)
    with pytest.raises(ValueError, match=r"^split_batches=True cannot split batches of 3 over 2 processes"):
        trainer(tmp_path, {}, per_device_train_batch_size=3, **SPLIT)
    with pytest.raises(ValueError, match=r"^gradient_accumulation_steps=4 and num_steps=2 of accelerator_config"):
        trainer(tmp_path, {}, gradient_accumulation_steps=4, **STEPS_OF_2)


@pytest.mark.parametrize("batch", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.on_ranks(2, shared=True)
def test_warning_at_resume_compares_what_the_user_set(tmp_path, batch):
    """The second plan has another micro-batch than the first."""
    said = said_by("transformers.trainer_utils")
    for steps, micro, given in ((2, 2, 4), (4, 1, batch)):
        options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": given}
        one = trainer(tmp_path, {"micro_batch_size": micro}, **options)
        one.train(resume_from_checkpoint=True if steps > 2 else None)
        assert one.state.train_batch_size == given or steps > 2
    lines = [line for line in said if "per_device_train_batch_size" in line]
    assert bool(lines) == (batch != 4)
    assert not lines or "per_device_train_batch_size: 2 (from args) != 4 (from trainer_state.json)" in lines[0]


@pytest.mark.on_ranks(2, shared=True)
def test_later_changes_of_arguments_count_or_are_refused(tmp_path):
    config = OSDPConfig(strategy="fsdp", micro_batch_size=2, hardware=preset("cpu", devices_per_node=2))
    options = {"per_device_train_batch_size": 2, "max_grad_norm": 0.0, "max_steps": 2, "lr_scheduler_type": "constant"}

    def made(**more: Any) -> tuple[Any, Trainer]:
        args = arguments(str(tmp_path), **options)
        return args, Trainer(model=tiny_model(), args=args, train_dataset=tokens(), osdp=config, **more)

    args, changed = made()
    args.learning_rate = 0.25
    changed.train()
    assert changed.state.log_history[0]["learning_rate"] == 0.25
    args, larger = made()
    args.per_device_train_batch_size = 4
    with pytest.raises(
        ValueError, match=r"^The Trainer's arguments now make 8 samples per step, but the plan has 4; set batch"
    ):
        larger.train()
