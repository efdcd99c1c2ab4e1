"""From what stands on the command line to what the planner takes."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InfeasibleError
from ..planner.description import ModelDescription
from ..planner.hardware import Backend, Hardware, check_margin
from ..planner.job import OptimizerSpec, Precision, TrainingJob
from ..planner.presets import preset, preset_names
from ..planner.problem import PlanningProblem
from ..planner.search.search import search
from ..planner.split import WHOLE_BLOCKS, ModelSplit
from ..planning.preflight.devices import limit_within
from ..quantities import parse_bytes
from .options import Request

OPTIMIZERS = {"adamw": OptimizerSpec(), "momentum": OptimizerSpec(name="momentum", states=1), "sgd": OptimizerSpec(name="sgd", states=0)}
"""What `--optimizer` names."""


def hardware_of(request: Request) -> Hardware:
    """The devices that were named or measured, as many as asked for, with the margin that was asked for.

    Raises:
        HardwareError: the name is not known.
        ValueError: neither a name nor a profile is given, or both are; the margin is no share.
    """
    margin = None if request.margin is None else check_margin(request.margin, name="--margin")
    return _devices_of(request).with_margin(margin)


def _devices_of(request: Request) -> Hardware:
    if (request.device is None) == (request.profile is None):
        given = "Both were given" if request.device else "Neither was given"
        raise ValueError(f"{given}: use either --device with one of {', '.join(preset_names())}, or --profile FILE.")
    if request.device is not None:
        return preset(request.device, nodes=request.num_nodes or 1, devices_per_node=request.devices_per_node or 1)
    measured = profile_of(request).hardware
    nodes, devices = request.num_nodes or measured.nodes, request.devices_per_node or measured.devices_per_node
    same = (nodes, devices) == (measured.nodes, measured.devices_per_node)
    return measured if same else measured.scaled(nodes=nodes, devices_per_node=devices)


def profile_of(request: Request) -> Any:
    """The profile that `--profile` names."""
    from ..planner.profile import Profile

    return Profile.load(request.profile)


def precision_of(request: Request, hardware: Hardware) -> Precision:
    """What is computed in: one device runs autocast, unless units may be on the host, which FSDP2 runs in its own precision."""
    may_offload = request.host_offload or (request.host_offload is None and hardware.host is not None)
    return Precision.named(request.precision, autocast=hardware.world_size == 1 and not may_offload)


def job_of(request: Request, hardware: Hardware) -> TrainingJob:
    """The job, with sizes that fit together.

    Raises:
        ValueError: the devices do not divide the batch, or the micro-batch size does not divide each one's share.
        HardwareError: the device's rate in this precision is not known.
    """
    job = TrainingJob(
        global_batch_size=request.global_batch_size,
        precision=precision_of(request, hardware),
        optimizer=OPTIMIZERS[request.optimizer],
        micro_batch_size=request.micro_batch_size,
        recompute=request.recompute,
        host_offload=request.host_offload,
        offload_activations=request.offload_activations,
    )
    if request.recompute is False and request.activation_checkpointing:
        raise ValueError("--no-recompute has no effect beside --activation-checkpointing; leave one of the two out.")
    if request.offload_activations and request.activation_checkpointing:
        raise ValueError("--offload-activations has no effect beside --activation-checkpointing; leave one of the two out.")
    for flag, asked in {"--host-offload": request.host_offload, "--offload-activations": request.offload_activations}.items():
        if asked and hardware.host is None:
            raise ValueError(f"{flag} needs a host beside the device, and none is known for {hardware.device.name}; leave it out.")
    job.micro_batch_sizes(hardware.world_size)
    if job.precision.compute is not None:
        hardware.device.rate(job.precision.compute)
    return job


def memory_limit_of(request: Request, hardware: Hardware) -> int:
    """Bytes of each device that training may use.

    Raises:
        ValueError: the text is no number of bytes, or more than the device has.
    """
    there = hardware.device.memory_bytes
    limit = there if request.memory_limit is None else parse_bytes(request.memory_limit, name="--memory-limit")
    return limit_within(hardware.device, limit, said=f"--memory-limit {request.memory_limit}")


def device_type_of(hardware: Hardware) -> str:
    """Whose kernels and allocation granularity count."""
    return "cuda" if hardware.backend is Backend.NCCL else "cpu"


def describer(request: Request, hardware: Hardware) -> Callable[..., ModelDescription]:
    """A function that describes a configuration at a sequence length as the request wants it, times by roofline."""
    precision = precision_of(request, hardware)
    names = names_in(request.block_classes)

    def describe_at(config: Any, sequence_length: int, split: ModelSplit = WHOLE_BLOCKS) -> ModelDescription:
        from ..tracing.describe import describe

        return describe(
            model_of(request, config),
            sequence_length=sequence_length,
            block_classes=names or None,
            compute_dtype=precision.compute,
            autocast=precision.autocast,
            device_type=device_type_of(hardware),
            capability=hardware.device.capability,
            activation_checkpointing=request.activation_checkpointing,
            split=split,
        )

    return describe_at


def model_of(request: Request, config: Any) -> Any:
    """What is trained, on the meta device: the configuration's model, with adapters if they are asked for, and with masters in float32
    where it is trained in less.

    Raises:
        ValueError: peft is not installed, or targets are given without a rank.
        DescriptionError: the model cannot be built, or has no such projections.
    """
    if request.lora_rank is None and request.lora_targets:
        raise ValueError(f"--lora-targets {request.lora_targets} has no effect without --lora-rank; give both, or neither.")
    from ..modeling.build import build_on_meta
    from ..sharding.environment import hold_master_weights

    model = build_on_meta(config, request.auto_class)
    if request.lora_rank is not None:
        from ..modeling.adapters import with_lora

        model = with_lora(model, request.lora_rank, names_in(request.lora_targets))
    hold_master_weights(model, Precision.named(request.precision))
    return model


def names_in(text: str | None) -> list[str]:
    """What stands between commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def timed(request: Request, description: ModelDescription) -> ModelDescription:
    """The description with the profile's times of its blocks, where there is a profile that holds blocks.

    Raises:
        ProfileError: it holds other blocks, or other sequence lengths.
    """
    if request.profile is None:
        return description
    from ..planner.profile import with_block_times

    return with_block_times(description, profile_of(request))


def case_of(request: Request) -> tuple[PlanningProblem, Any, Request]:
    """The whole question, the configuration that it is about, and the request as settled. Cheap checks come first.

    One device is asked to do without units on the host first, as the Trainer and Accelerate do.

    Raises:
        OSDPError: the device or the model is not known, or it cannot be described.
        ValueError: an option cannot be used.
    """
    hardware = hardware_of(request)
    if hardware.world_size == 1 and hardware.host is not None and request.host_offload is None and request.precision != "no":
        with suppress(InfeasibleError):
            settled = replace(request, host_offload=False)
            case, config = _case_of(settled, hardware)
            search(case)
            return case, config, settled
    return *_case_of(request, hardware), request


def _case_of(request: Request, hardware: Hardware) -> tuple[PlanningProblem, Any]:
    job = job_of(request, hardware)
    limit = memory_limit_of(request, hardware)
    config = load_config(request.model)
    case = PlanningProblem(
        description=plain_of(request, hardware, config), hardware=hardware, job=job, memory_limit_bytes=limit, strategy=request.strategy
    )
    if request.split_vocabulary and not request.operator_splitting:
        raise ValueError("--split-vocabulary has no effect beside --no-operator-splitting; leave one of the two out.")
    return (split_case(case, request, config) if request.operator_splitting else case), config


def plain_of(request: Request, hardware: Hardware, config: Any) -> ModelDescription:
    """The model as it is, not split."""
    return timed(request, describer(request, hardware)(config, request.sequence_length))


def split_case(case: PlanningProblem, request: Request, config: Any) -> PlanningProblem:
    """The case of the model split as it trains fastest. Blocks that are to be checkpointed, and those of a profile, stay whole."""
    if request.activation_checkpointing or (request.profile is not None and profile_of(request).segments):
        return case
    from ..modeling.split_candidates import possible_splits
    from ..planner.search.split_search import choose_description

    describe = describer(request, case.hardware)
    description = choose_description(
        case,
        lambda: possible_splits(model_of(request, config), case.description, vocabulary=request.split_vocabulary),
        lambda split: describe(config, request.sequence_length, split),
    )
    return replace(case, description=description)


def load_config(model: str) -> Any:
    """A transformers configuration from a hub id, a folder or a file; the hub's cache goes before the hub.

    Raises:
        ValueError: there is none, or the hub cannot be reached.
    """
    path = Path(model).expanduser()
    local = path.exists()
    if not local and (model.endswith(".json") or model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise ValueError(f"MODEL {model!r}: there is no such file or folder; give a config.json, a folder that has one, or a hub id.")
    _quiet()
    from transformers import AutoConfig

    if local:
        config = _read(AutoConfig, str(path), model)
        config._name_or_path = path.resolve().parent.name if path.name == "config.json" else path.stem  # tables have no room for a path
        return config
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        _check_hub(model)
    return _read(AutoConfig, model, model)


def _read(auto_config: Any, source: str, model: str) -> Any:
    try:
        return auto_config.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a malformed file may make transformers raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(f"MODEL {model!r} has no configuration that transformers can read: {reason}.") from None


def _check_hub(model: str) -> None:
    """Say at once that there is no network, before five retries do; behind a proxy names need not resolve here."""
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


def _quiet() -> None:
    """What transformers and the hub log about a configuration is of no use here."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
