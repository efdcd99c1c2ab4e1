"""OSDPConfig: what is accepted, and the one line that says why something is not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.training_job import EXACT
from hf_osdp.planner.wire import WireFormat
from hf_osdp.preparation.config import GROUPS, OSDPConfig, merged_config, option_texts


def test_block_classes_and_limits_are_read_from_texts():
    assert OSDPConfig().memory_limit_bytes is None and OSDPConfig(memory_limit="8GiB").memory_limit_bytes == 8 * 2**30
    expected = OSDPConfig(block_classes=("GPT2Block", "BertLayer"))
    assert OSDPConfig(block_classes="GPT2Block, BertLayer") == expected
    assert OSDPConfig(block_classes=["GPT2Block", "BertLayer"]) == expected


@pytest.mark.parametrize("options", [
    {"strategy": "ddp"}, {"hardware": "h100"}, {"profile": "p.json"}, {"nodes": 7},
    {"on_oom": "replan"}, {"memory_margin": 0.1}, {"simplicity": 0.02}, {"recompute": False},
    {"host_offload": False}, {"split_vocabulary": False}, {"operator_splitting": False},
])  # fmt: skip
def test_options_that_a_given_plan_leaves_without_effect_are_refused(options):
    ((name, value),) = options.items()
    shown = name if name in ("hardware", "profile") else f"{name}={value!r}"
    with pytest.raises(ValueError, match=f"^plan runs a given plan as it is, so {shown} would have no effect"):
        OSDPConfig(plan=Path("p.json"), **options)


def test_types_and_texts_of_options_are_complete():
    hints = get_type_hints(OSDPConfig)
    assert get_args(hints["strategy"]) == tuple(strategy.value for strategy in Strategy)
    assert get_args(hints["communication"]) == (EXACT, *(wire.value for wire in WireFormat))
    assert Counter(chain(*GROUPS.values())) == dict.fromkeys((f.name for f in dataclasses.fields(OSDPConfig)), 1)
    texts = option_texts()
    assert texts.keys() == {field.name for field in dataclasses.fields(OSDPConfig)}
    assert all("`" not in text and text.endswith(".") for text in texts.values()), texts


FILE = {"strategy": "ddp", "memory_limit": "1GiB", "report": False}


@pytest.mark.parametrize(("nearer", "changed"), [
    ((None,), {}),
    ((OSDPConfig(memory_limit="2GiB"),), {"memory_limit": "2GiB"}),
    (({"osdp": True, "strategy": "osdp", "report": True},), {"strategy": "osdp", "report": True}),
    (({}, {"strategy": "fsdp"}), {"strategy": "fsdp"}),
    ((OSDPConfig(inputs=dict),), {"inputs": dict}),
], ids=["none", "configuration", "mapping with defaults", "two places", "function"])  # fmt: skip
def test_merged_config_prefers_what_the_nearer_place_states(nearer, changed):
    assert merged_config(*nearer, FILE) == OSDPConfig(**{**FILE, **changed})
