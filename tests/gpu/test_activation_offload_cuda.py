"""Activations on the host of a real GPU: equality with plain torch, memory, and copies beside compute."""

import gc
import random

import pytest
import torch
from torch import nn

from benchmarks.cuda_memory import allocated_bytes
from hf_osdp.modeling import activations as offloading
from hf_osdp.modeling.activations import offload, tensors_of
from tests.helpers.offloading import WAYS, Way

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
SAMPLES, LENGTH, VOCABULARY = 4, 512, 1000
ROUNDS, LONGEST_SLEEP = 40, 10**7
"""Steps under delays, and the most cycles of one: some milliseconds, longer than any copy here takes."""


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request) -> Way:
    return request.param


def twelve_blocks() -> nn.Module:
    """GPT-2 whose blocks save much more than they have parameters, and whose attention is deterministic."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = dict(n_layer=12, n_embd=256, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY)
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).to(CUDA).train()
    model.config.use_cache = False
    model.set_attn_implementation("eager")
    return model


def changed(model: nn.Module, way: Way) -> nn.Module:
    """The same model after a change of its blocks."""
    for block in model.transformer.h:
        way(block)
    return model


def batch(samples: int = SAMPLES, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1)).to(CUDA)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits.square().mean()


def gradients(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of all parameters but those that lookups share, whose gradients are added up in any order."""
    loss_of(model, ids).backward()
    lookups = ("wte", "wpe")
    found = [p.grad for name, p in model.named_parameters() if not any(part in name for part in lookups)]
    model.zero_grad()
    return found


def all_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def step_bytes(model: nn.Module, ids: torch.Tensor) -> tuple[int, int]:
    """A second step's most bytes above those before it, and what its forward leaves for backward."""
    gradients(model, ids)
    before = allocated_bytes()
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(model, ids)
    left = torch.cuda.memory_allocated() - before
    loss.backward()
    model.zero_grad()
    return torch.cuda.max_memory_allocated() - before, left


def test_the_device_is_relieved_of_what_is_saved(way):
    """Forward leaves little more than embeddings and head; backward has one block back at a time."""
    ids = batch()
    plain_peak, plain_left = step_bytes(twelve_blocks(), ids)
    peak, left = step_bytes(changed(twelve_blocks(), way), ids)
    assert left < 0.1 * plain_left
    assert 0.75 * (plain_left - left) < plain_peak - peak < plain_left - left


def test_copies_run_beside_forward_and_end_with_it():
    block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(CUDA)
    computed = torch.cuda.Event()
    block[-1].register_forward_hook(lambda *_: computed.record())
    offload(block)
    x = torch.randn(8, 64, device=CUDA, requires_grad=True)
    block(x).sum().backward()  # so that memory is there, and no allocation waits
    torch.cuda.synchronize()
    copies = offloading._copy_stream(CUDA, False)
    with torch.cuda.stream(copies):
        torch.cuda._sleep(10**9)
    output = block(x)
    computed.synchronize()
    assert not copies.query()
    torch.cuda.current_stream().synchronize()
    assert copies.query() and output.requires_grad


def delay(model: nn.Module, dice: random.Random) -> None:
    """Hold up the compute stream or that of the copies, for a random time, at random modules in both passes."""

    def sleep(*_) -> None:
        if dice.random() < 0.3:
            stream = dice.choice([torch.cuda.current_stream(CUDA), offloading._copy_stream(CUDA, False)])
            with torch.cuda.stream(stream):
                torch.cuda._sleep(dice.randint(1, LONGEST_SLEEP))

    def sleep_in_backward(module: nn.Module, args: tuple, output: object) -> None:
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(sleep)

    for module in model.modules():
        module.register_forward_pre_hook(sleep)
        module.register_forward_hook(sleep_in_backward)


def test_no_delay_changes_a_gradient_or_leaves_memory_behind(way):
    """What is freed too early, or read before it has come, shows where streams are out of step."""
    ids = batch(2, 128)  # no tensor is too large to have values in a rehearsal
    wanted = gradients(twelve_blocks(), ids)
    model = changed(twelve_blocks(), way)
    delay(model, random.Random(0))
    gradients(model, ids)
    gc.collect()  # earlier models
    before = allocated_bytes()
    for step in range(ROUNDS):
        for columns in (256, 768, 1024):
            torch.full((*ids.shape, columns), float("nan"), device=CUDA)  # for those that read free memory
        assert all_equal(gradients(model, ids), wanted), f"step {step}"
    assert allocated_bytes() == before
