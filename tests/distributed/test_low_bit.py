"""torchao's optimizers with quantized states under a plan: memory, training against one process, checkpoints over plans and worlds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from hf_osdp.checkpoint.states import load_loop, save_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.split.apply_split import split_operators
from hf_osdp.modeling.split.names import is_split, keep_positions
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.job import Precision
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.planning.problem import RunFacts, training_job
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer import check_optimizer, spec_of_optimizer, spec_of_trainer_name
from hf_osdp.sharding.optimizer_steps import step_by_device
from hf_osdp.sharding.state import full_optimizer_state_dict, full_state_dict
from hf_osdp.sharding.steps import micro_step
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import mixed_plan, plan_of
from tests.helpers.models import tiny_batch, tiny_loss

from .test_integration_trainer import GLOBAL_BATCH, LENGTH, PlannedTrainer, StockTrainer, arguments, assert_close, history, tokens

torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed; pip install 'hf_osdp[low-bit]'")

WIDTH, ODD_WIDTH = 128, 72
"""With the first, blocks of 256 lie inside shards of whole rows; with the second, shards of some matrices have no whole blocks."""


def gpt2(width: int, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return (
        GPT2LMHeadModel(
            GPT2Config(n_layer=2, n_embd=width, n_head=4, vocab_size=61, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        )
        .double()
        .train()
    )  # gradients agree, so that what is quantized does: near-zero ones of float32 are noise that Adam scales up


def sharded(width: int, layout: str | None, *, seed: int = 0, slices: int = 1):
    model, plan = gpt2(width, seed=seed), None
    if slices > 1:
        split_operators(model, [OperatorSplit(fqn="transformer.h.0.mlp.c_fc", slices=slices)])
    if layout is not None:
        units = find_units(model)
        plan = plan_of(units, dist.get_world_size(), layout)
        apply_plan(model, plan, units, meshes=Meshes("cpu"))
    return model, plan


def made(kind: str, model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    optimizer = getattr(torchao if hasattr(torchao, kind) else torch.optim, kind)(model.parameters(), lr=lr)
    if model_is_sharded := isinstance(model, FSDPModule):
        step_by_device(optimizer)
    if model_is_sharded and is_split(model):
        keep_positions(optimizer, model)
    return optimizer


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, plan, steps: range) -> None:
    rank, parts = (dist.get_rank(), dist.get_world_size()) if plan is not None else (0, 1)
    for step in steps:
        with micro_step(model, is_last=True, plan=plan):
            tiny_loss(model, tiny_batch(step, part=rank, parts=parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_bytes(tensor: torch.Tensor) -> int:
    tensor = local(tensor)
    names = getattr(tensor, "tensor_attrs", None)
    return tensor.nbytes if names is None else sum(getattr(tensor, name).nbytes for name in names)


def held(kind: str, width: int, layout: str) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Bytes of each parameter's states on this rank, and as planned."""
    model, plan = sharded(width, layout)
    optimizer = made(kind, model, lr=1e-3)
    check_optimizer(optimizer)
    spec = spec_of_optimizer(optimizer, device_type="cpu")
    trained(model, optimizer, plan, range(1))
    sizes = {unit.module_names[0]: unit.shard_size for unit in plan.units}
    found, planned = {}, {}
    for unit in find_units(gpt2(width)):
        size = sizes[unit.module_names[0]]
        planned |= {p.name: spec.state_bytes(p, size) for p in unit.trainable}
    for name, parameter in model.named_parameters():
        states = optimizer.state[parameter]
        found[name] = sum(state_bytes(value) for key, value in states.items() if key != "step")
    return found, planned


@pytest.mark.parametrize(
    ("kind", "width"),
    [("AdamW8bit", WIDTH), *(pytest.param(kind, ODD_WIDTH, marks=pytest.mark.slow) for kind in ("AdamWFp8", "AdamW4bit"))],
)
def test_states_take_the_bytes_that_are_planned_on_the_rank_that_has_most(kind, width):
    ranks = run_ranks(held, 2, kind, width, "mixed", timeout_s=300)
    (first, planned), (second, _) = ranks
    assert {name: max(first[name], second[name]) for name in first} == {name: planned[name] for name in first}
    quantized = sum(planned.values()) / sum(16 * p.numel() for p in gpt2(width).parameters())
    assert quantized < 0.5, "most states are quantized"


def chain(kind: str, width: int, folder: str, layout: str, slices: int, is_sharded: bool, start: int) -> tuple[dict, dict]:
    """Two steps from a checkpoint, under another plan."""
    model, plan = sharded(width, layout, seed=start, slices=slices)
    optimizer = made(kind, model, lr=0.3 if start else 1e-2)
    if start:
        load_loop(f"{folder}/{start}", model, optimizer, others={})
    trained(model, optimizer, plan, range(start, start + 2))
    save_loop(CheckpointWriter(), f"{folder}/{start + 2}", model, optimizer, others={}, progress={}, sharded=is_sharded)
    return full_state_dict(model), full_optimizer_state_dict(model, optimizer).get("state", {})


def alone(kind: str, width: int, steps: int) -> dict[str, torch.Tensor]:
    model, _ = sharded(width, None)
    trained(model, made(kind, model), None, range(steps))
    return full_state_dict(model)


@pytest.mark.parametrize("kind", ["AdamWFp8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("AdamW8bit", "AdamW4bit"))])
def test_training_goes_on_over_plans_worlds_and_slices_as_in_one_process(tmp_path, kind):
    """Where blocks lie inside shards a sharded run quantizes as one process does; a checkpoint rounds once more, but for Fp8."""
    (first, _), _ = run_ranks(chain, 2, kind, WIDTH, str(tmp_path), "mixed", 1, True, 0, timeout_s=300)
    if kind != "AdamW4bit":  # whose blocks of 128 fill an embedding that is too small in shards
        assert worst(first, alone(kind, WIDTH, 2)) < 1e-6
    run_ranks(chain, 1, kind, WIDTH, str(tmp_path), "replicate", 2, False, 2, timeout_s=300)
    (weights, states), _ = run_ranks(chain, 2, kind, WIDTH, str(tmp_path), "zero3", 1, True, 4, timeout_s=300)
    one = alone(kind, WIDTH, 6)
    if kind == "AdamWFp8":
        assert worst(weights, one) < 1e-6
    else:
        assert apart(weights, one) < apart(alone("AdamW", WIDTH, 6), one), "less than quantizing itself changes"
    assert {state.dtype for own in states.values() for state in own.values() if state.dim()} == {torch.float32, torch.float64}
    (_, exact), _ = run_ranks(chain, 2, "AdamW", WIDTH, str(tmp_path), "zero2", 1, True, 6, timeout_s=300)
    assert states.keys() == exact.keys() and Path(tmp_path / "8").is_dir(), "AdamW goes on from it"


def apart(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return sum(float((weights[name] - value).norm()) for name, value in others.items())


def odd(kind: str) -> dict[str, torch.Tensor]:
    model, plan = sharded(ODD_WIDTH, "zero3")
    trained(model, made(kind, model), plan, range(6))
    return full_state_dict(model)


def test_other_blocks_than_one_process_has_differ_by_less_than_quantizing_does():
    weights, _ = run_ranks(odd, 2, "AdamW8bit", timeout_s=300)
    one = alone("AdamW8bit", ODD_WIDTH, 6)
    assert 0 < apart(weights, one) < 1.5 * apart(alone("AdamW", ODD_WIDTH, 6), one)


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[str, list[float]]:
    trainer = StockTrainer(model=gpt2(WIDTH), args=trainer_arguments(tmp_path_factory.mktemp("one"), 8), train_dataset=tokens())
    trainer.train()
    return history(trainer)


def trainer_arguments(folder: Path, samples: int, **options: object) -> TrainingArguments:
    return arguments(str(folder), per_device_train_batch_size=samples, optim="adamw_torch_8bit", **options)


@pytest.mark.on_ranks(2, init=False)
def test_trainer_with_adamw_torch_8bit_equals_the_stock_one(tmp_path, stock):
    model = gpt2(WIDTH)
    plan = mixed_plan(model, 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=True)
    args = trainer_arguments(tmp_path, 4, save_strategy="steps", save_steps=2)
    trainer = PlannedTrainer(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    trainer.train()
    assert_close(history(trainer), stock, 1e-9)
    assert any(type(value).__name__ == "OptimState8bit" for states in trainer.optimizer.state.values() for value in states.values())
    again = PlannedTrainer(model=gpt2(WIDTH, seed=1), args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_close(history(again), {"loss": stock["loss"][2:]}, 1e-3)


def test_trainer_name_states_and_host_are_known_before_a_run():
    eight = spec_of_trainer_name("adamw_torch_8bit", device_type="cuda")
    assert eight == spec_of_optimizer(torchao.AdamW8bit([nn.Parameter(torch.ones(2))]), device_type="cuda")
    four = spec_of_trainer_name("adamw_torch_4bit", device_type="cuda")
    made = torchao.AdamW4bit([nn.Parameter(torch.ones(2))], block_size=256)  # transformers' size, where torchao has 128
    assert four == spec_of_optimizer(made, device_type="cuda") and four.formats[0].bytes_per_element == 0.5 + 4 / 256
    check_optimizer(made)
    facts = RunFacts(
        world_size=2, device_type="cuda", precision=Precision(), optimizer=eight, sequence_length=8, global_batch_size=2,
    )  # fmt: skip
    assert training_job(OSDPConfig(), facts).host_offload is False
    with pytest.raises(ValueError, match=r"plain tensors, and adamw8bit's are quantized; leave the offload out, or use AdamW"):
        training_job(OSDPConfig(host_offload=True), facts)


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
    [("adamw_torch_8bit",) * 2, pytest.param("adamw_torch_4bit", "adamw_torch_4bit", marks=pytest.mark.slow)],
    indirect=["stock_after_evaluation"],
)
@pytest.mark.on_ranks(2, init=False)
def test_an_optimizer_made_after_an_evaluation_steps_shards_as_well(tmp_path, stock_after_evaluation, optim):
    plan = mixed_plan(gpt2(WIDTH), 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=True)
    trainer = evaluated_first(str(tmp_path), plan, optim)
    assert_close(history(trainer), stock_after_evaluation, 1e-9)
    assert not any(isinstance(value, DTensor) for states in trainer.optimizer.state.values() for value in states.values())


@pytest.mark.on_ranks(2, init=False)
def test_an_optimizer_made_after_an_evaluation_is_refused_where_shards_do_not_allow_it():
    hardware = preset("cpu", devices_per_node=2)
    accelerator = OSDPAccelerator(cpu=True, osdp=OSDPConfig(strategy="fsdp", sequence_length=LENGTH, hardware=hardware))
    accelerator.plan(gpt2_model := gpt2(WIDTH), global_batch_size=GLOBAL_BATCH)
    model = accelerator.prepare(gpt2_model)
    with pytest.raises(OSDPError, match="Adafactor is not element-wise: it needs whole parameters"):
        accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
