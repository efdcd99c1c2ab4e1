"""The kind of a loss: whether it is a sum over samples divided by the number of items."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

from hf_osdp.modeling.batch import training_batch
from hf_osdp.tracing.loss_kind import LossKind, find_loss_kind
from tests.helpers.architectures import TINY

TEXT, MOE = TINY["BertForMaskedLM"], TINY["MixtralForCausalLM"]
SPEECH = {**TEXT, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16}


def model_of(name: str, sizes: dict[str, object]) -> nn.Module:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes))


def its_own(model, batch, items):
    return model(**batch, num_items_in_batch=items)


@pytest.mark.parametrize(("name", "sizes", "kind"), [
    ("LlamaForCausalLM", {**MOE, "dtype": torch.bfloat16}, LossKind.SHARE),
    ("GPT2LMHeadModel", TINY["GPT2LMHeadModel"], LossKind.SHARE),
    ("MixtralForCausalLM", MOE, LossKind.SHARE),
    ("MixtralForCausalLM", {**MOE, "output_router_logits": True}, LossKind.MIXED),
    ("LlamaForSequenceClassification", {**MOE, "pad_token_id": 0, "num_labels": 1}, LossKind.MEAN),
    ("BertForMaskedLM", TEXT, LossKind.MEAN),
    ("T5ForConditionalGeneration", TINY["T5ForConditionalGeneration"], LossKind.MEAN),
    ("Wav2Vec2ForCTC", SPEECH, LossKind.WHOLE),
])  # fmt: skip
def test_find_loss_kind_of_models_of_transformers(name, sizes, kind):
    model = model_of(name, sizes).to(sizes.get("dtype"))
    length = 800 if model.main_input_name == "input_values" else 16
    assert find_loss_kind(model, training_batch(model, length), its_own) is kind


def test_find_loss_kind_sees_that_clip_compares_samples():
    pictures = {"text_config": TEXT, "vision_config": {**TEXT, "image_size": 32, "patch_size": 16}}
    model = model_of("CLIPModel", pictures)

    def divided(model, batch, items):
        return model(**batch).loss / items

    assert find_loss_kind(model, training_batch(model, 8), divided) is not LossKind.SHARE


class Classifier(nn.Module):
    """Returns logits of three classes for each token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.scale = nn.Embedding(50, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(()))

    def forward(self, input_ids, labels=None):
        return self.head(self.embedding(input_ids))


def inputs(samples):
    ids = torch.arange(12)[None].repeat(samples, 1)
    return {"input_ids": ids, "labels": ids % 3}


def summed(model, batch):
    return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def masked(model, batch):
    mask = torch.vmap(torch.vmap(lambda id: id.new_ones((), dtype=torch.bool) & id.ge(5)))(batch["input_ids"])
    return (model(batch["input_ids"]).pow(2).sum(-1) * mask).sum()


def contrasted(model, batch):
    pooled = model(batch["input_ids"]).mean(dim=1)
    return cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)), reduction="sum")


LOSSES = {
    "divided": (lambda model, batch, items: summed(model, batch) / items, LossKind.SHARE),
    "divided by a number": (lambda model, batch, items: summed(model, batch) / items.item(), LossKind.SHARE),
    "divided before the sum": (lambda model, batch, items: (model(batch["input_ids"]).pow(2) / items).sum(),
        LossKind.SHARE),
    "masked by a vmap": (lambda model, batch, items: masked(model, batch) / items, LossKind.SHARE),
    "a mean": (lambda model, batch, items: summed(model, batch) / batch["labels"].ne(-100).sum(), LossKind.MEAN),
    "the largest": (lambda model, batch, items: model(batch["input_ids"]).pow(2).sum((1, 2)).max(), LossKind.WHOLE),
    "a mean divided": (lambda model, batch, items: summed(model, batch) / batch["labels"].numel() / items,
        LossKind.MIXED),
    "divided, and a small mean": (lambda model, batch,
        items: summed(model, batch) / items + 1e-4 * model(batch["input_ids"]).pow(2).mean(), LossKind.MIXED),
    "divided by the root": (lambda model, batch, items: summed(model, batch) / items.sqrt(), LossKind.MIXED),
    "samples compared": (lambda model, batch, items: contrasted(model, batch) / items, LossKind.MIXED),
    "scaled by a weight": (lambda model, batch, items: summed(model, batch) / items * model.scale, LossKind.MIXED),
    "not on fake tensors": (lambda model, batch, items: torch.as_tensor(items.numpy()), LossKind.UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_find_loss_kind_of_other_losses(name):
    loss, kind = LOSSES[name]
    model = Classifier()
    assert find_loss_kind(model, inputs, loss) is kind
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in model.parameters())


class OtherOperatorsForOne(nn.Module):
    """As torch's own for products: a batch of one runs another operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if len(x) == 1 else x @ self.layer.weight.T + self.layer.bias


@pytest.mark.parametrize("over_pairs", [False, True])
def test_loss_over_pairs_of_neighbours_is_no_sum_over_samples(over_pairs):
    def loss(model, batch, items):
        scores = model(batch["x"]).flatten()
        return (((scores[::2] - scores[1::2]) if over_pairs else scores) ** 2).sum() / items

    found = find_loss_kind(OtherOperatorsForOne(), lambda samples: {"x": torch.randn(samples, 4)}, loss)
    assert (found is LossKind.SHARE) is not over_pairs, found
