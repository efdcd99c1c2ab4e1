"""How options arrive from `accelerate launch`."""

from __future__ import annotations

from argparse import Namespace

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from hf_osdp.integrations.launch import launch_request, launched_rank, launched_world_size, state_dict_type


def environment(strategy: str, **more: str) -> dict[str, str]:
    return {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": strategy, **more}


def test_without_a_launcher_nothing_is_asked_for():
    assert launch_request({}) is None
    assert (launched_rank({}), launched_world_size({}), state_dict_type({})) == (0, 1, "FULL_STATE_DICT")


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "1", ""])
def test_plain_fsdp_is_left_alone(strategy):
    assert launch_request(environment(strategy)) is None


def test_options_arrive_as_they_stand_in_the_file():
    request = launch_request(environment("{'osdp': True, 'memory_limit': '8GiB', 'compare': False}"))
    assert dict(request.options) == {"memory_limit": "8GiB", "compare": False}
    assert not request.use_cpu


def test_switched_off_is_told_apart_from_nothing_said():
    request = launch_request(environment("{'osdp': False, 'memory_limit': '1GiB', 'use_cpu': True}"))
    assert (request.osdp, request.use_cpu, dict(request.options)) == (False, True, {"memory_limit": "1GiB"})


def test_a_setting_that_the_plan_decides_is_refused():
    with pytest.raises(ValueError, match=r"fsdp_reshard_after_forward: false.*strategy"):
        launch_request(environment("{'osdp': True}", FSDP_RESHARD_AFTER_FORWARD="false"))


def test_use_cpu_is_for_the_launch_not_for_the_plan():
    request = launch_request(environment("{'osdp': True, 'use_cpu': True}"))
    assert request.use_cpu and not request.options


def test_wrap_classes_count_as_block_classes():
    request = launch_request(environment("{'osdp': True}", FSDP_TRANSFORMER_CLS_TO_WRAP="GPT2Block,BertLayer"))
    assert request.options["block_classes"] == "GPT2Block,BertLayer"


@pytest.mark.parametrize(
    ("strategy", "part"),
    [
        ("OSDP", "cannot be read"),
        ("{'osdp': True, ", "cannot be read"),
        ("{'osdp': True, 1: 2}", "cannot be read"),
        ("{{}: 1, 'osdp': True}", "cannot be read"),
        ("{'osdp': " + "[" * 15000, "cannot be read"),
        ("{'osdp': True, 'memory_limit': " + "-" * 15000 + "1}", "cannot be read"),
        ("{'osdp': True, 'memory_limit': " + "1" * 10**6 + "}", "1000032 letters, the most are 16384"),
        ("{'osdp': __import__('os').system('ls')}", "cannot be read"),
        ("{'memory_limit': '8GiB'}", "cannot be read"),
        ("{'osdp': 'yes'}", "osdp: true or osdp: false"),
        ("{'osdp': True, 'use_cpu': 'yes'}", "use_cpu: true"),
    ],
)
def test_asked_for_but_unreadable_fails_in_one_line(strategy, part):
    with pytest.raises(ValueError, match=part) as caught:
        launch_request(environment(strategy))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "-1", "1.0", "one", "٣", "9" * 5000])
def test_a_rank_that_is_none_is_refused(text):
    for read, name in ((launched_rank, "RANK"), (launched_world_size, "WORLD_SIZE")):
        with pytest.raises(ValueError, match=f"{name}=.* is not a whole number of at least 0") as caught:
            read({name: text})
        assert len(str(caught.value)) < 150


def test_fsdp_version_1_is_refused():
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        launch_request(environment("{'osdp': True}", FSDP_VERSION="1"))


def test_the_real_launcher_passes_the_mapping_on(tmp_path):
    file = tmp_path / "osdp.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 2\n"
        "use_cpu: true\nfsdp_config:\n  fsdp_version: 2\n  fsdp_cpu_ram_efficient_loading: false\n"
        "  fsdp_sharding_strategy: {osdp: true, memory_limit: 8GiB, reduce_every_micro_step: false}\n"
    )
    args = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    args, _, _ = _validate_launch_command(args)
    assert isinstance(args, Namespace)
    exported = prepare_multi_gpu_env(args)
    request = launch_request(exported)
    assert dict(request.options) == {"memory_limit": "8GiB", "reduce_every_micro_step": False}
