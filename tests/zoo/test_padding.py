"""Outputs of transformers' language models and classifiers do not change with masked columns on the right, but for
listed types.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hf_osdp.sharding.micro_batches import DEPEND_ON_PADDING

from .__main__ import types
from .ranks import _made, limited

TOKENS, COLUMNS, SECONDS = 16, 8, 20
MODELS = [row for row in types().values() if row.task in ("causal", "masked", "image-text-to-text")]


CLASSIFIERS = {"samples": AutoModelForSequenceClassification, "tokens": AutoModelForTokenClassification}


def change_by_padding(name: str, of: str | None) -> float:
    """Return the largest change, as a share of the largest output; skip a model that does not run on text alone, or
    whose type has no classifier.
    """
    model, _, problem = _made(name)
    config = getattr(model, "config", None)
    if config is None:
        pytest.skip(problem)
    text = config.get_text_config()
    padding, vocabulary = getattr(text, "pad_token_id", None) or 0, getattr(text, "vocab_size", 50)
    if of is not None:
        config.pad_token_id, config.num_labels = padding, 3
        if type(config) not in CLASSIFIERS[of]._model_mapping:
            pytest.skip("its type has no classifier")
        model = CLASSIFIERS[of].from_config(config)
    torch.manual_seed(0)
    for weight in model.double().eval().parameters():
        nn.init.normal_(weight, std=0.3)
    ids = torch.randint(min(5, vocabulary - 2), vocabulary, (2, TOKENS))
    ids[ids == padding] = min(5, vocabulary - 2)
    mask = torch.ones_like(ids)
    longer = nn.functional.pad(ids, (0, COLUMNS), value=padding)
    try:
        with torch.no_grad(), limited(SECONDS):
            alone = model(input_ids=ids, attention_mask=mask).logits
            padded = model(input_ids=longer, attention_mask=nn.functional.pad(mask, (0, COLUMNS))).logits
    except Exception as error:  # a model can raise any exception
        pytest.skip(f"{type(error).__name__}: {error}"[:200])
    padded = padded if of == "samples" else padded[:, :TOKENS]
    return float((alone - padded).abs().max() / alone.abs().max())


FIRST = {row.model_type: row.name for row in MODELS if row.model_type not in DEPEND_ON_PADDING}
"""One model of each type."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [row.name for row in MODELS if row.model_type not in DEPEND_ON_PADDING])
def test_outputs_do_not_depend_on_padding(name: str) -> None:
    assert change_by_padding(name, None) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("of", CLASSIFIERS)
@pytest.mark.parametrize("name", FIRST.values())
def test_classes_do_not_depend_on_padding(name: str, of: str) -> None:
    assert change_by_padding(name, of) < 1e-6
