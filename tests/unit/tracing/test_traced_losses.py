"""A loss of the user's in the trace, forwards that were replaced, and weights that are read without a call."""

from __future__ import annotations

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
from hf_osdp.tracing.trace import TraceOptions, trace_segments

TOKENS = 8
GPT2 = {
    "n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def gpt2(real_model):
    return real_model("GPT2LMHeadModel", **GPT2)


def spans(description) -> dict[str, GatherSpan]:
    return {unit.fqn: unit.span for unit in description.units}


def saved(description, samples: int = 4) -> float:
    return sum(segment.saved_bytes(samples) for segment in description.segments)


def test_a_loss_is_traced_in_the_place_of_the_models_own(gpt2):
    def log_probabilities(model, batch):
        labels = batch.pop("labels")  # as trainers do: each run gets the batch anew
        return model(**batch).logits.log_softmax(-1).gather(-1, labels[..., None]).mean()

    plain = describe(gpt2, sequence_length=TOKENS, recomputation=False)
    own = describe(gpt2, sequence_length=TOKENS, loss=log_probabilities)
    assert own.trace == plain.trace and own.recomputable
    assert own.segments[-1].saved_bytes != plain.segments[-1].saved_bytes


def test_a_second_forward_on_other_rows_is_traced(gpt2):
    def twice(model, batch):
        with torch.no_grad():
            reference = model(**batch).logits
        return ((model(**batch).logits - reference) ** 2).mean()

    once, both = (describe(gpt2, sequence_length=TOKENS, recomputation=False, loss=loss) for loss in (None, twice))
    assert len(both.segments) > 1.5 * len(once.segments)
    assert spans(both)["transformer.h.0"] is GatherSpan.STEP  # it runs again while it is still needed
    assert all(parameter.grad is None for parameter in gpt2.parameters())


def test_a_loss_that_calls_the_model_it_knows_runs_the_fake_one(gpt2):
    known = describe(gpt2, sequence_length=TOKENS, recomputation=False, loss=lambda model, batch: gpt2(**batch))
    assert known == describe(gpt2, sequence_length=TOKENS, recomputation=False)
    assert all(parameter.grad is None for parameter in gpt2.parameters()) and "forward" not in vars(gpt2)


def test_a_reference_model_runs_wherever_its_weights_are_and_they_count_nowhere(gpt2):
    reference = copy.deepcopy(gpt2).to("meta")

    def compared(model, batch):
        with torch.no_grad():
            wanted = reference(**batch).logits
        return (model(**batch).logits - wanted).square().mean()

    alone, both = (describe(gpt2, sequence_length=TOKENS, recomputation=False, loss=loss) for loss in (None, compared))
    assert both.trace == alone.trace and spans(both) == spans(alone)
    weights = sum(parameter.nbytes for parameter in reference.parameters())
    assert saved(both, 0) < saved(alone, 0) + weights / 10


def test_a_loss_that_reads_a_weight_of_the_model_it_knows_is_refused(gpt2):
    units, inputs = find_units(gpt2), training_batch(gpt2, TOKENS)

    def loss(model, batch):
        return model(**batch).loss + gpt2.lm_head.weight.square().sum()

    with pytest.raises(DescriptionError, match=r"lm_head\.weight of a model that it keeps; use the model that is passed"):
        trace_segments(gpt2, units, inputs, TraceOptions(loss=loss))
    assert gpt2.lm_head.weight.grad is None


def test_a_batch_may_be_nested(gpt2):
    rows = training_batch(gpt2, TOKENS)
    nested = describe(
        gpt2, sequence_length=TOKENS, recomputation=False, inputs=lambda samples: {"features": rows(samples)},
        loss=lambda model, batch: model(**batch["features"]),
    )  # fmt: skip
    assert nested == describe(gpt2, sequence_length=TOKENS, recomputation=False)


def by_method(model: nn.Module) -> None:
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, **kwargs):
        assert isinstance(self.lm_head.weight, FakeTensor)
        return original(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def by_partial(model: nn.Module) -> None:
    model.forward = functools.partial(type(model).forward, model)


def by_partial_of_a_bound_method(model: nn.Module) -> None:
    model.forward = functools.partial(model.forward, return_dict=True)


def by_closure(model: nn.Module) -> None:
    model.forward = lambda **batch: type(model).forward(model, **batch)


@pytest.mark.parametrize("replace", [by_method, by_partial, by_partial_of_a_bound_method, by_closure])
def test_a_forward_that_was_replaced_on_the_instance_runs_on_the_copy(gpt2, replace):
    plain = describe(gpt2, sequence_length=TOKENS, recomputation=False)
    replace(gpt2)
    found = describe(gpt2, sequence_length=TOKENS, recomputation=False)
    assert [s.saved_bytes for s in found.segments] == [s.saved_bytes for s in plain.segments]
    assert found.trace == plain.trace and all(parameter.grad is None for parameter in gpt2.parameters())


def test_a_forward_that_was_replaced_inside_adapters_runs_on_the_copy(gpt2):
    peft = pytest.importorskip("peft")
    by_method(gpt2)
    model = peft.get_peft_model(gpt2, peft.LoraConfig(target_modules=["c_attn"]))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(model, mode, untie=True)
    assert fake.get_base_model().forward.__self__ is fake.get_base_model()
    assert describe(model, sequence_length=TOKENS, recomputation=False).trace.startswith("fake tensors")


def test_a_head_that_is_read_and_not_called_stays_gathered(gpt2):
    def fused(model, batch):
        hidden = model.transformer(batch["input_ids"], use_cache=False).last_hidden_state
        return nn.functional.cross_entropy((hidden @ model.lm_head.weight.T).flatten(0, 1), batch["labels"].flatten())

    found = spans(describe(gpt2, sequence_length=TOKENS, loss=fused))
    assert [name for name, span in found.items() if span is GatherSpan.STEP] == ["", "lm_head"]


def test_a_blocks_weight_that_a_loss_reads_keeps_its_block_gathered(gpt2):
    def decayed(model, batch):
        return model(**batch).loss + model.transformer.h[1].mlp.c_fc.weight.square().sum()

    found = spans(describe(gpt2, sequence_length=TOKENS, loss=decayed))
    assert [name for name, span in found.items() if span is GatherSpan.STEP] == ["", "transformer.h.1"]


def test_called_units_are_not_read(gpt2):
    found = spans(describe(gpt2, sequence_length=TOKENS, activation_checkpointing=True))
    assert [name for name, span in found.items() if span is GatherSpan.STEP] == [""]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale.exp()


def test_a_plain_module_is_one_unit_with_what_it_computes():
    found = describe(Plain(), sequence_length=1, inputs=lambda samples: {"x": torch.zeros(samples, 4)})
    assert [unit.fqn for unit in found.units] == [""] and found.numel == 21 and not found.block_classes
    assert sum(segment.forward.matmul_flops(3) for segment in found.segments) == 2 * 3 * 4 * 4
