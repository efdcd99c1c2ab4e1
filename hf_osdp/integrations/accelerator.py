"""`OSDPAccelerator`: Accelerate's `Accelerator` that shards each unit as a plan says."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, DynamoBackend, ProjectConfiguration
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from ..checkpoint.writer import CheckpointWriter
from ..distributed.process_group import check_ranks, wait_for_ranks
from ..distributed.stop import Stopped
from ..measurement.step_meter import LoopMeter, Observation
from ..planner.job import OptimizerSpec
from ..planner.plan import Plan
from ..planning.config import OSDPConfig
from ..planning.out_of_memory import OutOfMemoryHandler
from ..planning.plan_run import PlannedRun, plan_run
from ..planning.preflight.checks import RunFolder
from ..planning.problem import RunFacts
from ..sharding.environment import form_process_group, prepare_model
from ..sharding.gradients import OSDPGradScaler, clip_grad_norm_
from ..sharding.host_offload import uses_host
from ..sharding.state import full_state_dict
from ..sharding.steps import micro_step
from .announce import announce_plan, announce_result, planning_status
from .checkpoints import AcceleratorCheckpoints
from .launch import launch_request, launched_world_size
from .optimizers import frozen_parameters, spec_of_optimizer, spec_of_trainer_name
from .plugin import OSDPPlugin, offloads, plugin_for, precision_of
from .samples import batch_size_of, batches_of_loader
from .sharding import apply_alone, check_bound, shard_model

_REFUSED = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")
"""Arguments of `Accelerator` that decide how the model is laid out."""
Parameters = torch.Tensor | Iterable[torch.Tensor]
_SIGNATURE = inspect.signature(Accelerator.__init__)


class OSDPAccelerator(AcceleratorCheckpoints, Accelerator):
    """An `Accelerator` that plans when a model is prepared, and shards each unit as the plan says.

    The plan is made at `prepare`, for the batch size of the first DataLoader given there. To let the planner choose the
    batch size as well, call `plan` first and build the DataLoader with `batch_size=plan.micro_batch_size`. The first
    DataLoader is the one to train with; others, for evaluation, may have batches of any size.

    The first 8 optimizer steps of the loop are measured (`measured`), and the estimate is printed beside them; with a `project_dir`
    it goes into `osdp_report.json` there. `end_training` tells it where a loop is shorter.

    A single process without a process group has nobody to share with: its plan sets the batch size, and which units live on the
    host.

    Args:
        *args: as for `Accelerator`.
        osdp: what to plan for; what it leaves open comes from the file given to `accelerate launch`.
        osdp_plugin: an `OSDPPlugin`, where more than the plan is to be set.
        **kwargs: as for `Accelerator`. `fsdp_plugin` is another name for `osdp_plugin`; without `cpu=True` it runs on the CPU where the
            launcher asks for it or there is no accelerator.

    Raises:
        ValueError: an option cannot be used, or several processes were started that would not know of each other.
        LaunchError: ranks are missing, or run different versions.
    """

    reports_steps = True
    """Whether the loop's first steps are measured; the Trainer measures its own."""

    def __init__(
        self, *args: Any, osdp: OSDPConfig | Mapping[str, object] | None = None, osdp_plugin: OSDPPlugin | None = None, **kwargs: Any
    ) -> None:
        options = _by_name(args, kwargs)
        request = launch_request()
        plugin = plugin_for(osdp, osdp_plugin, options.pop("fsdp_plugin", None), request)
        cpu = options.pop("cpu", False) or bool(request and request.use_cpu) or not torch.accelerator.is_available()
        self._run: PlannedRun | None = None
        self._watch: LoopMeter | None = None
        self._out_of_memory: OutOfMemoryHandler | None = None
        self._measured: Observation | None = None
        self._writer: CheckpointWriter | None = None
        self._earlier_error = id(sys.exc_info()[1])  # that is being handled: a training that failed before this one
        if dist.is_initialized() or not _meets_elsewhere(options.get("kwargs_handlers")):
            check_ranks()
        super().__init__(fsdp_plugin=plugin, cpu=cpu, **options)
        if self.num_processes == 1 and launched_world_size() > 1:
            raise ValueError(
                f"{launched_world_size()} processes were launched, but this one sees no other;"
                " pass cpu=True (TrainingArguments(use_cpu=True) with the Trainer) to run them on the CPU."
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(f"torch.compile ({self.state.dynamo_plugin.backend.value}) is not planned for yet; switch dynamo off.")
        self.plugin = plugin
        self._join_fsdp(plugin)
        self._choose_scaler()

    @property
    def planned_run(self) -> PlannedRun | None:
        """The plan with what it was made from; None before planning."""
        return self._run

    @property
    def measured(self) -> Observation | None:
        """Measurement of the loop's first optimizer steps, the same on every process; None before they ended."""
        return self._measured

    @property
    def _config(self) -> OSDPConfig:
        assert isinstance(self.plugin.osdp, OSDPConfig)
        return self.plugin.osdp

    @property
    def _planned(self) -> PlannedRun:
        assert self._run is not None, "the plan is made before it is used"
        return self._run

    def plan(
        self,
        model: nn.Module,
        *,
        sequence_length: int | None = None,
        global_batch_size: int | None = None,
        optimizer: torch.optim.Optimizer | OptimizerSpec | None = None,
    ) -> Plan:
        """Make the plan now, and set `gradient_accumulation_steps` by it. Every process calls this together.

        Args:
            model: the model that will be prepared.
            sequence_length: tokens of one sample; None takes it from the configuration.
            global_batch_size: samples of one optimizer step over all processes; None takes it from the configuration.
            optimizer: the optimizer, or what it holds; None plans for torch's AdamW.

        Returns:
            The plan. Build the DataLoader with `batch_size=plan.micro_batch_size`.

        Raises:
            ValueError: a size is known from nowhere, or sizes do not fit together.
            InfeasibleError: no plan meets the memory limit.
        """
        config = self._config
        facts = self._facts(sequence_length or config.sequence_length, global_batch_size or config.global_batch_size, optimizer)
        run = self._make_plan(model, replace(facts, micro_batch_size=config.micro_batch_size))
        self.gradient_accumulation_steps = run.plan.accumulation_steps
        return run.plan

    def _make_plan(self, model: nn.Module, facts: RunFacts) -> PlannedRun:
        """Plan, adopt the plan, and print it."""
        prepare_model(model, facts.precision)
        with planning_status(is_rank_zero=self.is_main_process):
            run = plan_run(model, self._config, facts)
        self.adopt(run)
        announce_plan(run, is_rank_zero=self.is_main_process)
        return run

    def adopt(self, run: PlannedRun) -> None:
        """Use this plan in `prepare`; when gradients are reduced is then decided by `no_sync`, not by Accelerate.

        FSDP2 runs units on the host, and its own mixed precision where the plan was not made for autocast: FSDP then takes charge of a
        single process, too.
        """
        self._run = run
        assert run.job is not None
        precision = run.job.precision
        if not self.is_fsdp2 and (uses_host(run.plan) or (precision.compute is not None and not precision.autocast)):
            form_process_group(needed=True)
            self._join_fsdp(self.plugin, alone=True)
            self._choose_scaler()
        self.gradient_state.plugin_kwargs["sync_each_batch"] = False

    def _plan_for(self, objects: Sequence[Any]) -> None:
        """Plan for what was given to `prepare`."""
        config = self._config
        model = next(o for o in objects if isinstance(o, nn.Module))
        loader = next((o for o in objects if isinstance(o, DataLoader)), None)
        optimizer = next((o for o in objects if isinstance(o, torch.optim.Optimizer)), None)
        length, micro, inputs, global_batch = config.sequence_length, config.micro_batch_size, None, config.global_batch_size
        if loader is not None:
            inputs, length = batches_of_loader(loader, model, length)
            size = batch_size_of(loader, share=self.num_processes if self.split_batches else 1)
            if micro not in (None, size):
                raise ValueError(f"micro_batch_size={micro}, but the DataLoader's batches hold {size}; make them agree.")
            micro = size
            if micro is not None:
                steps = micro * self.num_processes * self.gradient_accumulation_steps
                if global_batch not in (None, steps):
                    raise ValueError(
                        f"global_batch_size={global_batch}, but batches of {micro} on {self.num_processes} processes with"
                        f" {self.gradient_accumulation_steps} accumulation steps make {steps}; make them agree."
                    )
                global_batch = steps
        facts = replace(self._facts(length, global_batch, optimizer), micro_batch_size=micro, inputs=inputs)
        run = self._make_plan(model, facts)
        if loader is None:
            self.gradient_accumulation_steps = run.plan.accumulation_steps

    def _facts(
        self, sequence_length: int | None, global_batch_size: int | None, optimizer: torch.optim.Optimizer | OptimizerSpec | None
    ) -> RunFacts:
        """Return what is known about the run; a size that is not known is an error with the way to state it."""
        if sequence_length is None:
            raise ValueError("The sequence length is not known; give OSDPConfig(sequence_length=...) or accelerator.plan(...).")
        if global_batch_size is None:
            raise ValueError("The batch size is not known; give prepare a DataLoader, or give OSDPConfig(global_batch_size=...).")
        config, device_type = self._config, self.device.type
        if optimizer is None:
            spec = spec_of_trainer_name("adamw_torch", device_type=device_type)
        else:
            spec = optimizer if isinstance(optimizer, OptimizerSpec) else spec_of_optimizer(optimizer, device_type=device_type)
        syncs_each_batch = self.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return RunFacts(
            world_size=self.num_processes,
            device_type=device_type,
            precision=precision_of(self.mixed_precision, self.plugin.mixed_precision_policy, alone=not self.is_fsdp2),
            optimizer=spec,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            reduce_every_micro_step=True if syncs_each_batch else config.reduce_every_micro_step,
            holds_outputs=True,  # the usual loop names them: `out = model(**batch); accelerator.backward(out.loss)`
            activation_checkpointing=bool(self.plugin.activation_checkpointing),
            checkpoint_wrapper=bool(self.plugin.activation_checkpointing),
            cpu_offload=offloads(self.plugin),
            trains=optimizer is not None,
            frozen_in_optimizer=frozen_parameters(optimizer),
            folder=project_folder(self.project_configuration),
        )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:  # noqa: ANN401  as stock
        """As `Accelerator.prepare`; a model may also come without an optimizer, for evaluation."""
        model = next((a for a in args if isinstance(a, nn.Module)), None)
        self._check_models([a for a in args if isinstance(a, nn.Module)])
        if model is not None and not isinstance(model, FSDPModule):
            if self._run is None:
                self._plan_for(args)
            else:
                self._check_loaders(args)
            if not self.is_fsdp2 and not any(known is model for known in self._models):
                apply_alone(model, self._planned, [a for a in args if isinstance(a, torch.optim.Optimizer)])
                self._explain_memory_of(model)
        trains = any(isinstance(a, torch.optim.Optimizer) for a in args)
        if model is None or not self.is_fsdp2 or trains:
            result = super().prepare(*args, device_placement=device_placement)
        else:
            prepared = self._prepare_fsdp2(*args)
            result = prepared if len(prepared) > 1 else prepared[0]
        if trains and self.reports_steps and self._watch is None and self._run is not None and self._models:
            skips = self.scaler is not None and self.scaler.is_enabled()
            micro_steps = self._run.plan.accumulation_steps if skips else None
            self._watch = LoopMeter(self._models[-1], self.device, self._report, micro_steps=micro_steps)
        return result

    def _check_models(self, models: Sequence[nn.Module]) -> None:
        """Refuse a second model: the plan is for one."""
        others = {id(model) for model in (*self._models, *models)}
        if self.is_fsdp2 and models and len(others) > 1:
            raise ValueError(
                f"{len(others)} models were given to prepare, but an OSDPAccelerator plans for one; make them modules of one model, or move"
                " a model that is not trained to accelerator.device by hand."
            )

    def _check_loaders(self, objects: Iterable[Any]) -> None:
        """Refuse training batches of another size than the plan's. The first loader trains; others may be for evaluation."""
        share = self.num_processes if self.split_batches else 1
        loader = next((o for o in objects if isinstance(o, DataLoader)), None)
        size = None if loader is None else batch_size_of(loader, share=share)
        planned = self._planned.plan.micro_batch_size
        if size not in (None, planned):
            raise ValueError(
                f"The plan runs {planned} samples at once, but the first DataLoader gives {size};"
                f" use batch_size={planned * share} for training, and give that DataLoader first."
            )

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """Shard the model by the plan and hand the optimizers its new parameters, found by name."""
        result = [o if isinstance(o, nn.Module) else self._prepare_one(o, first_pass=True) for o in args]
        result = [o if isinstance(o, nn.Module) else self._prepare_one(o) for o in result]
        models = [index for index, o in enumerate(result) if isinstance(o, nn.Module)]
        if not models:
            return tuple(result)
        model = result[models[0]]
        optimizers = [o for o in result if isinstance(o, torch.optim.Optimizer)]
        if isinstance(model, FSDPModule):
            check_bound(optimizers, result[models[0]])
        else:
            model = self._shard(model, optimizers)
        if not any(known is model for known in self._models):
            self._models.append(model)
        result[models[0]] = model
        model._is_accelerate_prepared = True  # type: ignore[union-attr]
        return tuple(result)

    def _report(self, measured: Observation) -> None:
        """Print the estimate beside the measurement; write it into `project_dir` too, if there is one."""
        self._measured = measured
        if self.project_dir is not None:
            Path(self.project_dir).mkdir(parents=True, exist_ok=True)
        announce_result(self._planned, measured, output_dir=self.project_dir, is_rank_zero=self.is_main_process)

    def wait_for_everyone(self) -> None:
        """Wait on the host, since a rank may save for longer than NCCL waits, and may see no GPU of its local rank's number."""
        wait_for_ranks()

    def end_training(self) -> None:
        """Complete the last checkpoint, report a loop of fewer steps than are measured, and end as stock does.

        While an exception propagates, as in a `finally`, other ranks may be elsewhere: only trackers end then. `StopSignal.exit` is a
        normal end.
        """
        error = sys.exc_info()[1]
        if error is not None and id(error) != self._earlier_error and not isinstance(error, Stopped):
            for tracker in self.trackers:
                tracker.finish()
            return
        if self._watch is not None:
            self._watch.finish()
        if self._writer is not None:
            self._writer.wait()
        super().end_training()

    def _shard(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> nn.Module:
        """Wrap blocks for checkpointing first, then apply the plan: a unit is the wrapped block."""
        if self.plugin.activation_checkpointing:
            assert self._planned.description is not None
            self.plugin.transformer_cls_names_to_wrap = list(self._planned.description.block_classes)
            self.plugin.set_auto_wrap_policy(model)
            model = fsdp2_apply_ac(self, model)
        model = shard_model(model, self._planned, self.plugin, optimizers, device=self.device)
        self._explain_memory_of(model)
        return model

    def _explain_memory_of(self, model: nn.Module) -> None:
        """Explain errors of memory in this model's training from here on."""
        run, on_oom = self._planned, self._config.on_oom
        self._out_of_memory = OutOfMemoryHandler(model, run.plan, run.units, problem=run.problem, on_oom=on_oom, device=self.device)

    @contextmanager
    def out_of_memory_explained(self) -> Iterator[None]:
        """Give an error of memory inside its explanation, once a model has been prepared."""
        try:
            yield
        except Exception as error:
            if self._out_of_memory is not None:
                self._out_of_memory.handle(error)
            raise

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As `Accelerator.backward`; an error of memory in it is explained."""
        with self.out_of_memory_explained():
            super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Run one micro-step that is not the last: the plan decides what is reduced in it."""
        if not self.is_fsdp2:
            with super().no_sync(model):
                yield
            return
        with micro_step(model, is_last=False, plan=None if self._run is None else self._run.plan):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return whole weights under their Hugging Face names, as copies; empty on ranks other than 0."""
        return full_state_dict(model) if self.is_fsdp2 else super().get_state_dict(model, unwrap=unwrap)

    def clip_grad_norm_(self, parameters: Parameters, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip by the norm over all units, whatever mesh each is on, and return the norm before clipping."""
        if not self.is_fsdp2:
            norm: torch.Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
            return norm
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Parameters, clip_value: float) -> None:
        """Clip each element, of shards in place."""
        self.unscale_gradients()
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        for gradient in (p.grad for p in parameters if p.grad is not None):
            getattr(gradient, "_local_tensor", gradient).clamp_(-clip_value, clip_value)

    def _join_fsdp(self, plugin: OSDPPlugin, *, alone: bool = False) -> None:
        """Put FSDP in charge, as Accelerate does for several processes except on the CPU; replace the first plugin, which it keeps."""
        if not alone and self.state.distributed_type not in (DistributedType.MULTI_CPU, DistributedType.FSDP):
            return
        if self.state.mixed_precision != "no" and plugin.mixed_precision_policy is None:
            plugin.set_mixed_precision(self.state.mixed_precision)
        AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    def _choose_scaler(self) -> None:
        """Take a scaler that decides the same on every rank; the stock one asks the first mesh only."""
        if self.state.mixed_precision != "fp16" or not self.is_fsdp2:
            return
        options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
        self.scaler = OSDPGradScaler(device=self.device.type, **options)
        self.native_amp = True


def _meets_elsewhere(handlers: Iterable[Any] | None) -> bool:
    """Whether `InitProcessGroupKwargs(init_method=...)` names another place than the launcher's variables."""
    return any(getattr(handler, "init_method", None) not in (None, "env://") for handler in handlers or ())


def _by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `Accelerator` by name.

    Raises:
        TypeError: `Accelerator` has no such argument.
        ValueError: an argument lays the model out in another way than a plan.
    """
    options = dict(_SIGNATURE.bind(None, *args, **kwargs).arguments)
    del options["self"]
    if other := next((name for name in _REFUSED if options.get(name) is not None), None):
        raise ValueError(f"{other} and OSDP both decide how the model is laid out; leave {other} out, or use accelerate's Accelerator.")
    return options


def project_folder(project: ProjectConfiguration) -> RunFolder | None:
    """Return where an Accelerate loop writes, with the number of checkpoints if Accelerate names them; None without a folder."""
    if project.project_dir is None:
        return None
    if not project.automatic_checkpoint_naming:
        return RunFolder(path=project.project_dir, saves=False)
    return RunFolder(path=Path(project.project_dir) / "checkpoints", limit=project.total_limit)
