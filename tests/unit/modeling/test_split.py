"""Operators, embeddings and heads in slices compute what whole ones do; what cannot be split is refused."""

import copy
import functools

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BertForMaskedLM, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput
from transformers.pytorch_utils import Conv1D

from hf_osdp.errors import OSDPError
from hf_osdp.modeling.parts import part_names
from hf_osdp.modeling.split.deferred_logits import DeferredLogits
from hf_osdp.modeling.split.modules import SplitLinear
from hf_osdp.modeling.split.names import is_split, merge_state_dict, whole_parameters
from hf_osdp.modeling.split.operators import SplitHead, split_operators
from hf_osdp.planner.split import OperatorSplit
from tests.helpers.models import tiny_batch, tiny_model


def operator(kind: str, features: int = 11, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With tiny integers for weights: sums of their products are exact, in bfloat16 too."""
    module = Conv1D(features, 6) if kind == "conv1d" else nn.Linear(6, features, bias=kind == "linear")
    for parameter in module.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape).to(dtype)
    return module


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("slices", [2, 4, 11])
@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
def test_split_operator_computes_outputs_and_gradients_of_the_whole(kind, slices, dtype):
    whole = operator(kind, dtype=dtype)
    split = SplitLinear(whole, slices)
    value, grad = integers(2, 3, 6, dtype=dtype), integers(2, 3, 11, dtype=dtype)
    inputs = [value.clone().requires_grad_() for _ in range(2)]
    outputs = [module(x) for module, x in zip((whole, split), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward(grad)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for leaf, dim in split.leaves.items():
        assert torch.equal(torch.cat([part.grad for part in split.parts(leaf)], dim), getattr(whole, leaf).grad)


def test_split_operator_takes_weights_over():
    whole = operator("linear")
    whole.weight.requires_grad_(False)
    whole.eval()
    split = SplitLinear(whole, 2)
    assert split.slices[0].weight.data_ptr() == whole.weight.data_ptr()
    assert not split.slices[1].weight.requires_grad and split.slices[1].bias.requires_grad
    assert not split.training and not split.slices[0].training
    assert all(part.weight.is_contiguous() for part in SplitLinear(operator("conv1d"), 2).slices)
    with pytest.raises(AttributeError, match="no 'weight': it is split into 2 slices; leave it whole"):
        split.weight  # noqa: B018


def test_slice_may_change_between_forward_and_backward_of_another():
    split = SplitLinear(operator("linear"), 2)
    loss = split.slices[0](integers(3, 6).requires_grad_()).sum()
    with torch.no_grad():
        split.slices[1].weight.add_(1)
    loss.backward()


def test_operators_are_split_on_meta_and_fake_tensors():
    with torch.device("meta"):
        assert SplitLinear(operator("conv1d"), 4)(torch.empty(2, 6)).shape == (2, 11)
    with FakeTensorMode():
        split = SplitLinear(nn.Linear(6, 11), 4)
        split(torch.empty(2, 6)).sum().backward()
        assert split.slices[3].weight.grad.shape == (2, 6)


@pytest.mark.parametrize("padding", [None, 0, 4, -1])
@pytest.mark.parametrize("slices", [2, 11])
def test_split_embedding_equals_whole_in_lookups_and_gradient(slices, padding):
    whole, head = nn.Embedding(11, 6, padding_idx=padding), nn.Linear(6, 11, bias=False)
    whole.weight = head.weight
    split = SplitHead(head, slices).tie(whole)
    ids, grad = torch.tensor([[0, 3, 10, 4], [4, 9, 1, 0]]), torch.randn(2, 4, 6)
    assert torch.equal(split(ids), whole(ids))
    for module in (whole, split):
        module(ids).backward(grad)
        with pytest.raises(IndexError):
            module(torch.tensor([1, 11]))
        with pytest.raises(IndexError):
            module(torch.tensor([1, -1]))
    assert torch.equal(torch.cat([part.grad for part in split.parts("weight")]), whole.weight.grad)
    with torch.no_grad():
        assert torch.equal(split(ids), whole(ids))


VOCABULARY = 61
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
SIZES = {**TOKENS, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
LLAMA = {**SIZES, "intermediate_size": 32}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
GPT = {**TOKENS, "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16, **NO_DROPOUT}
OPT = {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 16, "dropout": 0.0, "pad_token_id": 1}
CONFIGS = {
    "gpt2": transformers.GPT2Config(**GPT),  # tied
    "opt": transformers.OPTConfig(**SIZES, **OPT),  # tied, padding
    "llama": LlamaConfig(**LLAMA),
    "mistral": transformers.MistralConfig(**LLAMA, num_key_value_heads=1, tie_word_embeddings=True),
    "gptj": transformers.GPTJConfig(**GPT, rotary_dim=4),  # a head with bias
    "cohere": transformers.CohereConfig(**LLAMA, tie_word_embeddings=False),  # scales its logits
}


def model_of(kind: str, slices: int = 1, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).train()
    for parameter in model.parameters():  # logits that differ, so that errors show
        parameter.data.mul_(3)
    return split(model, slices, "lm_head") if slices > 1 else model


def split(model: nn.Module, slices: int, *names: str) -> nn.Module:
    split_operators(model, [OperatorSplit(fqn=name, slices=slices) for name in names])
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
    "items": {"num_items_in_batch": 17}, "items as a tensor": {"num_items_in_batch": torch.tensor(23)},
    "shifted": {"shift_labels": batch()["labels"].roll(1)}, "ignore": {"ignore_index": 5},
}  # fmt: skip
CASES = {f"{kind} in {slices}": (kind, slices, {}) for kind in CONFIGS for slices in (2, 7, VOCABULARY)}
CASES |= {name: ("llama", 4, options) for name, options in OPTIONS.items()}


@pytest.mark.parametrize(("kind", "slices", "options"), CASES.values(), ids=CASES)
def test_loss_and_gradients_equal_the_whole_models(kind, slices, options):
    whole, parts, inputs = model_of(kind), model_of(kind, slices), batch()
    if "ignore_index" in options:
        inputs["labels"] = inputs["labels"].clamp(min=5)
    want = exact_loss(whole(inputs["input_ids"]).logits, inputs["labels"], **options)
    out = parts(**inputs, **options)
    assert abs(out.loss - want).item() < 1e-12
    want.backward()
    out.loss.backward()
    gradients = merge_state_dict({name: parameter.grad for name, parameter in parts.named_parameters()}, parts)
    for name, parameter in whole.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max().item() < 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_of_low_precision_is_transformers_own(dtype):
    want, got = (model_of("gpt2", slices, dtype)(**batch()).loss for slices in (1, 4))
    assert got.dtype == want.dtype == torch.float32
    assert abs(got - want).item() < 2e-6 * want.item()


def test_ignored_labels_give_nan_and_those_outside_fail():
    inputs = batch()
    for model in (model_of("llama"), model_of("llama", 4)):
        assert model(inputs["input_ids"], labels=torch.full((3, 12), -100)).loss.isnan()
        for wrong in (VOCABULARY, -7):
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                model(inputs["input_ids"], labels=inputs["labels"].clone().index_fill_(1, torch.tensor(5), wrong))


def test_logits_are_whole_but_in_training_with_labels():
    whole, parts, inputs = model_of("gpt2"), model_of("gpt2", 4), batch()
    ids = inputs["input_ids"]
    out = parts(**inputs)
    assert isinstance(out.logits, DeferredLogits)
    assert (out.logits.whole() - whole(ids).logits).abs().max() < 1e-12
    assert (parts(ids).logits - whole(ids).logits).abs().max() < 1e-12
    parts.eval(), whole.eval()
    evaluated = parts(**inputs)
    assert (evaluated.logits - whole(ids).logits).abs().max() < 1e-12
    assert abs(evaluated.loss - whole(**inputs).loss) < 1e-6
    generated = [model.generate(ids[1:2], max_new_tokens=3, do_sample=False) for model in (parts, whole)]
    assert torch.equal(*generated)


def test_failed_forward_leaves_nothing_behind():
    parts, inputs = model_of("llama", 4), batch()
    with pytest.raises(IndexError):
        parts(input_ids=inputs["input_ids"] + VOCABULARY, labels=inputs["labels"])
    assert parts.lm_head(torch.zeros(1, 16, dtype=torch.float64)).shape == (1, VOCABULARY)


def test_copy_of_a_split_model_is_one_of_its_own():
    parts = model_of("gpt2", 4)
    copied = copy.deepcopy(parts)
    assert copied.lm_head.slices is copied.transformer.wte.slices and copied.lm_head.slices is not parts.lm_head.slices
    for parameter in parts.parameters():
        parameter.data.zero_()
    assert abs(copied(**batch()).loss - model_of("gpt2", 4)(**batch()).loss) < 1e-12
    copied.tie_weights()
    assert copied.lm_head.slices is copied.transformer.wte.slices


class SliceSized(TorchDispatchMode):
    """Of tensors with a row for each token, and as wide as a slice at least: the width, and how many are alive."""

    def __init__(self, tokens: int, columns: int):
        super().__init__()
        self.tokens, self.columns, self.live, self.most, self.widest = tokens, columns, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shape = out.shape if isinstance(out, torch.Tensor) else ()
        if len(shape) > 1 and shape[-2] == self.tokens and shape[-1] >= self.columns:
            storage = out.untyped_storage()
            self.live[storage._cdata] = StorageWeakRef(storage)
            self.live = {key: ref for key, ref in self.live.items() if not ref.expired()}
            self.widest, self.most = max(self.widest, out.shape[-1]), max(self.most, len(self.live))
        return out


def test_no_more_than_a_slice_of_the_logits_exists():
    """Beside a slice's logits, one temporary of log-sum-exp; in backward the logits become their gradient."""
    vocabulary, slices, tokens = 2048, 8, 64
    config = LlamaConfig(**{**SIZES, "vocab_size": vocabulary}, intermediate_size=32)
    model = split(AutoModelForCausalLM.from_config(config).train(), slices, "lm_head")
    ids = torch.randint(0, vocabulary, (1, tokens))
    with SliceSized(tokens, vocabulary // slices) as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    assert seen.widest == vocabulary // slices and seen.most <= 2


NAMES = ("lm_head", "transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_attn", "transformer.h.2.mlp.c_proj")
GPT2 = functools.partial(tiny_model, "gpt2")


@pytest.mark.parametrize("slices", [2, 3, 20])
def test_outputs_and_state_dict_are_the_whole_models(slices):
    whole, inputs = GPT2(), tiny_batch(0)["input_ids"]
    model = split(split(GPT2(), slices, NAMES[0]), slices, *NAMES[1:])
    assert is_split(model) and not is_split(whole)
    assert (model(inputs).logits - whole(inputs).logits).abs().max().item() < 1e-14
    state, want = model.state_dict(), whole.state_dict()
    assert set(state) == set(want)
    assert all(torch.equal(state[name], value) for name, value in want.items())
    assert state["lm_head.weight"] is state["transformer.wte.weight"]


def test_pretrained_weights_load_and_are_saved(tmp_path):
    whole, model = GPT2(seed=5), split(GPT2(), 4, *NAMES)
    assert str(model.load_state_dict(whole.state_dict())) == "<All keys matched successfully>"
    model.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_loading_tells_what_does_not_fit():
    model, state = split(GPT2(), 4, *NAMES), GPT2().state_dict()
    message = r"transformer.h.0.mlp.c_fc.weight: shape \(20, 79\) was given, but the model's is \(20, 80\)"
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict({**state, "transformer.h.0.mlp.c_fc.weight": torch.zeros(20, 79)})
    del state["transformer.h.0.mlp.c_fc.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*transformer.h.0.mlp.c_fc.slices.0.bias"):
        model.load_state_dict(state)


def test_slices_have_names_in_the_whole_and_of_their_own():
    model = split(GPT2(), 4, *NAMES)
    names = whole_parameters(model)
    fc = names["transformer.h.0.mlp.c_fc.weight"]
    assert fc.parts == tuple(f"transformer.h.0.mlp.c_fc.slices.{index}.weight" for index in range(4))
    assert (fc.dim, fc.sizes, fc.shape, fc.starts) == (1, (20,) * 4, (20, 80), (0, 20, 40, 60))
    assert names["lm_head.weight"].parts == names["transformer.wte.weight"].parts
    assert names["lm_head.weight"].sizes == (16, 15, 15, 15)
    found = part_names(split(GPT2(), 2, "transformer.h.0.mlp.c_fc", "lm_head"))
    slices = [(owner, index) for owner in ("wte", "h.0.mlp.c_fc") for index in (0, 1)]
    assert list(found.items()) == [(f"transformer.{owner}.slices.{i}", owner == "wte") for owner, i in slices]
    assert not part_names(GPT2())


def test_blocks_in_a_checkpoint_wrapper_keep_their_names():
    model = GPT2()
    model.transformer.h[0] = checkpoint_wrapper(model.transformer.h[0])
    want = set(model.state_dict())
    split(model, 2, "transformer.h.0.mlp.c_fc")
    assert set(whole_parameters(model)) == {"transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.bias"}
    assert set(model.state_dict()) == want


def test_operator_in_two_places_is_split_in_both():
    model = nn.ModuleDict({"a": nn.Sequential(shared := nn.Linear(4, 6)), "b": nn.Sequential(shared, nn.Linear(6, 4))})
    split(model, 2, "b.0")
    assert model["a"][0] is model["b"][0] and is_split(model["a"])


def changed(change, model=None):
    model = model or GPT2()
    change(model)
    return model


class NoLabels(LlamaForCausalLM):
    def __init__(self):
        super().__init__(CONFIGS["llama"])

    def forward(self, input_ids):
        return self.lm_head(self.model(input_ids).last_hidden_state)


BERT = transformers.BertConfig(**LLAMA, max_position_embeddings=16)
FC = "transformer.h.0.mlp.c_fc"
TWO = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
WRONG = {
    "absent": (GPT2, "transformer.mlp.c_fc", f"is not a module of GPT2LMHeadModel; did you mean '{FC}'?"),
    "absent, nothing alike": (GPT2, "nothing", "take a name from named_modules"),
    "too many slices": (GPT2, "lm_head", f"has {VOCABULARY} output features, too few for 62 slices; use at most 61"),
}
REFUSED = WRONG | {
    "another class": (GPT2, "transformer.h.0.ln_1", "is a LayerNorm, but only nn.Linear and GPT-2's Conv1D"),
    "a subclass": (lambda: nn.MultiheadAttention(4, 2), "out_proj", "is a NonDynamicallyQuantizableLinear"),
    "the embedding": (GPT2, "transformer.wte", "name the head"),
    "tied": (lambda: changed(lambda m: setattr(m["down"], "weight", m["up"].weight), TWO), "up",
             "shares its weight or bias with 'down', which is not split with it; leave it whole"),
    "split already": (lambda: split(GPT2(), 2, "lm_head"), "lm_head", "already in 2 slices"),
    "a slice": (lambda: split(GPT2(), 2, "lm_head"), "transformer.wte.slices.0", "is a VocabularySlice"),
    "hooks": (lambda: changed(lambda m: m.get_submodule(FC).register_forward_hook(print)), FC, "has hooks"),
    "max_norm": (lambda: changed(lambda m: setattr(m.transformer.wte, "max_norm", 1.0)), "lm_head",
                 "one plain nn.Embedding"),
    "a bias that is shared": (lambda: BertForMaskedLM(BERT), "cls.predictions.decoder",
                              "a tied head can be split only without bias"),
    "no labels": (NoLabels, "lm_head", "of NoLabels cannot be split: its forward takes no labels"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_and_left_alone(name):
    model, fqn, says = REFUSED[name]
    built = model()
    before = {name: type(module) for name, module in built.named_modules()}
    with pytest.raises(ValueError if name in WRONG else OSDPError) as caught:
        split(built, 62 if name == "too many slices" else 2, *(["lm_head"] if fqn == "nothing" else []), fqn)
    assert says in str(caught.value) and repr(fqn) in str(caught.value) and "\n" not in str(caught.value)
    assert {name: type(module) for name, module in built.named_modules()} == before


def test_head_whose_logits_are_changed_gives_the_same_loss():
    class Changing(LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            logits = 3 * torch.tanh(self.lm_head(self.model(input_ids).last_hidden_state) / 3)
            flat = logits.view(-1, VOCABULARY), labels.view(-1)
            loss = nn.functional.cross_entropy(*flat, label_smoothing=self.smoothing)
            return CausalLMOutput(loss=loss, logits=logits)

    torch.manual_seed(0)
    whole = Changing(CONFIGS["llama"]).double().train()
    for whole.smoothing in (0.0, 0.1):
        want = whole(**batch()).loss
        assert abs(split(copy.deepcopy(whole), 4, "lm_head")(**batch()).loss - want).item() < 1e-12
