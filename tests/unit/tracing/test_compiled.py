"""Blocks that are compiled: what their trace allocates, against what Inductor's own code does on the CPU."""

import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from transformers import AlbertConfig, GPT2Config, LlamaConfig

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.wrapping import recompute
from hf_osdp.planner.block_forms import BlockForms
from hf_osdp.planner.description import DType, ModelDescription, Recomputation
from hf_osdp.tracing.block_forms import change_blocks, forms_in_trace
from hf_osdp.tracing.block_forms.compiled import CompiledForward
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.fake_model import fake_copy
from hf_osdp.tracing.memory_tracker import MemoryTracker

HIDDEN, LENGTH, SAMPLES = 256, 128, 4
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2 = {"n_embd": HIDDEN, "n_head": 4, "n_layer": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {"gpt2": GPT2Config(**GPT2, **NO_DROPOUT), "llama": LlamaConfig(**LLAMA, num_hidden_layers=2, vocab_size=64)}
WAYS = {1.0: None, 0.53: Recomputation(budget=0.53), 0.0: Recomputation()}


def block_of(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model's first block, with the arguments of its call."""
    torch.manual_seed(0)
    model = type(build_on_meta(CONFIGS[name]))(CONFIGS[name]).train()
    block = model.transformer.h[0] if name == "gpt2" else model.model.layers[0]
    calls = []
    hook = block.register_forward_pre_hook(lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(input_ids=torch.zeros(SAMPLES, LENGTH, dtype=torch.long), use_cache=False)
    hook.remove()
    return block, *calls[0]


def with_leaf(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with hidden states that need a gradient."""
    hidden = (args or (kwargs["hidden_states"],))[0].detach().clone().requires_grad_()
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def compile_block(block: nn.Module, way: Recomputation | None = None) -> None:
    change_blocks(block, BlockForms(compiled_classes=(type(block).__name__,)))
    if way is not None:
        recompute(block, way)


def levels(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], memory: MemoryTracker) -> dict[str, float]:
    """Bytes in hidden states: forward's peak, what it leaves, backward's peak above that."""
    output = block(*args, **kwargs)
    hidden = output[0] if isinstance(output, tuple) else output
    forward, saved = memory.peak_bytes, memory.current_bytes
    del output
    memory.reset_peak()
    hidden.backward(torch.ones_like(hidden))
    unit = SAMPLES * LENGTH * HIDDEN * 4
    return {"forward": forward / unit, "saved": saved / unit, "backward": (memory.peak_bytes - saved) / unit}


def estimated(name: str, way: Recomputation | None) -> dict[str, float]:
    block, *call = block_of(name)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake, memory, empty = fake_copy(block, mode), MemoryTracker(block_bytes=1), torch.empty_strided
    with forms_in_trace(mode) as forms, mode:
        compile_block(fake, way)
        fakes = tree_map_only(torch.Tensor, lambda t: empty(t.shape, t.stride(), dtype=t.dtype), tuple(call))
        args, kwargs = with_leaf(*fakes)
        with memory:
            pass  # it has seen the mode of fake tensors, and counts what compiled code makes alone
        forms.memory = memory
        return levels(fake, args, kwargs, memory)


def allocated(name: str, way: Recomputation | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The same of Inductor's own code, whose wrapper allocates by a function that no dispatch mode sees."""
    import torch._inductor.compile_fx as inductor
    from torch._C._dynamo import guards

    memory = MemoryTracker(block_bytes=1)
    original = inductor.compile_fx

    def compile_fx(module: Any, inputs: Any) -> Any:
        def seen(graph: Any, examples: Any, **options: Any) -> Any:
            code = inductor.compile_fx_inner(graph, examples, **options)

            def run(args: list[Any]) -> Any:
                with memory:
                    return code(args)

            run._boxed_call = True
            return run

        return original(module, inputs, inner_compile=seen)

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    empty = torch.empty_strided
    monkeypatch.setattr(guards, "_empty_strided_cpu", lambda size, stride, dtype: empty(size, stride, dtype=dtype))
    block, *call = block_of(name)
    compile_block(block, way)
    torch._dynamo.reset()
    try:
        with torch._inductor.config.patch(force_disable_caches=True):  # code of another test has the other function
            return levels(block, *with_leaf(*call), memory)
    finally:
        torch._dynamo.reset()


CASES = [(name, budget) for name in CONFIGS for budget in WAYS]


@pytest.mark.slow  # code is generated
@pytest.mark.parametrize(("name", "budget"), CASES)
def test_trace_allocates_as_inductor_does(name, budget, monkeypatch):
    found, real = estimated(name, WAYS[budget]), allocated(name, WAYS[budget], monkeypatch)
    assert found["saved"] == pytest.approx(real["saved"], abs=0.02)
    assert found["forward"] == pytest.approx(real["forward"], abs=0.02)
    assert abs(found["backward"] - real["backward"]) <= 1.05  # of some 20, where another kernel comes first


@functools.cache
def described(*, compiled: bool) -> ModelDescription:
    return describe(
        CONFIGS["gpt2"], sequence_length=LENGTH, device_type="cuda", compute_dtype=DType.BFLOAT16, compile=compiled,
        partial_recomputation=compiled,
    )  # fmt: skip


@pytest.mark.slow
def test_compiled_blocks_save_less_and_move_less_than_eager_ones():
    eager, compiled = described(compiled=False), described(compiled=True)
    assert (eager.compiled_classes, compiled.compiled_classes) == ((), ("GPT2Block",))
    assert "GPT2Block compiled" in compiled.trace
    block = next(index for index, segment in enumerate(eager.segments) if segment.recomputed)
    one, other = eager.segments[block], compiled.segments[block]
    assert other.saved_bytes(SAMPLES) < 0.7 * one.saved_bytes(SAMPLES)
    assert other.forward.traffic_bytes(SAMPLES) < 0.4 * one.forward.traffic_bytes(SAMPLES)
    assert other.forward.operators(SAMPLES) < 0.4 * one.forward.operators(SAMPLES)
    for phase in ("forward", "backward"):  # the products are the same
        wanted = getattr(one, phase).matmul_flops(SAMPLES)
        assert getattr(other, phase).matmul_flops(SAMPLES) == pytest.approx(wanted, rel=0.01)


@pytest.mark.slow
def test_budgets_of_compiled_blocks_are_a_frontier():
    segments = [segment for segment in described(compiled=True).segments if segment.recomputed]
    for segment in segments:
        ways = [way.recomputation for way in segment.recomputed]
        assert ways[0] == Recomputation()
        assert all(way.budget is not None for way in ways[1:])
        saved = [way.costs.saved_bytes(SAMPLES) for way in segment.recomputed] + [segment.saved_bytes(SAMPLES)]
        assert saved == sorted(saved)
        shares = [way.share for way in ways]
        assert shares == sorted(shares, reverse=True)


class Breaking(nn.Module):
    """A block in which dynamo cannot stay in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return hidden + self.inner(hidden)


class Whole(Breaking):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.relu(self.inner(hidden))


class TwoKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Whole(), Breaking(), Whole(), Breaking()])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.float().sum()}


def test_blocks_that_do_not_compile_are_named_and_stay(caplog):
    with caplog.at_level(logging.WARNING), torch.device("meta"):
        model = TwoKinds()
    options = {"block_classes": ("Whole", "Breaking"), "recomputation": False, "compile": True}
    description = describe(model, sequence_length=1, inputs=lambda count: {"x": torch.zeros(count, 4, 8)}, **options)
    assert description.compiled_classes == ("Whole",)
    assert "Breaking does not compile as one graph" in caplog.text


def test_trace_leaves_nothing_in_dynamos_caches():
    described(compiled=True)
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    block = type(build_on_meta(CONFIGS["gpt2"]).transformer.h[0])
    for function in (block.forward, getattr(block.forward, "__wrapped__", block.forward)):
        assert not _debug_get_cache_entry_list(function.__code__)


def test_compile_without_dynamo_or_blocks_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        with torch.compiler.set_stance("force_eager"):
            assert describe(CONFIGS["llama"], sequence_length=16, compile=True).compiled_classes == ()
        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        albert = AlbertConfig(**small, embedding_size=16, vocab_size=64)
        assert describe(albert, sequence_length=8, compile=True).compiled_classes == ()
    assert "dynamo is switched off" in caplog.text and "AlbertForMaskedLM has no blocks to compile" in caplog.text


def test_checkpointed_blocks_compile_too():
    """Without dropout, torch keeps the generator's state beside attention, in an operator of its own."""
    options = {"sequence_length": LENGTH, "activation_checkpointing": True}
    eager, compiled = (describe(CONFIGS["llama"], compile=one, **options) for one in (False, True))
    assert compiled.compiled_classes == ("LlamaDecoderLayer",)
    block = next(i for i, s in enumerate(eager.segments) if eager.units[s.unit].class_name == "LlamaDecoderLayer")
    one, other = eager.segments[block], compiled.segments[block]
    assert other.saved_bytes(SAMPLES) == pytest.approx(one.saved_bytes(SAMPLES), rel=0.1)
    assert other.backward.matmul_flops(SAMPLES) == pytest.approx(one.backward.matmul_flops(SAMPLES), rel=0.15)


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
    change_blocks(model, found, found.units)
    changed = [name for name, module in model.named_modules() if isinstance(module.forward, CompiledForward)]
    assert changed == ["blocks.0", "blocks.1", "blocks.2"]
