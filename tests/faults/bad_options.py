"""Bad options: of OSDPConfig, the Trainer, plain loops, launchers, optimizers, models, batches and folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_osdp.distributed.process_group import check_ranks, launch_timeout_s
from hf_osdp.integrations.launch import launch_request, launched_rank
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.integrations.trainer_options import asked_config
from hf_osdp.planning.config import OSDPConfig

from .bad_inputs import BadInput, raised

CASES: list[BadInput] = []


def case(place: str, given: str, names: str, line: str, do: Callable[[Path], object], **more: Any) -> None:
    """Something that raises."""
    CASES.append(BadInput(place=place, given=given, names=names, line=line, said=raised(do), **more))


# ---------------------------------------------------------------------------------------------------------------- options


def option(names: str, line: str, **options: Any) -> None:
    """Options as they stand in a script, a mapping or a YAML file."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    case("Options of OSDPConfig", given, names, line, lambda folder: OSDPConfig.from_options(options))


option(
    "4",
    "memory_margin=4 must be the share of the limit that stays free, at least 0 and below 1, such as 0.04.",
    memory_margin=4,
)
option(
    "'8GB?'",
    "memory_limit='8GB?' is not a number of bytes; write it as bytes or with a unit, for example 8GiB or 500MB.",
    memory_limit="8GB?",
)
option(
    "'8 gigs'",
    "memory_limit='8 gigs' is not a number of bytes; write it as bytes or with a unit, for example 8GiB or 500MB.",
    memory_limit="8 gigs",
)
option(
    "-1",
    "memory_limit=-1 must be between 1 byte and 2**60 bytes; write it as bytes or with a unit, for example 8GiB or 500MB.",
    memory_limit=-1,
)
option(
    "'-8GiB'",
    "memory_limit='-8GiB' is not a number of bytes; write it as bytes or with a unit, for example 8GiB or 500MB.",
    memory_limit="-8GiB",
)
option(
    "'0'",
    "memory_limit='0' must be between 1 byte and 2**60 bytes; write it as bytes or with a unit, for example 8GiB or 500MB.",
    memory_limit="0",
)
option("''", "memory_limit='' is not a number of bytes; write it as bytes or with a unit, for example 8GiB or 500MB.", memory_limit="")
option(
    "True", "memory_limit=True is not a number of bytes; write it as bytes or with a unit, for example 8GiB or 500MB.", memory_limit=True
)
option(
    "nan",
    "memory_limit=nan must be between 1 byte and 2**60 bytes; write it as bytes or with a unit, for example 8GiB or 500MB.",
    memory_limit=float("nan"),
)
option(
    "'2000000TiB'",
    "memory_limit='2000000TiB' must be between 1 byte and 2**60 bytes; write it as bytes or with a unit, for example 8GiB or 500MB.",
    memory_limit="2000000TiB",
)
option("'zero3'", "strategy='zero3' is not known; use one of osdp, fsdp, ddp, zero2, hsdp, two_stage.", strategy="zero3")
option(
    "' , '", "block_classes=' , ' names no class; give names such as GPT2Block, or leave it out to have them found.", block_classes=" , "
)
option("[1]", "block_classes=[1] must hold class names, for example GPT2Block,BertLayer.", block_classes=[1])
option("=0", "sequence_length=0 must be a whole number of at least 1, or left out.", sequence_length=0)
option("'8'", "global_batch_size='8' must be a whole number of at least 1, or left out.", global_batch_size="8")
option("2.5", "micro_batch_size=2.5 must be a whole number of at least 1, or left out.", micro_batch_size=2.5)
option("-1", "nodes=-1 must be a whole number of at least 1, or left out.", nodes=-1)
option("'yes'", "recompute='yes' is not a switch; use true or false.", recompute="yes")
option("None", "compare=None is not a switch; use true or false.", compare=None)
option("'retry'", "on_oom='retry' is not known; use one of raise, replan.", on_oom="retry")
option("'later'", "async_save='later' is not a switch; use true or false.", async_save="later")
option("=3", "plan=3 is of type int; use a Plan or the path of a plan file.", plan=3)
option("=3", "hardware=3 is of type int; use a Hardware or the name of a preset.", hardware=3)
option(
    "strategy='ddp'",
    "plan runs a given plan as it is, so strategy='ddp' would have no effect; leave one of the two out.",
    plan="plan.json",
    strategy="ddp",
)
option(
    "hardware",
    "profile already says what the hardware is, so hardware would have no effect; leave one of the two out.",
    profile="p.json",
    hardware="h100",
)
option(
    "split_vocabulary=True",
    "split_vocabulary=True has no effect beside operator_splitting=False; leave one of the two out.",
    split_vocabulary=True,
    operator_splitting=False,
)
option("'memorylimit'", "OSDP has no option 'memorylimit'; its options are ‹names›.", memorylimit="8GiB")


# ------------------------------------------------------------------------------------------------- Trainer, loops, launchers


def trainer(names: str, line: str, osdp: object = None, fsdp_config: dict[str, object] | None = None) -> None:
    """What the Trainer is given."""
    given = f"Trainer(osdp={osdp!r})" if fsdp_config is None else f"TrainingArguments(fsdp_config={fsdp_config!r})"
    arguments = SimpleNamespace(fsdp=[], fsdp_plugin_args=None, fsdp_config=fsdp_config)
    case("Trainer", given, names, line, lambda folder: asked_config(osdp, arguments))


trainer("'on'", "osdp='on' is of type str; use True, False, an OSDPConfig or a mapping of its fields.", "on")
trainer("'on'", "fsdp_config has osdp='on'; use true, false or a mapping of options.", fsdp_config={"osdp": "on"})
trainer(
    "sync_module_states=True",
    "sync_module_states=True is for the plan to decide; leave it out, FSDP2 under a plan has no such choice.",
    fsdp_config={"osdp": True, "sync_module_states": True},
)
trainer("version=1", "fsdp_config has version=1, which cannot run a plan; leave it out or use 2.", fsdp_config={"osdp": True, "version": 1})
trainer("'memory'", "OSDP has no option 'memory'; its options are ‹names›.", fsdp_config={"osdp": {"memory": "8GiB"}})


def plain_loop(given: str, names: str, line: str, config: dict[str, object] | None = None, **more: Any) -> None:
    """What a plain loop is given beside the model."""

    def do(folder: Path) -> object:
        return OptimalShardedDataParallel(nn.Linear(2, 2), config, **more)

    case("Plain loops", f"OptimalShardedDataParallel(model{given})", names, line, do)


_BATCH: dict[str, object] = {"sequence_length": 8, "global_batch_size": 8}
plain_loop("", "sequence_length and global_batch_size", "Planning needs sequence_length and global_batch_size; set them in OSDPConfig.")
plain_loop(
    ', config, mixed_precision="fp8"', "'fp8'", "mixed_precision='fp8' is not known; use no, bf16 or fp16.", _BATCH, mixed_precision="fp8"
)
plain_loop(
    ", config, optimizer=AdamW(...)",
    "AdamW",
    "optimizer is of type AdamW; give an OptimizerSpec, and make the optimizer from the sharded model's parameters.",
    _BATCH,
    optimizer=torch.optim.AdamW([nn.Parameter(torch.ones(1))]),
)
plain_loop(
    ", OSDPConfig(async_save=True, ...)",
    "async_save=True",
    "async_save=True has no effect in a plain loop; leave it out, and use save_checkpoint(in_background=True).",
    {**_BATCH, "async_save": True},
)


def launched(given: str, names: str, line: str, strategy: str, **environment: str) -> None:
    """What the accelerate configuration file makes of the environment."""
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": strategy, **environment}
    case("Launchers", given, names, line, lambda folder: launch_request(variables))


launched(
    "fsdp_sharding_strategy: {osdp: true, 8GiB}",
    "'8GiB'}",
    "OSDP was asked for, but its options cannot be read from fsdp_sharding_strategy: {'osdp': True, '8GiB'}; write "
    "`fsdp_sharding_strategy: {osdp: true, memory_limit: 8GiB}` under fsdp_config, with `fsdp_version: 2`.",
    "{'osdp': True, '8GiB'}",
)
launched(
    "fsdp_sharding_strategy: {osdp: maybe}",
    "'maybe'",
    "fsdp_sharding_strategy has osdp: 'maybe'; write osdp: true or osdp: false.",
    "{'osdp': 'maybe'}",
)
launched(
    "fsdp_sharding_strategy: {osdp: true, use_cpu: 1}",
    "use_cpu: 1",
    "fsdp_sharding_strategy has use_cpu: 1; write use_cpu: true or use_cpu: false.",
    "{'osdp': True, 'use_cpu': 1}",
)
launched(
    "fsdp_version: 1",
    "fsdp_version 1",
    "The options of OSDP were given with fsdp_version 1; write `fsdp_sharding_strategy: {osdp: true, memory_limit: "
    "8GiB}` under fsdp_config, with `fsdp_version: 2`.",
    "{'osdp': True}",
    FSDP_VERSION="1",
)
launched(
    "fsdp_reshard_after_forward: false",
    "forward: false",
    "fsdp_reshard_after_forward: false is for the plan to decide; leave it out, or write strategy: zero2 beside osdp.",
    "{'osdp': True}",
    FSDP_RESHARD_AFTER_FORWARD="false",
)


def environment(names: str, line: str, do: Callable[[], object], **variables: str) -> None:
    """Variables that a launcher or a user sets."""

    def with_variables(folder: Path) -> None:
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            do()
        finally:
            os.environ.clear()
            os.environ.update(before)

    given = next(f"{name}={value}" for name, value in variables.items() if value == names.strip("'"))
    case("Launchers", given, names, line, with_variables)


_TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
environment(
    "'zero'", "RANK='zero' is not a whole number of at least 0; it is for the launcher to set.", launched_rank, **{**_TWO, "RANK": "zero"}
)
environment(
    "'two'",
    "WORLD_SIZE='two' is not a whole number of at least 0; it is for the launcher to set.",
    check_ranks,
    **{**_TWO, "WORLD_SIZE": "two"},
)
environment(
    "'http'",
    "MASTER_PORT='http' is not a whole number of at least 0; it is for the launcher to set.",
    check_ranks,
    **{**_TWO, "MASTER_PORT": "http"},
)
environment(
    "soon",
    "OSDP_LAUNCH_TIMEOUT_S=soon is not a number of seconds above 0; give one, such as 300, or leave it out.",
    launch_timeout_s,
    OSDP_LAUNCH_TIMEOUT_S="soon",
)
environment(
    "-5",
    "OSDP_LAUNCH_TIMEOUT_S=-5 is not a number of seconds above 0; give one, such as 300, or leave it out.",
    launch_timeout_s,
    OSDP_LAUNCH_TIMEOUT_S="-5",
)
