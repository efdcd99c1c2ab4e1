"""Attributes replaced for a while, names replaced in other packages, and hooks of every optimizer's step."""

import inspect
from collections.abc import Callable

import pytest
import torch
import transformers.trainer
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from transformers import masking_utils, pytorch_utils

from hf_osdp.modeling.step_hooks import after_step, before_step


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
