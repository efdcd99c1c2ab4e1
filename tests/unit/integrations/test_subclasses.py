"""Trainers of others under a plan: how classes are put together, which loss is planned for, what stays as it is."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Seq2SeqTrainer

import hf_osdp
from hf_osdp import OSDPConfig, with_osdp
from tests.helpers.trainers import small_arguments, token_rows

CONFIG = OSDPConfig(hardware="cpu")


class Scaled(transformers.Trainer):
    """Has a constructor that knows nothing of a plan, and changes the model after the stock one has ended."""

    def __init__(self, model, args, scale, **kwargs):
        super().__init__(model=model, args=args, **kwargs)
        self.scale = scale
        self.seen = []
        self.judge = torch.nn.Linear(3, 5)
        forward = model.forward
        model.forward = functools.wraps(forward)(lambda **inputs: forward(**inputs))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen.append(1)
        logits = model(**inputs).logits
        extra = torch.zeros(len(logits), 4096)  # what the model's own loss does not allocate
        return self.scale * logits.float().pow(2).mean() + extra.exp().mean() * logits.mean()


def model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes))


@pytest.fixture
def about(tmp_path):
    return {"args": small_arguments(tmp_path), "train_dataset": token_rows(2, 16), "osdp": CONFIG}


def test_osdp_is_an_option_of_subclasses_unaware_of_it(about):
    class Mine(Scaled, hf_osdp.Trainer):
        pass

    class Known(hf_osdp.Trainer):
        def __init__(self, *args, osdp=None, **kwargs):
            self.given = osdp
            super().__init__(*args, osdp=osdp, **kwargs)

    class Bound(Mine):
        def __init__(self, model, args, scale, train_dataset):
            super().__init__(model, args, scale, train_dataset=train_dataset)

    for cls in (with_osdp(Scaled), Mine, Bound):
        trainer = cls(model(), scale=2.0, **about)
        assert isinstance(trainer, Scaled) and isinstance(trainer, hf_osdp.Trainer) and trainer.scale == 2.0
    assert trainer.plan is not None
    assert with_osdp(Scaled)(model(), scale=2.0, **{**about, "osdp": False}).plan is None
    known = Known(model=model(), **about)
    assert known.given is CONFIG and known.plan is not None
    assert with_osdp(Scaled).__name__ == "Scaled"
    assert "scale" in inspect.signature(with_osdp(Scaled).__init__).parameters


def test_with_osdp_keeps_known_classes_and_refuses_others():
    assert with_osdp(transformers.Trainer) is hf_osdp.Trainer and with_osdp(hf_osdp.Trainer) is hf_osdp.Trainer
    assert issubclass(with_osdp(Seq2SeqTrainer), Seq2SeqTrainer)
    with pytest.raises(ValueError, match=r"with_osdp needs a subclass of transformers\.Trainer"):
        with_osdp(dict)
    with pytest.raises(TypeError, match="Wrong lists hf_osdp's Trainer before Scaled"):
        type("Wrong", (hf_osdp.Trainer, Scaled), {})


def test_plan_is_made_for_the_loss_that_runs(about):
    own, stock = with_osdp(Scaled)(model(), scale=1.0, **about), hf_osdp.Trainer(model=model(), **about)
    assert own.plan.sequence_length == stock.plan.sequence_length == 16
    assert own.seen == [] and "compute_loss" not in vars(own), "the trainer itself stays as it is"
    descriptions = [trainer._run.inputs.description for trainer in (own, stock)]
    held = [sum(segment.saved_bytes.bytes(2) for segment in each.segments) for each in descriptions]
    assert held[0] != held[1]
    assert descriptions[0].trace.startswith("fake tensors") and descriptions[0].other_bytes == (3 * 5 + 5) * 4


class Weighs(transformers.Trainer):
    def __init__(self, *args, weigh, **kwargs):
        super().__init__(*args, **kwargs)
        self.weigh = weigh

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.weigh(model, inputs)


class Anneals:
    calls = 0

    def __call__(self, outputs, labels, num_items_in_batch=None):
        self.calls += 1
        if isinstance(outputs, torch.nn.Module):  # called by `Weighs`
            outputs = outputs(**labels)
        return outputs.logits.mean() / self.calls


class Holds(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.own = inner, torch.nn.Parameter(torch.ones(3))

    def forward(self, _, inputs):
        return self.inner(**inputs).loss * self.own.sum()


def test_tracing_leaves_modules_and_counters_of_a_loss_as_they_are(about):
    holds, own, given, enclosed = Holds(inner := model()), Anneals(), Anneals(), Anneals()
    trainers = [with_osdp(Weighs)(model=of, weigh=loss, **about) for of, loss in ((inner, holds), (model(), own))]
    for loss in (given, lambda outputs, labels, num_items_in_batch=None: enclosed(outputs, labels)):
        trainers.append(hf_osdp.Trainer(model=model(), compute_loss_func=loss, **about))
    assert all(trainer.plan for trainer in trainers)
    assert all(trainer._run.inputs.description.trace.startswith("fake tensors") for trainer in trainers)
    assert trainers[0].weigh.inner is inner and holds.own.grad is None
    assert [each.calls for each in (own, given, enclosed)] == [0, 0, 0]
