"""Turn a command line's request into the planning problem that a run with the same options would have."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import InfeasibleError, OSDPError, Price, Remedy, first_line, nearest, refuse_first
from ..modeling.catalogue import find_shape, shape_names
from ..planner.description import ModelDescription
from ..planner.hardware import Backend, Hardware
from ..planner.optimizers import NEED_MODEL, spec_of_name
from ..planner.presets import assumed_host, preset, preset_names
from ..planner.profile import Profile, with_block_times
from ..planner.training_job import OptimizerSpec, Precision, TrainingJob
from ..quantities import format_bytes, parse_limit
from .options import Request

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from ..planner.problem import PlanningProblem
    from ..preparation.config import OSDPConfig
    from ..preparation.find_plan import Describer, FoundPlan
    from ..preparation.job import Job

_OTHER_KINDS = {
    "adapter_config.json": ("an adapter", "the model that it adapts, with --lora-rank"),
    "model_index.json": ("a diffusion pipeline", "the folder of its transformer, if that is a model of transformers"),
    ".gguf": ("a quantized file for inference (GGUF)", "the model that it was made of"),
}
"""Ending of a file, in a folder without a config.json → what that is, and what to give instead."""
_HOST_MEMORIES, _REMEDY_RANK = ("64GiB", "128GiB", "256GiB", "512GiB"), 16
"""Tried where nothing fits."""
_HUB_TIMEOUT_S = 5
"""Seconds to wait for the hub's first answer."""


class Case:
    """The run that a request describes.

    Each part is computed on first use, and raises OSDPError or ValueError if it is wrong.
    """

    def __init__(self, request: Request) -> None:
        self.request = request

    def check(self) -> Case:
        """Refuse what is wrong without the model, before torch and transformers are imported; return the case.

        Raises:
            ValueError: a value is wrong, or contradicts another.
            InfeasibleError: the limit is below what the device takes for itself.
        """
        request, hardware, limit = self.request, self.hardware, self.limit_bytes
        self.check_model()
        if request.optimizer.lower() not in NEED_MODEL:
            _ = self.training
        if hardware.tensor_bytes(limit) <= 0:
            least, free = hardware.limit_for(hardware.unavoidable_bytes), limit - hardware.room_bytes(limit)
            raise InfeasibleError(
                f"--memory-limit {self.config.memory_limit} leaves nothing for tensors: driver, context, workspaces"
                f" and communicator take {format_bytes(hardware.unavoidable_bytes)} of each {hardware.device.name},"
                f" and {format_bytes(free)} stay free; give more than {format_bytes(least)}.",
                memory_limit_bytes=limit,
                least_peak_bytes=least,
            )
        return self

    def check_model(self) -> None:
        """Refuse what is wrong about the model without reading it."""
        request = self.request
        check_path(request.model)
        alone = request.lora_rank is None
        refuse_first({
            f"--lora-targets {request.lora_targets} has no effect without --lora-rank; give both, or neither.":
                alone and request.lora_targets,
            f"--quantize {request.quantize} freezes the base, so that nothing trains; add --lora-rank 16.":
                alone and request.quantize,
        })  # fmt: skip

    @cached_property
    def optimizer(self) -> OptimizerSpec:
        """What the requested optimizer holds."""
        if (name := self.request.optimizer.lower()) not in NEED_MODEL:
            return spec_of_name(self.request.optimizer, device_type=self.device_type)
        from ..sharding.optimizers import OF_MODEL

        return OF_MODEL[name](self.model, device_type=self.device_type)

    @cached_property
    def profile(self) -> Profile | None:
        file = self.request.config.profile
        return Profile.load(file) if isinstance(file, (str, Path)) else file

    @cached_property
    def hardware(self) -> Hardware:
        """The named or measured devices, in the requested number and with the requested margin."""
        request = self.request
        if (request.device is None) == (request.config.profile is None):
            given = "Both were given" if request.device else "Neither was given"
            raise ValueError(
                f"{given}: use either --device with one of {', '.join(preset_names())}, or --profile FILE."
            )
        hardware = preset(str(request.device)) if self.profile is None else self.profile.hardware
        nodes, devices = request.num_nodes or hardware.nodes, request.devices_per_node or hardware.devices_per_node
        if (nodes, devices) != (hardware.nodes, hardware.devices_per_node):
            hardware = hardware.scaled(nodes=nodes, devices_per_node=devices)
        return self._with_host(hardware).with_margin(request.config.memory_margin)

    def _with_host(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the requested host's memory; a card of workstations has a host, an assumed one,
        only if the request offloads or names its memory.
        """
        request = self.request
        if request.host_memory and hardware.backend is not Backend.NCCL:
            raise ValueError(
                f"--host-memory {request.host_memory} has no effect on {hardware.device.name}, which trains in the"
                " host's own memory; use --memory-limit."
            )
        host = hardware.host
        if host is None and request.device and (request.config.asked or request.host_memory):
            alone = replace(preset(request.device), host=assumed_host(request.device))
            host = alone.scaled(devices_per_node=hardware.devices_per_node).host
        if host is None and request.host_memory:
            raise ValueError(
                f"--host-memory {request.host_memory} has no effect, since the profile has no host; leave it out, or"
                " profile the machine again."
            )
        if host is not None and request.host_memory:
            given = parse_limit(request.host_memory, name="--host-memory")
            host = replace(
                host,
                memory_bytes=given // hardware.devices_per_node,
                source=f"{host.source}; memory: --host-memory {request.host_memory}",
            )
        return replace(hardware, host=host)

    @property
    def device_type(self) -> str:
        return "cuda" if self.hardware.backend is Backend.NCCL else "cpu"

    @property
    def precision(self) -> str:
        """Mixed precision: the requested one, or the device's default."""
        native = self.hardware.backend is Backend.NCCL and self.hardware.device.native_bf16
        return self.request.precision or ("bf16" if native else "no")

    @property
    def precision_line(self) -> str:
        """The precision, and the reason for it."""
        if self.request.precision is not None:
            return f"Precision {self.precision}, set by --precision."
        why = "has hardware for it" if self.precision != "no" else "is not a GPU with hardware for bf16"
        return f"Precision {self.precision}, because {self.hardware.device.name} {why}; change it with --precision."

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        self.check_model()
        return load_config(self.request.model)

    @cached_property
    def config(self) -> OSDPConfig:
        """The options of the run."""
        return replace(self.request.config, profile=self.profile)

    @cached_property
    def job(self) -> Job:
        """The run, which is one of the Trainer."""
        from ..preparation.job import Job

        world_size = self.hardware.world_size
        return Job(
            config=self.config,
            world_size=world_size,
            device_type=self.device_type,
            precision=Precision.named(self.precision, autocast=world_size == 1),
            optimizer=self.optimizer,
            capability=self.hardware.device.capability,
            reads_loss_alone=True,
        )

    @property
    def training(self) -> TrainingJob:
        """What the planner searches for; the rate of its precision must be known."""
        if (compute := self.job.precision.compute) is not None:
            self.hardware.device.rate(compute)
        return self.job.training()

    @property
    def limit_bytes(self) -> int:
        """Bytes of each device that training may use."""
        device, config = self.hardware.device, self.request.config
        return device.check_limit(config.memory_limit_bytes, given=f"--memory-limit {config.memory_limit}")

    @cached_property
    def model(self) -> nn.Module:
        return self._build(self.model_config)

    def _build(self, model_config: object) -> nn.Module:
        """Return a configuration's model on the meta device, with requested adapters, and float32 master weights in
        mixed precision; a quantized base has its other weights in the compute dtype.
        """
        from ..modeling.build import build_on_meta, with_lora
        from ..modeling.quantized import pack, quantize
        from ..sharding.environment import prepare_precision

        request = self.request
        model, precision = build_on_meta(model_config, request.auto_class), Precision.named(self.precision)
        if request.quantize:
            quantize(model, request.quantize, precision.compute)
        if request.lora_rank is not None:
            model = with_lora(model, request.lora_rank, names_in(request.lora_targets))
        prepare_precision(model, precision)
        return pack(model)

    @cached_property
    def found(self) -> FoundPlan:
        """The plan that a run would find, with its problem."""
        from ..preparation.find_plan import find_plan

        _ = self.training, self.limit_bytes, self.model_config
        found = find_plan(self.model, self.job, hardware=self.hardware, trace=self._trace)
        if isinstance(found.outcome, InfeasibleError):
            return replace(found, outcome=found.outcome.with_remedies(tuple(self._remedies(found.problem))))
        return found

    def _remedies(self, problem: PlanningProblem) -> Iterator[Remedy]:
        """Yield flags of the command line alone with which some plan fits."""
        from ..planner.search.remedies import fits_by_estimate

        request = self.request
        if request.device and problem.hardware.host is None and self.device_type == "cuda":
            for memory in _HOST_MEMORIES:
                host = Case(replace(request, host_memory=memory)).hardware
                if fits_by_estimate(replace(problem, hardware=host)):
                    yield Remedy(f"a host with {memory} (--host-memory {memory})", price=Price.DEVICES)
                    break
        if request.lora_rank is None:
            adapted = Case(replace(request, lora_rank=_REMEDY_RANK))
            adapted.model_config = self.model_config
            with suppress(OSDPError, ValueError, ImportError):  # peft is missing, or knows no target in this model
                description = adapted.describer().describe()
                if fits_by_estimate(replace(problem, description=description)):
                    yield Remedy(f"adapters, which train less (--lora-rank {_REMEDY_RANK})", price=Price.SIZE)

    def describer(self, model_config: object = None, job: Job | None = None) -> Describer:
        """Return a describer of the model, or of another configuration's model, perhaps for another job."""
        from ..preparation.find_plan import Describer

        return Describer(self._build(model_config) if model_config else self.model, job or self.job, self._trace)

    @cached_property
    def _trace(self) -> Callable[..., ModelDescription]:
        from ..preparation.cache import describe_once

        return cache(describe_once)

    def timed(self, description: ModelDescription) -> ModelDescription:
        """Return the description with the profile's block times, if there is a profile."""
        return description if self.profile is None else with_block_times(description, self.profile)


def names_in(text: str | None) -> list[str]:
    """Return names that are separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def check_path(model: str) -> Path:
    """Return a model's name as a path; raise ValueError if it can only be a path, and is none of a model."""
    path = Path(model).expanduser()
    if not path.exists():
        if model.endswith(".json") or model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ValueError(
                f"MODEL {model!r}: there is no such file or folder; give a config.json, a folder that has one, or a"
                " hub id."
            )
        return path
    inside = [] if not path.is_dir() or (path / "config.json").exists() else [file.name for file in path.iterdir()]
    for name, (kind, remedy) in _OTHER_KINDS.items():
        if any(file.endswith(name) for file in (path.name, *inside)):
            raise ValueError(f"MODEL {model!r} is {kind}, which has no config.json; give {remedy}.")
    return path


def load_config(model: str) -> PreTrainedConfig:
    """Load a transformers configuration from a hub id, a folder or a file; raise ValueError if there is none.

    The hub's cache is tried before the hub; if neither has the configuration, a built-in shape is used, with a line on
    stderr.
    """
    path = check_path(model)
    local = path.exists()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    if local:
        config = _read(str(path), model)
        config._name_or_path = (
            path.resolve().parent.name if path.name == "config.json" else path.stem
        )  # tables have no room for a path
        return config
    with suppress(OSError, ValueError):
        return _from_pretrained(model, local_files_only=True)
    reason = _fetch_from_hub(model)
    if reason is None:
        return _read(model, model)
    if (shape := find_shape(model)) is None:
        raise ValueError(
            f"MODEL {model!r} {reason}; give a config.json, or a folder that has one{nearest(model, shape_names())}."
        )
    typer.echo(
        f"hf-osdp: MODEL {model!r} {reason}; using the built-in shape of {shape.name}, from {shape.source}.", err=True
    )
    return shape.config


def _from_pretrained(source: str, **options: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    return config


def _read(source: str, model: str) -> PreTrainedConfig:
    try:
        return _from_pretrained(source)
    except Exception as error:  # a malformed file may make transformers raise anything
        raise ValueError(
            f"MODEL {model!r} has no configuration that transformers can read: {first_line(error)}."
        ) from None


def _fetch_from_hub(model: str) -> str | None:
    """Fetch a configuration into the hub's cache; return the reason if that fails, else None.

    A request with a short timeout is sent first, because `huggingface_hub` retries for half a minute if the hub does
    not answer.
    """
    from huggingface_hub import constants, errors, hf_hub_download

    try:
        if not constants.HF_HUB_OFFLINE:
            with suppress(urllib.error.HTTPError), urllib.request.urlopen(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S):
                pass
        hf_hub_download(model, "config.json")
    except errors.HFValidationError:
        return "is not a file or folder, and not a hub id"
    except errors.GatedRepoError:
        return "is a gated model: request access on its page and log in (hf auth login)"
    except errors.RepositoryNotFoundError:
        return "is not on the hub or is private (hf auth login), and it is not a file or folder"
    except errors.RemoteEntryNotFoundError:
        return "has no config.json on the hub"
    except OSError:
        return (
            f"is not a file or folder and not in the hub's cache, and the hub ({constants.ENDPOINT}) cannot be reached"
        )
    return None
