"""Tiny configurations of many architectures, built without the hub."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


@pytest.fixture
def configuration():
    """From a model class's name to its tiny configuration, with dropout as it comes; keyword arguments change it."""
    transformers = pytest.importorskip("transformers")
    from tests.helpers.architectures import TINY

    def make(name: str, **changes):
        sizes = {key: value for key, value in TINY[name].items() if "drop" not in key}
        return getattr(transformers, name).config_class(**{**sizes, **changes})

    return make


@pytest.fixture
def meta_model(configuration):
    import transformers

    def make(name: str, **changes):
        with torch.device("meta"):
            return getattr(transformers, name)._from_config(configuration(name, **changes))

    return make


@pytest.fixture
def real_model(configuration):
    import transformers

    def make(name: str, **changes):
        torch.manual_seed(0)
        return getattr(transformers, name)(configuration(name, **changes))

    return make
