"""Blocks that are compiled in place: which, copies of the model, recomputation, batch normalisation."""

import copy
import functools
import logging
import pickle

import pytest
import torch
from torch import nn
from transformers import AlbertConfig

from hf_osdp.modeling.compiled import CompiledForward, compile_blocks
from hf_osdp.modeling.wrapping import recompute
from hf_osdp.planner.block_forms import BlockForms
from hf_osdp.tracing.describe import describe

WITHOUT_CODE = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
"""Dynamo and the partitioner alone."""
NORMED = BlockForms(compiled_classes=("Normed",))


class Normed(nn.Module):
    """A block that counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).relu()


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(0)
    return Normed()


@pytest.mark.parametrize("generates_code", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_batch_norm_in_compiled_block_counts_each_batch_once(block, generates_code, monkeypatch):
    if not generates_code:
        monkeypatch.setattr(torch, "compile", WITHOUT_CODE)
    compiled = copy.deepcopy(block)
    compile_blocks(compiled, NORMED)
    for seed in range(2):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        for one in (compiled, block):
            one(x).square().sum().backward()
    found, wanted = ([*(p.grad for p in one.parameters()), *one.buffers()] for one in (compiled, block))
    torch.testing.assert_close(found, wanted)
    assert compiled.norm.num_batches_tracked == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_with_compiled_blocks_run_their_own_weights(block, copied, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_: lambda *args: forward(*args))  # it needs no code
    compile_blocks(block, NORMED)
    block(torch.ones(2, 4))
    other = copied(block)
    assert isinstance(other.forward, CompiledForward)
    with torch.no_grad():
        other.norm.weight.zero_()
    assert other(torch.ones(2, 4)).abs().max() == 0 and block.norm.weight.abs().max() > 0
    other(torch.ones(2, 4)).sum().backward()
    assert other.norm.bias.grad is not None and block.norm.bias.grad is None


def test_recomputed_compiled_block_saves_its_input_and_has_the_same_gradients(monkeypatch):
    monkeypatch.setattr(torch, "compile", WITHOUT_CODE)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
    compiled = copy.deepcopy(plain)
    compile_blocks(compiled, BlockForms(compiled_classes=("Sequential",)))
    recompute(compiled)
    x, saved = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        output = compiled(x)
    assert [tensor.shape for tensor in saved if tensor.numel()] == [x.shape]
    output.square().sum().backward()
    plain(x.detach()).square().sum().backward()
    for mine, wanted in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-12, atol=1e-14)


def test_model_without_blocks_to_compile_says_so(caplog):
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with caplog.at_level(logging.WARNING):
        albert = AlbertConfig(**small, embedding_size=16, vocab_size=64)
        assert describe(albert, sequence_length=8, compile=True).compiled_classes == ()
    assert "AlbertForMaskedLM has no blocks to compile" in caplog.text


def test_only_units_are_compiled_not_other_modules_of_class():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            inner = [nn.Sequential(nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 16))) for _ in "123"]
            self.blocks, self.head = nn.ModuleList(inner), nn.Sequential(nn.Linear(16, 16))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return {"loss": self.head(self.head(x)).sum()}

    model, options = Nested(), {"compile": True, "recomputation": False}
    found = describe(model, sequence_length=8, inputs=lambda n: {"x": torch.ones(n, 8, 16)}, **options)
    assert found.compiled_classes == ("Sequential",)
    compile_blocks(model, found, found.units)
    changed = [name for name, module in model.named_modules() if isinstance(module.forward, CompiledForward)]
    assert changed == ["blocks.0", "blocks.1", "blocks.2"]
