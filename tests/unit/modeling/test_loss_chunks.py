"""The loss in chunks is the whole loss, with its gradients; logits are there where something reads them."""

import copy
import logging
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_osdp.errors import OSDPError
from hf_osdp.modeling.split.deferred_logits import DeferredLogits
from hf_osdp.modeling.split.loss_chunks import chunk_loss
from tests.helpers.models import VOCABULARY, tiny_batch, tiny_model

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2}
T5 = {"vocab_size": VOCABULARY, "d_model": 20, "d_ff": 36, "num_layers": 1, "num_heads": 2, "d_kv": 10}
MODELS = {  # the first caps its logits, the second scales them
    "gemma2": ("Gemma2", {**SMALL, "num_key_value_heads": 1, "head_dim": 10, "final_logit_softcapping": 0.5}),
    "cohere": ("Cohere", {**SMALL, "num_key_value_heads": 1, "logit_scale": 0.3, "pad_token_id": 0}),
    "t5": ("T5", {**T5, "dropout_rate": 0.0, "decoder_start_token_id": 0}),
}
CHUNKS = 5


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **options):
    """transformers' ForCausalLMLoss in the logits' own dtype, with torch's options."""
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    options |= {"ignore_index": ignore_index, "reduction": reduction}
    loss = F.cross_entropy(logits.view(-1, vocab_size), targets, **options)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in MODELS:
        prefix, sizes = MODELS[name]
        kind = "ForConditionalGeneration" if name == "t5" else "ForCausalLM"
        model = getattr(transformers, prefix + kind)(getattr(transformers, f"{prefix}Config")(**sizes))
    else:
        model = tiny_model(name, layers=1)
    model.double().train()
    if hasattr(model, "loss_function") and name not in ("bert", "t5"):
        model.loss_function = causal_loss
    return model


def pair(name: str = "llama") -> tuple[nn.Module, nn.Module]:
    """A model, and its equal with the loss in chunks."""
    model = model_of(name)
    chunked = copy.deepcopy(model)
    chunk_loss(chunked, CHUNKS)
    return model, chunked


def batch(step: int = 0) -> dict[str, torch.Tensor]:
    """Some labels do not count."""
    given = tiny_batch(step)
    given["labels"][0, :7] = -100
    return given


def assert_gradients_alike(one: nn.Module, other: nn.Module, tolerance: float = 1e-14) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(theirs.grad, mine.grad, rtol=0, atol=tolerance, msg=name)


class LargestTensor(TorchDispatchMode):
    """Sees the most elements of any one tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


OPTIONS = {"mean": {}, "sum": {"num_items_in_batch": torch.tensor(77)}, "smoothed": {"label_smoothing": 0.2}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "cohere", "bert", "t5"])
def test_loss_and_gradients_are_those_of_whole_logits(name, options):
    whole, chunked = pair(name)
    if options and whole.loss_function is not causal_loss:
        pytest.skip("the model's forward knows no such option")
    losses = [model(**batch(), **options).loss for model in (whole, chunked)]
    (3 * losses[0]).backward()
    (3 * losses[1]).backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-14)
    assert_gradients_alike(whole, chunked)


def test_logits_of_all_tokens_never_exist():
    whole, chunked = pair()
    seen = []
    for model in (whole, chunked):
        with LargestTensor() as largest:
            model(**batch()).loss.backward()
        seen.append(largest.elements)
    tokens = batch()["input_ids"].numel()
    assert seen == [tokens * VOCABULARY, tokens * chunked.config.intermediate_size]


def test_gradients_of_low_precision_are_summed_in_float32():
    exact = model_of("llama")
    low = copy.deepcopy(exact).bfloat16()
    chunk_loss(low, 48)
    for model in (exact, low):
        model(**batch()).loss.backward()
    gradient, expected = low.lm_head.weight.grad, exact.lm_head.weight.grad
    whole = copy.deepcopy(exact).bfloat16()
    whole.zero_grad()
    whole(**batch()).loss.backward()
    found = (gradient, whole.lm_head.weight.grad)
    error, of_whole = ((one.double() - expected).norm() / expected.norm() for one in found)
    assert gradient.dtype is torch.bfloat16 and error < 1.3 * of_whole


def test_logits_that_are_read_are_the_models_and_train_it(caplog):
    whole, chunked = pair("cohere")
    with caplog.at_level(logging.WARNING):
        losses = []
        for model in (whole, chunked):
            out = model(**batch())
            losses.append(out.loss + out.logits.logsumexp(-1).square().mean() + (out.logits[:, -1] + 1).mean())
    assert isinstance(out.logits, DeferredLogits)
    assert out.logits.shape == (8, 12, VOCABULARY) == tuple(out.logits.size())
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-13)
    assert_gradients_alike(whole, chunked)
    assert [record.message for record in caplog.records] == [
        f"The logits are read in training, so the loss in {CHUNKS} chunks saves no memory; the results are the same."
    ]


def weighted(logits, labels, vocab_size, **how):
    losses = F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1), **how)
    return (losses * torch.linspace(0, 1, losses.numel(), dtype=torch.float64)).sum() if losses.dim() else losses


def shifted(logits, labels, vocab_size, **_):
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, vocab_size), labels[..., 1:].reshape(-1))


LOSSES = {
    "by token": partial(weighted, reduction="none"),
    "classes": partial(weighted, weight=torch.rand(VOCABULARY, dtype=torch.float64)),
    "shifted by slices, as in older models": shifted,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_other_forms_have_the_gradients_of_whole_logits(loss):
    whole, chunked = pair()
    for model in (whole, chunked):
        model.loss_function = loss
        model(**batch()).loss.backward()
    assert_gradients_alike(whole, chunked)
    assert loss is not shifted or not chunked.lm_head._has_warned


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_what_is_frozen_gets_no_gradient(frozen):
    whole, chunked = pair()
    for model in (whole, chunked):
        getattr(model, frozen).requires_grad_(False)
        model(**batch()).loss.backward()
    assert_gradients_alike(whole, chunked)


def test_hooks_of_a_weight_see_the_sum_of_all_chunks():
    whole, chunked = pair()
    seen = []
    for model in (whole, chunked):
        model.lm_head.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        model(**batch()).loss.backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=1e-14)
    assert_gradients_alike(whole, chunked)


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
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))
    hooked, other = model_of("llama"), model_of("llama")
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
