"""The plugin, and how the Trainer's arguments and Accelerate's dynamo plugin ask for OSDP."""

from __future__ import annotations

import json
import os

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, TorchDynamoPlugin
from accelerate.utils.other import is_compiled_module
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import TrainingArguments

from hf_osdp import OptimalShardedDataParallel, OSDPAccelerator, Trainer
from hf_osdp.integrations.accelerator import plugin_for, precision_of
from hf_osdp.integrations.plugin import OSDPPlugin, requested_options, requested_plugin
from hf_osdp.planner.description import DType
from hf_osdp.planner.training_job import Precision
from hf_osdp.preparation.config import OSDPConfig
from tests.helpers.models import tiny_model
from tests.helpers.trainers import small_arguments, small_trainer, token_rows

BFLOAT16 = DType.BFLOAT16
ON, OFF = "{'osdp': True, 'memory_limit': '1GiB'}", "{'osdp': False, 'memory_limit': '1GiB'}"
DDP = "{'osdp': True, 'strategy': 'ddp'}"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))]:
        monkeypatch.delenv(name)
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test's accelerator would answer
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def launch(monkeypatch, strategy: str) -> None:
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": strategy}
    for name, value in fsdp.items():
        monkeypatch.setenv(name, value)


def test_plugin_is_fsdp2_with_float32_reduction():
    assert "SHARDED" in str(OSDPPlugin(osdp={"async_save": True}).state_dict_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert precision_of("bf16", None, single_process=False) == Precision(compute=BFLOAT16, reduce=DType.FLOAT32)
    assert precision_of("fp16", None, single_process=False).compute is DType.FLOAT16
    assert precision_of("no", policy, single_process=False).reduce is BFLOAT16
    assert precision_of("bf16", policy, single_process=True).autocast
    with pytest.raises(ValueError, match=r"computes in bfloat16, but .* mixed_precision='no'"):
        precision_of("no", policy, single_process=True)


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
    args = small_arguments(tmp_path, fsdp_config=fsdp_config)
    if launched is not None:
        launch(monkeypatch, launched)
    options = requested_options(asked, args)
    assert (options is None) == (expected is None)
    if options is not None:
        config = OSDPPlugin(osdp=options).config
        assert config == OSDPConfig(**expected)
        if asked not in (None, True) and fsdp_config is None:
            assert OSDPPlugin(osdp=asked).osdp == plugin_for(asked, None).osdp == config


def test_requested_plugin_reads_the_file_of_fsdp_config(tmp_path):
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"osdp": {"strategy": "zero2"}, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}))
    args = small_arguments(tmp_path, fsdp_config=str(file))
    plugin = requested_plugin(None, args, tiny_model("gpt2", layers=1), on_by_default=False)
    assert plugin.config == OSDPConfig(strategy="zero2") and "SHARDED" in str(plugin.state_dict_type)


def test_fsdp_of_arguments_asks_for_nothing_but_shard_grad_op(tmp_path):
    asked = {"strategy": "ddp"}
    for fsdp in (True, "full_shard", "full_shard auto_wrap"):
        assert requested_options(asked, TrainingArguments(str(tmp_path), fsdp=fsdp)) == asked
    with pytest.raises(ValueError, match=r"reshard_after_forward=False is decided by the plan.*fsdp='shard_grad_op'"):
        requested_options(True, TrainingArguments(str(tmp_path), fsdp="shard_grad_op"))


def test_torch_compile_of_arguments_is_an_option_of_plans(tmp_path):
    for asked in (True, False):
        trainer = small_trainer(tmp_path, arguments={"torch_compile": asked})
        assert trainer.accelerator.config.compile == asked
    with pytest.raises(ValueError, match=r"^torch_compile=True contradicts compile=False"):
        requested_options({"compile": False}, small_arguments(tmp_path, torch_compile=True))
    with pytest.raises(ValueError, match=r"^The Trainer was given torch.compile\(model\); give it the model itself"):
        small_trainer(tmp_path, model=torch.compile(tiny_model("gpt2", layers=1)))


def test_trainer_and_accelerator_refuse_what_has_no_effect(tmp_path):
    checkpointing = {"gradient_checkpointing": True}
    with pytest.raises(ValueError, match="recompute=False has no effect with activation checkpointing"):
        small_trainer(tmp_path, arguments=checkpointing, train_dataset=token_rows(), osdp={"recompute": False}).train()
    with pytest.raises(ValueError, match="model_init"):
        Trainer(model_init=lambda: None, args=small_arguments(tmp_path), osdp=True)
    with pytest.raises(ValueError, match=r"^comm_hook=bf16 is for DDP and has no effect under a plan"):
        OSDPAccelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)])
    OSDPAccelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])


# ---- what Accelerate's dynamo plugin asks for becomes an option of the plan


def inductor(**options) -> dict[str, TorchDynamoPlugin]:
    return {"dynamo_plugin": TorchDynamoPlugin(**{"backend": "inductor", **options})}


@pytest.mark.parametrize(("variable", "asked", "compiles"), [
    ("NO", {}, False),
    ("INDUCTOR", {}, True),
    ("NO", inductor(disable=True), False),
    ("NO", {"dynamo_backend": "inductor"}, True),
    ("NO", inductor(use_regional_compilation=True), True),
], ids=["none", "launcher", "disabled", "backend", "regional"])  # fmt: skip
def test_blocks_are_compiled_as_launcher_and_dynamo_ask_and_accelerate_compiles_nothing(
    monkeypatch, variable, asked, compiles
):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", variable)
    for _ in range(2):  # they share the state
        accelerator = OSDPAccelerator(cpu=True, osdp={}, **asked)
        assert accelerator.config.compile == compiles
        assert not is_compiled_module(accelerator.prepare_model(torch.nn.Linear(2, 2), evaluation_mode=True))


def test_model_wrapped_by_torch_compile_is_refused():
    for act in (OSDPAccelerator(cpu=True, osdp={}).prepare, OptimalShardedDataParallel):
        with pytest.raises(ValueError, match=r"give the model itself, and OSDPConfig\(compile=True\)"):
            act(torch.compile(tiny_model("gpt2")))


def test_what_a_plan_cannot_compile_is_refused_in_one_line():
    for asked in ({"backend": "aot_eager"}, {"mode": "max-autotune"}, {"fullgraph": True}, {"dynamic": True},
                  {"options": {"max_autotune": True}}):  # fmt: skip
        with pytest.raises(ValueError, match="cannot be planned; use inductor with its defaults"):
            OSDPAccelerator(cpu=True, osdp={}, **inductor(**asked))
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match="plan runs a given plan as it is"):
        OSDPAccelerator(cpu=True, osdp={"plan": "plan.json"}, dynamo_backend="inductor")
