"""Preparing under a plan: an `Accelerator` that plans for the model it is given, and lays the plan out on it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch import nn
from torch.utils.data import DataLoader

from ..errors import refuse_first
from ..measurement.step_meter import Observation, StepMeter
from ..modeling.build import checkpoint_blocks
from ..modeling.replaced import replaced
from ..modeling.units import refuse_changed
from ..planner.optimizers import upper_bound
from ..planner.plan import Plan
from ..planner.training_job import OptimizerSpec, Precision
from ..preparation.announce import announce_result, plan_and_announce
from ..preparation.beside import ModelsBeside
from ..preparation.config import OSDPConfig
from ..preparation.job import Job, RunFolder
from ..preparation.out_of_memory import OutOfMemoryHandler
from ..preparation.plan_run import PlannedRun
from ..preparation.samples import batches_of_loader, lengths_of_loader, loop_options
from ..sharding.apply import apply_plan
from ..sharding.environment import (
    form_process_group,
    prepare_model,
    uses_host,
)
from ..sharding.gradients import OSDPGradScaler
from ..sharding.optimizer import spec_of_optimizer
from ..sharding.optimizer_steps import (
    bind_optimizer,
    reason_against_unit_steps,
    step_by_device,
)
from ..sharding.optimizers import bare_optimizer, kind_of
from ..sharding.replicas import is_under_plan
from .accelerator_sharding import prepare_late_optimizers, shard_model
from .checkpoints import AcceleratorCheckpoints
from .plugin import OSDPPlugin, refuse_compiled


class AcceleratorPreparation(AcceleratorCheckpoints):
    """`Accelerator` that plans when a model is prepared, and measures the loop's first steps."""

    plugin: OSDPPlugin
    config: OSDPConfig
    """The options of the plan, merged from all places that set them."""
    precision: Precision
    beside: ModelsBeside
    meter: StepMeter | None = None
    measured: Observation | None = None
    """Measurement of the loop's first optimizer steps, the same on every process; None until they have ended."""
    _out_of_memory: OutOfMemoryHandler | None = None
    _waits_for_cuts = False
    """The plan is for steps that the loop cuts, and it has cut none yet."""
    _waits_for_loader = False
    """The plan was made without a loader, and none was prepared since."""

    def plan(
        self,
        model: nn.Module,
        *,
        sequence_length: int | None = None,
        global_batch_size: int | None = None,
        optimizer: torch.optim.Optimizer | OptimizerSpec | None = None,
    ) -> Plan:
        """Make the plan now, and set `gradient_accumulation_steps` to its value. Collective.

        Args:
            model: the model that will be prepared.
            sequence_length: tokens of one sample; None takes it from the configuration.
            global_batch_size: samples of one optimizer step over all processes; None takes it from the configuration.
            optimizer: the optimizer, or its `OptimizerSpec`; None plans for torch's AdamW.

        Returns:
            The plan. Build the DataLoader with `batch_size=plan.micro_batch_size`.

        Raises:
            ValueError: a size is not known, or sizes contradict each other.
            InfeasibleError: no plan meets the memory limit.
        """
        sizes = {"sequence_length": sequence_length, "global_batch_size": global_batch_size}
        config = replace(self.config, **{name: value for name, value in sizes.items() if value})  # type: ignore[arg-type]
        self.gradient_accumulation_steps = self._make_plan(model, config, [optimizer])
        return self._planned.plan

    def use_plan(self, run: PlannedRun) -> None:
        """Use this plan in `prepare`; `no_sync`, not Accelerate, then decides when gradients are reduced.

        A single process runs under FSDP2, with its mixed precision, only if the plan keeps units on the host: under
        autocast, the copies of their weights would stay on the device from forward to backward.
        """
        self.planned_run, self._writer.plan = run, run.plan
        self.beside.place(sharded=run.shards_beside)
        if not self.is_fsdp2 and uses_host(run.plan):
            form_process_group(needed=True)
            self._distribute(DistributedType.FSDP)
        self.gradient_state.plugin_kwargs["sync_each_batch"] = False

    def _make_plan(
        self,
        model: nn.Module,
        config: OSDPConfig,
        optimizers: Sequence[torch.optim.Optimizer | OptimizerSpec | None],
        loader: DataLoader[Any] | None = None,
    ) -> int:
        """Make the plan, print it and use it; return its accumulation steps."""
        job = self._job(model, config, optimizers, loader)
        prepare_model(model, job.precision)
        run = plan_and_announce(model, job)
        self.use_plan(run)
        self._waits_for_loader, self._waits_for_cuts = loader is None, job.cuts_by_length
        return 1 if job.cuts_by_length else run.plan.accumulation_steps

    def _job(
        self,
        model: nn.Module,
        config: OSDPConfig,
        optimizers: Sequence[torch.optim.Optimizer | OptimizerSpec | None],
        loader: DataLoader[Any] | None,
    ) -> Job:
        """Return the job of this loop with the batches of its training loader, without one with those of the options.
        Collective.
        """
        refuse_compiled(model)
        inputs = None
        if loader is not None:
            inputs, length = batches_of_loader(loader, model, config.sequence_length)
            config = replace(self._for_batches(config, loader), sequence_length=length)
        config = loop_options(config, model, known=inputs is not None)
        refuse_first({
            "The sequence length is not known; give OSDPConfig(sequence_length=...) or accelerator.plan(...).":
                config.sequence_length is None,
            "The batch size is not known; give prepare a DataLoader, or give OSDPConfig(global_batch_size=...).":
                config.global_batch_size is None,
        })  # fmt: skip
        if self.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            config = replace(config, reduce_every_micro_step=True)
        device_type, project = self.device.type, self.project_configuration
        made = [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]
        specs = [
            one if isinstance(one, OptimizerSpec) else spec_of_optimizer(one, device_type=device_type)
            for one in optimizers or [None]
        ]
        folder = None
        if project.project_dir is not None:
            saves = bool(project.automatic_checkpoint_naming)
            folder = RunFolder(path=Path(project.project_dir) / ("checkpoints" if saves else ""), saves=saves)
        return Job(
            config=config,
            world_size=self.num_processes,
            device_type=device_type,
            precision=self.precision,
            optimizer=upper_bound(specs),
            inputs=inputs,
            cuts_by_length=bool(config.batch_by_tokens),
            lengths=None if loader is None else lengths_of_loader(loader, config.sequence_length),
            holds_outputs=True,  # as the usual loop does: `out = model(**batch); accelerator.backward(out.loss)`
            activation_checkpointing=bool(self.plugin.activation_checkpointing),
            against_unit_steps=next(filter(None, map(reason_against_unit_steps, made)), None),
            trains=any(optimizers),
            **self.beside.facts(model),
            folder=folder,
        )

    def _for_batches(self, config: OSDPConfig, loader: DataLoader[Any]) -> OSDPConfig:
        """Return the options with the sizes of the training loader's batches."""
        size, steps, ranks = self._batch_size(loader), self.gradient_accumulation_steps, self.num_processes
        micro, by_tokens, asked = config.micro_batch_size, config.batch_by_tokens, config.global_batch_size
        samples = asked if size is None else size * ranks * steps
        refuse_first({
            f"gradient_accumulation_steps={steps}, but with batch_by_tokens=True each batch is a whole step; set it to"
            " 1.": by_tokens and steps != 1,
            f"micro_batch_size={micro}, but the DataLoader's batches hold {size}; make them agree.":
                not by_tokens and micro not in (None, size),
            f"global_batch_size={asked}, but batches of {size} on {ranks} processes with {steps} accumulation steps"
            f" make {samples}; make them agree.": asked not in (None, samples),
        })  # fmt: skip
        return replace(config, micro_batch_size=micro if by_tokens else size, global_batch_size=samples)

    def _batch_size(self, loader: DataLoader[Any]) -> int | None:
        """Return the samples per process in one batch of a loader; None if the loader does not say."""
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        return size if size is None or not self.split_batches else size // self.num_processes

    def _plan_for_accumulation(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make the plan for the loop's accumulation, with the micro-batch size that fills it if the options leave it
        open; a given plan or micro-batch size sets the accumulation where the loop leaves it at 1.
        """
        config, steps, ranks = self.config, self.gradient_accumulation_steps, self.num_processes
        samples, chosen = config.global_batch_size, config.plan or config.micro_batch_size or config.batch_by_tokens
        if samples is not None and not chosen:
            if samples % (ranks * steps):
                raise ValueError(
                    f"global_batch_size={samples} is not a multiple of {ranks} processes x {steps} accumulation"
                    " steps; make them agree."
                )
            config = replace(config, micro_batch_size=samples // (ranks * steps))
        planned = self._make_plan(model, config, optimizers)
        if steps not in (1, planned):
            raise ValueError(
                f"gradient_accumulation_steps={steps}, but the plan accumulates {planned} micro-batches; make them"
                " agree."
            )
        self.gradient_accumulation_steps = planned

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:  # noqa: ANN401  as stock
        """Prepare as `Accelerator.prepare`; a model may also come without an optimizer, for evaluation."""
        models, loaders = [o for o in args if isinstance(o, nn.Module)], [o for o in args if isinstance(o, DataLoader)]
        optimizers = [o for o in args if isinstance(o, torch.optim.Optimizer)]
        for model in models:
            refuse_compiled(model)
        known = {id(model) for model in (*self._models, *models)}
        if self.is_fsdp2 and models and len(known) > 1:
            raise ValueError(
                f"{len(known)} models were given to prepare, but an OSDPAccelerator plans for one; make them modules"
                " of one model, or move"
                " a model that is not trained to accelerator.device by hand."
            )
        if loaders and self._waits_for_loader:
            self._check_loader(loaders[0])
        if models:
            if self.planned_run is None and not is_under_plan(models[0]):
                if loaders:
                    self._make_plan(models[0], self.config, optimizers, loaders[0])
                else:
                    self._plan_for_accumulation(models[0], optimizers)
            self._apply_plan(models[0], optimizers)
        if not models or not self.is_fsdp2 or optimizers:
            result = super().prepare(*args, device_placement=device_placement)
        else:
            prepared = self._prepare_fsdp2(*args)
            result = prepared if len(prepared) > 1 else prepared[0]
        if optimizers and self._models and self.planned_run is not None:
            self._compare_training(args)
            self._bind_optimizers(optimizers, self.planned_run)
        return result

    def _check_loader(self, loader: DataLoader[Any]) -> None:
        """Refuse the first loader, which is for training, with another batch size than the plan's."""
        size, plan = self._batch_size(loader), self._planned.plan
        planned = plan.samples_per_rank if self.config.batch_by_tokens else plan.micro_batch_size
        if size not in (None, planned):
            raise ValueError(
                f"The plan takes {planned} samples in a batch, but the first DataLoader gives {size};"
                f" use batch_size={planned * (self.num_processes if self.split_batches else 1)} for training, and give"
                " that DataLoader first."
            )
        self._waits_for_loader = False

    def _apply_plan(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Apply the plan to the model and give its optimizers the new parameters; if it is applied already, prepare
        the optimizers only. Refuse a model that has changed since it was planned.
        """
        if is_under_plan(model) or any(known is model for known in self._models):
            prepare_late_optimizers(optimizers, model)
            if self.planned_run is not None:  # else another accelerator's
                refuse_changed(model, self.planned_run.units)
            return
        run = self._planned
        if self.plugin.activation_checkpointing:
            checkpoint_blocks(model, run.inputs.description.block_classes, trains=True)
        if self.is_fsdp2:
            shard_model(model, run, self.plugin, optimizers, device=self.device)
        else:  # what needs no FSDP2, such as recomputed blocks
            apply_plan(model, run.plan, run.units)
            for optimizer in optimizers:
                if kind_of(optimizer).has_plain_states:
                    step_by_device(bare_optimizer(optimizer))
        self._out_of_memory = OutOfMemoryHandler(
            model, run.plan, run.units, hardware=run.hardware, on_oom=self.config.on_oom, device=self.device
        )

    def _bind_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], run: PlannedRun) -> None:
        """Make the optimizers step as planned, and measure the first steps of this loop, also of a later one."""
        model = self._models[-1]
        bind_optimizer(model, run.plan, run.units, optimizers)
        if self.meter is None or self.meter.model is None:
            skips = self.scaler is not None and self.scaler.is_enabled() and run.budget is None
            self.meter = StepMeter(
                model, self.device, self._report, run.plan, may_skip=skips, beside=self.beside.placed_tensors
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:  # noqa: ANN401  as stock
        """Prepare as `Accelerator.prepare_model`, without what the plan does in its place; a model for evaluation is
        moved to the device with the plan, whole or in shards, or when it runs.
        """
        state = copy(self.state)  # all accelerators share the state itself
        state.dynamo_plugin = TorchDynamoPlugin(backend="no")
        waits = evaluation_mode and self.is_fsdp2
        with replaced(self, state=state):
            result = super().prepare_model(model, False if waits else device_placement, evaluation_mode)
        if waits:
            self._models.remove(model)  # the others are planned
            self.beside.add(model)
            if self.planned_run is not None:
                self.beside.place(sharded=False)
        return result

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """Prepare all but the model, which is under its plan already."""
        result = [o if isinstance(o, nn.Module) else self._prepare_one(o, first_pass=True) for o in args]
        result = [o if isinstance(o, nn.Module) else self._prepare_one(o) for o in result]
        for model in (o for o in result if isinstance(o, nn.Module)):
            if not any(known is model for known in self._models):
                self._models.append(model)
            model._is_accelerate_prepared = True  # type: ignore[assignment]
        return tuple(result)

    def _report(self, measured: Observation) -> None:
        """Print estimate and measurement; also write them into `project_dir` if it is set and `report` is on."""
        self.measured = measured
        announce_result(self._planned, measured, self.project_dir if self.config.report else None)

    @property
    def _planned(self) -> PlannedRun:
        assert self.planned_run is not None, "the plan is made before it is used"
        return self.planned_run

    def _select_fsdp(self) -> None:
        """Select FSDP with this plugin in the shared state for several processes, also on the CPU, and none for a
        single one; prepare loss scaling, also on the CPU.
        """
        if self.num_processes == 1:
            self._distribute(DistributedType.NO)
        elif self.state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP):
            self._distribute(DistributedType.FSDP)
        if self.state.mixed_precision == "fp16":  # the stock scaler checks the first mesh only
            options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = OSDPGradScaler(device=self.device.type, **options)
            self.native_amp = True

    def _distribute(self, kind: DistributedType) -> None:
        """Select FSDP with this plugin, or nothing, in the state that all accelerators share, which keeps the first
        plugin.
        """
        AcceleratorState._shared_state["fsdp_plugin"] = self.plugin if kind is DistributedType.FSDP else None
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = kind
