"""Options of OSDP from `accelerate launch`, by Accelerate's own reader and launcher; how a loop ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from hf_osdp.distributed.stop import EXIT_CODE, Stopped
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.launch import LaunchRequest, launch_request
from hf_osdp.integrations.plugin import OSDPPlugin
from hf_osdp.preparation.config import OSDPConfig

FILES = sorted((Path(__file__).parents[3] / "accelerate_configs").glob("*.yaml"))


def requested(strategy: str) -> LaunchRequest:
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": strategy}
    return launch_request(fsdp)


def test_launch_request_is_empty_without_launcher_and_for_plain_fsdp():
    assert launch_request({}) == requested("FULL_SHARD") == requested("1") == requested("") == LaunchRequest()


@pytest.mark.parametrize("strategy", [
    "OSDP", "{'osdp': True, 1: 2}", "{{}: 1, 'osdp': True}", "{'osdp': " + "[" * 15000,
    "{'osdp': True, 'memory_limit': " + "-" * 15000 + "1}", "{'osdp': True, 'memory_limit': " + "1" * 10**6 + "}",
    "{'osdp': __import__('os').system('ls')}", "{'memory_limit': '8GiB'}",
], ids=["word", "key", "mapping as key", "brackets", "signs", "digits", "call", "no switch"])  # fmt: skip
def test_launch_request_refuses_what_it_cannot_read_in_one_line(strategy):
    with pytest.raises(ValueError, match="cannot be read") as caught:
        requested(strategy)
    assert "\n" not in str(caught.value)
    assert len(strategy) < 16384 or f"{len(strategy)} characters, the limit is 16384" in str(caught.value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_each_file_and_launch_passes_its_options_on_to_the_plugin(path, tmp_path, monkeypatch):
    config = load_config_from_file(str(path))
    assert config.distributed_type == "FSDP" and config.fsdp_config["fsdp_version"] == 2
    config.to_yaml_file(tmp_path / "again.yaml")  # as `accelerate config update` writes it
    again = load_config_from_file(str(tmp_path / "again.yaml"))
    assert again.fsdp_config == config.fsdp_config and again.num_processes == config.num_processes

    args, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "train.py"]))
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(name, value)
    request = launch_request()
    stated = dict(config.fsdp_config["fsdp_sharding_strategy"])
    assert (request.osdp, request.use_cpu) == (stated.pop("osdp"), stated.pop("use_cpu", False))
    assert request.osdp and request.use_cpu == ("cpu" in path.stem)
    plugin = OSDPPlugin()
    assert request.options.items() >= stated.items() and plugin.config == OSDPConfig.from_options(request.options)
    assert plugin.fsdp_version == 2


@pytest.mark.parametrize("error", [KeyError("lost"), KeyboardInterrupt(), SystemExit(EXIT_CODE), Stopped(EXIT_CODE)])
def test_end_training_waits_for_nobody_while_an_error_propagates(error):
    accelerator, ends = OSDPAccelerator(cpu=True, osdp={}), []
    accelerator._writer = SimpleNamespace(wait=lambda: ends.append("waited"))
    accelerator.trackers = [SimpleNamespace(finish=lambda: ends.append("finished"))]
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            accelerator.end_training()
    assert ends == (["waited", "finished"] if isinstance(error, Stopped) else ["finished"])
