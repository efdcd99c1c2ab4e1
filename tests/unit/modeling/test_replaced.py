"""Attributes replaced for a while, names replaced in other packages, and hooks of every optimizer's step."""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers.trainer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from transformers import masking_utils, pytorch_utils

from hf_osdp.integrations.samples import _preserve_generators
from hf_osdp.modeling.replaced import replaced
from hf_osdp.modeling.step_hooks import after_step, before_step


@dataclass(frozen=True)
class Frozen:
    owner: random.Random


def test_generator_of_frozen_dataset_is_replaced_and_restored():
    dataset = Frozen(random.Random(0))
    given = dataset.owner
    with _preserve_generators(dataset):
        assert dataset.owner is not given
    assert dataset.owner is given


def test_attribute_of_a_compiled_submodule_is_as_before_afterwards():
    block = nn.Linear(1, 1)
    block.gradient_checkpointing = True
    model = nn.Sequential(torch.compile(block))
    with replaced(block, gradient_checkpointing=False), replaced(model[0], gradient_checkpointing=False):
        assert not block.gradient_checkpointing and not model[0].gradient_checkpointing
    assert block.gradient_checkpointing and model[0].gradient_checkpointing


def test_inherited_attribute_is_inherited_again_after_an_error():
    class Base:
        name = staticmethod(lambda: "base")

    class Derived(Base):
        pass

    for owner in (Base, Derived):
        before = vars(owner).get("name")
        with pytest.raises(KeyError), replaced(owner, name=lambda: "other"):
            assert owner.name() == "other"
            raise KeyError
        assert vars(owner).get("name") is before and owner.name() == "base"


def step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def test_hooks_removed_during_a_step_leave_others_alone():
    said, before = [], (len(before_step), len(after_step))
    for hooks in (before_step, after_step):
        removers: list[Callable[[], object]] = []
        removers.append(hooks.add(lambda optimizer, removers=removers: said.append("leaves") or removers[0]()))
        removers.append(hooks.add(lambda optimizer: said.append("stays")))
        step()
        step()
        for remove in removers:
            remove()
    step()
    assert said == ["leaves", "stays", "stays"] * 2
    assert (len(before_step), len(after_step)) == before


@pytest.mark.parametrize(
    ("caller", "name"),
    [
        (torch.nn.utils.clip_grad_norm_, "_get_total_norm"),
        (torch.nn.utils.clip_grad_norm_, "_clip_grads_with_norm_"),
        (_fsdp_param.alloc_storage, "resize_"),
        (_fsdp_param.free_storage, "resize_"),
        (FakeTensor.tolist, "item"),
        (torch.nn.Module._apply, "torch.utils.swap_tensors"),
        (masking_utils._preprocess_mask_arguments, "find_packed_sequence_indices"),
        (pytorch_utils, "if is_torchdynamo_compiling():"),
        (transformers.trainer.Trainer.create_accelerator_and_postprocess, "Accelerator"),
    ],
)
def test_other_packages_call_the_names_that_are_replaced_in_them(caller, name):
    """By torch 2.13 and transformers 5.23; docs/design.md says what each is replaced for."""
    assert name in inspect.getsource(inspect.unwrap(caller))
