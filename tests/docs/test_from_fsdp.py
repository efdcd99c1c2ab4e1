"""The page about FSDP files says of every option what really becomes of it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.launch import launch_command_parser

from hf_osdp import OSDPPlugin
from hf_osdp.integrations.plugin import DECIDED

from .pages import page

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in page("from_fsdp.md").split("## Option by option")[1].split("## Checkpoints")[0].splitlines()
    if line.startswith("| `")
]
NAMED = {name: row for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
OF_PLUGIN = {
    "version": "fsdp_version",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "offload_params": "cpu_offload",
}
VALUES = {"auto_wrap_policy": "size_based_wrap", "limit_all_gathers": False}
"""Of options of which True is no value, or the default."""
IN_FILE = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "1000", "backward_prefetch": "BACKWARD_PRE",
           "state_dict_type": "SHARDED_STATE_DICT"}  # fmt: skip


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """As `accelerate launch` starts a process with the page's second file."""
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_SHARDING_STRATEGY": "{'osdp': True}",
    }.items():
        monkeypatch.setenv(name, value)


def fields_of(plugin: OSDPPlugin) -> dict[str, str]:
    return {
        field.name: str(getattr(plugin, field.name))
        for field in dataclasses.fields(plugin)
        if field.name != "auto_wrap_policy"
    }


def test_every_option_of_file_and_plugin_has_a_row():
    flags = {
        option.removeprefix("--fsdp_") for action in launch_command_parser()._actions for option in action.option_strings  # noqa: E501
        if option.startswith("--fsdp_")
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    fields -= {
        "state_dict_config",
        "optim_state_dict_config",
        *OF_PLUGIN.values(),
    }  # the first two follow from state_dict_type
    assert flags | fields <= set(NAMED)


def test_the_plugin_refuses_what_the_page_says_it_refuses():
    refused = {OF_PLUGIN.get(name, name) for name, row in NAMED.items() if "refused" in row[2]}
    refused -= {"fsdp_version", "activation_checkpointing_offload"}
    assert refused == set(DECIDED) - {"transformer_layer_cls_to_wrap"}
    for name in refused:
        with pytest.raises(ValueError, match="is decided by the plan"):
            OSDPPlugin(**{name: VALUES.get(name, True)})
    with pytest.raises(ValueError, match="cannot run a plan"):
        OSDPPlugin(fsdp_version=1)


@pytest.mark.parametrize("name", [name for name, row in NAMED.items() if row[1] == "no effect"])
def test_what_has_no_effect_in_the_file_changes_nothing(name, monkeypatch):
    plain = fields_of(OSDPPlugin())
    monkeypatch.setenv(f"FSDP_{name.upper()}", IN_FILE.get(name, "true"))
    assert fields_of(OSDPPlugin()) == plain


@pytest.mark.parametrize(
    "name", [name for name, row in NAMED.items() if row[1].startswith("taken") and name != "cpu_offload"]
)
def test_what_is_taken_from_the_file_changes_the_plugin(name, monkeypatch):
    plain = OSDPPlugin()
    monkeypatch.setenv(f"FSDP_{name.upper()}", IN_FILE.get(name, "true"))
    taken = OSDPPlugin()
    assert (fields_of(taken), taken.osdp) != (fields_of(plain), plain.osdp)


def test_checkpointing_with_offload_is_refused_from_file_and_plugin(monkeypatch):
    with pytest.raises(ValueError, match="not counted in a plan"):
        OSDPPlugin(activation_checkpointing=True, activation_checkpointing_offload=True)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true")
    with pytest.raises(ValueError, match="not counted in a plan"):
        OSDPPlugin()


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [("RESHARD_AFTER_FORWARD", "false", "strategy: zero2"), ("TRANSFORMER_CLS_TO_WRAP", "A", "block_classes")],
)
def test_what_the_plan_decides_is_refused_in_the_file(monkeypatch, variable, value, remedy):
    monkeypatch.setenv(f"FSDP_{variable}", value)
    with pytest.raises(ValueError, match=remedy):
        OSDPPlugin()
