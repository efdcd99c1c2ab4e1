"""Arguments of the Trainer that FSDP2 or the planner once took for something else: equal to the stock Trainer in one process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from hf_osdp.integrations.launch import launched_world_size
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import OSDPConfig
from tests.distributed.test_integration_trainer import GLOBAL_BATCH, arguments, tiny_model, tokens
from tests.helpers.distributed import run_ranks

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "label_smoothing_factor": ({"label_smoothing_factor": 0.1}, {}),
    "adagrad": ({"optim": "adagrad"}, {}),
    "num_steps": (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}, "per_device_train_batch_size": GLOBAL_BATCH // 4},
        {},
    ),
    "split_batches": (
        {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": GLOBAL_BATCH},
        {"micro_batch_size": 2},
    ),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, {}),
}
"""Arguments on two ranks, and options of OSDP. In one process the batch is `GLOBAL_BATCH`."""


def losses(trainer: transformers.Trainer) -> list[tuple[float, float]]:
    return [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]


def planned(folder: str, cases: Mapping[str, tuple[dict, dict]]) -> tuple[dict[str, list], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hf_osdp").addHandler(handler)
    found = {}
    for name, (changes, options) in cases.items():
        args = arguments(folder, **{"per_device_train_batch_size": GLOBAL_BATCH // launched_world_size(), **changes})
        config = OSDPConfig(hardware=preset("cpu", devices_per_node=2), compare=False, **options)
        trainer = Trainer(model=tiny_model(), args=args, train_dataset=tokens(), osdp=config)
        assert trainer.plan.global_batch_size == GLOBAL_BATCH, name
        trainer.train()
        found[name] = losses(trainer)
    return found, said


def test_arguments_train_as_the_stock_trainer_does(tmp_path):
    results = run_ranks(planned, 2, str(tmp_path / "planned"), CASES, init=False)
    for name, (changes, _) in CASES.items():
        own = {key: value for key, value in changes.items() if key in ("label_smoothing_factor", "optim")}
        args = arguments(str(tmp_path / "one"), per_device_train_batch_size=GLOBAL_BATCH, **own)
        stock = transformers.Trainer(model=tiny_model(), args=args, train_dataset=tokens())
        stock.train()
        want, got = torch.tensor(losses(stock)), torch.tensor(results[0][0][name])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert [line for line in results[0][1] if line.startswith("auto_find_batch_size=True was switched off")]
    assert not [line for line in results[1][1] if "auto_find_batch_size" in line]


def bad_batches(folder: str) -> list[str]:
    said = []
    for changes in (
        {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 3},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}, "gradient_accumulation_steps": 4},
    ):
        with pytest.raises(ValueError) as caught:
            Trainer(model=tiny_model(), args=arguments(folder, **changes), train_dataset=tokens(), osdp=True)
        said.append(str(caught.value))
    return said


def test_batches_that_cannot_be_meant_are_refused(tmp_path):
    split, steps = run_ranks(bad_batches, 2, str(tmp_path), init=False)[0]
    assert split.startswith("split_batches=True splits batches of 3 over 2 processes; use a per_device_train_batch_size that 2 divides")
    assert steps.startswith("gradient_accumulation_steps=4 and num_steps=2 of accelerator_config were both given; leave one")


def resumed(folder: str, batch: int) -> list[str]:
    """What transformers warns of at a resume; the second plan has another micro-batch than the first."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("transformers.trainer_utils").addHandler(handler)
    for steps, micro, given in ((2, 2, 4), (4, 1, batch)):
        args = arguments(folder, max_steps=steps, save_strategy="steps", save_steps=2, per_device_train_batch_size=given)
        config = OSDPConfig(hardware=preset("cpu", devices_per_node=2), compare=False, micro_batch_size=micro)
        trainer = Trainer(model=tiny_model(), args=args, train_dataset=tokens(), osdp=config)
        trainer.train(resume_from_checkpoint=True if steps > 2 else None)
        assert trainer.state.train_batch_size == given or steps > 2
    return [line for line in said if "per_device_train_batch_size" in line]


@pytest.mark.parametrize("batch", [4, 2])
def test_the_warning_at_resume_compares_what_the_user_set(tmp_path, batch):
    said = run_ranks(resumed, 2, str(tmp_path), batch, init=False)[0]
    assert bool(said) is (batch != 4)
    assert not said or "per_device_train_batch_size: 2 (from args) != 4 (from trainer_state.json)" in said[0]
