"""Operators in slices compute what whole ones do; what cannot be split is refused."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from hf_osdp.errors import OSDPError
from hf_osdp.modeling.split.modules import SplitLinear
from hf_osdp.modeling.split.names import is_split, whole_parameters
from hf_osdp.modeling.split.operators import split_operators
from hf_osdp.planner.split import OperatorSplit
from tests.helpers.models import tiny_batch, tiny_model


def operator(kind: str, features: int = 11, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With tiny integers for weights: sums of their products are exact, in bfloat16 too."""
    module = Conv1D(features, 6) if kind == "conv1d" else nn.Linear(6, features, bias=kind == "linear")
    for parameter in module.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape).to(dtype)
    return module


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("slices", [2, 4, 11])
@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
def test_split_operator_computes_outputs_and_gradients_of_the_whole(kind, slices, dtype):
    whole = operator(kind, dtype=dtype)
    split = SplitLinear(whole, slices)
    value, grad = integers(2, 3, 6, dtype=dtype), integers(2, 3, 11, dtype=dtype)
    inputs = [value.clone().requires_grad_() for _ in range(2)]
    outputs = [module(x) for module, x in zip((whole, split), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward(grad)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for leaf, dim in split.leaves.items():
        assert torch.equal(
            torch.cat([getattr(part, leaf).grad for part in split.slices], dim), getattr(whole, leaf).grad
        )


def test_split_operator_takes_weights_over():
    whole = operator("linear")
    whole.weight.requires_grad_(False)
    whole.eval()
    split = SplitLinear(whole, 2)
    assert torch.equal(split.slices[0].weight, whole.weight[: split.sizes[0]])
    assert all(part.weight.untyped_storage().nbytes() == part.weight.nbytes for part in split.slices), "of its own"
    assert not split.slices[1].weight.requires_grad and split.slices[1].bias.requires_grad
    assert not split.training and not split.slices[0].training
    assert all(part.weight.is_contiguous() for part in SplitLinear(operator("conv1d"), 2).slices)
    with pytest.raises(AttributeError, match="no 'weight': it is split into 2 slices; leave it whole"):
        split.weight  # noqa: B018


def test_slice_may_change_between_forward_and_backward_of_another():
    split = SplitLinear(operator("linear"), 2)
    loss = split.slices[0](integers(3, 6).requires_grad_()).sum()
    with torch.no_grad():
        split.slices[1].weight.add_(1)
    loss.backward()


def test_operators_are_split_on_meta_and_fake_tensors():
    with torch.device("meta"):
        assert SplitLinear(operator("conv1d"), 4)(torch.empty(2, 6)).shape == (2, 11)
    with FakeTensorMode():
        split = SplitLinear(nn.Linear(6, 11), 4)
        split(torch.empty(2, 6)).sum().backward()
        assert split.slices[3].weight.grad.shape == (2, 6)


def split(model: nn.Module, slices: int, *names: str) -> nn.Module:
    split_operators(model, [OperatorSplit(fqn=name, slices=slices) for name in names])
    return model


NAMES = ("transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_attn", "transformer.h.2.mlp.c_proj")
GPT2 = functools.partial(tiny_model, "gpt2")


@pytest.mark.parametrize("slices", [2, 3, 20])
def test_outputs_and_state_dict_are_the_whole_models(slices):
    whole, inputs = GPT2(), tiny_batch(0)["input_ids"]
    model = split(GPT2(), slices, *NAMES)
    assert is_split(model) and not is_split(whole)
    assert (model(inputs).logits - whole(inputs).logits).abs().max().item() < 1e-14
    state, want = model.state_dict(), whole.state_dict()
    assert set(state) == set(want)
    assert all(torch.equal(state[name], value) for name, value in want.items())


def test_pretrained_weights_load_and_are_saved(tmp_path):
    whole, model = GPT2(seed=5), split(GPT2(), 4, *NAMES)
    assert str(model.load_state_dict(whole.state_dict())) == "<All keys matched successfully>"
    model.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_loading_tells_what_does_not_fit():
    model, state = split(GPT2(), 4, *NAMES), GPT2().state_dict()
    message = r"transformer.h.0.mlp.c_fc.weight: shape \(20, 79\) was given, but the model's is \(20, 80\)"
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict({**state, "transformer.h.0.mlp.c_fc.weight": torch.zeros(20, 79)})
    del state["transformer.h.0.mlp.c_fc.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*transformer.h.0.mlp.c_fc.slices.0.bias"):
        model.load_state_dict(state)


def test_slices_have_names_in_the_whole_and_of_their_own():
    model = split(GPT2(), 4, *NAMES)
    names = whole_parameters(model)
    fc = names["transformer.h.0.mlp.c_fc.weight"]
    assert fc.parts == tuple(f"transformer.h.0.mlp.c_fc.slices.{index}.weight" for index in range(4))
    assert (fc.dim, fc.sizes, fc.shape, fc.starts) == (1, (20,) * 4, (20, 80), (0, 20, 40, 60))


def test_blocks_in_a_checkpoint_wrapper_keep_their_names():
    model = GPT2()
    model.transformer.h[0] = checkpoint_wrapper(model.transformer.h[0])
    want = set(model.state_dict())
    split(model, 2, "transformer.h.0.mlp.c_fc")
    assert set(whole_parameters(model)) == {"transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.bias"}
    assert set(model.state_dict()) == want


def test_operator_in_two_places_is_split_in_both():
    model = nn.ModuleDict({"a": nn.Sequential(shared := nn.Linear(4, 6)), "b": nn.Sequential(shared, nn.Linear(6, 4))})
    split(model, 2, "b.0")
    assert model["a"][0] is model["b"][0] and is_split(model["a"])


def changed(change, model=None):
    model = model or GPT2()
    change(model)
    return model


FC = "transformer.h.0.mlp.c_fc"
TWO = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
WRONG = {
    "absent": (GPT2, "transformer.mlp.c_fc", f"is not a module of GPT2LMHeadModel; did you mean '{FC}'?"),
    "absent, nothing alike": (GPT2, "nothing", "take a name from named_modules"),
    "too many slices": (GPT2, FC, "has 80 output features, too few for 81 slices; use at most 80"),
}
REFUSED = WRONG | {
    "another class": (GPT2, "transformer.h.0.ln_1", "is a LayerNorm, but only nn.Linear and GPT-2's Conv1D"),
    "a subclass": (lambda: nn.MultiheadAttention(4, 2), "out_proj", "is a NonDynamicallyQuantizableLinear"),
    "the embedding": (GPT2, "transformer.wte", "is a Embedding, but only nn.Linear and GPT-2's Conv1D"),
    "the head": (GPT2, "lm_head", "is the vocabulary projection; leave it whole, and take its loss in chunks"),
    "tied": (lambda: changed(lambda m: setattr(m["down"], "weight", m["up"].weight), TWO), "up",
             "shares its weight or bias with 'down', which is not split with it; leave it whole"),
    "split already": (lambda: split(GPT2(), 2, FC), FC, "already in 2 slices"),
    "a slice": (lambda: split(GPT2(), 2, FC), f"{FC}.slices.0", "is a LinearSlice"),
    "hooks": (lambda: changed(lambda m: m.get_submodule(FC).register_forward_hook(print)), FC, "has hooks"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_and_left_alone(name):
    model, fqn, says = REFUSED[name]
    built = model()
    before = {name: type(module) for name, module in built.named_modules()}
    with pytest.raises(ValueError if name in WRONG else OSDPError) as caught:
        split(built, 81 if name == "too many slices" else 2, *([FC] if fqn == "nothing" else []), fqn)
    assert says in str(caught.value) and repr(fqn) in str(caught.value) and "\n" not in str(caught.value)
    assert {name: type(module) for name, module in built.named_modules()} == before
