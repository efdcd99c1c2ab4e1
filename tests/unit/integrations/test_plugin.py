"""The plugin, and how the Trainer's arguments ask for OSDP."""

from __future__ import annotations

import json
import os

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import TrainingArguments

from hf_osdp import OSDPAccelerator, Trainer
from hf_osdp.integrations.accelerator import plugin_for, precision_of
from hf_osdp.integrations.plugin import OSDPPlugin, plugin_options, requested_options
from hf_osdp.planner.description import DType
from hf_osdp.planner.training_job import Precision
from hf_osdp.preparation.config import OSDPConfig
from tests.helpers.models import tiny_model

BFLOAT16 = DType.BFLOAT16
ON, OFF = "{'osdp': True, 'memory_limit': '1GiB'}", "{'osdp': False, 'memory_limit': '1GiB'}"
DDP = "{'osdp': True, 'strategy': 'ddp'}"
DATA = [{"input_ids": torch.arange(12), "labels": torch.arange(12)}] * 8


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))]:
        monkeypatch.delenv(name)


def launch(monkeypatch, strategy: str) -> None:
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": strategy}
    for name, value in fsdp.items():
        monkeypatch.setenv(name, value)


def arguments(tmp_path, **options) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)


def test_plugin_is_fsdp2_with_float32_reduction():
    plugin = OSDPPlugin(osdp={"memory_limit": "1GiB"})
    assert plugin.fsdp_version == 2 and plugin.osdp == OSDPConfig(memory_limit="1GiB")
    assert "FULL" in str(plugin.state_dict_type)
    assert "SHARDED" in str(OSDPPlugin(osdp={"async_save": True}).state_dict_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert precision_of("bf16", None, single_process=False) == Precision(compute=BFLOAT16, reduce=DType.FLOAT32)
    assert precision_of("fp16", None, single_process=False).compute is DType.FLOAT16
    assert precision_of("no", policy, single_process=False).reduce is BFLOAT16
    assert precision_of("bf16", policy, single_process=True).autocast
    with pytest.raises(ValueError, match=r"computes in bfloat16, but .* mixed_precision='no'"):
        precision_of("no", policy, single_process=True)


def test_plugin_accepts_the_defaults_that_the_launcher_exports(monkeypatch):
    flags = "--use_fsdp --fsdp_version 2 --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    args = launch_command_parser().parse_args([*flags.split(), "train.py"])
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", ON)
    assert OSDPPlugin().osdp == OSDPConfig(memory_limit="1GiB")


def test_cpu_offload_is_refused(monkeypatch):
    for given in (True, CPUOffloadPolicy(pin_memory=False)):
        with pytest.raises(ValueError, match=r"is decided by the plan; leave it out, or use OSDPConfig\(host_"):
            OSDPPlugin(cpu_offload=given)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ValueError, match=r"^cpu_offload \(fsdp_offload_params\) is decided"):
        OSDPPlugin()


def test_plugin_for_takes_a_plugin_or_a_configuration(monkeypatch):
    plugin = OSDPPlugin()
    assert plugin_for(None, plugin) is plugin
    with pytest.raises(ValueError, match="Both osdp and fsdp_plugin"):
        plugin_for(OSDPConfig(), plugin)
    launch(monkeypatch, OFF)
    with pytest.raises(ValueError, match=r"osdp: false.*use accelerate's Accelerator"):
        plugin_for(None, None)
    assert plugin_for({"strategy": "ddp"}, None).osdp == OSDPConfig(strategy="ddp", memory_limit="1GiB")


@pytest.mark.parametrize(("asked", "fsdp_config", "launched", "expected"), [
    (None, None, None, None),
    (True, None, None, {}),
    (None, None, ON, {"memory_limit": "1GiB"}),
    (False, None, ON, None),
    (OSDPConfig(memory_limit="2GiB"), None, DDP, {"memory_limit": "2GiB", "strategy": "ddp"}),
    ({"strategy": "osdp"}, None, DDP, {}),
    (None, None, OFF, None),
    (True, None, OFF, {"memory_limit": "1GiB"}),
    (None, {"osdp": {"strategy": "hsdp"}}, ON, {"strategy": "hsdp", "memory_limit": "1GiB"}),
    (None, {"osdp": False}, ON, None),
])  # fmt: skip
def test_requested_options_merges_argument_fsdp_config_and_launcher(
    tmp_path, monkeypatch, asked, fsdp_config, launched, expected
):
    args = arguments(tmp_path, fsdp_config=fsdp_config)
    if launched is not None:
        launch(monkeypatch, launched)
    options = requested_options(asked, args)
    assert (options is None) == (expected is None)
    if options is not None:
        config = OSDPPlugin(osdp=options).config
        assert config == OSDPConfig(**expected)
        if asked not in (None, True) and fsdp_config is None:
            assert OSDPPlugin(osdp=asked).osdp == plugin_for(asked, None).osdp == config


def test_requested_options_reads_the_file_of_fsdp_config(tmp_path):
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"osdp": {"strategy": "zero2"}, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}))
    args = arguments(tmp_path, fsdp_config=str(file))
    assert requested_options(None, args) == {"strategy": "zero2"}
    assert plugin_options(args) == {"state_dict_type": "SHARDED_STATE_DICT"}


def test_fsdp_of_arguments_asks_for_nothing_but_shard_grad_op(tmp_path):
    for fsdp in (True, "full_shard", "full_shard auto_wrap"):
        assert requested_options({"strategy": "ddp"}, TrainingArguments(str(tmp_path), fsdp=fsdp)) == {
            "strategy": "ddp"
        }
    with pytest.raises(ValueError, match=r"reshard_after_forward=False is decided by the plan.*fsdp='shard_grad_op'"):
        requested_options(True, TrainingArguments(str(tmp_path), fsdp="shard_grad_op"))


def test_torch_compile_of_arguments_is_an_option_of_plans(tmp_path):
    for asked in (True, False):
        args = arguments(tmp_path, torch_compile=asked)
        assert Trainer(model=tiny_model("gpt2", layers=1), args=args, osdp=True).accelerator.config.compile == asked
    with pytest.raises(ValueError, match=r"^torch_compile=True contradicts compile=False"):
        requested_options({"compile": False}, arguments(tmp_path, torch_compile=True))
    with pytest.raises(ValueError, match=r"^The Trainer was given torch.compile\(model\); give it the model itself"):
        Trainer(model=torch.compile(tiny_model("gpt2", layers=1)), args=arguments(tmp_path), osdp=True)


def test_trainer_and_accelerator_refuse_what_has_no_effect(tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=8, gradient_checkpointing=True)
    with pytest.raises(ValueError, match="recompute=False has no effect with activation checkpointing"):
        Trainer(model=tiny_model("gpt2", layers=1), args=args, train_dataset=DATA, osdp={"recompute": False}).train()
    with pytest.raises(ValueError, match="model_init"):
        Trainer(model_init=lambda: None, args=args, train_dataset=DATA, osdp=True)
    with pytest.raises(ValueError, match=r"^comm_hook=bf16 is for DDP and has no effect under a plan"):
        OSDPAccelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)])
    OSDPAccelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
