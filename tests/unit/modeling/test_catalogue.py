"""Built-in shapes are the models they say: built on the meta device, they have the published numbers of parameters."""

import re

import pytest

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.catalogue import catalogue, find_shape


def rounding(published: str) -> tuple[float, float]:
    """A published count and half a unit of its last digit; the zero of BERT's 110M and 340M is none."""
    digits, scale = float(published[:-1]), {"M": 1e6, "B": 1e9}[published[-1]]
    decimals = -1 if re.fullmatch(r"\d+0M", published) else len(published[:-1].partition(".")[2])
    return digits * scale, 0.5 * scale * 10**-decimals


@pytest.mark.parametrize("name", catalogue())
def test_shape_has_the_published_number_of_parameters(name):
    shape = catalogue()[name]
    model = build_on_meta(shape.config)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert [type(model).__name__] == shape.fields["architectures"]
    published, half = rounding(shape.published)
    assert abs(shape.parameters - published) <= half
    assert name in shape.source and shape.published_by


@pytest.mark.parametrize(("model_id", "name"), [
    ("gpt2-xl", "openai-community/gpt2-xl"), ("OpenAI-Community/GPT2-XL", "openai-community/gpt2-xl"),
    ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
    ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"), ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B"),
    *((unknown, None) for unknown in ("somebody/gpt2-xl", "gpt2-xxl", "", "meta-llama/")),
])  # fmt: skip
def test_find_shape_takes_known_ids_in_any_case_without_organisation(model_id, name):
    assert find_shape(model_id) is (name and catalogue()[name])
