"""Optimizer states by Hugging Face names, and slices as chunks of one tensor."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hf_osdp.errors import OSDPError
from hf_osdp.modeling.split.names import WholeParameter, merge_state_dict, split_state_dict
from hf_osdp.modeling.split.operators import split_operators
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.sharding.optimizer_steps import parameter_names, rebind_parameters
from hf_osdp.sharding.state import (
    WholeTensor,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from tests.helpers.models import VOCABULARY, tiny_batch, tiny_loss, tiny_model

NAMES = ("transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_attn")


def model_in(slices: int, seed: int = 0) -> nn.Module:
    model = tiny_model("gpt2", seed=seed, layers=2)
    if slices > 1:
        split_operators(model, [OperatorSplit(fqn=name, slices=slices) for name in NAMES])
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as the Trainer makes them, from the model before it was split, then bound to its slices."""
    whole = tiny_model("gpt2", layers=2)
    decay = {parameter: parameter.ndim > 1 for parameter in whole.parameters()}
    chosen = {flag: [p for p, d in decay.items() if d == flag] for flag in (True, False)}
    groups = [{"params": chosen[flag], "weight_decay": 0.1 * flag} for flag in chosen]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    rebind_parameters(optimizer, parameter_names(whole), model)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        tiny_loss(model, tiny_batch(step)).backward()
        optimizer.step()


def test_state_dicts_there_and_back():
    model = model_in(3)
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    merged = merge_state_dict(own, model)
    back = split_state_dict(merged, model)
    assert set(back) == set(own) and all(torch.equal(back[name], own[name]) for name in own)
    assert all(value.is_contiguous() for value in back.values())
    del own["transformer.h.0.mlp.c_fc.slices.1.bias"]
    message = r"slices.1.bias' is not in the state.*give all slices of 'transformer.h.0.mlp.c_fc.bias'"
    with pytest.raises(OSDPError, match=message):
        merge_state_dict(own, model)


def full_states(model: nn.Module, optimizer: torch.optim.Optimizer):
    """By names, as checkpoints have them; returns what loads them."""
    weights, state = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    whole = {name: tuple(parameter.shape) for name, parameter in model_in(1).named_parameters()}
    assert {name: tuple(own["exp_avg"].shape) for name, own in state["state"].items()} == whole
    names = [name for group in state["param_groups"] for name in group["params"]]
    assert names == sorted(whole, key=lambda name: len(whole[name]) == 1)

    def load(other: nn.Module, its: torch.optim.Optimizer) -> None:
        load_full_state_dict(other, weights)
        load_full_optimizer_state_dict(other, its, state)
        steps = [own["step"] for own in its.state.values()]
        assert len({step.data_ptr() for step in steps}) == len(steps)

    return load


def our_state_functions(model: nn.Module, optimizer: torch.optim.Optimizer):
    """By positions of the whole model's parameters, as torch has them; returns what loads them."""
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, copy.deepcopy(optimizer.state_dict())
    whole = optimizer_of(model_in(1)).state_dict()["param_groups"]
    assert [group["params"] for group in state["param_groups"]] == [group["params"] for group in whole]
    assert state["state"][0]["exp_avg"].shape == (VOCABULARY, 20) and state["param_groups"][1]["weight_decay"] == 0.0

    def load(other: nn.Module, its: torch.optim.Optimizer) -> None:
        other.load_state_dict(weights)
        its.load_state_dict(state)

    return load


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("states", [full_states, our_state_functions])
def test_training_continues_in_any_number_of_slices(states, before, after):
    first = model_in(before)
    optimizer = optimizer_of(first)
    train(first, optimizer, range(2))
    load = states(first, optimizer)
    train(first, optimizer, range(2, 4))

    second = model_in(after, seed=3)
    optimizer = optimizer_of(second)
    load(second, optimizer)
    train(second, optimizer, range(2, 4))
    found, wanted = full_state_dict(second), full_state_dict(first)
    assert set(found) == set(wanted)
    assert max((found[name] - wanted[name]).abs().max().item() for name in found) < 1e-12


def test_optimizer_state_of_another_model_does_not_load():
    optimizer = optimizer_of(model_in(4))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict())


def sliced(whole: torch.Tensor, sizes: tuple[int, ...], dim: int) -> WholeTensor:
    parts = tuple(f"w{i}" for i in range(len(sizes)))
    name = WholeParameter(name="w", parts=parts, dim=dim, sizes=sizes, shape=tuple(whole.shape))
    return WholeTensor([part.clone() for part in whole.split(list(sizes), dim)], name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_are_saved_as_one_tensor_and_loaded_into_others(tmp_path, dim):
    whole = torch.arange(77.0).view(7, 11)
    sizes = (3, 2, 2) if dim == 0 else (4, 4, 3)
    dcp.save({"w": sliced(whole, sizes, dim)}, checkpoint_id=tmp_path)
    plain, other = torch.zeros(7, 11), sliced(torch.zeros(7, 11), (5, 2), 0)
    dcp.load({"w": plain}, checkpoint_id=tmp_path)
    dcp.load({"w": other}, checkpoint_id=tmp_path)
    assert torch.equal(plain, whole) and torch.equal(torch.cat(other.parts), whole)


def test_tensor_in_slices_cannot_be_computed_with():
    tensor = sliced(torch.zeros(4, 4), (2, 2), 0)
    assert repr(tensor) == "WholeTensor(shape=(4, 4))"
    with pytest.raises(NotImplementedError, match="on a WholeTensor, which can only be saved and loaded"):
        tensor + 1
