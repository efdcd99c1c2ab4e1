"""What is known of a run that is being planned, the training job that follows from it, and what a given plan is refused for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import PlanError
from ..modeling.batch import Inputs, Loss
from ..planner.cost.local_steps import fastest_wire
from ..planner.description import DType, ModelDescription
from ..planner.hardware import DeviceSpec, Hardware
from ..planner.job import OptimizerSpec, Precision, TrainingJob
from ..planner.local_steps import LocalSteps
from ..planner.plan import Plan
from ..planner.wire import EXACT, WireFormat, formats_up_to
from ..quantities import format_bytes
from .config import OSDPConfig

_BESIDE_CHECKPOINTING = (("recompute", False), ("split_vocabulary", True), ("offload_activations", True))
"""Options that have no effect where all blocks are recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder that a run writes to, and what it writes there."""

    path: str | Path
    saves: bool = True
    """Whether checkpoints are written while it trains."""
    limit: int | None = None
    """How many are kept (`save_total_limit`); None keeps all."""
    states: bool = True
    """Whether they hold the optimizer's states."""
    adapters: bool = False
    """Whether they hold trained parameters alone, as those of peft do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the caller knows about the run that is being planned, beside the configuration, in which the run's sizes are by now."""

    world_size: int
    device_type: str
    """`cpu` or `cuda`."""
    precision: Precision
    """With `autocast` where one process can run without FSDP2."""
    optimizer: OptimizerSpec
    optimizer_choices: tuple[tuple[str, OptimizerSpec], ...] = ()
    """Names with what they hold, of which one may run, `optimizer` first; empty where there is no choice."""
    inputs: Inputs | None = None
    """From a number of samples to a batch, as the data gives them; None makes one for a transformers model."""
    loss: Loss | None = None
    """How the loop makes the loss of a batch, where it is not the model's own."""
    other_models: Mapping[str, int] = field(default_factory=dict)
    """Bytes that models beside the trained one take on the device throughout, by name."""
    holds_outputs: bool = False
    """The training loop may keep the model's outputs through backward."""
    clips_gradients: bool = False
    """Each step clips the norm of all gradients."""
    against_backward_step: str | None = "this loop may read gradients before the optimizer steps"
    """Why units are not to step in backward unless that is asked for; None where nothing speaks against it."""
    against_unit_steps: str | None = None
    """Why the optimizer cannot step unit by unit; None where it can."""
    activation_checkpointing: bool = False
    """Blocks will be recomputed in backward; not needed for a model that has it switched on already."""
    reads_loss_alone: bool = False
    """The loop gives labels to forward and reads only the loss from it in training."""
    cpu_offload: bool = False
    """Every unit's parameters, gradients and optimizer states are to live in the host's memory; else as many as the plan needs."""
    steps: int | None = None
    """Optimizer steps of the run; None where they are not known."""
    trains: bool = True
    """The model is trained, and not evaluated alone."""
    frozen_in_optimizer: int = 0
    """Frozen parameters that the optimizer was given."""
    folder: RunFolder | None = None
    """Where the run writes; None where that is not known."""
    estimates_given_plan: bool = True
    """Describe the model and estimate a given plan; False takes the plan's own figures."""
    capability: tuple[int, int] | None = None
    """Compute capability of the device; None is that of this machine's GPU."""

    @property
    def offloads_all(self) -> bool:
        return self.cpu_offload and self.device_type != "cpu"  # which has no memory but its own

    @property
    def under_fsdp(self) -> RunFacts:
        """The same with FSDP2's mixed precision, under which alone units can live on the host, in place of autocast."""
        return replace(self, precision=replace(self.precision, autocast=False))


def _reason_against_backward_step(facts: RunFacts) -> str | None:
    """Return what needs all gradients at once, whatever is asked for."""
    if facts.clips_gradients:
        return "gradients are clipped by the norm of all of them (max_grad_norm=0 does not clip)"
    return "fp16 scales the loss and may skip a step" if facts.precision.compute is DType.FLOAT16 else facts.against_unit_steps


def _steps_in_backward(config: OSDPConfig, facts: RunFacts) -> bool:
    """Return whether units may step in backward: where that is asked for, else where nothing is known against it."""
    against = _reason_against_backward_step(facts) or facts.against_backward_step
    return against is None if config.step_in_backward is None else config.step_in_backward


def check_backward_step(plan: Plan, config: OSDPConfig, facts: RunFacts) -> None:
    """Refuse a given plan that steps in backward where something may read gradients before the step, and an option without effect."""
    planned = any(unit.step_in_backward for unit in plan.units)
    reason = _reason_against_backward_step(facts) if plan.local_steps is None else "local steps begin with the optimizer's step"
    if planned and reason:
        raise PlanError(f"The plan steps in backward, but {reason}; change that, or plan again.")
    if planned and not _steps_in_backward(config, facts):
        reason = facts.against_backward_step if config.step_in_backward is None else "step_in_backward=False"
        raise PlanError(f"The plan steps in backward, but {reason}; set step_in_backward=True where none is read, or plan again.")
    if config.step_in_backward and not planned:
        raise ValueError("plan runs a given plan as it is, so step_in_backward=True would have no effect; leave one of the two out.")


def check_whole(plan: Plan, description: ModelDescription, optimizer: OptimizerSpec) -> None:
    """Refuse a given plan that shards, cuts or offloads what the optimizer needs whole."""
    decisions = [plan.decision(unit.fqn) for unit in description.units if unit.trainable_numel and optimizer.looks_at_whole]
    sharded = (d.label for d in decisions if d.on_host or (d.shard_size > 1 and optimizer.needs_whole))
    parted = next((f"has {label} sharded or on the host" for label in sharded), None)
    if parted or (plan.split.sliced and not optimizer.takes_slices):
        what = parted or "cuts operators in slices"
        needed = "parameters" if optimizer.looks_at_whole else "operators"
        raise PlanError(f"{optimizer.name} needs whole {needed}, and the plan {what}; plan again for it, or use AdamW.")


def check_communication(plan: Plan, allowed: WireFormat | None) -> None:
    """Refuse a given plan that sends coarser formats than the user allows, which trains with other rounding."""
    sent = plan.communication
    if sent not in (EXACT, *formats_up_to(allowed)):
        asked = EXACT if allowed is None else allowed.value
        raise PlanError(
            f"The plan sends parameters or gradients in {sent}, but communication={asked!r}; set"
            f" communication={sent!r} where that is meant, or plan again."
        )


def training_job(config: OSDPConfig, facts: RunFacts) -> TrainingJob:
    """Return the job to search for, with what the user has fixed; raise ValueError where sizes do not fit together."""
    assert config.global_batch_size is not None
    host_offload, offload_optimizer = facts.offloads_all or config.host_offload, config.offload_optimizer
    problem = None
    if facts.optimizer.is_quantized and (host_offload or offload_optimizer):
        problem = f"States on the host are plain tensors, and {facts.optimizer.name}'s are quantized; leave the offload out, or use AdamW."
    elif facts.optimizer.looks_at_whole and host_offload:
        name = facts.optimizer.name
        problem = f"{name} needs whole parameters at once, which host and device do not have; leave host_offload out, or use AdamW."
    elif facts.against_unit_steps and offload_optimizer:
        problem = f"offload_optimizer=True, but {facts.against_unit_steps}; leave it out, or use AdamW."
    elif config.step_in_backward and (reason := _reason_against_backward_step(facts)):
        problem = f"step_in_backward=True, but {reason}; leave one of the two out."
    useless = next((f"{name}={value}" for name, value in _BESIDE_CHECKPOINTING if getattr(config, name) is value), None)
    if facts.activation_checkpointing and useless:
        problem = f"{useless} has no effect beside activation checkpointing of all blocks; leave one of the two out."
    if problem is not None:
        raise ValueError(problem)
    job = TrainingJob(
        global_batch_size=config.global_batch_size,
        precision=facts.precision,
        optimizer=facts.optimizer,
        holds_outputs=facts.holds_outputs,
        clips_gradients=facts.clips_gradients,
        step_in_backward=_steps_in_backward(config, facts),
        micro_batch_size=config.micro_batch_size,
        reduce_every_micro_step=config.reduce_every_micro_step,
        recompute=config.recompute,
        host_offload=False if facts.optimizer.is_quantized or facts.optimizer.looks_at_whole else host_offload,
        offload_optimizer=False if facts.optimizer.is_quantized or facts.against_unit_steps else offload_optimizer,
        offload_activations=config.offload_activations,
        communication=config.wire,
    )
    job.micro_batch_sizes(facts.world_size)
    return job


def check_limit(limit_bytes: int, device: DeviceSpec, *, given: str) -> int:
    """Return a limit that the device has; raise ValueError above it, which quotes the limit as it was `given`: `memory_limit='8GiB'`."""
    if limit_bytes <= (there := device.memory_bytes):
        return limit_bytes
    raise ValueError(
        f"{given} is more than the {format_bytes(there)} of {device.name}; use at most {there // 2**20}MiB, or leave it out for all of"
        " them."
    )


def of_one_machine(hardware: Hardware, job: TrainingJob, config: OSDPConfig) -> tuple[Hardware, TrainingJob]:
    """Return one machine, with the link to others, and the job with local steps.

    Raises:
        ValueError: there is one machine, or states are to lie on the host.
    """
    if hardware.nodes == 1:
        raise ValueError(f"local_steps={config.local_steps} is for several machines, and the processes are on one; leave it out.")
    if job.host_offload or job.offload_optimizer:
        raise ValueError(f"local_steps={config.local_steps} keeps all states on the device; leave the offload to the host out.")
    local = config.outer(hardware.nodes)
    assert local is not None
    machine = replace(hardware, nodes=1, timings=tuple(timing for timing in hardware.timings if not timing.crosses_nodes))
    local = replace(local, wire=fastest_wire(machine, local, config.wire))
    return machine, replace(job, local_steps=local, host_offload=False, offload_optimizer=False, step_in_backward=False)


def check_local_steps(plan: Plan, asked: LocalSteps | None) -> None:
    """Refuse a given plan of another algorithm than is asked for."""
    for name in ("steps", "outer_learning_rate", "outer_momentum"):
        has, wanted = (None if local is None else getattr(local, name) for local in (plan.local_steps, asked))
        if has != wanted:
            option = "local_steps" if name == "steps" else name
            raise PlanError(f"The plan trains with {option}={has}, but {option}={wanted} is asked for; make them agree, or plan again.")
