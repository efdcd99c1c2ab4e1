"""Activations that wait on the host: the same gradients from less memory of the device."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hf_osdp.modeling import activations as offloading
from hf_osdp.modeling.activations import change_forward, offload
from hf_osdp.modeling.wrapping import recompute
from hf_osdp.planner.description import Recomputation
from hf_osdp.planner.placement import Activations
from tests.helpers.host_tracker import HostTracker
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.offloading import WAYS, Way, recompute_and_offload
from tests.helpers.read_back import activations_of


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request) -> Way:
    return request.param


@pytest.fixture
def host_copies() -> Iterator[list[weakref.ref[torch.Tensor]]]:
    """References to all memory that is taken on the host."""
    references, stock = [], offloading._page_locked

    def allocate(like: torch.Tensor) -> torch.Tensor:
        memory = stock(like)
        references.append(weakref.ref(memory))
        return memory

    with offloading.host_memory(allocate):
        yield references


def sizes(references: list[weakref.ref[torch.Tensor]]) -> list[int]:
    """Elements of those that are alive."""
    return sorted(memory.numel() for memory in (reference() for reference in references) if memory is not None)


def blocks(model: nn.Module) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def two_layers(name: str, *, attention: str = "sdpa", dropout: float = 0.0) -> nn.Module:
    model = tiny_model(name, layers=2)
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    return model


def gradients(model, loss, *, backwards=1) -> list[torch.Tensor]:
    """The loss, and what backward leaves in parameters."""
    torch.manual_seed(1)
    value = loss(model)
    for step in range(backwards):
        value.backward(retain_graph=step + 1 < backwards)
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


def batch_loss(model: nn.Module) -> torch.Tensor:
    return tiny_loss(model, tiny_batch(0))


def all_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def changed(model: nn.Module, way: Way) -> nn.Module:
    for block in blocks(model):
        way(block)
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_losses_and_gradients_are_the_plain_models(name, attention, dropout, way):
    plain, model = (two_layers(name, attention=attention, dropout=dropout) for _ in range(2))
    changed(model, way)
    assert all_equal(gradients(model, batch_loss), gradients(plain, batch_loss))


def test_blocks_of_each_way_train_together_with_retained_graph():
    plain, model = (tiny_model("gpt2", layers=4) for _ in range(2))
    for block, change in zip(blocks(model), (offload, recompute, recompute_and_offload), strict=False):
        change(block)
    assert all_equal(gradients(model, batch_loss, backwards=2), gradients(plain, batch_loss, backwards=2))


def test_names_stay_and_each_way_is_told_apart(way):
    plain, model = two_layers("gpt2"), changed(two_layers("gpt2"), way)
    for block in blocks(model):  # as if it were prepared again
        change_forward(block, Activations(recomputation=Recomputation(), offloads=True))
    for names in ("named_modules", "named_parameters", "state_dict"):
        assert list(dict(getattr(model, names)())) == list(dict(getattr(plain, names)()))
    recompute(blocks(plain)[0])
    found = [activations_of(block) for block in (*blocks(model), blocks(plain)[0])]
    told = [(one.recomputes, one.offloads) for one in found]
    assert told == [(way is not offload, True)] * 2 + [(True, False)]


def device_and_host_bytes(block: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Bytes that a block's forward leaves beside its parameters and output: its input and what it saves."""
    with HostTracker(block_bytes=1) as memory, memory.host_copies():
        output = block(x * 1)
        left = memory.current_bytes - output.nbytes
        assert output.requires_grad
        return left, memory.host_peak_bytes


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_only_the_output_is_left_on_the_device(name, way):
    model = two_layers(name)
    x = torch.randn(2, 8, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    positions = {"position_embeddings": model.model.rotary_emb(x, torch.arange(8)[None])} if name == "llama" else {}
    block = blocks(model)[0]
    block.register_forward_pre_hook(lambda module, args, kwargs: (args, {**kwargs, **positions}), with_kwargs=True)
    saved, _ = device_and_host_bytes(block, x)
    way(block)
    left, away = device_and_host_bytes(block, x)
    assert left == 0 < saved
    assert away == (x.nbytes if activations_of(block).recomputes else saved)


class Toy(nn.Module):
    """A block with all that others hold: parameter, buffer, mask, position embeddings, its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5, bias=False)
        self.register_buffer("scale", torch.full((5,), 2.0))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x) * mask + self.scale * positions)


def test_what_others_hold_is_not_copied(host_copies):
    offload(block := Toy())
    x, mask, positions = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4), (3, 5), (1, 5)))
    output = block(x * 1, mask, positions=positions)
    assert sizes(host_copies) == [3 * 4, 3 * 5]  # the input, and the product that the mask multiplies
    output.sum().backward()
    assert sizes(host_copies) == []


class Chunks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.sin().chunk(3, dim=-1)
        return q * k + k * v + v.t().t() * q


def test_views_of_one_storage_are_copied_once(host_copies):
    block, x = Chunks(), torch.randn(2, 6, requires_grad=True)
    wanted = torch.autograd.grad(block(x).sum(), x)[0]
    offload(block)
    output = block(x)
    assert sizes(host_copies) == [12, 12]  # the input of the sine, and its result
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], wanted)


class ChangedInPlace(nn.Module):
    """Saves a tensor, changes it, and saves it again."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        between = x * 2
        before = between.sin()
        between.add_(1)
        return before, between.cos(), between


@pytest.mark.parametrize("offloaded", [False, True])
def test_change_in_place_between_two_saves(offloaded):
    """As without offload: the gradient that would need what is lost is refused, the other is right."""
    block, x = ChangedInPlace(), torch.randn(4, requires_grad=True)
    if offloaded:
        offload(block)
    before, after, _ = block(x)
    assert torch.equal(torch.autograd.grad(after.sum(), x)[0], -(x * 2 + 1).sin() * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.sum().backward()


class Lazy(nn.Module):
    """Saves a storage as it is and, lazily, its conjugate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x * 1)
        return torch.view_as_real(z.conj() * z * z.conj())


def test_what_storage_and_strides_do_not_say_is_not_lost():
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    pair = two_tensor(torch.randn(3), torch.randn(3))
    for block, x in ((Lazy(), torch.randn(3, 2)), (nn.Sequential(nn.GELU(), nn.Tanh()), pair)):
        x.requires_grad_()
        wanted = torch.autograd.grad((block(x * 1) ** 2).sum(), x)[0]
        offload(block)
        assert torch.equal(torch.autograd.grad((block(x * 1) ** 2).sum(), x)[0], wanted)


def test_host_memory_is_taken_only_while_a_graph_lives(host_copies, way):
    model = changed(two_layers("gpt2"), way)
    with torch.no_grad():
        batch_loss(model.eval())
    assert host_copies == []
    loss = batch_loss(model.train())
    assert sizes(host_copies)
    del loss
    assert sizes(host_copies) == []


def t5_loss(model: nn.Module) -> torch.Tensor:
    ids = tiny_batch(0)["input_ids"]
    return model(input_ids=ids, decoder_input_ids=ids[:, :5], use_cache=False).logits.square().mean()


def test_encoder_and_decoder_train_as_the_plain_model(real_model, way):
    plain, model = (real_model("T5ForConditionalGeneration").double().train() for _ in range(2))
    for block in (*model.encoder.block, *model.decoder.block):
        way(block)
    assert all_equal(gradients(model, t5_loss), gradients(plain, t5_loss))
