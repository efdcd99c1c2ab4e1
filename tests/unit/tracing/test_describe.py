"""Descriptions of models and configurations, with their own loss or the user's."""

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_osdp.errors import DescriptionError
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import GatherSpan
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.fake_model import fake_copy
from hf_osdp.tracing.options import DescribeOptions
from hf_osdp.tracing.trace import trace_segments
from tests.helpers.small_models import built


def test_model_and_its_configuration_give_one_description(configuration, real_model):
    given = real_model("LlamaForCausalLM"), configuration("LlamaForCausalLM")
    of_model, of_configuration = (describe(one, sequence_length=16, partial_recomputation=False) for one in given)
    assert of_model == of_configuration
    order = [of_model.units[s.unit].fqn for s in of_model.segments]
    assert order == ["model.embed_tokens", "", "model.layers.0", "model.layers.1", "", "lm_head", ""]


PAIR = ("x", "target")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, target)


class Deep(Plain):
    """As deep as its values say."""

    def forward(self, x, target):
        for _ in torch.unique(self.layers[0](x).round()):
            x = self.layers[0](x)
        return super().forward(x, target)


@pytest.mark.parametrize(
    ("holds", "reason"), [(False, "runs other units .* depends on the batch"), (True, "gradient's history")]
)
def test_reason_of_a_model_that_cannot_be_traced_is_said(holds, reason):
    model = Plain() if holds else Deep()
    model.held = [model.layers[0](torch.zeros(1, 8))] if holds else []
    with pytest.raises(DescriptionError, match=reason) as raised:
        describe(model, sequence_length=1, inputs=lambda n: dict.fromkeys(PAIR, torch.zeros(n, 8)))
    assert "fake kernel" not in str(raised.value)


def test_plain_module_is_traced_with_inputs_that_it_takes():
    for config in (None, {"hidden_size": 8}):
        model = Plain()
        model.config = config
        with pytest.raises(DescriptionError, match=r"Plain is not a transformers model.*pass inputs"):
            describe(model, sequence_length=1)
    with pytest.raises(DescriptionError, match="Plain cannot be traced on fake tensors: TypeError"):
        describe(Plain(), sequence_length=1, inputs=lambda n: {"y": torch.zeros(n, 8)})
    description = describe(Plain(), sequence_length=1, inputs=lambda n: dict.fromkeys(PAIR, torch.zeros(n, 8)))
    assert [s.unit for s in description.segments] == [1, 2, 3, 0]
    assert description.segments[1].saved_bytes(5) == 2 * 5 * 8 * 4  # the product and its GELU
    assert description.input_bytes(5) == 2 * 5 * 8 * 4


TOKENS = 8


@pytest.fixture
def gpt2(real_model):
    return real_model("GPT2LMHeadModel", tie_word_embeddings=False)


def described(model: nn.Module, **options):
    return describe(model, sequence_length=TOKENS, recomputation=False, **options)


def in_use_all_step(description) -> list[str]:
    return [unit.fqn for unit in description.units if unit.span is GatherSpan.STEP]


def test_reversible_blocks_whose_parts_run_in_backward_are_in_use_all_step():
    description = describe(built("ReformerForMaskedLM").float(), sequence_length=24, recomputation=False)
    assert {"reformer.encoder.layers.0", "reformer.encoder.layers.1"} <= set(in_use_all_step(description))


def test_loss_is_traced_in_the_place_of_the_models_own(gpt2):
    def log_probabilities(model, batch):
        labels = batch["rows"].pop("labels")  # as trainers do: each run gets the batch anew
        return model(**batch["rows"]).logits.log_softmax(-1).gather(-1, labels[..., None]).mean()

    rows = training_batch(gpt2, TOKENS)
    plain = described(gpt2)
    own = described(gpt2, loss=log_probabilities, inputs=lambda samples: {"rows": rows(samples)})
    assert own.trace == plain.trace
    assert own.segments[-1].saved_bytes != plain.segments[-1].saved_bytes


@pytest.mark.parametrize("in_one_model", [True, False])
def test_second_forward_is_traced_but_another_models_weights_never_count(gpt2, in_one_model):
    reference = gpt2 if in_one_model else copy.deepcopy(gpt2).to("meta")

    def compared(model, batch):
        with torch.no_grad():
            wanted = (model if in_one_model else reference)(**batch).logits
        return (model(**batch).logits - wanted).square().mean()

    alone, both = described(gpt2), described(gpt2, loss=compared)
    if in_one_model:  # it runs again while it is still needed
        assert len(both.segments) > 1.5 * len(alone.segments) and "transformer.h.0" in in_use_all_step(both)
    else:
        assert both.trace == alone.trace and both.units == alone.units
        saved = [sum(segment.saved_bytes(0) for segment in found.segments) for found in (alone, both)]
        assert saved[1] < saved[0] + sum(parameter.nbytes for parameter in reference.parameters()) / 10
    assert all(parameter.grad is None for parameter in gpt2.parameters())


def test_loss_that_reads_weights_of_known_model_is_refused(gpt2):
    def loss(model, batch):
        return model(**batch).loss + gpt2.lm_head.weight.square().sum()

    with pytest.raises(DescriptionError, match=r"lm_head\.weight of a model that it stores"):
        run = DescribeOptions(sequence_length=TOKENS, loss=loss)
        trace_segments(gpt2, find_units(gpt2), training_batch(gpt2, TOKENS), run)
    assert gpt2.lm_head.weight.grad is None


def by_method(model: nn.Module):
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, **kwargs):
        assert isinstance(self.lm_head.weight, FakeTensor)
        return original(*args, **kwargs)

    return types.MethodType(forward, model)


FORWARDS = {
    "method": by_method,
    "partial": lambda model: functools.partial(type(model).forward, model),
    "partial of a bound method": lambda model: functools.partial(model.forward, return_dict=True),
    "closure": lambda model: lambda **batch: type(model).forward(model, **batch),
}


@pytest.mark.parametrize("replaced", FORWARDS.values(), ids=FORWARDS)
def test_forward_replaced_on_the_instance_runs_on_the_copy(gpt2, replaced):
    plain = described(gpt2)
    gpt2.forward = replaced(gpt2)
    found = described(gpt2)
    assert [s.saved_bytes for s in found.segments] == [s.saved_bytes for s in plain.segments]
    assert found.trace == plain.trace and all(parameter.grad is None for parameter in gpt2.parameters())


class Counter:
    calls = 0

    def count(self, module, args, output):
        self.calls += 1
        return output * self.calls


def test_hooks_count_in_copies(gpt2):
    closed_over, counter = Counter(), Counter()
    gpt2.transformer.ln_f.register_forward_hook(lambda *given: closed_over.count(*given))
    gpt2.transformer.ln_f.register_forward_hook(counter.count)
    assert described(gpt2).trace.startswith("fake tensors")
    assert (closed_over.calls, counter.calls) == (0, 0)


def test_forward_that_was_replaced_inside_adapters_runs_on_the_copy(gpt2):
    peft = pytest.importorskip("peft")
    gpt2.forward = by_method(gpt2)
    model = peft.get_peft_model(gpt2, peft.LoraConfig(target_modules=["c_attn"]))
    fake = fake_copy(model, FakeTensorMode(allow_non_fake_inputs=True), untie=True)
    assert fake.get_base_model().forward.__self__ is fake.get_base_model()


def fused(model, batch):
    hidden = model.transformer(batch["input_ids"], use_cache=False).last_hidden_state
    return nn.functional.cross_entropy((hidden @ model.lm_head.weight.T).flatten(0, 1), batch["labels"].flatten())


def decayed(model, batch):
    return model(**batch).loss + model.transformer.h[1].mlp.c_fc.weight.square().sum()


@pytest.mark.parametrize(("loss", "read"), [(fused, ["lm_head"]), (decayed, ["transformer.h.1"]), (None, [])])
def test_units_whose_weights_a_loss_reads_stay_gathered(gpt2, loss, read):
    assert in_use_all_step(described(gpt2, loss=loss, activation_checkpointing=loss is None)) == ["", *read]
