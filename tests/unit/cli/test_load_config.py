"""A model's configuration comes from a file, the cache of the hub, or built-in shapes."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from hf_osdp.cli.cases import load_config


def test_load_config_without_a_network_names_the_nearest_shapes(monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'qwen3-8' .*connect.*give a config.json, .* \(nearest: qwen3-8b"):
        load_config("qwen3-8")
    assert load_config("Qwen3-8B").hidden_size == 4096
    assert "shape of Qwen/Qwen3-8B, from https://huggingface.co/Qwen/Qwen3-8B/" in caplog.text
    with pytest.raises(ValueError, match=r"there is no such file or folder"):
        load_config("./gpt2-xl")
