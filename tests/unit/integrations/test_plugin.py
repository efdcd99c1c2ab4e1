"""The plugin, and how the Trainer's arguments ask for OSDP."""

from __future__ import annotations

import json
import os

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainingArguments

from hf_osdp import Trainer
from hf_osdp.integrations.launch import launch_request
from hf_osdp.integrations.plugin import OSDPPlugin, plugin_for, precision_of
from hf_osdp.integrations.trainer_options import asked_config, plugin_options, refuse_unplanned
from hf_osdp.modeling.split.names import is_split
from hf_osdp.modeling.wrapping import is_recomputed
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import Activations, DType
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.split import WHOLE_BLOCKS, ModelSplit, OperatorSplit
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.tracing.describe import describe
from tests.helpers.models import tiny_model


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No launcher, and no variables of FSDP left behind."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))]:
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


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"fsdp_version": 1}, "use 2"),
        ({"reshard_after_forward": True}, r"OSDPConfig\(strategy"),
        ({"reshard_after_forward": False}, r"OSDPConfig\(strategy"),
        ({"sharding_strategy": "FULL_SHARD"}, r"OSDPConfig\(strategy"),
        ({"min_num_params": 1000}, r"OSDPConfig\(block_classes"),
        ({"auto_wrap_policy": "size_based_wrap"}, r"OSDPConfig\(block_classes"),
        ({"ignored_modules": "x"}, r"OSDPConfig\(block_classes"),
        ({"backward_prefetch": "BACKWARD_PRE"}, "leave it out"),
        ({"limit_all_gathers": False}, "leave it out"),
    ],
)
def test_plugin_refuses_what_the_plan_decides(options, remedy):
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*{remedy}") as caught:
        OSDPPlugin(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [["GPT2Block", "BertLayer"], "GPT2Block,BertLayer"])
def test_classes_to_wrap_are_block_classes(names):
    assert OSDPPlugin(transformer_cls_names_to_wrap=names).osdp.block_classes == ("GPT2Block", "BertLayer")
    with pytest.raises(ValueError, match=r"transformer_cls_names_to_wrap.*OSDPConfig\(block_classes"):
        OSDPPlugin(osdp=OSDPConfig(block_classes="GPT2Block"), transformer_cls_names_to_wrap=names)


def test_defaults_that_the_launcher_exports_pass(monkeypatch):
    flags = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    args = launch_command_parser().parse_args([*flags, "--dynamo_backend", "no", "train.py"])
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "{'osdp': True, 'memory_limit': '1GiB'}")
    assert OSDPPlugin().osdp == OSDPConfig(memory_limit="1GiB")


def test_plugin_for_takes_either_name_and_one_of_them():
    plugin = OSDPPlugin()
    assert plugin_for(None, plugin, None, None) is plugin
    assert plugin_for(None, None, plugin, None) is plugin
    with pytest.raises(ValueError, match="Both osdp_plugin and fsdp_plugin"):
        plugin_for(None, plugin, plugin, None)
    with pytest.raises(ValueError, match="Both osdp and osdp_plugin"):
        plugin_for(OSDPConfig(), plugin, None, None)


def test_an_accelerator_that_is_switched_off_says_so(monkeypatch):
    launched(monkeypatch, "{'osdp': False, 'memory_limit': '1GiB'}")
    with pytest.raises(ValueError, match=r"osdp: false.*use accelerate's Accelerator"):
        plugin_for(None, None, None, launch_request())
    assert plugin_for({"strategy": "ddp"}, None, None, launch_request()).osdp == OSDPConfig(strategy="ddp", memory_limit="1GiB")


def test_an_explicit_configuration_and_the_file_are_merged_everywhere(tmp_path, monkeypatch):
    launched(monkeypatch, "{'osdp': True, 'memory_limit': '1GiB', 'strategy': 'ddp'}")
    args = arguments(tmp_path)
    for asked, want in (
        (OSDPConfig(memory_limit="2GiB"), OSDPConfig(memory_limit="2GiB", strategy="ddp")),
        ({"strategy": "osdp"}, OSDPConfig(memory_limit="1GiB")),
    ):
        assert asked_config(asked, args) == want
        assert OSDPPlugin(osdp=asked).osdp == want
        assert plugin_for(asked, None, None, launch_request()).osdp == want
        assert OSDPPlugin(osdp=want.options()).osdp == want


def test_the_file_can_switch_off(tmp_path, monkeypatch):
    launched(monkeypatch, "{'osdp': False, 'memory_limit': '1GiB'}")
    args = arguments(tmp_path)
    assert asked_config(None, args) is None
    assert asked_config(True, args) == OSDPConfig(memory_limit="1GiB")


@pytest.mark.parametrize(
    ("beside", "part"),
    [
        ({"reshard_after_forward": True}, r"reshard_after_forward=True.*OSDPConfig\(strategy"),
        ({"fsdp_min_num_params": 10}, r"min_num_params=10.*OSDPConfig\(block_classes"),
        ({"no_such_key": 1}, "no_such_key=1.*no effect"),
        ({"xla": True}, "xla=True.*no effect"),
        ({"version": 1}, "version=1"),
    ],
)
def test_fsdp_config_without_effect_is_refused(tmp_path, beside, part):
    with pytest.raises(ValueError, match=part) as caught:
        asked_config(True, arguments(tmp_path, fsdp_config=beside))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fsdp", [None, True])
def test_layers_of_fsdp_config_are_block_classes(tmp_path, fsdp):
    options = {} if fsdp is None else {"fsdp": fsdp}
    args = arguments(tmp_path, fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]}, **options)
    assert asked_config(True, args) == OSDPConfig(block_classes="GPT2Block")
    with pytest.raises(ValueError, match=r"transformer_layer_cls_to_wrap.*OSDPConfig\(block_classes"):
        asked_config(OSDPConfig(block_classes="BertLayer"), args)


def test_precision_from_name_or_policy():
    assert precision_of("fp16", None, alone=False).compute is DType.FLOAT16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert precision_of("no", policy, alone=False).reduce is DType.BFLOAT16


def test_off_unless_asked_for(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    assert asked_config(None, args) is None
    assert asked_config(True, args) == OSDPConfig()
    launched(monkeypatch)
    assert asked_config(None, args) == OSDPConfig(memory_limit="1GiB")
    assert asked_config(False, args) is None
    assert asked_config({"strategy": "ddp"}, args) == OSDPConfig(strategy="ddp", memory_limit="1GiB")


def test_asked_for_in_fsdp_config(tmp_path, monkeypatch):
    launched(monkeypatch)
    assert asked_config(None, arguments(tmp_path, fsdp_config={"osdp": {"strategy": "hsdp"}})) == OSDPConfig(
        strategy="hsdp", memory_limit="1GiB"
    )
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"osdp": {"strategy": "zero2"}, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}))
    args = arguments(tmp_path, fsdp_config=str(file))
    assert asked_config(None, args) == OSDPConfig(strategy="zero2", memory_limit="1GiB")
    assert plugin_options(args) == {"state_dict_type": "SHARDED_STATE_DICT"}


@pytest.mark.parametrize("bad", [{"osdp": "yes"}, {"osdp": {"no_such": 1}}])
def test_unreadable_fsdp_config_fails(tmp_path, bad):
    with pytest.raises(ValueError):
        asked_config(None, arguments(tmp_path, fsdp_config=bad))


@pytest.mark.parametrize(
    ("text", "part"),
    [('{"osdp": true, "osdp": false}', "the key 'osdp' twice"), ("[1]", "holds a list"), ("{", "is not JSON"), (None, "No such")],
)
def test_a_file_of_fsdp_config_that_cannot_be_read_fails(tmp_path, text, part):
    args = arguments(tmp_path)
    args.fsdp_config = str(tmp_path / "fsdp.json")  # as transformers leaves it where fsdp is not set
    if text is not None:
        (tmp_path / "fsdp.json").write_text(text)
    with pytest.raises(ValueError, match=part) as caught:
        asked_config(None, args)
    assert "fsdp.json" in str(caught.value) and "\n" not in str(caught.value)


def test_another_type_fails():
    with pytest.raises(ValueError, match="osdp='yes'"):
        asked_config("yes", None)


def test_what_cannot_be_planned_is_refused(tmp_path):
    with pytest.raises(ValueError, match="torch_compile"):
        refuse_unplanned({"model": torch.nn.Linear(1, 1), "args": arguments(tmp_path, torch_compile=True)})


def test_auto_find_batch_size_is_answered_by_the_plan(tmp_path):
    asked = arguments(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=8)
    data = [{"input_ids": torch.zeros(12, dtype=torch.long), "labels": torch.zeros(12, dtype=torch.long)}] * 8
    trainer = Trainer(model=tiny_model("gpt2", layers=1), args=asked, train_dataset=data, osdp={"hardware": "cpu", "memory_limit": "1GiB"})
    assert trainer.args.auto_find_batch_size is False and asked.auto_find_batch_size is True
    assert trainer.args.per_device_train_batch_size == trainer.plan.micro_batch_size
    assert trainer.plan.global_batch_size == 8


def test_model_init_is_refused():
    with pytest.raises(ValueError, match="model_init"):
        refuse_unplanned({"model_init": lambda: None})


@pytest.mark.parametrize("split", [WHOLE_BLOCKS, ModelSplit(sliced=(OperatorSplit(fqn="lm_head", slices=3),))], ids=["recomputed", "split"])
def test_one_process_runs_what_its_plan_says(tmp_path, split):
    model = tiny_model("llama", layers=2)
    description = describe(model, sequence_length=12, split=split)
    choices = [
        UnitLayout(
            shard_size=1,
            reshard_after_forward=False,
            activations=Activations.RECOMPUTE if index in description.recomputable else Activations.SAVE,
        )
        for index in range(len(description.units))
    ]
    plan = Plan.of(description, choices, Batch(micro_batch_size=4, accumulation_steps=2), world_size=1)
    data = [{"input_ids": torch.arange(12), "labels": torch.arange(12)}] * 8
    args = arguments(tmp_path, per_device_train_batch_size=8, max_steps=1, logging_steps=1, save_strategy="no")
    before = model.lm_head.weight.detach().clone()
    trainer = Trainer(model=model, args=args, train_dataset=data, osdp=OSDPConfig(plan=plan))
    trainer.train()
    assert all(is_recomputed(layer) for layer in model.model.layers)
    assert is_split(model) == bool(split.sliced)
    assert not torch.equal(model.state_dict()["lm_head.weight"], before), "the optimizer trains what the model computes with"


def test_recomputation_that_others_decide_cannot_be_forbidden(tmp_path):
    data = [{"input_ids": torch.arange(12), "labels": torch.arange(12)}] * 8
    args = arguments(tmp_path, per_device_train_batch_size=8, gradient_checkpointing=True)
    with pytest.raises(ValueError, match="recompute=False has no effect beside activation checkpointing"):
        Trainer(model=tiny_model("gpt2", layers=1), args=args, train_dataset=data, osdp={"recompute": False})


def test_saving_in_the_background_is_for_shards():
    assert "SHARDED" in str(OSDPPlugin(osdp={"async_save": True}).state_dict_type)
    with pytest.raises(ValueError, match="async_save=True writes shards while training goes on, but state_dict_type is FULL_STATE_DICT"):
        OSDPPlugin(osdp={"async_save": True}, state_dict_type="FULL_STATE_DICT")
