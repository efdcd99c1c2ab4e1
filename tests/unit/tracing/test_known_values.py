"""Values of ids, labels and masks beside fake tensors: what models ask for, and models that ask."""

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.known_values import KnownValues, on_fake_tensors
from hf_osdp.tracing.tensors import FunctionMode
from tests.helpers.architectures import TINY
from tests.helpers.sampling import slow_but

IDS = torch.tensor([[5, 7, 7, 2], [9, 2, 1, 1]])


@pytest.fixture
def ids():
    """The ids as fake tensors whose values are known, inside the modes."""
    mode, known = FakeTensorMode(allow_non_fake_inputs=True), KnownValues(alone=True)
    with on_fake_tensors(mode, known):
        yield known.fakes_of(IDS, mode)


@pytest.mark.parametrize("asked", [
    lambda x: x.nonzero(), lambda x: x[x > 4], lambda x: x.masked_select(x.eq(2)),
    lambda x: torch.unique(x, return_counts=True)[1], lambda x: torch.unique_consecutive(x.flatten()),
    lambda x: torch.repeat_interleave(x[:, 0]), lambda x: torch.where(x.eq(1))[1], lambda x: x.flatten().bincount(),
    lambda x: torch.ones(2, 4, 3)[x.eq(2)],
])  # fmt: skip
def test_shapes_that_depend_on_ids_are_the_real_ones(ids, asked):
    assert asked(ids).shape == asked(IDS.clone()).shape


def with_ends_masked(labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels[:, 1:][labels[:, 1:] == 2] = -100
    return labels


@pytest.mark.parametrize("asked", [
    lambda x: x.sum().item(), lambda x: with_ends_masked(x).tolist(), lambda x: bool((x == 7).any()),
    lambda x: int(x.ne(1).sum(-1).max()), lambda x: x.float().mean().item(), lambda x: torch.equal(x, x.clone()),
    lambda x: torch.zeros_like(x).add_(x).masked_fill_(x == 7, 0).sum().item(),
])  # fmt: skip
def test_numbers_that_are_asked_for_are_the_real_ones(ids, asked):
    assert asked(ids) == asked(IDS.clone())


def test_values_that_activations_decide_count_as_true(ids):
    scores, counts = torch.rand(2, 4), torch.zeros(4, dtype=torch.long)
    assert scores[scores > 0.5].shape == (8,) and (scores > 0.5).nonzero().shape == (8, 2)
    assert scores.sum().item() == 1.0 and not (scores.sum() > 0)
    assert (torch.empty(4) > 0).nonzero().shape == (4, 1)  # memory that nobody has written
    assert (torch.empty(4, dtype=torch.long) > 0).nonzero().shape == (0, 1), "integers there are zeros"
    assert counts.sum().item() == 0
    counts.copy_(torch.rand(4).argsort())
    assert (counts > 0).nonzero().shape == (4, 1)


TEXT = TINY["BertForMaskedLM"]
SPEECH = {**TEXT, "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
LONGFORMER = {**TEXT, "attention_window": 8, "pad_token_id": 1, "sep_token_id": 2, "max_position_embeddings": 66}
PICTURES = {"text_config": TEXT, "vision_config": {**TEXT, "image_size": 32, "patch_size": 8}}
ASKING = {
    "DebertaV2ForSequenceClassification": (TEXT, 16),
    "BartForSequenceClassification": (TINY["BartForConditionalGeneration"], 16),
    "LongformerForQuestionAnswering": (LONGFORMER, 32), "Wav2Vec2ForCTC": (SPEECH, 4000), "CLIPModel": (PICTURES, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(ASKING, daily=("Wav2Vec2ForCTC",)))
def test_models_that_ask_for_values_are_traced_and_recomputable(name):
    sizes, length = ASKING[name]
    model = build_on_meta(getattr(transformers, name).config_class(**sizes), name)
    found = describe(model, sequence_length=length)
    assert found.trace.startswith("fake tensors") and found.recomputable


@pytest.mark.parametrize("options", [{}, {"retain_graph": True}, {"gradient": torch.ones(3)}])
def test_functions_stay_replaced_where_backward_recomputes(options):
    seen = []
    x = torch.ones(3, requires_grad=True)
    with FunctionMode({torch.Tensor.tanh: lambda y: seen.append(1) or y.sinh()}):
        y = checkpoint(lambda z: z.tanh() * z, x, use_reentrant=False)
        (y if "gradient" in options else y.sum()).backward(**options)
    assert len(seen) == 2
    torch.testing.assert_close(x.grad, (x.cosh() * x + x.sinh()).detach())


def test_experts_in_a_loop_share_the_tokens_among_them():
    def work(experts):
        config = transformers.MixtralConfig(**TINY["MixtralForCausalLM"])
        config._experts_implementation = experts
        found = describe(build_on_meta(config), sequence_length=16, recomputation=False)
        return [(one.forward.flops(2), one.backward.flops(2)) for one in found.segments]

    assert work("eager") == work("grouped_mm")
