"""Turn a command line's request into the planning problem that a run with the same options would have."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from ..errors import InfeasibleError, nearest
from ..modeling.catalogue import find_shape, shape_names
from ..planner.description import ModelDescription
from ..planner.hardware import Backend, Hardware, check_margin
from ..planner.job import OptimizerSpec, Precision, TrainingJob
from ..planner.presets import preset, preset_names
from ..planner.problem import PlanningProblem, Strategy
from ..planner.profile import Profile, with_block_times
from ..planner.search.compare import StrategyResult, compare_strategies
from ..planner.search.search import search
from ..planner.split import WHOLE_BLOCKS, ModelSplit
from ..quantities import parse_limit
from .options import Request

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from ..planning.config import OSDPConfig
    from ..planning.problem import ProblemBuilder, RunFacts

OPTIMIZERS = {"adamw": OptimizerSpec(), "momentum": OptimizerSpec(name="momentum", states=1), "sgd": OptimizerSpec(name="sgd", states=0)}
"""Optimizers by the names of `--optimizer`."""
_HUB_ANSWERS_S = 5
"""Seconds that the hub has for its first answer."""


class Case:
    """The run that a request asks about. Each part is looked up when it is asked for, and raises then what is wrong with it.

    Args:
        request: what the command line states.
        optimizer: in place of the request's.

    Raises (its parts):
        OSDPError: devices or model are not known, a profile holds other blocks, or the model cannot be described.
        ValueError: an option cannot be used.
    """

    def __init__(self, request: Request, optimizer: OptimizerSpec | None = None) -> None:
        self.request = request
        self._optimizer = optimizer or OPTIMIZERS[request.optimizer]

    @cached_property
    def profile(self) -> Profile | None:
        """What `--profile` names."""
        return None if self.request.profile is None else Profile.load(self.request.profile)

    @cached_property
    def hardware(self) -> Hardware:
        """The devices that were named or measured, as many as asked for, with the margin that was asked for."""
        request = self.request
        margin = None if request.margin is None else check_margin(request.margin, name="--margin")
        if (request.device is None) == (request.profile is None):
            given = "Both were given" if request.device else "Neither was given"
            raise ValueError(f"{given}: use either --device with one of {', '.join(preset_names())}, or --profile FILE.")
        if request.device is not None:
            hardware = preset(request.device, nodes=request.num_nodes or 1, devices_per_node=request.devices_per_node or 1)
            return hardware.with_margin(margin)
        assert self.profile is not None
        measured = self.profile.hardware
        nodes, devices = request.num_nodes or measured.nodes, request.devices_per_node or measured.devices_per_node
        same = (nodes, devices) == (measured.nodes, measured.devices_per_node)
        return (measured if same else measured.scaled(nodes=nodes, devices_per_node=devices)).with_margin(margin)

    @property
    def device_type(self) -> str:
        """Whose kernels and allocation granularity count."""
        return "cuda" if self.hardware.backend is Backend.NCCL else "cpu"

    @property
    def precision(self) -> str:
        """Mixed precision, as asked for or as the device is good at."""
        return self.request.precision or default_precision(self.hardware)

    @property
    def precision_line(self) -> str:
        """The precision, and who chose it."""
        if self.request.precision is not None:
            return f"Precision {self.precision}, as --precision says."
        why = "has hardware for it" if self.precision == "bf16" else "is no GPU with hardware for bf16"
        return f"Precision {self.precision}, as {self.hardware.device.name} {why}; --precision says otherwise."

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        """The model's configuration."""
        return load_config(self.request.model)

    @cached_property
    def run(self) -> tuple[OSDPConfig, RunFacts]:
        """Configuration and facts of the run, without the limit: of the attempts the last, until `problem` has settled it."""
        return self._attempts()[-1]

    def _attempts(self) -> list[tuple[OSDPConfig, RunFacts]]:
        from ..planning.config import OSDPConfig
        from ..planning.problem import RunFacts, precision_attempts

        request, world_size = self.request, self.hardware.world_size
        config = OSDPConfig(
            strategy=request.strategy.value,
            block_classes=tuple(names_in(request.block_classes)) or None,
            recompute=request.recompute,
            host_offload=request.host_offload,
            offload_activations=request.offload_activations,
            compile=request.compile,
            operator_splitting=request.operator_splitting,
            split_vocabulary=request.split_vocabulary and request.operator_splitting and request.strategy is Strategy.OSDP,
            profile=self.profile,
        )
        facts = RunFacts(
            world_size=world_size,
            device_type=self.device_type,
            precision=Precision.named(self.precision, autocast=world_size == 1),
            optimizer=self._optimizer,
            sequence_length=request.sequence_length,
            global_batch_size=request.global_batch_size,
            micro_batch_size=request.micro_batch_size,
            activation_checkpointing=request.activation_checkpointing,
            capability=self.hardware.device.capability,
            expandable_segments=True,
        )
        return precision_attempts(config, facts)

    @property
    def job(self) -> TrainingJob:
        """The job, of sizes that fit together and options that have an effect, in a precision whose rate is known."""
        from ..planning.problem import training_job

        request, device = self.request, self.hardware.device
        for flag, given in (("--no-recompute", request.recompute is False), ("--offload-activations", request.offload_activations)):
            if given and request.activation_checkpointing:
                raise ValueError(f"{flag} has no effect beside --activation-checkpointing; leave one of the two out.")
        for flag, asked in {"--host-offload": request.host_offload, "--offload-activations": request.offload_activations}.items():
            if asked and self.hardware.host is None:
                raise ValueError(f"{flag} needs a host beside the device, and none is known for {device.name}; leave it out.")
        job = training_job(*self.run)
        if job.precision.compute is not None:
            device.rate(job.precision.compute)
        return job

    @property
    def limit_bytes(self) -> int:
        """Bytes of each device that training may use."""
        from ..planning.problem import check_limit

        device, asked = self.hardware.device, self.request.memory_limit
        limit = device.memory_bytes if asked is None else parse_limit(asked, name="--memory-limit")
        return check_limit(limit, device, given=f"--memory-limit {asked}")

    def model(self, model_config: object = None) -> nn.Module:
        """Return a configuration's model on the meta device, with adapters if asked for, and with float32 masters in mixed precision."""
        request = self.request
        if request.lora_rank is None and request.lora_targets:
            raise ValueError(f"--lora-targets {request.lora_targets} has no effect without --lora-rank; give both, or neither.")
        from ..modeling.build import build_on_meta, with_lora
        from ..sharding.environment import hold_master_weights

        model = build_on_meta(model_config or self.model_config, request.auto_class)
        if request.lora_rank is not None:
            model = with_lora(model, request.lora_rank, names_in(request.lora_targets))
        hold_master_weights(model, Precision.named(self.precision))
        return model

    def describe(
        self,
        split: ModelSplit = WHOLE_BLOCKS,
        *,
        model_config: object = None,
        sequence_length: int | None = None,
        micro_batch_size: int | None = None,
        least_memory: bool = False,
    ) -> ModelDescription:
        """Return the description of the model at the request's length, or of another one or at another; times by roofline.

        What is compiled is described at the micro-batch size, where one is given. The rest as `Describer.describe`.
        """
        from ..planning.description_cache import describe_once
        from ..planning.problem import Describer

        config, facts = self.run
        facts = replace(facts, sequence_length=sequence_length or facts.sequence_length)
        return Describer(self.model(model_config), config, facts, describe_once).describe(
            split, micro_batch_size=micro_batch_size, least_memory=least_memory
        )

    def timed(self, description: ModelDescription) -> ModelDescription:
        """Return the description with the profile's times of its blocks, where there is a profile that holds blocks."""
        return description if self.profile is None else with_block_times(description, self.profile)

    def builder(self) -> ProblemBuilder:
        """Return what builds the run's problem."""
        from ..planning.description_cache import describe_once
        from ..planning.problem import ProblemBuilder

        config, facts = self.run
        limited = replace(config, memory_limit=self.limit_bytes)
        return ProblemBuilder(self.model(), limited, facts, hardware=self.hardware, trace=describe_once)

    def problem(self) -> PlanningProblem:
        """Return the problem of the model as it trains fastest, whole or split, and settle the run.

        One device is first planned without units on the host, as the Trainer and Accelerate do.
        """
        request = self.request
        _ = self.job, self.limit_bytes, self.model_config
        if request.split_vocabulary and not request.operator_splitting:
            raise ValueError("--split-vocabulary has no effect beside --no-operator-splitting; leave one of the two out.")
        *first, last = self._attempts()
        for attempt in first:
            self.run = attempt
            with suppress(InfeasibleError):
                problem = self._with_best_split()
                search(problem)
                return problem
        self.run = last
        return self._with_best_split()

    def compared(self, problem: PlanningProblem, *, compiles: bool = False) -> tuple[StrategyResult, ...]:
        """Return every strategy at its own best batch for the run's problem, OSDP first.

        `compiles` also describes eager blocks as compiled, which takes seconds.
        """
        description = problem.description
        plain = description if description.split.is_none else self.timed(self.describe())
        builder = self.builder()
        other = builder.eager(problem) or (builder.compiled(replace(problem, description=plain)) if compiles else None)
        return compare_strategies(replace(problem, description=plain), split=description, other=other)

    def _with_best_split(self) -> PlanningProblem:
        builder = self.builder()
        whole = builder.build()
        if whole.description.compiled_classes:
            with suppress(InfeasibleError):
                return builder.settled(whole, lambda problem: search(problem).plan)[0]
        return builder.with_best_split(whole)


def default_precision(hardware: Hardware) -> Literal["no", "bf16"]:
    """Return bf16 for GPUs whose hardware has it."""
    from ..planning.preflight import bf16_on

    return "bf16" if hardware.backend is Backend.NCCL and bf16_on(hardware.device, "cuda") else "no"


def names_in(text: str | None) -> list[str]:
    """Return the names between commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def load_config(model: str) -> PreTrainedConfig:
    """Load a transformers configuration from a hub id, a folder or a file.

    The hub's cache goes before the hub, and a built-in shape, announced on stderr, stands in where neither has the configuration.

    Raises:
        ValueError: there is none, or the hub cannot be reached.
    """
    path = Path(model).expanduser()
    local = path.exists()
    if not local and (model.endswith(".json") or model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise ValueError(f"MODEL {model!r}: there is no such file or folder; give a config.json, a folder that has one, or a hub id.")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    if local:
        config = _read(str(path), model)
        config._name_or_path = path.resolve().parent.name if path.name == "config.json" else path.stem  # tables have no room for a path
        return config
    with suppress(OSError, ValueError):
        return _from_pretrained(model, local_files_only=True)
    reason = _why_not_from_the_hub(model)
    if reason is None:
        return _read(model, model)
    shape = find_shape(model)
    if shape is None:
        raise ValueError(f"MODEL {model!r} {reason}; give a config.json, or a folder that has one{nearest(model, shape_names())}.")
    typer.echo(f"hf-osdp: MODEL {model!r} {reason}; taking the built-in shape of {shape.name}, from {shape.source}.", err=True)
    return shape.config


def _from_pretrained(source: str, **options: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    return config


def _read(source: str, model: str) -> PreTrainedConfig:
    try:
        return _from_pretrained(source)
    except Exception as error:  # a malformed file may make transformers raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(f"MODEL {model!r} has no configuration that transformers can read: {reason}.") from None


def _why_not_from_the_hub(model: str) -> str | None:
    """Fetch a configuration into the hub's cache, or return why there is none.

    One request with a short time limit goes ahead, as `huggingface_hub` tries for half a minute where nothing answers.
    """
    from huggingface_hub import constants, errors, hf_hub_download

    try:
        if not constants.HF_HUB_OFFLINE:
            with suppress(urllib.error.HTTPError), urllib.request.urlopen(constants.ENDPOINT, timeout=_HUB_ANSWERS_S):
                pass
        hf_hub_download(model, "config.json")
    except errors.HFValidationError:
        return "is no file or folder here, and no hub id"
    except errors.GatedRepoError:
        return "is open only to those who asked for access on its page and logged in (hf auth login)"
    except errors.RepositoryNotFoundError:
        return "is not known to the hub, or private (hf auth login); it is no file or folder here"
    except errors.RemoteEntryNotFoundError:
        return "has no config.json on the hub"
    except OSError:
        return f"is no file or folder here and not in the hub's cache, and the hub ({constants.ENDPOINT}) cannot be reached"
    return None
