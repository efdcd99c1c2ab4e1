"""Blocks that are recomputed but for chosen operators: the same gradients, random numbers included, or refusals."""

import copy
import logging
import random

import pytest
import torch
from torch import nn

from hf_osdp.modeling import selective
from hf_osdp.modeling.activations import change_forward
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.replaced import replaced
from hf_osdp.modeling.wrapping import recomputation_of, recompute
from hf_osdp.planner.description import Recomputation
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.recomputation import LoggedCall, OperatorLog
from tests.helpers.architectures import tiny_architecture
from tests.helpers.problems import problem

MODELS = {
    "GPT2LMHeadModel": {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "MixtralForCausalLM": {"attention_dropout": 0.1, "num_local_experts": 3},
}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return next(list(module) for module in model.modules() if isinstance(module, nn.ModuleList))


def saveable(block: nn.Module, run) -> list[LoggedCall]:
    """Operators of a block whose outputs can be saved."""
    original, log = block.forward, OperatorLog(block)

    def forward(*args, **kwargs):
        with log:
            output = original(*args, **kwargs)
        log.returned(output)
        return output

    with replaced(block, forward=forward):
        run()
    return [call for call in log.calls if call.saved_bytes]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_model_whatever_is_saved(name):
    model = tiny_architecture(name, **MODELS[name])
    batch = training_batch(model, 16)(2)

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        logits = model(**batch).logits
        (logits.square().mean() + torch.rand_like(logits).mul(logits).sum()).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    wanted, logged = gradients(copy.deepcopy(model)), copy.deepcopy(model)
    calls = saveable(blocks_of(logged)[0], lambda: gradients(logged))
    assert len(calls) > 8
    dice = random.Random(name)
    for number in (1, 3, len(calls) // 2, len(calls)):
        one = copy.deepcopy(model)
        for block in blocks_of(one):
            saved = tuple(call.call for call in dice.sample(calls, number))
            recompute(block, Recomputation(saved_calls=saved))
            assert recomputation_of(block).saved_calls == saved
        found = gradients(one)
        assert found.keys() == wanted.keys()
        for parameter, gradient in wanted.items():
            assert torch.equal(found[parameter], gradient), (number, parameter)


class Block(nn.Module):
    """A product, dropout, and what `after` does to the product's output."""

    def __init__(self, after=lambda product: product):
        super().__init__()
        self.linear, self.after = nn.Linear(4, 4), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.linear(x)
        hidden = nn.functional.dropout(product.relu(), 0.5) * product.sigmoid()
        self.after(product)
        return nn.functional.dropout(hidden, 0.5)


def gradients_of(block: nn.Module, *saved: str) -> list[torch.Tensor]:
    """Gradients of two steps, with the outputs of these calls saved."""
    block = copy.deepcopy(block)
    recompute(block, Recomputation(saved_calls=saved))
    found = []
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(3, 4, requires_grad=True)
        block(x).square().sum().backward()
        found += [x.grad, *(parameter.grad.clone() for parameter in block.parameters())]
    return found


class Caching(nn.Module):
    """Fills a table in its first forward, as rotary embeddings do, so that the run in backward makes fewer calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0) * 0.5 * 2.0
        return (self.linear(x) * self.table).mul(x).sigmoid() * 3.0


class InPlace(nn.Module):
    """Writes into a view of a product, whose version that view does not share."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x[None])
        return hidden.add_(1).sigmoid() * hidden.cos()


CACHED = [(Caching, call) for call in ("mul#0", "mul#1", "mul#2", "mul#3", "mul#4", "addmm#0", "sigmoid#0")]


@pytest.mark.parametrize(("kind", "saved"), [*CACHED, (InPlace, "mm#0")])
def test_block_with_cache_or_change_in_place_has_plain_gradients(kind, saved):
    torch.manual_seed(0)
    block = kind()
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(block), gradients_of(block, saved), strict=True))


def test_output_that_others_change_in_place_is_refused():
    kept = []
    block = Block(after=kept.append)
    recompute(block, Recomputation(saved_calls=("addmm#0",)))
    loss = block(torch.ones(3, 4, requires_grad=True)).sum()
    kept[0].detach().add_(1)
    with pytest.raises(RuntimeError, match="output of addmm#0, which the plan saves for backward"):
        loss.backward()


def test_operators_that_do_not_run_are_named_once_and_recomputed(caplog):
    selective._warn_of_missing.cache_clear()
    block, plain = Block(), Block()
    plain.load_state_dict(block.state_dict())
    recompute(block, Recomputation(saved_calls=("addmm#0", "mm#7")))
    for _ in range(2):
        for one in (block, plain):
            torch.manual_seed(0)
            one(torch.ones(3, 4)).sum().backward()
    assert torch.equal(block.linear.weight.grad, plain.linear.weight.grad)
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1 and "The plan saves outputs of mm that this step did not compute" in said[0].getMessage()


class Shared(nn.Module):
    """Uses one weight three times, whose cast autocast keeps."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.functional.dropout(self.linear(self.linear(x).relu()), 0.5)) * self.linear(x).sigmoid()


@pytest.mark.parametrize("saved", [(), ("addmm#0", "addmm#2", "relu#0"), ("native_layer_norm#0", "sigmoid#0")])
@pytest.mark.parametrize("cached_before", [False, True])
def test_casts_that_autocast_keeps_change_no_gradients_or_saves(saved, cached_before, monkeypatch):
    taken, take = [], selective._Output.take
    monkeypatch.setattr(selective._Output, "take", lambda self, call: taken.append(call) or take(self, call))

    def gradients(block: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(3, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            start = block.linear(x) if cached_before else x  # its cast is there before, and gone in the second run
            loss = block(start).float().square().sum()
        loss.backward()
        return [x.grad, *(parameter.grad for parameter in block.parameters())]

    torch.manual_seed(0)
    plain = Shared()
    one = copy.deepcopy(plain)
    recompute(one, Recomputation(saved_calls=saved))
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(one), strict=True))
    assert sorted(taken) == sorted(saved), "each is handed out once"


class Drawing(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, generator: torch.Generator | None):
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.linear(x).sigmoid() * torch.rand(x.shape, generator=self.generator)).square()


def test_blocks_with_a_generator_of_their_own_are_not_recomputed(caplog):
    def described(generator: torch.Generator | None):
        options = {"inputs": lambda count: {"input": torch.zeros(count, 4, 8)}, "block_classes": ["Drawing"]}
        options["loss"] = lambda model, batch: model(**batch).mean()
        return describe(nn.Sequential(Drawing(generator), Drawing(generator)), sequence_length=4, **options)

    assert any(described(None).recomputations) and not caplog.records
    found = described(torch.Generator())
    assert not any(found.recomputations)
    assert "No block of Sequential can recompute: DescriptionError: Drawing draws random numbers" in caplog.text
    assert "would draw different ones. Draw from torch's default generator to allow it" in caplog.text
    job = TrainingJob(global_batch_size=2, recompute=True)
    with pytest.raises(ValueError, match="recompute=True, but no block of this model can be recomputed"):
        search(problem(found, preset("cpu", devices_per_node=2), job))


class Keeping(nn.Module):
    """Keeps a tensor between its runs."""

    def __init__(self, kind: str):
        super().__init__()
        self.linear, self.kind, self.sum = nn.Linear(8, 8), kind, torch.zeros(8)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        h = self.linear(x).sigmoid()
        if self.kind == "cache":
            cache.append(h)
            h = torch.stack(cache).sum(0)
        elif self.kind == "sum":
            self.sum = self.sum + h.detach().mean((0, 1))
            h = h + self.sum
        elif self.kind == "sum in place":
            self.sum.add_(h.detach().mean((0, 1)))
            h = h + self.sum
        elif self.kind == "table":
            if not hasattr(self, "table"):
                self.table = torch.arange(8.0).cos()
            h = h * self.table
        elif self.kind == "last":
            self.last = h
        return x + h.square()


class WithCaches(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, [])
        return x


@pytest.mark.parametrize("kind", ["cache", "sum", "sum in place", "table", "last"])
def test_blocks_that_would_read_what_their_first_run_kept_are_not_recomputed(kind, caplog):
    def train(recomputed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = WithCaches(kind)
        for block in model.blocks if recomputed else ():
            change_forward(block, Activations.RECOMPUTE)
        model(torch.linspace(-1, 1, 64).view(2, 4, 8)).mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    is_equal = all(map(torch.equal, train(recomputed=True), train(recomputed=False)))
    assert is_equal == (kind in ("table", "last"))
    options = {"inputs": lambda count: {"x": torch.zeros(count, 4, 8)}, "block_classes": ["Keeping"]}
    found = describe(WithCaches(kind), sequence_length=4, loss=lambda model, batch: model(**batch).mean(), **options)
    assert any(found.recomputations) == is_equal
    assert ("Keeping keeps tensors between its runs, such as a cache that it fills" in caplog.text) != is_equal


def test_saved_operators_run_once_and_the_others_twice():
    ran = []

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(selective.operator_name(func))
            return func(*args, **(kwargs or {}))

    block = Block()
    recompute(block, Recomputation(saved_calls=("addmm#0", "sigmoid#0")))
    with Counts():
        block(torch.ones(3, 4)).sum().backward()
    assert [ran.count(name) for name in ("addmm", "sigmoid", "relu")] == [1, 1, 2]
