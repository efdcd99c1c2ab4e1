"""Weights that are read without a call of their module: where the mechanism is missing, backward ends with an error.
That they train as in one process is in `cases/reads.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, UnreducedGradientError
from hf_osdp.sharding.weight_reads import WeightReads
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.training import Case, alone, assert_trained_alike, loop_of, train

from .cases import reads

UNGUARDED = tuple(
    (model, kind, layout)
    for model, kind in (
        ("llama", "forward reads head"),
        ("llama", "loss reads head"),
        ("gpt2", "penalties"),
        ("llama", "read first"),
    )
    for layout in ("zero3", "replicate", "mixed")
)


def warm(model: nn.Module) -> nn.Module:
    """Have forward read a weight of a unit that an earlier call has left gathered, before the unit runs."""

    def logits(self: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            reads.hidden_of(self, input_ids)
        scale = reads.weight_of(reads.matrix(self)).mean()
        return self.lm_head(reads.hidden_of(self, input_ids)) * (1 + scale)

    reads.with_forward(model, logits)
    return model


@pytest.mark.on_ranks(2)
def test_guard_raises_on_all_ranks_where_reads_are_not_gathered():
    """Without the mechanism, a read of each kind is an error, or right where the weight happened to be gathered."""
    WeightReads.read = lambda self, group: None
    meshes, raised = Meshes("cpu"), set()
    for name, kind, layout in UNGUARDED:
        case = Case(model=reads.reading(name, kind), loss=reads.KINDS[kind][1], layout=layout)
        try:
            trained = train(case, meshes=meshes)
        except UnreducedGradientError as error:
            assert str(error).startswith("Unit '") and "got a gradient for a shard of its weight" in str(error)
            raised.add(kind)
        else:
            assert_trained_alike(trained, lambda case=case: alone(case.alone))
    assert raised == {kind for _, kind, _ in UNGUARDED}, "the guard is needed for every way to read"
    with pytest.raises(UnreducedGradientError, match=r"Unit 'model\.layers\.1' got a gradient for its weight"):
        train(Case(model=lambda: warm(tiny_model("llama")), layout="zero2"), meshes=meshes)


@pytest.mark.on_ranks(2, shared=True)
def test_second_backward_through_a_read_weight_is_refused():
    loop, _ = loop_of(Case(model=reads.reading("llama", "loss reads head"), layout="zero3"))
    loop.loss(0).backward(retain_graph=True)  # nothing was read
    with pytest.raises(OSDPError, match="retain_graph=True lets backward run again"):
        reads.loss_reads_head(loop.model, tiny_batch(0)).backward(retain_graph=True)
