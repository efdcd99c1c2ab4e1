"""A vocabulary projection in slices gives transformers' causal loss, and whole logits only where somebody asks for them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPTJConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OPTConfig,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from hf_osdp.errors import OSDPError
from hf_osdp.modeling.split.apply_split import split_operators
from hf_osdp.modeling.split.names import merge_state_dict
from hf_osdp.planner.split import OperatorSplit

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIGS = {
    "gpt2": GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0,
        eos_token_id=0,
    ),  # tied
    "opt": OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=16, dropout=0.0, pad_token_id=1),  # tied, padding
    "llama": LlamaConfig(**SIZES, intermediate_size=32),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=1, intermediate_size=32, tie_word_embeddings=True),
    "gptj": GPTJConfig(
        n_layer=1, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=16, rotary_dim=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    ),  # a head with bias
}  # fmt: skip


def model_of(kind: str, slices: int = 1, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).train()
    for parameter in model.parameters():  # logits that differ, so that errors show
        parameter.data.mul_(3)
    if slices > 1:
        split_operators(model, [OperatorSplit(fqn="lm_head", slices=slices)])
    return model


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (3, 12), generator=generator)
    ids[0, :3] = 1  # OPT's padding
    labels = torch.randint(0, VOCABULARY, (3, 12), generator=generator)
    labels[1, 4:9] = -100
    return {"input_ids": ids, "labels": labels}


def exact_loss(logits: torch.Tensor, labels: torch.Tensor, **options) -> torch.Tensor:
    """transformers' own, were it not for its cast to float32."""

    class Exact(torch.Tensor):
        def float(self):
            return self

    return ForCausalLMLoss(logits.as_subclass(Exact), labels, VOCABULARY, **options).as_subclass(torch.Tensor)


OPTIONS = {
    "mean": {},
    "items": {"num_items_in_batch": 17},
    "items as a tensor": {"num_items_in_batch": torch.tensor(23)},
    "shifted": {"shift_labels": batch()["labels"].roll(1)},
    "ignore": {"ignore_index": 5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_takes_what_transformers_takes(options):
    inputs, split = batch(), model_of("llama", slices=4)
    if "ignore_index" in options:
        inputs["labels"] = inputs["labels"].clamp(min=5)
    whole = exact_loss(model_of("llama")(inputs["input_ids"]).logits, inputs["labels"], **options)
    assert abs(split(**inputs, **options).loss - whole).item() < 1e-12


@pytest.mark.parametrize("slices", [2, 7, VOCABULARY])
@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_gradients_equal_the_whole_models(kind, slices):
    whole, split, inputs = model_of(kind), model_of(kind, slices), batch()
    want = exact_loss(whole(inputs["input_ids"]).logits, inputs["labels"])
    out = split(**inputs)
    assert abs(out.loss - want).item() < 1e-12
    want.backward()
    out.loss.backward()
    gradients = merge_state_dict({name: parameter.grad for name, parameter in split.named_parameters()}, split)
    for name, parameter in whole.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max().item() < 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_of_low_precision_is_transformers_own(dtype):
    whole, split, inputs = model_of("gpt2", dtype=dtype), model_of("gpt2", 4, dtype), batch()
    want, got = whole(**inputs).loss, split(**inputs).loss
    assert got.dtype == want.dtype == torch.float32
    assert abs(got - want).item() < 2e-6 * want.item()


def test_no_labels_that_count_give_what_transformers_gives():
    inputs = batch()
    inputs["labels"].fill_(-100)
    assert model_of("llama", 4)(**inputs).loss.isnan() and model_of("llama")(**inputs).loss.isnan()


@pytest.mark.parametrize("wrong", [VOCABULARY, -7])
def test_labels_outside_the_vocabulary_fail(wrong):
    inputs = batch()
    inputs["labels"][0, 5] = wrong
    for slices in (1, 4):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            model_of("llama", slices)(**inputs)


# ------------------------------------------------------------------------------------------------------------------ logits


def test_logits_are_whole_but_in_training_with_labels():
    whole, split, inputs = model_of("gpt2"), model_of("gpt2", 4), batch()
    ids = inputs["input_ids"]
    out = split(**inputs)
    assert out.logits is None and "logits" not in out
    as_tuple = split(**inputs, return_dict=False)
    assert as_tuple[0].ndim == 0 and not any(torch.is_tensor(value) and 0 in value.shape for value in as_tuple)
    assert (split(ids).logits - whole(ids).logits).abs().max() < 1e-12
    split.eval(), whole.eval()
    evaluated = split(**inputs)
    assert (evaluated.logits - whole(ids).logits).abs().max() < 1e-12
    assert abs(evaluated.loss - whole(**inputs).loss) < 1e-6
    assert torch.equal(
        split.generate(ids[1:2], max_new_tokens=3, do_sample=False), whole.generate(ids[1:2], max_new_tokens=3, do_sample=False)
    )


def test_a_failed_forward_leaves_nothing_behind():
    split, inputs = model_of("llama", 4), batch()
    with pytest.raises(IndexError):
        split(input_ids=inputs["input_ids"] + VOCABULARY, labels=inputs["labels"])
    assert split.lm_head(torch.zeros(1, 16, dtype=torch.float64)).shape == (1, VOCABULARY)


def test_copies_are_whole_models():
    split = model_of("gpt2", 4)
    copied = copy.deepcopy(split)
    assert copied.lm_head.slices is copied.transformer.wte.slices and copied.lm_head.slices is not split.lm_head.slices
    assert copied.loss_function.__self__ is copied.lm_head
    for parameter in split.parameters():
        parameter.data.zero_()
    assert abs(copied(**batch()).loss - model_of("gpt2", 4)(**batch()).loss) < 1e-12
    split.train(), copied.tie_weights()
    assert copied.lm_head.slices is copied.transformer.wte.slices


class SliceSized(TorchDispatchMode):
    """How wide tensors with a row for each token are, of those as wide as a slice at least, and how many are alive at once."""

    def __init__(self, tokens: int, columns: int):
        super().__init__()
        self.tokens, self.columns, self.live, self.most, self.widest = tokens, columns, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim > 1 and out.shape[-2] == self.tokens and out.shape[-1] >= self.columns:
            storage = out.untyped_storage()
            self.live[storage._cdata] = StorageWeakRef(storage)
            self.live = {key: ref for key, ref in self.live.items() if not ref.expired()}
            self.widest, self.most = max(self.widest, out.shape[-1]), max(self.most, len(self.live))
        return out


def test_no_more_than_a_slice_of_the_logits_exists():
    """A slice's logits and one temporary of log-sum-exp in forward; in backward the logits made again become their gradient."""
    vocabulary, slices, tokens = 2048, 8, 64
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "vocab_size": vocabulary}, intermediate_size=32)).train()
    split_operators(model, [OperatorSplit(fqn="lm_head", slices=slices)])
    ids = torch.randint(0, vocabulary, (1, tokens))
    with SliceSized(tokens, vocabulary // slices) as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    assert seen.widest == vocabulary // slices
    assert seen.most <= 2


# ---------------------------------------------------------------------------------------------------------------- refusals


def refused(model: nn.Module, fqn: str = "lm_head") -> str:
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(OSDPError) as caught:
        split_operators(model, [OperatorSplit(fqn=fqn, slices=4)])
    assert {name: type(module) for name, module in model.named_modules()} == before
    return str(caught.value)


def test_models_with_another_loss_are_refused():
    bert = BertForMaskedLM(BertConfig(**{**SIZES, "intermediate_size": 32, "max_position_embeddings": 16}))
    assert "'cls.predictions.decoder' of BertForMaskedLM cannot be split: its forward does not compute" in refused(
        bert, "cls.predictions.decoder"
    )
    assert "leave the head whole" in refused(GPT2DoubleHeadsModel(CONFIGS["gpt2"]))
    own = model_of("llama")
    own.loss_function = lambda *args, **kwargs: None
    assert "not transformers' ForCausalLMLoss" in refused(own)


def test_models_that_scale_their_logits_are_refused():
    model = AutoModelForCausalLM.from_config(CohereConfig(**SIZES, intermediate_size=32, tie_word_embeddings=False))
    assert "its forward puts logit_scale between head and loss" in refused(model)


def test_a_model_that_changes_its_logits_is_refused_when_it_runs():
    class Doubled(LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            logits = 2 * self.lm_head(self.model(input_ids).last_hidden_state)
            loss = None if labels is None else self.loss_function(logits, labels, vocab_size=VOCABULARY)
            return CausalLMOutput(loss=loss, logits=logits)

    model = Doubled(CONFIGS["llama"]).train()
    split_operators(model, [OperatorSplit(fqn="lm_head", slices=4)])
    with pytest.raises(OSDPError, match="changes its logits between head and loss"):
        model(**batch())
    assert model(batch()["input_ids"]).logits.shape == (3, 12, VOCABULARY)


def test_embeddings_that_do_more_than_look_up_are_refused():
    model = model_of("gpt2")
    model.transformer.wte.max_norm = 1.0
    assert "one plain nn.Embedding" in refused(model)
