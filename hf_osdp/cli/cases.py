"""Turn a command line's request into the planning problem that a run with the same options would have."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InfeasibleError, Remedy, first_line, nearest, refuse_first, shown
from ..modeling.catalogue import find_shape, shape_names
from ..planner.hardware import Backend, Hardware
from ..planner.lengths import Lengths, lognormal
from ..planner.optimizers import NEED_MODEL, spec_of_name
from ..planner.presets import assumed_host, preset, preset_names
from ..planner.profile import Profile
from ..planner.training_job import OptimizerSpec, Precision
from ..quantities import format_bytes, parse_limit
from ..reading import read_bytes
from .options import Request

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from ..planner.problem import PlanningProblem
    from ..preparation.config import OSDPConfig
    from ..preparation.find_plan import FoundPlan
    from ..preparation.job import Job

_log = logging.getLogger(__name__)
_HOST_MEMORIES = ("64GiB", "128GiB", "256GiB", "512GiB")
"""Tried where nothing fits."""
_HUB_TIMEOUT_S = 5
"""Seconds to wait for the hub's first answer."""


class Case:
    """The run that a request describes; what is wrong without the model is refused before torch and transformers are
    imported.

    Each part is computed on first use, and raises OSDPError or ValueError if it is wrong.

    Raises:
        ValueError: a value is wrong, or contradicts another.
        InfeasibleError: the limit is below what the device takes for itself.
    """

    def __init__(self, request: Request) -> None:
        self.request, profile = request, request.config.profile
        if (request.device is None) == (profile is None):
            given = "Both were given" if request.device else "Neither was given"
            raise ValueError(
                f"{given}: use either --device with one of {', '.join(preset_names())}, or --profile FILE."
            )
        if isinstance(profile, (str, Path)):
            profile = Profile.load(profile)
        self.config: OSDPConfig = replace(request.config, profile=profile)
        """The options of the run."""
        hardware, given = self.hardware, f"--memory-limit {self.config.memory_limit}"
        if self.config.memory_limit is None and self.config.beside is not None:
            given = f"--beside {self.config.beside}"
        limit = hardware.check_limit(self.config.memory_limit_bytes, given=given)
        _path_of(request.model)
        alone, lengths = request.lora_rank is None, [request.lengths, request.mean_length]
        refuse_first({
            "--lengths and --mean-length say the same in two ways; give one of them.": None not in lengths,
            "--batch-by-tokens needs the lengths of samples; add --lengths FILE or --mean-length N.":
                request.config.batch_by_tokens and lengths == [None, None],
            f"--lora-targets {request.lora_targets} has no effect without --lora-rank; give both, or neither.":
                alone and request.lora_targets,
            f"--quantize {request.quantize} freezes the base, so that nothing trains; add --lora-rank 16.":
                alone and request.quantize,
        })  # fmt: skip
        if (compute := Precision.named(self.precision).compute) is not None:
            hardware.device.rate(compute)
        if request.optimizer.lower() not in NEED_MODEL:
            self.job.training()
        if hardware.tensor_bytes(limit) <= 0:
            least, free = hardware.limit_for(hardware.unavoidable_bytes), limit - hardware.room_bytes(limit)
            raise InfeasibleError(
                f"{given} leaves nothing for tensors: driver, context, workspaces"
                f" and communicator take {format_bytes(hardware.unavoidable_bytes)} of each {hardware.device.name},"
                f" and {format_bytes(free)} stay free; give more than {format_bytes(least)}.",
                memory_limit_bytes=limit,
                least_peak_bytes=least,
            )

    @cached_property
    def optimizer(self) -> OptimizerSpec:
        """What the requested optimizer holds."""
        if (name := self.request.optimizer.lower()) not in NEED_MODEL:
            return spec_of_name(self.request.optimizer, device_type=self.device_type)
        from ..sharding.optimizers import OF_MODEL

        return OF_MODEL[name](self.model, device_type=self.device_type)

    @property
    def lengths(self) -> Lengths | None:
        """The lengths of samples, if they were given."""
        request, longest = self.request, self.config.sequence_length
        assert longest is not None
        if request.mean_length is not None:
            found = lognormal(request.mean_length, longest)
        elif request.lengths is not None:
            found = _read_lengths(request.lengths)
            if max(found) > longest:
                raise ValueError(
                    f"--lengths {request.lengths} has a sample of {max(found)} tokens, and --sequence-length {longest}"
                    f" is the longest; use --sequence-length {max(found)}."
                )
        else:
            return None
        return Lengths.of(found, longest)

    @cached_property
    def hardware(self) -> Hardware:
        """The named or measured devices, in the requested number and with the requested margin."""
        request, profile = self.request, self.config.profile
        hardware = profile.hardware if isinstance(profile, Profile) else preset(str(request.device))
        nodes, devices = request.num_nodes or hardware.nodes, request.devices_per_node or hardware.devices_per_node
        if (nodes, devices) != (hardware.nodes, hardware.devices_per_node):
            hardware = hardware.scaled(nodes=nodes, devices_per_node=devices)
        beside_bytes = self.config.beside_bytes(hardware.device.memory_bytes)
        return replace(self._with_host(hardware).with_margin(self.config.memory_margin), beside_bytes=beside_bytes)

    def _with_host(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the requested host's memory; a card of workstations has a host, an assumed one,
        only if the request offloads or names its memory.
        """
        request, host, asked = self.request, hardware.host, self.request.host_memory
        on_gpus = hardware.backend is Backend.NCCL
        if host is None and request.device and on_gpus and (asked or self.config.asked):
            alone = replace(preset(request.device), host=assumed_host(request.device))
            host = alone.scaled(devices_per_node=hardware.devices_per_node).host
        if asked and (host is None or not on_gpus):
            raise ValueError(
                f"--host-memory {asked} has no effect: {hardware.summary} has no host beside it; leave it out, or"
                " profile the machine again."
            )
        if host is not None and asked:
            memory = parse_limit(asked, name="--host-memory") // hardware.devices_per_node
            source = f"{host.source}; memory: --host-memory {asked}"
            host = replace(host, memory_bytes=memory, source=source)
        return replace(hardware, host=host)

    @property
    def device_type(self) -> str:
        return "cuda" if self.hardware.backend is Backend.NCCL else "cpu"

    @property
    def precision(self) -> str:
        """Mixed precision: the requested one, or the device's default."""
        native = self.hardware.backend is Backend.NCCL and self.hardware.device.native_bf16
        return self.request.precision or ("bf16" if native else "no")

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        return load_config(self.request.model)

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
            lengths=self.lengths,
            deals_samples=True,
            capability=self.hardware.device.capability,
            reads_loss_alone=True,
        )

    @cached_property
    def model(self) -> nn.Module:
        """The model on the meta device, with requested adapters, and float32 master weights in mixed precision; a
        quantized base has its other weights in the compute dtype.
        """
        from ..modeling.build import build_on_meta, with_lora
        from ..modeling.quantized import pack, quantize
        from ..sharding.environment import prepare_precision

        request = self.request
        model, precision = build_on_meta(self.model_config, request.auto_class), Precision.named(self.precision)
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
        from ..preparation.samples import refuse_lengths
        from ..sharding.micro_batches import reason_against_lengths

        refuse_lengths(self.config, self.model)
        reason = reason_against_lengths(self.model, compiles=self.config.compile)
        job = replace(self.job, cuts_by_length=self.lengths is not None and reason is None)
        found = find_plan(self.model, job, hardware=self.hardware)
        if isinstance(found.outcome, InfeasibleError):
            return replace(found, outcome=found.outcome.with_remedies(self._hosts(found.problem)))
        return found

    def _hosts(self, problem: PlanningProblem) -> tuple[Remedy, ...]:
        """Return the least memory of a host with which some plan fits, if the devices have no host yet."""
        from ..planner.search.remedies import fits_by_estimate

        if not self.request.device or problem.hardware.host is not None or self.device_type != "cuda":
            return ()
        for memory in _HOST_MEMORIES:
            hardware = Case(replace(self.request, host_memory=memory)).hardware
            if fits_by_estimate(replace(problem, hardware=hardware)):
                return (Remedy(f"--host-memory {memory} (if each machine has that much; none was given)"),)
        return ()


def _read_lengths(path: Path) -> list[int]:
    """Return the numbers in a file; raise ValueError if it has others than whole ones of at least 1."""
    lines = read_bytes(path, "--lengths", ValueError).decode(errors="replace").split()
    wrong = next((line for line in lines if not line.isdecimal() or not int(line)), None if lines else "nothing")
    if wrong is not None:
        raise ValueError(f"--lengths {path} holds {shown(wrong)}; it must have a number of tokens on each line.")
    return list(map(int, lines))


def names_in(text: str | None) -> list[str]:
    """Return names that are separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def load_config(model: str) -> PreTrainedConfig:
    """Load a transformers configuration from a hub id, a folder or a file; raise ValueError if there is none.

    The hub's cache is tried before the hub; if neither has the configuration, a built-in shape is used, with a
    warning.
    """
    path = _path_of(model)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    read = partial(AutoConfig.from_pretrained, trust_remote_code=False)
    try:
        if path.exists():
            config = read(path)
            name = path.resolve().parent.name if path.name == "config.json" else path.stem
            config._name_or_path = name  # tables have no room for a path
            return config
        with suppress(OSError, ValueError):
            return read(model, local_files_only=True)
        _reach_hub()
        return read(model)
    except Exception as error:  # a malformed file may make transformers raise anything
        reason = f"MODEL {model!r} has no configuration that transformers can read: {first_line(error)}"
    if path.exists() or (shape := find_shape(model)) is None:
        raise ValueError(f"{reason}; give a config.json, or a folder that has one{nearest(model, shape_names())}.")
    _log.warning("%s; using the built-in shape of %s, from %s.", reason, shape.name, shape.source)
    return shape.config


def _path_of(model: str) -> Path:
    """Return a model's name as a path; raise ValueError if it can only be a path, and is none."""
    path = Path(model).expanduser()
    is_path = model.endswith(".json") or model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_path and not path.exists():
        raise ValueError(
            f"MODEL {model!r}: there is no such file or folder; give a config.json, a folder that has one, or a hub"
            " id."
        )
    return path


def _reach_hub() -> None:
    """Raise OSError soon if the hub does not answer, where `huggingface_hub` would retry for half a minute."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S):
            pass
