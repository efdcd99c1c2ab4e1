"""Memory of replicas' gradients."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.sharding.replica_buckets import Parameters
from hf_osdp.sharding.replicas import Replicas
from tests.helpers.fake_step import fake_process_group


def replicated(dtype: torch.dtype | None) -> nn.Module:
    """A linear layer on two ranks, which computes in a dtype."""
    model = nn.Linear(8, 8)
    places = [[(model, name)] for name, _ in model.named_parameters()]
    replicas = Replicas(model, [Parameters(label="", places=places, dtype=dtype)], dist.group.WORLD, averages=True)
    replicas.watch(model, dtype or torch.float32)
    return model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_zero_grad_frees_averaged_gradients(dtype):
    """Nothing else holds the flat buffer, which would be there beside the activations of the next step."""
    with fake_process_group(2):
        model = replicated(dtype)
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            buffers = {weakref.ref(parameter.grad.untyped_storage()) for parameter in model.parameters()}
            assert len(buffers) == 1 and all(buffer() is not None for buffer in buffers)
            model.zero_grad()
            assert [buffer() for buffer in buffers] == [None]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_model_without_owner_is_freed_with_its_parameters(dtype):
    with fake_process_group(2):
        model = replicated(dtype)
        model(torch.ones(2, 8)).sum().backward()
        held = [weakref.ref(one) for one in (model, *model.parameters())]
        del model
        gc.collect()
        assert [one() for one in held] == [None] * 3
