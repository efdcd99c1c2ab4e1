"""The plugin, and how the Trainer's arguments ask for OSDP."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainingArguments

from hf_osdp.integration.config import OSDPConfig
from hf_osdp.integration.plugin import OSDPPlugin, precision_of
from hf_osdp.integration.trainer_options import asked_config, plugin_options, refuse_unplanned
from hf_osdp.planner.description import DType


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_SHARDING_STRATEGY", "FSDP_VERSION", "FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_STATE_DICT_TYPE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def launched(monkeypatch, strategy: str = "{'osdp': True, 'memory_limit': '1GiB'}") -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", strategy)


def arguments(tmp_path, **options) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)


def test_plugin_is_fsdp2_with_float32_reduction():
    plugin = OSDPPlugin(osdp={"memory_limit": "1GiB"})
    assert plugin.fsdp_version == 2
    assert plugin.osdp == OSDPConfig(memory_limit="1GiB")
    assert "FULL" in str(plugin.state_dict_type)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("options", [{"fsdp_version": 1}, {"reshard_after_forward": False}, {"ignored_modules": "x"}])
def test_plugin_refuses_what_the_plan_decides(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        OSDPPlugin(**options)


def test_precision_from_name_or_policy():
    assert precision_of("fp16", None).compute is DType.FLOAT16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert precision_of("no", policy).reduce is DType.BFLOAT16


def test_off_unless_asked_for(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    assert asked_config(None, args) is None
    assert asked_config(True, args) == OSDPConfig()
    launched(monkeypatch)
    assert asked_config(None, args) == OSDPConfig(memory_limit="1GiB")
    assert asked_config(False, args) is None
    assert asked_config({"strategy": "ddp"}, args) == OSDPConfig(strategy="ddp")


def test_asked_for_in_fsdp_config(tmp_path, monkeypatch):
    launched(monkeypatch)
    assert asked_config(None, arguments(tmp_path, fsdp_config={"osdp": {"strategy": "hsdp"}})) == OSDPConfig(strategy="hsdp")
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"osdp": {"strategy": "zero2"}, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}))
    args = arguments(tmp_path, fsdp_config=str(file))
    assert asked_config(None, args) == OSDPConfig(strategy="zero2")
    assert plugin_options(args) == {"state_dict_type": "SHARDED_STATE_DICT"}


@pytest.mark.parametrize("bad", [{"osdp": "yes"}, {"osdp": {"no_such": 1}}])
def test_unreadable_fsdp_config_fails(tmp_path, bad):
    with pytest.raises(ValueError):
        asked_config(None, arguments(tmp_path, fsdp_config=bad))


def test_another_type_fails():
    with pytest.raises(ValueError, match="osdp='yes'"):
        asked_config("yes", None)


@pytest.mark.parametrize(
    ("options", "part"), [({"auto_find_batch_size": True}, "auto_find_batch_size"), ({"torch_compile": True}, "torch_compile")]
)
def test_what_cannot_be_planned_is_refused(tmp_path, options, part):
    with pytest.raises(ValueError, match=part):
        refuse_unplanned({"model": torch.nn.Linear(1, 1), "args": arguments(tmp_path, **options)})


def test_model_init_is_refused():
    with pytest.raises(ValueError, match="model_init"):
        refuse_unplanned({"model_init": lambda: None})
