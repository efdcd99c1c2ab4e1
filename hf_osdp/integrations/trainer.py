"""`Trainer`: the one of transformers, sharding each unit of the model as a plan says."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput

from ..checkpoint.resume import start_fresh
from ..distributed.process_group import host_barrier
from ..distributed.stop import StopSignal
from ..measurement.step_meter import StepMeter
from ..planning.config import OSDPConfig
from ..planning.plan_run import PlannedRun
from ..sharding.environment import hold_master_weights
from ..sharding.state import free_gathered
from ..sharding.weight_reads import mixing_explained
from .accelerator import OSDPAccelerator
from .announce import announce_result, plan_and_announce
from .checkpoints import replaced
from .local_steps import check_plugin
from .plugin import OSDPPlugin
from .subclasses import check_order, ignores_item_count, planning_at_the_end, with_whole_weights
from .trainer_checkpoints import StopCallback, TrainerCheckpoints
from .trainer_facts import (
    copied_arguments,
    facts_of_trainer,
    plugin_options,
    refuse_changes,
    refuse_unplanned,
    requested_config,
    set_batch,
    take_changes,
)


class Trainer(TrainerCheckpoints):
    """`transformers.Trainer` that shards each unit of the model as a plan says.

    The plan is made when the Trainer is. The samples of one optimizer step stay as the arguments have them (`per_device_train_batch_size` ×
    `gradient_accumulation_steps` × processes); how many of them run at once is the planner's choice, and goes into a copy of the arguments.

    Args:
        *args: as for `transformers.Trainer`.
        osdp: None is on where the launcher or `TrainingArguments(fsdp_config={"osdp": {...}})` asks for it; True is on; False is the stock
            Trainer; an `OSDPConfig` or a mapping of its fields is on with those options. What it leaves open comes from `fsdp_config`,
            then from the launcher.
        **kwargs: as for `transformers.Trainer`.

    Raises:
        ValueError: an option cannot be used, or an argument asks for what a plan cannot give.
        InfeasibleError: no plan meets the memory limit.
    """

    plans_unasked = False
    """Whether OSDP is on where nobody says so, as under `hf_osdp.run`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls, Trainer)
        cls.__init__ = planning_at_the_end(cls.__init__)  # type: ignore[method-assign]
        if any("_save" in vars(other) for other in cls.__mro__[: cls.__mro__.index(Trainer)]):
            cls._save = with_whole_weights(cls._save)  # type: ignore[method-assign]

    def __init__(self, *args: Any, osdp: OSDPConfig | Mapping[str, object] | bool | None = None, **kwargs: Any) -> None:
        call = inspect.signature(StockTrainer.__init__).bind(self, *args, **kwargs)
        given = call.arguments
        self._run: PlannedRun | None = None
        asked = self.__dict__.pop("_asked_osdp", None) if osdp is None else osdp
        self._osdp = requested_config(asked, given.get("args"), unasked=self.plans_unasked)
        if self._osdp is not None:
            refuse_unplanned(given)
            arguments = given.get("args") or TrainingArguments(output_dir="tmp_trainer")
            given["args"] = copied_arguments(arguments)
            self._given_args = arguments, dict(vars(arguments))
            assert arguments.output_dir is not None
            self._asked_batch = arguments.per_device_train_batch_size
            if given.get("train_dataset") is not None:
                start_fresh(arguments.output_dir)  # before planning, which may be the end of this start
            self._makes_folder = not Path(arguments.output_dir).exists()
        super().__init__(*call.args[1:], **call.kwargs)

    def _plan_now(self) -> None:
        """Plan once every `__init__` has ended, since subclasses change model, data and loss in theirs."""
        if self._osdp is None:
            return
        args = self.args
        take_changes(args, *self._given_args)
        assert isinstance(self.accelerator.plugin.osdp, OSDPConfig)
        self._osdp = replace(self._osdp, compile=self._osdp.compile or self.accelerator.plugin.osdp.compile)  # the launcher's dynamo
        try:
            if self._osdp.local_steps is not None:
                check_plugin(self.accelerator.plugin, self._osdp.local_steps)
            config, facts = facts_of_trainer(self, self._osdp)
            hold_master_weights(self.model, facts.precision)
            self._run = plan_and_announce(self.model, config, facts)
        except Exception:
            if self._makes_folder:
                with suppress(OSError):  # it is gone, or holds something
                    Path(str(args.output_dir)).rmdir()
            raise
        set_batch(args, self._run.plan)
        if self._run.optimizer is not None:
            args.optim = self._run.optimizer.name
        self._train_batch_size = args.train_batch_size
        self.accelerator.adopt(self._run)
        self.is_fsdp_enabled = self.is_fsdp_enabled or self.accelerator.is_fsdp2  # one process with units on the host
        if self.place_model_on_device and not self.is_fsdp_enabled:
            super()._move_model_to_device(self.model, args.device)
        self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs and not ignores_item_count(self.model)
        self._meter = StepMeter(args.device, compiled=bool(self._run.plan.compiled_classes))
        self.add_callback(_StepCallback(self._meter))
        self._stop = StopSignal()
        if self._osdp.save_on_sigterm:
            self.add_callback(StopCallback(self._stop))

    def _validate_args(self) -> None:
        """As stock, which takes no optimizer under FSDP; here it gets the shards of its parameters."""
        with replaced(self, is_fsdp_enabled=self.is_fsdp_enabled and self._osdp is None):
            super()._validate_args()

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """As stock, but only after planning, which decides which units live on the host."""
        if self._osdp is None or self._run is not None:
            super()._move_model_to_device(model, device)

    def create_accelerator_and_postprocess(self) -> None:
        """As stock, with an accelerator that runs plans."""
        if self._osdp is None:
            super().create_accelerator_and_postprocess()
            return
        with replaced(transformers.trainer, Accelerator=OSDPAccelerator):  # stock has no argument for it
            super().create_accelerator_and_postprocess()
        self.accelerator.has_loop = False  # the Trainer knows where its steps begin and end

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """As stock, with the plan's plugin."""
        options = super()._build_accelerator_args(**kwargs)
        if self._osdp is not None:
            options["fsdp_plugin"] = OSDPPlugin(osdp=self._osdp.options(), **plugin_options(self.args))
            options["cpu"] = self.args.device.type == "cpu"
        return options

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As stock, from shards: after an evaluation the model still shows gathered parameters of units that are kept."""
        if self._osdp is not None:
            free_gathered(self.model if model is None else model)
        return super().create_optimizer(model)

    def _has_mixed_mesh_grads(self, model: torch.nn.Module) -> bool:
        """Return False: the Trainer's own path for several meshes does not unscale fp16 gradients; the accelerator's does."""
        return False if self._osdp is not None else super()._has_mixed_mesh_grads(model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As stock, which writes no loadable model where checkpoints are sharded; here a user's call always does."""
        if self._osdp is not None:
            self.accelerator._synchronise("A save")
        sharded = self._osdp is not None and self._writes_shards()
        if not sharded or _internal_call:
            super().save_model(output_dir, _internal_call)
        else:
            self._save(output_dir or self.args.output_dir, state_dict=self.accelerator.get_state_dict(self.model))
            if self.args.push_to_hub:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        if self._osdp is not None:
            host_barrier()  # stock goes on to collectives while rank 0 writes

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As stock; then estimate and measurement are printed, and `osdp_report.json` is written.

        A restart by `torchrun --max-restarts` or a SLURM requeue goes on from the last complete checkpoint. After SIGTERM on any rank
        a checkpoint is saved, and the process ends with exit code 143.

        Raises:
            CheckpointError: the checkpoint that was asked for is damaged, or of another model.
            torch.OutOfMemoryError: with the unit, the figures and the next plan; not where `on_oom="replan"` starts all ranks again.
        """
        if self._osdp is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        assert self._run is not None
        take_changes(self.args, *self._given_args)
        refuse_changes(self, self._osdp, self._run.plan)
        if self.accelerator._local_steps is not None:
            self.accelerator._local_steps.end()  # of an earlier training
        try:
            with self.accelerator.out_of_memory_explained(), mixing_explained():
                output = super().train(self._checkpoint_to_resume(resume_from_checkpoint), *args, **kwargs)
        finally:
            self._stop.abandon()  # where an error ended training
        self._finish_checkpoints()
        if self._meter.steps:
            announce_result(self._run, self._meter.summary(), self.args.output_dir)
        self._stop.exit()
        return output


Trainer.__init__ = planning_at_the_end(Trainer.__init__)  # type: ignore[method-assign]


def with_osdp(trainer_class: type[StockTrainer]) -> type[StockTrainer]:
    """Return a Trainer class that shards as a plan says, made from any subclass of `transformers.Trainer`.

    ```python
    trainer = with_osdp(SFTTrainer)(model=model, args=args, train_dataset=dataset, osdp=OSDPConfig(memory_limit="8GiB"))
    ```

    Args:
        trainer_class: such as TRL's `SFTTrainer`; its constructor then takes `osdp=` too.

    Raises:
        ValueError: it is no subclass of `transformers.Trainer`.
    """
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, StockTrainer):
        raise ValueError(f"with_osdp takes a subclass of transformers.Trainer; {trainer_class!r} is none.")
    if issubclass(trainer_class, Trainer):
        return trainer_class
    if issubclass(Trainer, trainer_class):
        return Trainer
    members = {"__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__, "__qualname__": trainer_class.__qualname__}
    return type(trainer_class.__name__, (trainer_class, Trainer), members)


class _StepCallback(TrainerCallback):
    """Measure each optimizer step; evaluation and checkpoints lie between."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter, self._open = meter, False

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._meter.step_begins()
        self._open = True

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if self._open:
            self._meter.step_ends()
            self._open = False
