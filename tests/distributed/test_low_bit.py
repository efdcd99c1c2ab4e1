"""torchao's optimizers with quantized states: memory, training, checkpoints over plans and worlds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from hf_osdp.errors import OSDPError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.split.names import is_split, keep_positions
from hf_osdp.planner.optimizers import spec_of_trainer_name
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.optimizer import check_optimizer, spec_of_optimizer
from hf_osdp.sharding.optimizer_steps import step_by_device
from hf_osdp.sharding.state import full_state_dict
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import mixed_plan
from tests.helpers.low_bit import ODD_WIDTH, WIDTH, alone, apart, chain, eagerly, gpt2, held, sharded
from tests.helpers.problems import run_job
from tests.helpers.sampling import slow_but
from tests.helpers.training import trained

from .test_integration_trainer import (
    GLOBAL_BATCH,
    LENGTH,
    PlannedTrainer,
    StockTrainer,
    arguments,
    assert_close,
    history,
    tokens,
    trained_and_resumed_as_stock,
)

torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed; pip install 'hf_osdp[low-bit]'")


def made(kind: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    optimizer = getattr(torchao if hasattr(torchao, kind) else torch.optim, kind)(model.parameters(), lr=lr)
    if model_is_sharded := isinstance(model, FSDPModule):
        step_by_device(optimizer)
    if model_is_sharded and is_split(model):
        keep_positions(optimizer, model)
    return optimizer


@pytest.mark.parametrize(
    "kind, width",
    slow_but(
        {"AdamW8bit": WIDTH, "AdamWFp8": ODD_WIDTH, "AdamW4bit": ODD_WIDTH}.items(), daily=[("AdamW8bit", WIDTH)]
    ),
)
def test_states_take_planned_bytes_on_the_rank_with_most(kind, width):
    ranks = run_ranks(held, 2, made, kind, width, "mixed", timeout_s=300, shared=True)
    (first, planned), (second, _) = ranks
    assert {name: max(first[name], second[name]) for name in first} == {name: planned[name] for name in first}
    quantized = sum(planned.values()) / sum(16 * p.numel() for p in gpt2(width).parameters())
    assert quantized < 0.5, "most states are quantized"


@pytest.mark.parametrize("kind", slow_but(("AdamWFp8", "AdamW8bit", "AdamW4bit"), daily=("AdamWFp8",)))
def test_training_over_plans_worlds_and_slices_equals_one_process(tmp_path, kind):
    """Blocks inside shards are quantized as in one process; a checkpoint rounds once more, but for Fp8."""
    (first, _), _ = run_ranks(
        chain, 2, made, kind, WIDTH, str(tmp_path), "mixed", 1, True, 0, timeout_s=300, shared=True
    )
    if kind != "AdamW4bit":  # whose blocks of 128 fill an embedding that is too small in shards
        assert worst(first, alone(made, kind, WIDTH, 2)) < 1e-6
    run_ranks(chain, 1, made, kind, WIDTH, str(tmp_path), "replicate", 2, False, 2, timeout_s=300, shared=True)
    (weights, states), _ = run_ranks(
        chain, 2, made, kind, WIDTH, str(tmp_path), "zero3", 1, True, 4, timeout_s=300, shared=True
    )
    one = alone(made, kind, WIDTH, 6)
    if kind == "AdamWFp8":
        assert worst(weights, one) < 1e-6
    else:
        assert apart(weights, one) < apart(alone(made, "AdamW", WIDTH, 6), one), "less than quantizing itself changes"
    assert {state.dtype for own in states.values() for state in own.values() if state.dim()} == {
        torch.float32,
        torch.float64,
    }
    (_, exact), _ = run_ranks(
        chain, 2, made, "AdamW", WIDTH, str(tmp_path), "zero2", 1, True, 6, timeout_s=300, shared=True
    )
    assert states.keys() == exact.keys() and Path(tmp_path / "8").is_dir(), "AdamW goes on from it"


@eagerly
def odd(kind: str) -> dict[str, torch.Tensor]:
    model, plan = sharded(ODD_WIDTH, "zero3")
    trained(model, made(kind, model, 1e-2), plan, range(6))
    return full_state_dict(model)


def test_other_blocks_differ_by_less_than_quantizing_does():
    weights, _ = run_ranks(odd, 2, "AdamW8bit", timeout_s=300, shared=True)
    one = alone(made, "AdamW8bit", ODD_WIDTH, 6)
    assert 0 < apart(weights, one) < 1.5 * apart(alone(made, "AdamW", ODD_WIDTH, 6), one)


@pytest.fixture(scope="module", params=["force_eager", "default"])
def stance(request) -> str:
    """Of torch.compile."""
    return request.param


@pytest.fixture(scope="module")
def stock(tmp_path_factory, stance) -> dict[str, list[float]]:
    trainer = StockTrainer(
        model=gpt2(WIDTH), args=trainer_arguments(tmp_path_factory.mktemp("one"), 8), train_dataset=tokens()
    )
    with torch.compiler.set_stance(stance):
        trainer.train()
    return history(trainer)


def trainer_arguments(folder: Path, samples: int, **options: object) -> TrainingArguments:
    return arguments(str(folder), per_device_train_batch_size=samples, optim="adamw_torch_8bit", **options)


@pytest.mark.slow
@pytest.mark.on_ranks(2, init=False)
def test_trainer_with_adamw_torch_8bit_equals_the_stock_one(tmp_path, stock, stance):
    args = trainer_arguments(tmp_path, 4, save_strategy="steps", save_steps=2)
    with torch.compiler.set_stance(stance):
        trainer = trained_and_resumed_as_stock(partial(gpt2, WIDTH), args, stock)
    assert any(
        type(value).__name__ == "OptimState8bit"
        for states in trainer.optimizer.state.values()
        for value in states.values()
    )


def test_trainer_name_states_and_host_are_known_before_a_run():
    eight = spec_of_trainer_name("adamw_torch_8bit", device_type="cuda")
    assert eight == spec_of_optimizer(torchao.AdamW8bit([nn.Parameter(torch.ones(2))]), device_type="cuda")
    four = spec_of_trainer_name("adamw_torch_4bit", device_type="cuda")
    made = torchao.AdamW4bit(
        [nn.Parameter(torch.ones(2))], block_size=256
    )  # transformers' size, where torchao has 128
    assert four == spec_of_optimizer(made, device_type="cuda") and four.formats[0].bytes_per_element == 0.5 + 4 / 256
    check_optimizer(made)
    job = run_job(OSDPConfig(global_batch_size=2), world_size=2, device_type="cuda", optimizer=eight)
    assert job.training().host_offload is False
    with pytest.raises(ValueError, match="plain tensors, and adamw8bit's are quantized; leave the offload out"):
        job.asking(host_offload=True).training()


@eagerly
def evaluated_first(folder: str, plan: Plan | None, optim: str) -> Trainer:
    samples = GLOBAL_BATCH // (plan.world_size if plan else 1)
    args = arguments(folder, per_device_train_batch_size=samples, per_device_eval_batch_size=4, optim=optim)
    cls, options = (StockTrainer, {}) if plan is None else (PlannedTrainer, {"osdp": OSDPConfig(plan=plan)})
    trainer = cls(model=gpt2(WIDTH), args=args, train_dataset=tokens(), eval_dataset=tokens(8), **options)
    trainer.evaluate()
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def stock_after_evaluation(request, tmp_path_factory) -> dict[str, list[float]]:
    return history(evaluated_first(str(tmp_path_factory.mktemp("one")), None, request.param))


@pytest.mark.parametrize(
    ("stock_after_evaluation", "optim"),
    [("adamw_torch_8bit",) * 2, ("adamw_torch_4bit",) * 2],
    indirect=["stock_after_evaluation"],
)
@pytest.mark.slow
@pytest.mark.on_ranks(2, init=False)
def test_optimizer_made_after_evaluation_steps_shards(tmp_path, stock_after_evaluation, optim):
    plan = mixed_plan(gpt2(WIDTH), 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=True)
    trainer = evaluated_first(str(tmp_path), plan, optim)
    assert_close(history(trainer), stock_after_evaluation, 1e-9)
    assert not any(
        isinstance(value, DTensor) for states in trainer.optimizer.state.values() for value in states.values()
    )


@pytest.mark.on_ranks(2, init=False)
def test_optimizer_made_after_evaluation_is_refused_if_shards_forbid_it():
    hardware = preset("cpu", devices_per_node=2)
    accelerator = OSDPAccelerator(
        cpu=True, osdp=OSDPConfig(strategy="fsdp", sequence_length=LENGTH, hardware=hardware)
    )
    accelerator.plan(gpt2_model := gpt2(WIDTH), global_batch_size=GLOBAL_BATCH)
    model = accelerator.prepare(gpt2_model)
    with pytest.raises(OSDPError, match="Adafactor is not element-wise: it needs whole parameters"):
        accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
