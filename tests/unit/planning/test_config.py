"""OSDPConfig: what is accepted, and the one line that says why something is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import STRATEGIES, OSDPConfig, merged_config


def test_defaults_leave_everything_to_the_planner():
    config = OSDPConfig()
    assert (config.strategy, config.compare, config.operator_splitting) == ("osdp", True, True)
    assert config.memory_limit_bytes is None
    assert (config.recalibrate, config.async_save, config.resume_after_restart, config.save_on_sigterm, config.on_oom) == (
        False, False, True, True, "raise",
    )  # fmt: skip
    stated = {"strategy", "compare", "operator_splitting", "recalibrate", "async_save", "resume_after_restart", "save_on_sigterm", "on_oom"}
    assert all(value is None for name, value in dataclasses.asdict(config).items() if name not in stated)


@pytest.mark.parametrize(("text", "count"), [("8GiB", 8 * 2**30), ("500MB", 500 * 10**6), (1234, 1234), ("1.5 GiB", 3 * 2**29)])
def test_memory_limit_in_bytes(text, count):
    assert OSDPConfig(memory_limit=text).memory_limit_bytes == count


@pytest.mark.parametrize("classes", ["GPT2Block, BertLayer", ("GPT2Block", "BertLayer"), ["GPT2Block", "BertLayer"]])
def test_block_classes_as_text_or_names(classes):
    assert OSDPConfig(block_classes=classes).block_classes == ("GPT2Block", "BertLayer")


def test_is_immutable_and_hashable():
    config = OSDPConfig(memory_limit="1GiB", block_classes=["A"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strategy = "ddp"
    assert config == OSDPConfig(memory_limit="1GiB", block_classes="A")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_accepted(strategy):
    assert OSDPConfig(strategy=strategy).strategy == strategy


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"strategy": "zero3"}, ("strategy='zero3'", "osdp, fsdp, ddp, zero2, hsdp")),
        ({"memory_limit": "8 gigs"}, ("memory_limit='8 gigs'", "8GiB")),
        ({"memory_limit": 0}, ("memory_limit=0", "1 byte")),
        ({"memory_limit": True}, ("memory_limit=True", "not a number of bytes")),
        ({"block_classes": " , "}, ("block_classes", "names no class")),
        ({"block_classes": [1]}, ("block_classes=[1]", "class names")),
        ({"sequence_length": 0}, ("sequence_length=0", "at least 1")),
        ({"global_batch_size": "8"}, ("global_batch_size='8'", "whole number")),
        ({"micro_batch_size": True}, ("micro_batch_size=True", "whole number")),
        ({"nodes": -1}, ("nodes=-1", "at least 1")),
        ({"compare": None}, ("compare=None", "true or false")),
        ({"reduce_every_micro_step": "yes"}, ("reduce_every_micro_step='yes'", "true or false")),
        ({"plan": 3}, ("plan=3", "path")),
        ({"hardware": 3}, ("hardware=3", "preset")),
        ({"plan": "p.json", "strategy": "ddp"}, ("strategy='ddp'", "no effect")),
        ({"plan": Path("p.json"), "hardware": "h100"}, ("hardware", "no effect")),
        ({"plan": "p.json", "nodes": 7}, ("nodes=7", "no effect")),
        ({"memorylimit": "1GiB"}, ("no option 'memorylimit'", "memory_limit, memory_margin, strategy, block_classes")),
    ],
)
def test_bad_options_give_value_limit_and_remedy_in_one_line(options, parts):
    with pytest.raises(ValueError) as caught:
        OSDPConfig.from_options(options)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.parametrize("margin", [-0.1, 1, "4 %", float("nan"), True])
def test_a_margin_that_is_no_share_is_refused_in_one_line(margin):
    with pytest.raises(ValueError) as caught:
        OSDPConfig.from_options({"osdp": True, "memory_margin": margin})
    said = f"memory_margin={margin!r} must be the share of the limit that stays free, at least 0 and below 1, such as 0.04."
    assert str(caught.value) == said
    with pytest.raises(ValueError, match=r"plan runs a given plan as it is, so memory_margin=0.1 would have no effect"):
        OSDPConfig(plan="plan.json", memory_margin=0.1)


def test_nodes_beside_a_hardware_description_is_refused():
    with pytest.raises(ValueError, match="nodes=2"):
        OSDPConfig(hardware=preset("h100"), nodes=2)


def test_from_options_accepts_the_switch_of_the_accelerate_file():
    assert OSDPConfig.from_options({"osdp": True, "strategy": "hsdp"}) == OSDPConfig(strategy="hsdp")


FILE = {"strategy": "ddp", "memory_limit": "1GiB", "compare": False}


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        (None, OSDPConfig(strategy="ddp", memory_limit="1GiB", compare=False)),
        (OSDPConfig(memory_limit="2GiB"), OSDPConfig(strategy="ddp", memory_limit="2GiB", compare=False)),
        ({"memory_limit": "2GiB"}, OSDPConfig(strategy="ddp", memory_limit="2GiB", compare=False)),
        ({"strategy": "osdp", "compare": True}, OSDPConfig(memory_limit="1GiB")),
    ],
)
def test_what_the_caller_set_goes_before_the_file(asked, want):
    assert merged_config(asked, FILE) == want


def test_the_nearer_place_goes_before_the_farther():
    assert merged_config({}, {"strategy": "fsdp"}, FILE) == OSDPConfig(strategy="fsdp", memory_limit="1GiB", compare=False)


def test_options_of_two_places_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="strategy='ddp' would have no effect"):
        merged_config(OSDPConfig(plan="p.json"), FILE)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"recalibrate": "yes"}, "recalibrate='yes' is not a switch"),
        ({"recalibrate": None}, "recalibrate=None is not a switch"),
        ({"recalibrate": True, "plan": "plan.json"}, "recalibrate=True would have no effect"),
        ({"profile": "p.json", "plan": "plan.json"}, "profile would have no effect"),
        ({"profile": "p.json", "hardware": "h100"}, "hardware would have no effect"),
        ({"profile": "p.json", "nodes": 2}, "nodes=2 would have no effect"),
        ({"profile": 3}, "profile=3 is of type int"),
    ],
)
def test_profile_and_recalibrate_that_cannot_be_are_refused(options, part):
    with pytest.raises(ValueError, match=part):
        OSDPConfig.from_options(options)


def test_recalibrate_and_profile_come_from_the_launchers_file():
    config = OSDPConfig.from_options({"osdp": True, "recalibrate": True, "profile": "machine.json"})
    assert config.recalibrate and config.profile == "machine.json"


@pytest.mark.parametrize("name", ["recompute", "host_offload", "split_vocabulary", "operator_splitting"])
def test_switches_of_the_ways_to_fit(name):
    assert getattr(OSDPConfig(**{name: True}), name) is True
    with pytest.raises(ValueError, match=f"{name}='yes' is not a switch"):
        OSDPConfig(**{name: "yes"})
    with pytest.raises(ValueError, match="plan runs a given plan as it is"):
        OSDPConfig(plan="plan.json", **{name: False})


def test_a_split_that_is_forbidden_cannot_be_asked_for():
    with pytest.raises(ValueError, match="split_vocabulary=True has no effect beside operator_splitting=False"):
        OSDPConfig(split_vocabulary=True, operator_splitting=False)
    with pytest.raises(ValueError, match="split_vocabulary=True has no effect beside strategy='fsdp'"):
        OSDPConfig(split_vocabulary=True, strategy="fsdp")


def test_inputs_is_a_function_which_no_file_can_hold():
    def make(samples: int) -> dict[str, object]:
        return {}

    assert merged_config(OSDPConfig(inputs=make), {"compare": False}).inputs is make
    with pytest.raises(ValueError, match=r"^inputs='batch.py' is of type str; give a function .* OSDPConfig\(inputs=...\) in the script.$"):
        OSDPConfig.from_options({"inputs": "batch.py"})
