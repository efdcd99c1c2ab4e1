"""Linear operators and embeddings in slices compute what whole ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers.pytorch_utils import Conv1D

from hf_osdp.modeling.split.head import SplitHead
from hf_osdp.modeling.split.modules import SplitLinear, slice_sizes


def operator(kind: str, features: int = 11, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With tiny integers for weights: sums of their products are exact, in bfloat16 too, whatever kernel a BLAS picks."""
    module = Conv1D(features, 6) if kind == "conv1d" else nn.Linear(6, features, bias=kind == "linear")
    for parameter in module.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape).to(dtype)
    return module


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


@pytest.mark.parametrize(
    ("features", "slices", "sizes"), [(8, 4, (2, 2, 2, 2)), (11, 4, (3, 3, 3, 2)), (5, 5, (1,) * 5), (6, 4, (2, 2, 1, 1))]
)
def test_sizes_are_as_equal_as_can_be(features, slices, sizes):
    assert slice_sizes(features, slices) == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("slices", [2, 3, 4, 11])
@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
def test_outputs_and_gradients_are_those_of_the_whole(kind, slices, dtype):
    whole = operator(kind, dtype=dtype)
    split = SplitLinear(whole, slices)
    x, y = integers(2, 3, 6, dtype=dtype).requires_grad_(), None
    inputs = (x, x.detach().clone().requires_grad_())
    grad = integers(2, 3, 11, dtype=dtype)
    for module, value in zip((whole, split), inputs, strict=True):
        out = module(value)
        assert y is None or torch.equal(out, y)
        y = out
        out.backward(grad)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for leaf, dim in split.leaves.items():
        assert torch.equal(torch.cat([part.grad for part in split.parts(leaf)], dim), getattr(whole, leaf).grad)


def test_each_slice_has_its_own_bias():
    split = SplitLinear(operator("linear"), 4)
    assert [part.bias.shape[0] for part in split.slices] == [3, 3, 3, 2]
    assert set(split.state_dict()) == {f"slices.{index}.{leaf}" for index in range(4) for leaf in ("weight", "bias")}


def test_weights_are_taken_over():
    whole = operator("linear")
    whole.weight.requires_grad_(False)
    whole.eval()
    split = SplitLinear(whole, 2)
    assert split.slices[0].weight.data_ptr() == whole.weight.data_ptr()
    assert not split.slices[1].weight.requires_grad and split.slices[1].bias.requires_grad
    assert not split.training and not split.slices[0].training
    conv = SplitLinear(operator("conv1d"), 2)
    assert all(part.weight.is_contiguous() for part in conv.slices)


def test_a_slice_may_change_between_forward_and_backward_of_another():
    split = SplitLinear(operator("linear"), 2)
    loss = split.slices[0](integers(3, 6).requires_grad_()).sum()
    with torch.no_grad():
        split.slices[1].weight.add_(1)
    loss.backward()


def test_on_the_meta_device_and_under_fake_tensors():
    with torch.device("meta"):
        assert SplitLinear(operator("linear"), 4)(torch.empty(2, 6)).shape == (2, 11)
        assert next(SplitLinear(Conv1D(11, 6), 4).parameters()).device.type == "meta"
    with FakeTensorMode():
        split = SplitLinear(nn.Linear(6, 11), 4)
        split(torch.empty(2, 6)).sum().backward()
        assert split.slices[3].weight.grad.shape == (2, 6)


def test_weight_is_not_to_be_had():
    with pytest.raises(AttributeError, match="no 'weight': it is in 3 slices; leave the operator whole"):
        SplitLinear(operator("linear"), 3).weight  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        SplitLinear(operator("linear"), 3).nothing  # noqa: B018


# ------------------------------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("padding", [None, 0, 4, -1])
@pytest.mark.parametrize("slices", [2, 4, 11])
def test_lookup_and_its_gradient_are_those_of_the_whole(slices, padding):
    whole, head = nn.Embedding(11, 6, padding_idx=padding), nn.Linear(6, 11, bias=False)
    whole.weight = head.weight
    split = SplitHead(head, slices).tie(whole)
    ids, grad = torch.tensor([[0, 3, 10, 4], [4, 9, 1, 0]]), torch.randn(2, 4, 6)
    assert torch.equal(split(ids), whole(ids))
    for module in (whole, split):
        module(ids).backward(grad)
    assert torch.equal(torch.cat([part.grad for part in split.parts("weight")]), whole.weight.grad)
    with torch.no_grad():
        assert torch.equal(split(ids), whole(ids))


@pytest.mark.parametrize("wrong", [11, -1])
def test_ids_outside_the_vocabulary_fail_as_in_the_whole(wrong):
    whole, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    split = SplitHead(head, 3).tie(whole)
    for module in (whole, split):
        with pytest.raises(IndexError):
            module(torch.tensor([1, wrong]))


def test_tied_slices_have_one_name():
    head = nn.Linear(6, 11, bias=False)
    model = nn.ModuleDict({"head": SplitHead(head, 2)})
    model["embedding"] = model["head"].tie(nn.Embedding(11, 6))
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [f"embedding.slices.{index}.weight" for index in (0, 1)]
    assert model["head"].slices is model["embedding"].slices
