"""Read the facts that planning needs from an Accelerate loop: sizes of batches, data, optimizers; refuse those that
contradict the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader

from ..errors import refuse_first
from ..planner.optimizers import upper_bound
from ..planner.training_job import OptimizerSpec
from ..preparation.config import OSDPConfig
from ..preparation.job import Job, RunFolder
from ..preparation.samples import Batches, batches_of_loader, lengths_of_loader, refuse_lengths, with_length_of_inputs
from ..sharding.optimizer import spec_of_optimizer
from ..sharding.optimizer_steps import reason_against_unit_steps
from .plugin import refuse_compiled


def loop_options(config: OSDPConfig, model: nn.Module, *, known: bool = False) -> OSDPConfig:
    """Return a loop's options with the length of its `inputs`; refuse those that its model cannot have, and a model
    whose batches are not `known`.
    """
    refuse_compiled(model)
    config = with_length_of_inputs(config, model, known=known)
    refuse_lengths(config, model)
    return config


def job_of_loop(
    accelerator: Any,  # noqa: ANN401  an OSDPAccelerator
    model: nn.Module,
    config: OSDPConfig,
    optimizers: Sequence[torch.optim.Optimizer | OptimizerSpec | None],
    loader: DataLoader[Any] | None,
) -> Job:
    """Return the job of a loop with the batches of its training loader, without one with those of the options.
    Collective.
    """
    inputs: Batches | None = None
    if loader is not None:
        inputs, length = batches_of_loader(loader, model, config.sequence_length)
        config = replace(_for_batches(config, accelerator, loader), sequence_length=length)
    config = loop_options(config, model, known=inputs is not None)
    refuse_first({
        "The sequence length is not known; give OSDPConfig(sequence_length=...) or accelerator.plan(...).":
            config.sequence_length is None,
        "The batch size is not known; give prepare a DataLoader, or give OSDPConfig(global_batch_size=...).":
            config.global_batch_size is None,
    })  # fmt: skip
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        config = replace(config, reduce_every_micro_step=True)
    device_type = accelerator.device.type
    made = [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]
    specs = [
        one if isinstance(one, OptimizerSpec) else spec_of_optimizer(one, device_type=device_type)
        for one in optimizers or [None]
    ]
    return Job(
        config=config,
        world_size=accelerator.num_processes,
        device_type=device_type,
        precision=accelerator.precision,
        optimizer=upper_bound(specs),
        inputs=inputs,
        cuts_by_length=bool(config.batch_by_tokens),
        lengths=None if loader is None else lengths_of_loader(loader, config.sequence_length),
        holds_outputs=True,  # as the usual loop does: `out = model(**batch); accelerator.backward(out.loss)`
        activation_checkpointing=bool(accelerator.plugin.activation_checkpointing),
        against_unit_steps=next(filter(None, map(reason_against_unit_steps, made)), None),
        trains=any(optimizers),
        **accelerator.beside.facts(model),
        folder=project_folder(accelerator.project_configuration),
    )


def _for_batches(config: OSDPConfig, accelerator: Any, loader: DataLoader[Any]) -> OSDPConfig:  # noqa: ANN401
    """Return the options with the sizes of the training loader's batches."""
    size, steps, ranks = (
        batch_size(accelerator, loader),
        accelerator.gradient_accumulation_steps,
        accelerator.num_processes,
    )
    micro, by_tokens, asked = config.micro_batch_size, config.batch_by_tokens, config.global_batch_size
    samples = asked if size is None else size * ranks * steps
    refuse_first({
        f"gradient_accumulation_steps={steps}, but with batch_by_tokens=True each batch is a whole step; set it to 1.":
            by_tokens and steps != 1,
        f"micro_batch_size={micro}, but the DataLoader's batches hold {size}; make them agree.":
            not by_tokens and micro not in (None, size),
        f"global_batch_size={asked}, but batches of {size} on {ranks} processes with {steps} accumulation steps make"
        f" {samples}; make them agree.": asked not in (None, samples),
    })  # fmt: skip
    return replace(config, micro_batch_size=micro if by_tokens else size, global_batch_size=samples)


def for_accumulation(config: OSDPConfig, accelerator: Any) -> OSDPConfig:  # noqa: ANN401
    """Return the options with the micro-batch size that fills the loop's accumulation steps, if they leave it open."""
    samples, steps, ranks = (
        config.global_batch_size,
        accelerator.gradient_accumulation_steps,
        accelerator.num_processes,
    )
    chosen = config.plan is not None or config.micro_batch_size is not None or config.batch_by_tokens
    if samples is None or chosen:
        return config
    refuse_first({
        f"global_batch_size={samples} is not a multiple of {ranks} processes x {steps} accumulation steps; make them"
        " agree.": samples % (ranks * steps)
    })  # fmt: skip
    return replace(config, micro_batch_size=samples // (ranks * steps))


def batch_size(accelerator: Any, loader: DataLoader[Any]) -> int | None:  # noqa: ANN401
    """Return the samples per process in one batch of a loader; None if the loader does not say."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if size is None or not accelerator.split_batches else size // accelerator.num_processes


def project_folder(project: ProjectConfiguration) -> RunFolder | None:
    """Return the folder that an Accelerate loop writes; None without a folder."""
    if project.project_dir is None:
        return None
    if not project.automatic_checkpoint_naming:
        return RunFolder(path=project.project_dir, saves=False)
    return RunFolder(path=Path(project.project_dir) / "checkpoints")
