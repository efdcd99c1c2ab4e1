"""The loss in chunks is the whole loss, with its gradients; logits are there where something reads them."""

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_osdp.errors import OSDPError
from hf_osdp.modeling.split.loss_chunks import chunk_loss, only_loss_read
from tests.helpers.architectures import tiny_architecture
from tests.helpers.models import VOCABULARY, tiny_batch, tiny_model

MODELS = {
    "bert": lambda: tiny_model("bert", layers=1),  # its head has a bias
    "llama": lambda: tiny_model("llama", layers=1),
    "gemma2": lambda: tiny_architecture("Gemma2ForCausalLM", final_logit_softcapping=0.5),
    "t5": lambda: tiny_architecture("T5ForConditionalGeneration"),
}
CHUNKS = 5


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **options):
    """transformers' ForCausalLMLoss in the logits' own dtype, with torch's options."""
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    options |= {"ignore_index": ignore_index, "reduction": reduction}
    loss = F.cross_entropy(logits.view(-1, vocab_size), targets, **options)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def pair(name: str = "llama") -> tuple[nn.Module, nn.Module]:
    """A model, and its equal with the loss in chunks."""
    model = MODELS[name]()
    if name in ("llama", "gemma2"):
        model.loss_function = causal_loss
    chunked = copy.deepcopy(model)
    chunk_loss(chunked, CHUNKS)
    return model, chunked


def batch() -> dict[str, torch.Tensor]:
    """Some labels do not count."""
    given = tiny_batch(0)
    given["labels"][0, :7] = -100
    return given


def assert_gradients_alike(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(theirs.grad, mine.grad, rtol=0, atol=1e-14, msg=name)


class LargestTensor(TorchDispatchMode):
    """Sees the most elements of any one tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


ITEMS = {"num_items_in_batch": torch.tensor(77)}


@pytest.mark.parametrize(
    ("name", "options"),
    [("gemma2", {}), ("gemma2", ITEMS), ("gemma2", {"label_smoothing": 0.2}), ("bert", {}), ("t5", {})],
)
def test_loss_and_gradients_are_those_of_whole_logits(name, options):
    whole, chunked = pair(name)
    losses = [model(**batch(), **options).loss for model in (whole, chunked)]
    for loss in losses:
        (3 * loss).backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-14)
    assert_gradients_alike(whole, chunked)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_has_whole_logits_unless_only_its_loss_is_read(name):
    whole, chunked = (model.eval() for model in pair(name))
    seen, tokens = [], batch()["input_ids"].numel()
    with torch.no_grad():
        loss = whole(**batch()).loss
        for context in (nullcontext(), only_loss_read(chunked)):
            with context, LargestTensor() as largest:
                torch.testing.assert_close(chunked(**batch()).loss, loss, rtol=0, atol=1e-14)
            seen.append(largest.elements)
    assert seen[1] < tokens * whole.config.vocab_size <= seen[0]
    assert isinstance(chunked(**batch()).logits, torch.Tensor)


def test_gradients_of_low_precision_are_summed_in_float32():
    exact, _ = pair()
    whole, chunked = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    chunk_loss(chunked, 48)
    for model in (exact, whole, chunked):
        model(**batch()).loss.backward()
    wanted, of_whole, found = (model.lm_head.weight.grad.double() for model in (exact, whole, chunked))
    assert (found - wanted).norm() < 1.3 * (of_whole - wanted).norm()


def test_logits_that_are_read_are_the_models_and_said_to_save_nothing(caplog):
    whole, chunked = pair("gemma2")
    with caplog.at_level(logging.WARNING):
        for model in (whole, chunked):
            out = model(**batch())
            (out.loss + out.logits.logsumexp(-1).square().mean() + (out.logits[:, -1] + 1).mean()).backward()
    assert out.logits.shape == (8, 12, whole.config.vocab_size) == tuple(out.logits.size())
    assert_gradients_alike(whole, chunked)
    assert [record.message for record in caplog.records] == [
        f"The logits are read in training, so the loss in {CHUNKS} chunks saves no memory; the results are the same."
    ]


def weighted(logits, labels, vocab_size, **how):
    losses = F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1), **how)
    return (losses * torch.linspace(0, 1, losses.numel(), dtype=torch.float64)).sum() if losses.dim() else losses


def shifted(logits, labels, vocab_size, **_):
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, vocab_size), labels[..., 1:].reshape(-1))


def with_loss(loss) -> Callable[[nn.Module], object]:
    return lambda model: setattr(model, "loss_function", loss)


CHANGES = {
    "loss by token": with_loss(partial(weighted, reduction="none")),
    "loss of weighted classes": with_loss(partial(weighted, weight=torch.rand(VOCABULARY, dtype=torch.float64))),
    "loss shifted by slices, as in older models": with_loss(shifted),
    "frozen head": lambda model: model.lm_head.requires_grad_(False),
    "frozen backbone": lambda model: model.model.requires_grad_(False),
    "hook, which sees the sum of all chunks": lambda model: model.lm_head.weight.register_hook(torch.sign),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_model_has_the_gradients_of_whole_logits_which_never_exist(name):
    whole, chunked = pair()
    seen = []
    for model in (whole, chunked):
        CHANGES[name](model)
        with LargestTensor() as largest:
            model(**batch()).loss.backward()
        seen.append(largest.elements)
    assert_gradients_alike(whole, chunked)
    if "loss" not in name:
        tokens = batch()["input_ids"].numel()
        assert seen == [tokens * VOCABULARY, tokens * chunked.config.intermediate_size]
    assert chunked.lm_head._has_warned is (name in ("loss by token", "loss of weighted classes"))


def test_second_backward_and_fp16_are_refused():
    chunked = pair()[1]
    loss = chunked(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(OSDPError, match="differentiated twice"):
        loss.backward()
    with pytest.raises(OSDPError, match="underflow in fp16; use bf16"), torch.autocast("cpu", torch.float16):
        chunked(**batch())


@pytest.mark.parametrize("change", [lambda logits: logits.div_(2), torch.relu_, lambda logits: logits.retain_grad()])
def test_changes_in_place_that_the_loss_would_miss_are_refused(change):
    _, chunked = pair()

    def loss_after(logits, labels, vocab_size, **options):
        change(logits)
        return causal_loss(logits, labels, vocab_size)

    chunked.loss_function = loss_after
    with pytest.raises(OSDPError, match="of the logits has no effect on a loss in chunks"):
        chunked(**batch())


def test_models_without_such_a_head_are_refused():
    bert, hooked, other = tiny_architecture("BertForSequenceClassification"), MODELS["llama"](), MODELS["llama"]()
    hooked.lm_head.register_forward_hook(lambda *_: None)
    other.lm_head = nn.Sequential(other.lm_head)
    for model, says in (
        (bert, "no vocabulary projection with labels; leave it whole"),
        (pair()[1], f"is already in {CHUNKS} chunks"),
        (hooked, "has hooks, which would see no logits; leave it whole"),
        (other, "is a Sequential, not a plain nn"),
    ):
        with pytest.raises(OSDPError, match=says):
            chunk_loss(model, CHUNKS + 1)
