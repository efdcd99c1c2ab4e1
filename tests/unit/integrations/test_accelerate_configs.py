"""The accelerate configuration files are such as `accelerate config` itself reads, and `accelerate launch` passes their options on."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from hf_osdp.integrations.launch import launch_request
from hf_osdp.planning.config import OSDPConfig, merged_config

FILES = sorted((Path(__file__).parents[3] / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerates_own_reader_takes_the_file(path, tmp_path):
    config = load_config_from_file(str(path))
    assert config.distributed_type == "FSDP" and config.fsdp_config["fsdp_version"] == 2
    config.to_yaml_file(tmp_path / "again.yaml")  # as `accelerate config update` writes it
    again = load_config_from_file(str(tmp_path / "again.yaml"))
    assert again.fsdp_config == config.fsdp_config and again.num_processes == config.num_processes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_launch_hands_the_options_to_every_process(path):
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "train.py"]))
    request = launch_request(prepare_multi_gpu_env(args))
    assert request.osdp and request.use_cpu == ("cpu" in path.stem)
    assert isinstance(merged_config({}, request.options), OSDPConfig)
