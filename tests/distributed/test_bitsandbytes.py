"""bitsandbytes' optimizers under a plan: memory, training, checkpoints over plans and worlds, what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import TrainingArguments

from hf_osdp.distributed.mesh import world_size
from hf_osdp.errors import OSDPError
from hf_osdp.planner.optimizers import spec_of_trainer_name
from hf_osdp.sharding.optimizer import check_optimizer, spec_of_optimizer
from hf_osdp.sharding.optimizer_steps import prepare_new_optimizers, step_by_device
from hf_osdp.sharding.optimizers import kind_of
from hf_osdp.sharding.state import full_optimizer_state_dict, full_state_dict
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.low_bit import ODD_WIDTH, alone, apart, chain, gpt2, held, sharded
from tests.helpers.sampling import slow_but
from tests.helpers.training import trained

from .test_integration_trainer import StockTrainer, arguments, history, tokens, trained_and_resumed_as_stock

bnb = pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed; pip install 'hf_osdp[bnb]'")
BLOCKS = 256
"""Width at which every shard of whole rows has whole blocks."""
TABLES = 2048
"""Bytes of the tables of what codes mean, which all parameters share."""


@pytest.fixture(autouse=True)
def fresh_manager():
    """bitsandbytes keeps options of parameters for the whole process."""
    bnb.GlobalOptimManager.get_instance().initialize()


def made(kind: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    optimizer = getattr(bnb, kind)(model.parameters(), lr=lr)
    if isinstance(model, FSDPModule):
        step_by_device(optimizer)
    return optimizer


@pytest.mark.parametrize(
    "kind, width",
    slow_but(
        {"AdamW8bit": ODD_WIDTH, "AdEMAMix8bit": BLOCKS, "Lion": BLOCKS}.items(), daily=[("AdamW8bit", ODD_WIDTH)]
    ),
)
def test_states_take_the_bytes_that_are_planned_and_two_tables(kind, width):
    """Shards have no whole blocks, and those of an embedding fewer elements than a whole one must have."""
    (found, planned), (second, _) = run_ranks(held, 2, made, kind, width, "mixed", shared=True)
    quantized = {name for name in planned if "8bit" in kind and gpt2(width).get_parameter(name).numel() >= 4096}
    tables = {name: TABLES * (name in quantized) for name in planned}
    assert {name: max(found[name], second[name]) - tables[name] for name in found} == {
        name: planned[name] for name in found
    }
    assert "8bit" not in kind or "transformer.wte.weight" in quantized


@pytest.mark.parametrize(
    "kind", slow_but(("AdamW8bit", "AdEMAMix8bit", "RMSprop8bit", "AdEMAMix", "RMSprop"), daily=())
)
def test_training_over_plans_and_worlds_equals_one_process(tmp_path, kind):
    """Where blocks lie inside shards a sharded run is that of one process; a checkpoint of 8 bits rounds once more."""
    (first, _), _ = run_ranks(chain, 2, made, kind, BLOCKS, str(tmp_path), "mixed", 1, True, 0, shared=True)
    assert worst(first, alone(made, kind, BLOCKS, 2)) < 1e-9
    run_ranks(chain, 1, made, kind, BLOCKS, str(tmp_path), "replicate", 1, False, 2, shared=True)
    (weights, states), _ = run_ranks(chain, 2, made, kind, BLOCKS, str(tmp_path), "zero3", 1, True, 4, shared=True)
    one = alone(made, kind, BLOCKS, 6)
    if "8bit" in kind:
        exact = alone(made, kind.removesuffix("8bit"), BLOCKS, 6)
        assert 0 < apart(weights, one) < 0.5 * apart(exact, one), "less than quantizing itself changes"
    else:
        assert worst(weights, one) < 1e-9
    assert {state.dtype for own in states.values() for state in own.values() if torch.is_tensor(state)} == {
        torch.float32
    }
    assert {own["step"] for own in states.values()} == {6}
    if kind == "AdamW8bit":
        (_, full), _ = run_ranks(chain, 2, made, "AdamW", BLOCKS, str(tmp_path), "zero2", 1, True, 6, shared=True)
        assert {own["step"] for own in full.values()} == {8}, "states of 32 bits go on from it"


def test_lion_of_8_bits_equals_one_process_but_for_zeros(tmp_path):
    """Keys have no gradient from their biases but rounding, of which Lion takes the sign."""
    (weights, _), _ = run_ranks(chain, 2, made, "Lion8bit", BLOCKS, str(tmp_path), "mixed", 1, True, 0, shared=True)
    one = alone(made, "Lion8bit", BLOCKS, 2)
    assert (
        worst(*({name: value for name, value in of.items() if "c_attn.bias" not in name} for of in (weights, one)))
        < 1e-9
    )


def in_a_loop(kind: str) -> dict[str, torch.Tensor]:
    """As a plain loop prepares an optimizer when it first steps."""
    model, plan = sharded(ODD_WIDTH, "zero3")
    prepare_new_optimizers(model, lambda model, optimizer: None)
    trained(model, getattr(bnb, kind)(model.parameters(), lr=1e-2), plan, range(6))
    return full_state_dict(model)


def test_other_blocks_differ_by_less_than_quantizing_does():
    weights, _ = run_ranks(in_a_loop, 2, "AdamW8bit", shared=True)
    one = alone(made, "AdamW8bit", ODD_WIDTH, 6)
    assert 0 < apart(weights, one) < 1.5 * apart(alone(made, "AdamW", ODD_WIDTH, 6), one)


def one_row() -> tuple[torch.Tensor, dict, object]:
    torch.manual_seed(0)
    layer = nn.Linear(8192, 1)
    if world_size() > 1:
        fully_shard(layer)
    optimizer = made("AdamW8bit", layer, 1e-2)
    for _ in range(3):
        layer(torch.linspace(-1, 1, 8192)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = optimizer.state[layer.weight]["step"]
    return full_state_dict(layer), full_optimizer_state_dict(layer, optimizer), steps


def test_ranks_without_a_row_pass_by_and_count_steps():
    (weights, states, _), (_, _, steps) = run_ranks(one_row, 2, shared=True)
    ((whole, of_whole, _),) = run_ranks(one_row, 1, shared=True)
    assert steps == 3 and worst(weights, whole) == 0.0
    assert all(
        torch.equal(states["state"]["weight"][key], of_whole["state"]["weight"][key]) for key in ("state1", "state2")
    )


def trainer_arguments(folder: Path, samples: int, **options: object) -> TrainingArguments:
    return arguments(str(folder), per_device_train_batch_size=samples, optim="adamw_bnb_8bit", **options)


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[str, list[float]]:
    trainer = StockTrainer(
        model=gpt2(BLOCKS), args=trainer_arguments(tmp_path_factory.mktemp("one"), 8), train_dataset=tokens()
    )
    trainer.train()
    return history(trainer)


@pytest.mark.slow
@pytest.mark.on_ranks(2, init=False)
def test_trainer_with_adamw_bnb_8bit_equals_the_stock_one(tmp_path, stock):
    args = trainer_arguments(tmp_path, 4, save_strategy="steps", save_steps=2)
    trainer = trained_and_resumed_as_stock(partial(gpt2, BLOCKS), args, stock)
    states, named = trainer.optimizer.optimizer.state, dict(trainer.model.named_parameters())
    kinds = {name: states[named[f"transformer.{name}.weight"]]["state1"].dtype for name in ("wte", "h.0.mlp.c_fc")}
    assert kinds == {"wte": torch.float32, "h.0.mlp.c_fc": torch.uint8}


def optimizer_of(cls: type = bnb.AdamW, **options: object) -> torch.optim.Optimizer:
    return cls([nn.Parameter(torch.ones(2))], **options)


def overridden() -> torch.optim.Optimizer:
    optimizer = optimizer_of(optim_bits=8)
    bnb.GlobalOptimManager.get_instance().pid2config[id(optimizer.param_groups[0]["params"][0])] = {
        "betas": (0.0, 0.9)
    }
    return optimizer


def of_an_old_version() -> torch.optim.Optimizer:
    optimizer = optimizer_of(optim_bits=8)
    optimizer.args.block_wise = False
    return optimizer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: optimizer_of(is_paged=True),
            "^AdamW keeps states in CUDA's unified memory, .* the one that is not paged",
        ),
        (lambda: optimizer_of(bnb.PagedLion8bit), "^PagedLion8bit keeps states in CUDA's unified memory"),
        (lambda: optimizer_of(bnb.LAMB8bit), "^LAMB8bit holds its states in blocks that are quantized together"),
        (overridden, "^AdamW has parameters with options of their own in GlobalOptimManager"),
        (of_an_old_version, "^AdamW comes from bitsandbytes before 0.50"),
    ],
)
def test_what_shards_cannot_hold_is_refused_in_one_line(make, said):
    with pytest.raises(OSDPError, match=said):
        kind_of(make()).needs_whole()
    with pytest.raises(ValueError, match=said):
        spec_of_optimizer(make(), device_type="cuda")


def test_slices_and_the_host_are_refused_where_states_have_blocks():
    for bits, allowed in ((8, False), (32, True)):
        optimizer = optimizer_of(optim_bits=bits)
        assert spec_of_optimizer(optimizer, device_type="cuda").steps_parts is allowed
        with (
            nullcontext()
            if allowed
            else pytest.raises(OSDPError, match="quantizes blocks of whole parameters, and 1 of 1 are in parts")
        ):
            check_optimizer(optimizer, optimizer.param_groups[0]["params"])


def test_plain_loop_of_one_process_refuses_options_of_parameters():
    optimizer = overridden()
    model = nn.ParameterList(optimizer.param_groups[0]["params"])
    prepare_new_optimizers(model, lambda *_: None)
    model[0].grad = torch.ones(2)
    with pytest.raises(OSDPError, match=r"^AdamW has parameters with options of their own in GlobalOptimManager"):
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "cls", "bits"),
    [
        ("adamw_bnb_8bit", "AdamW", 8),
        ("lion_32bit", "Lion", 32),
        ("rmsprop_bnb", "RMSprop", 32),
        ("ademamix", "AdEMAMix", 32),
    ],
)
def test_trainer_names_stand_for_what_the_optimizers_hold(name, cls, bits):
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 128), "other": nn.Linear(128, 64)})
    optimizer = getattr(bnb, cls)(model.parameters(), optim_bits=bits)
    if bits == 8:
        bnb.GlobalOptimManager.get_instance().register_module_override(
            model["embedding"], "weight", {"optim_bits": 32}
        )  # as a Trainer does
    for device_type in ("cpu", "cuda"):
        assert spec_of_trainer_name(name, device_type=device_type) == spec_of_optimizer(
            optimizer, device_type=device_type
        )
