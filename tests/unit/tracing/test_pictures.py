"""Batches with pictures: what is made of a configuration trains, is planned and named."""

import pytest

from hf_osdp.errors import DescriptionError
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.pictures import UsualBatch
from tests.helpers.architectures import VISION, tiny_vision
from tests.helpers.models import tiny_model
from tests.helpers.sampling import slow_but

TOKENS = {
    "LlavaForConditionalGeneration": 16, "MllamaForConditionalGeneration": 0, "IdeficsForVisionText2Text": 0,
    "Molmo2ForConditionalGeneration": 8,
}  # fmt: skip
"""Placeholders of a picture of 32 x 32; the others merge 4 patches."""
RECOMPUTED = ("Qwen2_5_VLForConditionalGeneration", "MllamaForConditionalGeneration")


DAILY = [f"{name}ForConditionalGeneration" for name in ("Llava", "Qwen3VL")]
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


def test_pictures_without_room_or_vision_are_refused():
    with pytest.raises(DescriptionError, match=r"no room for 1 picture of 32 x 32 \(16 tokens\).* use at least 18"):
        describe(tiny_vision("LlavaForConditionalGeneration"), sequence_length=17)
    with pytest.raises(ValueError, match="images=1, but GPT2LMHeadModel takes no pictures"):
        describe(tiny_model("gpt2"), sequence_length=8, images=1)
