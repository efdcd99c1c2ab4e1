"""Turn a command line's request into the planning problem that a run with the same options would have."""

from __future__ import annotations

import logging
import socket
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InfeasibleError
from ..planner.description import ModelDescription
from ..planner.hardware import Backend, Hardware, check_margin
from ..planner.job import OptimizerSpec, Precision, TrainingJob
from ..planner.presets import preset, preset_names
from ..planner.problem import PlanningProblem
from ..planner.profile import Profile, with_block_times
from ..planner.search.search import search
from ..planner.split import WHOLE_BLOCKS, ModelSplit
from ..quantities import parse_bytes
from .options import Request

if TYPE_CHECKING:
    from torch import nn
    from transformers import AutoConfig, PreTrainedConfig

    from ..planning.config import OSDPConfig
    from ..planning.problem import RunFacts

OPTIMIZERS = {"adamw": OptimizerSpec(), "momentum": OptimizerSpec(name="momentum", states=1), "sgd": OptimizerSpec(name="sgd", states=0)}
"""Optimizers by the names of `--optimizer`."""


def hardware_of(request: Request) -> Hardware:
    """Return the devices that were named or measured, as many as asked for, with the margin that was asked for.

    Raises:
        HardwareError: the name is not known.
        ValueError: neither a name nor a profile is given, or both are; the margin is not a share.
    """
    margin = None if request.margin is None else check_margin(request.margin, name="--margin")
    if (request.device is None) == (request.profile is None):
        given = "Both were given" if request.device else "Neither was given"
        raise ValueError(f"{given}: use either --device with one of {', '.join(preset_names())}, or --profile FILE.")
    if request.device is not None:
        hardware = preset(request.device, nodes=request.num_nodes or 1, devices_per_node=request.devices_per_node or 1)
        return hardware.with_margin(margin)
    measured = profile_of(request).hardware
    nodes, devices = request.num_nodes or measured.nodes, request.devices_per_node or measured.devices_per_node
    same = (nodes, devices) == (measured.nodes, measured.devices_per_node)
    return (measured if same else measured.scaled(nodes=nodes, devices_per_node=devices)).with_margin(margin)


def profile_of(request: Request) -> Profile:
    """Return the profile that `--profile` names."""
    assert request.profile is not None
    return Profile.load(request.profile)


def run_of(request: Request, hardware: Hardware) -> tuple[OSDPConfig, RunFacts]:
    """Return configuration and facts of the run that is asked about, without the limit; of its `precision_attempts` the last."""
    from ..planning.problem import precision_attempts

    return precision_attempts(*_run_of(request, hardware))[-1]


def _run_of(request: Request, hardware: Hardware) -> tuple[OSDPConfig, RunFacts]:
    from ..planning.config import OSDPConfig
    from ..planning.problem import RunFacts

    config = OSDPConfig(
        strategy=request.strategy.value,
        block_classes=tuple(names_in(request.block_classes)) or None,
        recompute=request.recompute,
        host_offload=request.host_offload,
        offload_activations=request.offload_activations,
        operator_splitting=request.operator_splitting,
        split_vocabulary=request.split_vocabulary and request.operator_splitting and request.strategy.value == "osdp",
        profile=None if request.profile is None else profile_of(request),
    )
    facts = RunFacts(
        world_size=hardware.world_size,
        device_type=device_type_of(hardware),
        precision=Precision.named(request.precision, autocast=hardware.world_size == 1),
        optimizer=OPTIMIZERS[request.optimizer],
        sequence_length=request.sequence_length,
        global_batch_size=request.global_batch_size,
        micro_batch_size=request.micro_batch_size,
        activation_checkpointing=request.activation_checkpointing,
        capability=hardware.device.capability,
        expandable_segments=True,
    )
    return config, facts


def job_of(request: Request, hardware: Hardware) -> TrainingJob:
    """Return the job, with sizes that fit together.

    Raises:
        ValueError: the devices do not divide the batch, or the micro-batch size does not divide each one's share.
        HardwareError: the device's rate in this precision is not known.
    """
    for flag, given in (("--no-recompute", request.recompute is False), ("--offload-activations", request.offload_activations)):
        if given and request.activation_checkpointing:
            raise ValueError(f"{flag} has no effect beside --activation-checkpointing; leave one of the two out.")
    for flag, asked in {"--host-offload": request.host_offload, "--offload-activations": request.offload_activations}.items():
        if asked and hardware.host is None:
            raise ValueError(f"{flag} needs a host beside the device, and none is known for {hardware.device.name}; leave it out.")
    from ..planning.problem import training_job

    job = training_job(*run_of(request, hardware))
    if job.precision.compute is not None:
        hardware.device.rate(job.precision.compute)
    return job


def memory_limit_of(request: Request, hardware: Hardware) -> int:
    """Return the bytes of each device that training may use.

    Raises:
        ValueError: the text is no number of bytes, or more than the device has.
    """
    from ..planning.problem import check_limit

    there = hardware.device.memory_bytes
    limit = there if request.memory_limit is None else parse_bytes(request.memory_limit, name="--memory-limit")
    return check_limit(limit, hardware.device, given=f"--memory-limit {request.memory_limit}")


def device_type_of(hardware: Hardware) -> str:
    """Return whose kernels and allocation granularity count."""
    return "cuda" if hardware.backend is Backend.NCCL else "cpu"


def describer(request: Request, hardware: Hardware) -> Callable[..., ModelDescription]:
    """Return a function that describes a configuration at a sequence length as the request asks, times by roofline."""
    from ..planning.problem import Describer

    config, facts = run_of(request, hardware)

    def describe_at(model_config: object, sequence_length: int, split: ModelSplit = WHOLE_BLOCKS) -> ModelDescription:
        return Describer(model_of(request, model_config), config, replace(facts, sequence_length=sequence_length)).describe(split)

    return describe_at


def model_of(request: Request, config: object) -> nn.Module:
    """Return the configuration's model on the meta device, with adapters if asked for, and with float32 masters in mixed precision.

    Raises:
        ValueError: peft is not installed, or targets are given without a rank.
        DescriptionError: the model cannot be built, or has no such projections.
    """
    if request.lora_rank is None and request.lora_targets:
        raise ValueError(f"--lora-targets {request.lora_targets} has no effect without --lora-rank; give both, or neither.")
    from ..modeling.build import build_on_meta, with_lora
    from ..sharding.environment import hold_master_weights

    model = build_on_meta(config, request.auto_class)
    if request.lora_rank is not None:
        model = with_lora(model, request.lora_rank, names_in(request.lora_targets))
    hold_master_weights(model, Precision.named(request.precision))
    return model


def names_in(text: str | None) -> list[str]:
    """Return the names between commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def timed(request: Request, description: ModelDescription) -> ModelDescription:
    """Return the description with the profile's times of its blocks, where there is a profile that holds blocks.

    Raises:
        ProfileError: it holds other blocks, or other sequence lengths.
    """
    return description if request.profile is None else with_block_times(description, profile_of(request))


def case_of(request: Request) -> tuple[PlanningProblem, PreTrainedConfig, Request]:
    """Return the problem, the model's configuration, and the request as settled.

    One device is first planned without units on the host, as the Trainer and Accelerate do.

    Raises:
        OSDPError: the device or the model is not known, or it cannot be described.
        ValueError: an option cannot be used.
    """
    from ..planning.problem import ProblemBuilder, precision_attempts

    hardware = hardware_of(request)
    job_of(request, hardware)
    limit = memory_limit_of(request, hardware)
    model_config = load_config(request.model)
    if request.split_vocabulary and not request.operator_splitting:
        raise ValueError("--split-vocabulary has no effect beside --no-operator-splitting; leave one of the two out.")

    def problem(config: OSDPConfig, facts: RunFacts) -> PlanningProblem:
        builder = ProblemBuilder(model_of(request, model_config), replace(config, memory_limit=limit), facts, hardware=hardware)
        return builder.with_best_split(builder.build())

    *first, last = precision_attempts(*_run_of(request, hardware))
    for attempt in first:
        with suppress(InfeasibleError):
            found = problem(*attempt)
            search(found)
            return found, model_config, replace(request, host_offload=attempt[0].host_offload)
    return problem(*last), model_config, request


def plain_of(request: Request, hardware: Hardware, config: object) -> ModelDescription:
    """Return the description of the model as it is, not split."""
    return timed(request, describer(request, hardware)(config, request.sequence_length))


def split_case(case: PlanningProblem, request: Request, config: object) -> PlanningProblem:
    """Return the problem of the model as it trains fastest, whole or split."""
    from ..planning.problem import ProblemBuilder

    return ProblemBuilder(model_of(request, config), *run_of(request, case.hardware), hardware=case.hardware).with_best_split(case)


def load_config(model: str) -> PreTrainedConfig:
    """Load a transformers configuration from a hub id, a folder or a file; the hub's cache goes before the hub.

    Raises:
        ValueError: there is none, or the hub cannot be reached.
    """
    path = Path(model).expanduser()
    local = path.exists()
    if not local and (model.endswith(".json") or model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise ValueError(f"MODEL {model!r}: there is no such file or folder; give a config.json, a folder that has one, or a hub id.")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    if local:
        config = _read(AutoConfig, str(path), model)
        config._name_or_path = path.resolve().parent.name if path.name == "config.json" else path.stem  # tables have no room for a path
        return config
    try:
        return _from_pretrained(AutoConfig, model, local_files_only=True)
    except (OSError, ValueError):
        _check_hub(model)
    return _read(AutoConfig, model, model)


def _from_pretrained(auto_config: type[AutoConfig], source: str, **options: bool) -> PreTrainedConfig:
    config: PreTrainedConfig = auto_config.from_pretrained(source, trust_remote_code=False, **options)
    return config


def _read(auto_config: type[AutoConfig], source: str, model: str) -> PreTrainedConfig:
    try:
        return _from_pretrained(auto_config, source)
    except Exception as error:  # a malformed file may make transformers raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(f"MODEL {model!r} has no configuration that transformers can read: {reason}.") from None


def _check_hub(model: str) -> None:
    """Raise at once where there is no network, before five retries do; behind a proxy names need not resolve here."""
    from huggingface_hub import constants

    unreachable = (
        f"MODEL {model!r} is no file or folder here and is not in the hub's cache, and the hub ({constants.ENDPOINT}) cannot be reached;"
        " give a config.json, a folder that has one, or connect."
    )
    if constants.HF_HUB_OFFLINE:
        raise ValueError(unreachable)
    if urllib.request.getproxies():
        return
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        raise ValueError(unreachable) from None
