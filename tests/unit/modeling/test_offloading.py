"""Activations that wait on the host: the same gradients from less memory of the device."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hf_osdp.modeling import activations as offloading
from hf_osdp.modeling.activations import offload
from hf_osdp.modeling.wrapping import recompute
from tests.helpers.host_tracker import HostTracker
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.offloading import WAYS, Way


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


def blocks_offloaded(*ways: Way, dropout: float = 0.0) -> nn.Module:
    """GPT-2 with its first blocks changed, each its own way."""
    model = tiny_model("gpt2")
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    for block, change in zip(model.transformer.h, ways, strict=False):
        change(block)
    return model


def batch_loss(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return tiny_loss(model, tiny_batch(0))


def test_blocks_of_each_way_train_together_with_dropout_and_retained_graph():
    plain, model = (blocks_offloaded(*ways, dropout=0.2) for ways in ((), (*WAYS.values(), recompute)))
    for one in (plain, model):
        loss = batch_loss(one)
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def device_and_host_bytes(block: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Bytes that a block's forward leaves beside its parameters and output: its input and what it saves."""
    with HostTracker(block_bytes=1) as memory, memory.host_copies():
        output = block(x * 1)
        left = memory.current_bytes - output.nbytes
        assert output.requires_grad
        return left, memory.host_peak_bytes


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_only_the_output_is_left_on_the_device(way):
    x = torch.randn(2, 8, 20, dtype=torch.float64, requires_grad=True)
    saved, _ = device_and_host_bytes(blocks_offloaded().transformer.h[0], x)
    left, away = device_and_host_bytes(blocks_offloaded(way).transformer.h[0], x)
    assert left == 0 < saved
    assert away == (saved if way is offload else x.nbytes)


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


def test_views_of_one_storage_are_copied_once(host_copies):
    class Chunks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = x.sin().chunk(3, dim=-1)
            return q * k + k * v + v.t().t() * q

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


def test_change_in_place_between_two_saves():
    """As without offload: the gradient that would need what is lost is refused, the other is right."""
    offload(block := ChangedInPlace())
    before, after, _ = block(x := torch.randn(4, requires_grad=True))
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


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_host_memory_is_taken_only_while_a_graph_lives(host_copies, way):
    model = blocks_offloaded(way)
    with torch.no_grad():
        batch_loss(model.eval())
    assert host_copies == []
    loss = batch_loss(model.train())
    assert sizes(host_copies)
    del loss
    assert sizes(host_copies) == []
