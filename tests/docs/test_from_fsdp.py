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
CLASSES = {"transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
OF_PLUGIN = {"version": "fsdp_version", "offload_params": "cpu_offload", **CLASSES}
VALUES = {"auto_wrap_policy": "size_based_wrap", "limit_all_gathers": False}  # where True is none, or the default
IN_FILE = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "1000", "backward_prefetch": "BACKWARD_PRE",
           "state_dict_type": "SHARDED_STATE_DICT"}  # fmt: skip


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """As `accelerate launch` starts a process with the page's second file."""
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "{'osdp': True}")


def fields_of(plugin: OSDPPlugin) -> dict[str, str]:
    names = {field.name for field in dataclasses.fields(plugin)} - {"auto_wrap_policy"}
    return {name: str(getattr(plugin, name)) for name in names}


def test_every_option_of_file_and_plugin_has_a_row():
    options = [option for action in launch_command_parser()._actions for option in action.option_strings]
    flags = {option.removeprefix("--fsdp_") for option in options if option.startswith("--fsdp_")}
    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)} - {*OF_PLUGIN.values()}
    fields -= {"state_dict_config", "optim_state_dict_config"}  # follow from state_dict_type
    assert flags | fields <= set(NAMED)


def test_the_plugin_refuses_what_the_page_says_it_refuses():
    refused = {OF_PLUGIN.get(name, name) for name, row in NAMED.items() if "refused" in row[2]}
    refused -= {"fsdp_version", "activation_checkpointing_offload", "cpu_offload"}
    assert refused == set(DECIDED) - {"transformer_layer_cls_to_wrap"}
    for name in refused:
        with pytest.raises(ValueError, match="is decided by the plan"):
            OSDPPlugin(**{name: VALUES.get(name, True)})
    with pytest.raises(ValueError, match="block_classes"):
        OSDPPlugin(transformer_cls_names_to_wrap=["A"])
    with pytest.raises(ValueError, match="cannot run a plan"):
        OSDPPlugin(fsdp_version=1)
    with pytest.raises(ValueError, match="not counted in a plan"):
        OSDPPlugin(activation_checkpointing=True, activation_checkpointing_offload=True)


HAVING = {name: row[1] for name, row in NAMED.items() if row[1].startswith(("no effect", "taken"))}


@pytest.mark.parametrize("name", sorted(HAVING))
def test_option_in_the_file_has_the_effect_of_its_row(name, monkeypatch):
    plain = OSDPPlugin()
    monkeypatch.setenv(f"FSDP_{name.upper()}", IN_FILE.get(name, "true"))
    changed = OSDPPlugin()
    assert ((fields_of(changed), changed.osdp) == (fields_of(plain), plain.osdp)) == (HAVING[name] == "no effect")
