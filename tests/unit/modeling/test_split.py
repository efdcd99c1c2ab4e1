"""Operators in slices: weights and states have the whole operators' names; what cannot be split is refused."""

import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers.pytorch_utils import Conv1D

from hf_osdp.errors import OSDPError
from hf_osdp.modeling.split.modules import SplitLinear
from hf_osdp.modeling.split.names import WholeParameter, is_split, merge_state_dict, whole_parameters
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
from tests.helpers.checkpointed import groups_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model

FC = "transformer.h.0.mlp.c_fc"
NAMES = (FC, "transformer.h.1.attn.c_attn")
GPT2 = functools.partial(tiny_model, "gpt2", layers=2)


def split(model: nn.Module, slices: int, *names: str) -> nn.Module:
    split_operators(model, [OperatorSplit(fqn=name, slices=slices) for name in names])
    return model


@pytest.mark.parametrize("whole", [nn.Linear(6, 11), Conv1D(11, 6)], ids=["Linear", "Conv1D"])
def test_slices_take_weights_over_into_memory_of_their_own(whole):
    whole.weight.requires_grad_(False)
    slices = SplitLinear(whole.eval(), 2)
    for leaf, dim in slices.leaves.items():
        assert torch.equal(torch.cat([getattr(part, leaf) for part in slices.slices], dim), getattr(whole, leaf))
    for part in slices.slices:
        assert part.weight.is_contiguous() and part.weight.untyped_storage().nbytes() == part.weight.nbytes
        assert not part.weight.requires_grad and part.bias.requires_grad and not part.training
    with pytest.raises(AttributeError, match="no 'weight': it is split into 2 slices; leave it whole"):
        slices.weight  # noqa: B018


def test_slices_have_names_in_the_whole_through_checkpoint_wrappers():
    model, state = GPT2(), GPT2().state_dict()
    model.transformer.h[0] = checkpoint_wrapper(model.transformer.h[0])
    names = whole_parameters(split(model, 3, FC))
    assert set(names) == {f"{FC}.weight", f"{FC}.bias"}
    weight = names[f"{FC}.weight"]
    assert weight.parts == tuple(f"{FC}.slices.{index}.weight" for index in range(3))
    assert (weight.dim, weight.sizes, weight.shape, weight.starts) == (1, (27, 27, 26), (20, 80), (0, 27, 54))
    assert set(full_state_dict(model)) == set(state)


def test_operator_in_two_places_is_split_in_both():
    model = nn.ModuleDict({"a": nn.Sequential(shared := nn.Linear(4, 6)), "b": nn.Sequential(shared, nn.Linear(6, 4))})
    split(model, 2, "b.0")
    assert model["a"][0] is model["b"][0] and is_split(model["a"])


def tied() -> nn.Module:
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    model["down"].weight = model["up"].weight
    return model


def hooked() -> nn.Module:
    model = GPT2()
    model.get_submodule(FC).register_forward_hook(print)
    return model


REFUSED = {
    "absent": (GPT2, "transformer.mlp.c_fc", "is absent"),
    "too many slices": (GPT2, FC, "has fewer output features, and cannot be split into 81 slices; leave it whole."),
    "another class": (GPT2, "transformer.h.0.ln_1", "is LayerNorm, not nn.Linear or GPT-2's Conv1D"),
    "a subclass": (lambda: nn.MultiheadAttention(4, 2), "out_proj", "is NonDynamicallyQuantizableLinear, not"),
    "the head": (GPT2, "lm_head", "is the vocabulary projection"),
    "tied": (tied, "up", "shares its weight or bias"),
    "split already": (lambda: split(GPT2(), 2, FC), FC, "is SplitLinear, not"),
    "hooks": (hooked, FC, "has hooks"),
}


@pytest.mark.parametrize(("make", "fqn", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_split_is_refused_and_left_alone(make, fqn, says):
    model = make()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(OSDPError) as caught:
        split(model, 81 if "81" in says else 2, fqn)
    assert says in str(caught.value) and repr(fqn) in str(caught.value) and "\n" not in str(caught.value)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_states_that_do_not_fit_are_refused():
    model, whole = split(GPT2(), 4, *NAMES), GPT2().state_dict()
    with pytest.raises(RuntimeError, match=r"c_fc.weight' has shape \(20, 79\), but the model's has \(20, 80\)"):
        load_full_state_dict(model, {**whole, f"{FC}.weight": torch.zeros(20, 79)})
    del whole[f"{FC}.bias"]
    with pytest.raises(RuntimeError, match=rf"1 missing \['{FC}.bias'\]"):
        load_full_state_dict(model, whole)
    own = dict(model.named_parameters())
    del own[f"{FC}.slices.1.bias"]
    with pytest.raises(OSDPError, match=rf"slices.1.bias' is not in the state.*give all slices of '{FC}.bias'"):
        merge_state_dict(own, model)


# ---- a training goes on in other slices


def model_in(slices: int, seed: int = 0) -> nn.Module:
    return split(GPT2(seed=seed), slices, *NAMES[: len(NAMES) if slices > 1 else 0])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as the Trainer makes them, from the model before it was split, then bound to its slices."""
    whole = GPT2()
    optimizer = torch.optim.AdamW(groups_of(whole), lr=1e-2)
    rebind_parameters(optimizer, parameter_names(whole), model)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        tiny_loss(model, tiny_batch(step)).backward()
        optimizer.step()


def full_states(model: nn.Module, optimizer: torch.optim.Optimizer):
    """By names, as checkpoints have them; returns what loads them."""
    weights, state = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    whole = {name: tuple(parameter.shape) for name, parameter in GPT2().named_parameters()}
    assert {name: tuple(own["exp_avg"].shape) for name, own in state["state"].items()} == whole
    names = [name for group in state["param_groups"] for name in group["params"]]
    assert names == sorted(whole, key=lambda name: len(whole[name]) == 1)

    def load(other: nn.Module, its: torch.optim.Optimizer) -> None:
        load_full_state_dict(other, weights)
        load_full_optimizer_state_dict(other, its, state)
        steps = [own["step"] for own in its.state.values()]
        assert len({step.data_ptr() for step in steps}) == len(steps)

    return load


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 3)])
def test_training_continues_in_any_number_of_slices(before, after):
    first = model_in(before)
    optimizer = optimizer_of(first)
    train(first, optimizer, range(2))
    load = full_states(first, optimizer)
    train(first, optimizer, range(2, 4))

    second = model_in(after, seed=3)
    optimizer = optimizer_of(second)
    load(second, optimizer)
    train(second, optimizer, range(2, 4))
    found, wanted = full_state_dict(second), full_state_dict(first)
    assert set(found) == set(wanted)
    assert max((found[name] - wanted[name]).abs().max().item() for name in found) < 1e-12


def sliced(whole: torch.Tensor, sizes: tuple[int, ...], dim: int) -> WholeTensor:
    parts = tuple(f"w{i}" for i in range(len(sizes)))
    name = WholeParameter(name="w", parts=parts, dim=dim, sizes=sizes, shape=tuple(whole.shape))
    return WholeTensor([part.clone() for part in whole.split(list(sizes), dim)], name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("dim", "sizes"), [(0, (3, 2, 2)), (1, (4, 4, 3))])
def test_slices_are_saved_as_one_tensor_and_loaded_into_others(tmp_path, dim, sizes):
    whole = torch.arange(77.0).view(7, 11)
    dcp.save({"w": sliced(whole, sizes, dim)}, checkpoint_id=tmp_path)
    plain, other = torch.zeros(7, 11), sliced(torch.zeros(7, 11), (5, 2), 0)
    dcp.load({"w": plain}, checkpoint_id=tmp_path)
    dcp.load({"w": other}, checkpoint_id=tmp_path)
    assert torch.equal(plain, whole) and torch.equal(torch.cat(other.parts), whole)
    with pytest.raises(NotImplementedError, match="on a WholeTensor, which can only be saved and loaded"):
        other + 1
