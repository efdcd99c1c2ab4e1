"""Batches with pictures: what is made of a configuration trains, is planned and named."""

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_osdp.errors import DescriptionError
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.known_values import KnownValues
from hf_osdp.tracing.pictures import UsualBatch
from tests.helpers.models import tiny_model
from tests.helpers.sampling import slow_but
from tests.helpers.vision import VISION, tiny_vision

TOKENS = {
    "LlavaForConditionalGeneration": 16, "MllamaForConditionalGeneration": 0, "IdeficsForVisionText2Text": 0,
    "Molmo2ForConditionalGeneration": 8,
}  # fmt: skip
"""Placeholders of a picture of 32 x 32; the others merge 4 patches."""
RECOMPUTED = ("Qwen2_5_VLForConditionalGeneration", "MllamaForConditionalGeneration")


DAILY = [f"{name}ForConditionalGeneration" for name in ("Llava", "Qwen3VL", "Molmo2")]
"""Pictures in the text, and with merged patches; beside it (Mllama) takes longer."""


@pytest.mark.parametrize("name", slow_but(VISION, daily=DAILY))
def test_batch_with_two_pictures_trains_and_is_traced(name):
    model, batch = tiny_vision(name), UsualBatch(tiny_vision(name), 48, 2)
    assert (batch.pictures.number, batch.pictures.tokens) == (2, TOKENS.get(name, 4))
    model(**batch(2)).loss.backward()
    sees = [n for n, p in model.named_parameters() if "vis" in n and "layers.0" in n.replace("blocks", "layers")]
    assert sees and any(model.get_parameter(n).grad.abs().sum() > 0 for n in sees)
    description = describe(tiny_vision(name).float(), sequence_length=48, images=2, recomputation=name in RECOMPUTED)
    assert str(batch.pictures) in description.trace
    units = {description.units[segment.unit].fqn for segment in description.segments}
    assert any("vis" in fqn for fqn in units)


def test_one_picture_is_default_and_more_need_more_memory():
    saved = []
    model = tiny_vision("LlavaForConditionalGeneration")
    for images in (0, None, 2):
        description = describe(model, sequence_length=48, images=images, recomputation=False)
        saved.append(sum(segment.saved_bytes.bytes(2) for segment in description.segments))
        assert ("no pictures" in description.trace) == (images == 0)
    assert saved[0] < saved[1] < saved[2]


def test_units_that_do_not_run_are_named_if_they_train(caplog):
    model = tiny_vision("LlavaForConditionalGeneration")
    describe(model, sequence_length=24, images=0, recomputation=False)
    assert "2 units with trainable parameters (model.vision_tower.encoder.layers.0 to" in caplog.text
    caplog.clear()
    model.model.vision_tower.requires_grad_(False)
    describe(model, sequence_length=24, images=0, recomputation=False)
    assert not caplog.text


def test_pictures_without_room_or_vision_are_refused():
    with pytest.raises(DescriptionError, match=r"no room for 1 picture of 32 x 32 \(16 tokens\).* use at least 18"):
        describe(tiny_vision("LlavaForConditionalGeneration"), sequence_length=17)
    with pytest.raises(ValueError, match="images=1, but GPT2LMHeadModel takes no pictures"):
        describe(tiny_model("gpt2"), sequence_length=8, images=1)


def test_lists_of_fake_numbers_become_tensors_and_lists_again():
    real = torch.tensor([[1, 4, 6], [1, 2, 2]])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, KnownValues(alone=True) as known:
        grid = known.fakes_of({"grid": real}, mode)["grid"]
        assert torch.tensor([row.prod() for row in grid]).tolist() == [24, 4]
        made = torch.as_tensor([[grid[0, 1], 3], [grid[1, 2] + 1, 5]])
        assert made.tolist() == [[4, 3], [3, 5]] and made.dtype is torch.int64
        assert [int(row.max()) for row in grid] == [6, 2] and f"expert_{grid[0, 2]}" == "expert_6"
        assert torch.tensor([grid[0, 0].int()]).dtype is torch.int32
    assert torch.tensor([1.5]).tolist() == [1.5]


def test_blocks_that_cannot_be_recomputed_are_reported(caplog, monkeypatch):
    import hf_osdp.modeling.activations as activations

    def refuse(*args: object) -> None:
        raise RuntimeError("no second forward")

    monkeypatch.setattr(activations, "recompute", refuse)
    with caplog.at_level(logging.WARNING, logger="hf_osdp"):
        describe(tiny_model("gpt2"), sequence_length=8)
    assert "No block of GPT2LMHeadModel can recompute: RuntimeError: no second forward." in caplog.text
