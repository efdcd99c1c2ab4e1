"""`Trainer`: the one of transformers, under a plan."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import transformers.trainer
from transformers import TrainingArguments

from ..checkpoint.finding import recorded_batch
from ..checkpoint.starts import begin_anew
from ..checkpoint.writer import CheckpointWriter, Staging
from ..distributed.consensus import largest_of_ranks
from ..distributed.process_group import wait_for_ranks
from ..distributed.stop import StopSignal
from ..modeling.batch import Inputs
from ..planner.job import OptimizerSpec, Precision
from ..planner.plan import Plan
from ..planning import out_of_memory as oom
from ..planning.config import OSDPConfig, every_option
from ..planning.plan_run import PlannedRun, RunFacts, plan_run
from ..planning.run_checks import frozen_given, trainer_folder
from ..sharding.environment import hold_master_weights
from ..sharding.state import free_gathered
from ..sharding.weight_reads import mixing_explained
from .accelerator import OSDPAccelerator
from .announce import announce_plan, announce_result, shown_while_planning
from .launch import launched_world_size
from .losses import ignores_item_count
from .measuring import StepCallback
from .optimizers import spec_of_optimizer, spec_of_trainer_name
from .own_loss import held_models, traced_loss
from .plugin import OSDPPlugin, offloads
from .samples import Batches, Looked, find_batches, tokens_of
from .stopping import StopCallback
from .subclasses import batch_coupling, check_order, planning_at_the_end, tokens_to_generate, vars_of_others, with_whole_weights
from .trainer_checkpoints import TrainerCheckpoints
from .trainer_options import asked_config, own_arguments, plugin_options, refuse_unplanned, samples_of_step, set_batch

_log = logging.getLogger(__name__)

_Stock = transformers.Trainer
"""`hf_osdp.run` puts ours under its name."""


class Trainer(TrainerCheckpoints, _Stock):
    """`transformers.Trainer` that shards each unit of the model as a plan says.

    The plan is made when the Trainer is. The samples of one optimizer step stay as the arguments have them
    (`per_device_train_batch_size` × `gradient_accumulation_steps` × processes); how many of them run at once is the
    planner's choice, and goes into a copy of the arguments.

    Args:
        *args: as for `transformers.Trainer`.
        osdp: None is on where the launcher or `TrainingArguments(fsdp_config={"osdp": {...}})` asks for it; True is on;
            False is the stock Trainer; an `OSDPConfig` or a mapping of its fields is on with those options. What it leaves
            open comes from `fsdp_config`, then from the launcher.
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
        cls.__init__ = planning_at_the_end(cls.__init__)
        if "_save" in vars_of_others(cls, Trainer):
            cls._save = with_whole_weights(cls._save)

    def __init__(self, *args: Any, osdp: OSDPConfig | Mapping[str, object] | bool | None = None, **kwargs: Any):
        call = inspect.signature(_Stock.__init__).bind(self, *args, **kwargs)
        given = call.arguments
        self._run: PlannedRun | None = None
        self._steps: StepCallback | None = None
        self._staging: Staging | None = None
        asked = self.__dict__.pop("_asked_osdp", None) if osdp is None else osdp
        self._osdp = asked_config(asked, given.get("args"), unasked=self.plans_unasked)
        if self._osdp is not None:
            refuse_unplanned(given)
            arguments = given.get("args") or TrainingArguments(output_dir="tmp_trainer")
            given["args"] = own_arguments(arguments)
            self._asked_batch = arguments.per_device_train_batch_size
            if given.get("train_dataset") is not None:
                begin_anew(arguments.output_dir)  # before planning, which may be the end of this start
            self._makes_folder = not Path(arguments.output_dir).exists()
        super().__init__(*call.args[1:], **call.kwargs)

    def _plan_now(self) -> None:
        """Plan for this trainer, of which every `__init__` has ended: subclasses change model, data and loss in theirs."""
        if self._osdp is None:
            return
        args = self.args
        try:
            self._run = self._make_plan(self._osdp)
        except Exception:
            if self._makes_folder:
                with suppress(OSError):  # it is gone, or holds something
                    Path(args.output_dir).rmdir()
            raise
        set_batch(args, self._run.plan)
        self._train_batch_size = args.train_batch_size
        self.accelerator.adopt(self._run)
        self.is_fsdp_enabled = self.is_fsdp_enabled or self.accelerator.is_fsdp2  # one process with units on the host
        if self.place_model_on_device and not self.is_fsdp_enabled:
            super()._move_model_to_device(self.model, args.device)
        self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs and not ignores_item_count(self.model)
        self._steps = StepCallback(args.device)
        self.add_callback(self._steps)
        self._writer = CheckpointWriter(in_background=self._osdp.async_save)
        self._stop = StopSignal()
        if self._osdp.save_on_sigterm:
            self.add_callback(StopCallback(self._stop))

    def _validate_args(self) -> None:
        """As stock, which takes no optimizer under FSDP; here it is handed the shards of its parameters."""
        fsdp, self.is_fsdp_enabled = self.is_fsdp_enabled, self.is_fsdp_enabled and self._osdp is None
        super()._validate_args()
        self.is_fsdp_enabled = fsdp

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """As stock; the model that is trained moves when the plan says which units live on the host."""
        if self._osdp is None or self._run is not None:
            super()._move_model_to_device(model, device)

    @property
    def plan(self) -> Plan | None:
        """The plan that runs; None where OSDP is off."""
        return None if self._run is None else self._run.plan

    # ------------------------------------------------------------------------------------------------------- planning

    def create_accelerator_and_postprocess(self) -> None:
        """As stock, with an accelerator that runs plans."""
        if self._osdp is None:
            super().create_accelerator_and_postprocess()
            return
        with _accelerator_class(_TrainersAccelerator):
            super().create_accelerator_and_postprocess()

    def _make_plan(self, config: OSDPConfig) -> PlannedRun:
        """Plan for the training that the arguments describe. Every process calls this together."""
        args = self.args
        if args.world_size == 1 and launched_world_size() > 1:
            raise ValueError(
                f"{launched_world_size()} processes were launched, but TrainingArguments sees one;"
                " pass TrainingArguments(use_cpu=True) to run them on the CPU."
            )
        plugin = self._plugin()
        batches, sequence_length = self._batches(config)
        facts = RunFacts(
            world_size=args.world_size,
            device_type=args.device.type,
            precision=Precision.named(args.mixed_precision, autocast=args.world_size == 1 and not dist.is_initialized()),
            sequence_length=sequence_length,
            inputs=batches,
            loss=None if batches is None or config.inputs or self._model_makes_loss else traced_loss(self),
            other_models=held_models(self),
            global_batch_size=config.global_batch_size or self._global_batch_size(config),
            micro_batch_size=config.micro_batch_size or self._kept_batch_size(),
            reduce_every_micro_step=config.reduce_every_micro_step,
            optimizer=self._optimizer_spec(),
            holds_outputs=False,
            clips_gradients=bool(args.max_grad_norm and args.max_grad_norm > 0),
            activation_checkpointing=bool(args.gradient_checkpointing or plugin.activation_checkpointing),
            checkpoint_wrapper=bool(plugin.activation_checkpointing),
            reads_loss_alone=self._model_makes_loss and not args.use_liger_kernel,
            cpu_offload=offloads(plugin),
            trains=self.train_dataset is not None,
            frozen_in_optimizer=frozen_given(self.optimizer),
            folder=trainer_folder(args, self.model) if self.train_dataset is not None else None,
        )
        hold_master_weights(self.model, facts.precision)
        with shown_while_planning(is_rank_zero=args.process_index == 0):
            run = plan_run(self.model, config, facts)
        announce_plan(run, is_rank_zero=args.process_index == 0)
        return run

    def _global_batch_size(self, config: OSDPConfig) -> int:
        """Samples of a step as the arguments have them; a restart, which may have fewer processes, keeps those it began with."""
        args = self.args
        given = samples_of_step(args)
        trains = self.train_dataset is not None
        begun = recorded_batch(args.output_dir) if trains and config.resume_after_restart else None
        if begun in (None, given) or begun % args.world_size:
            return given
        if args.process_index == 0:
            _log.warning("This restart keeps the global batch of %d samples that training began with; the arguments make %d.", begun, given)
        return begun

    def _plugin(self) -> OSDPPlugin:
        """The plugin as arguments and launcher set it."""
        return OSDPPlugin(osdp=every_option(self._osdp), **plugin_options(self.args))

    @property
    def _model_makes_loss(self) -> bool:
        """Whether the loss is the model's own, of a batch's labels."""
        stock = type(self).compute_loss is _Stock.compute_loss
        return stock and self.compute_loss_func is None and self.label_smoother is None

    def _batches(self, config: OSDPConfig) -> tuple[Inputs | None, int]:
        """Batches as the data gives them, and the tokens of a row; None for batches where the data does not show what will run.

        Raises:
            ValueError: the length is known from nowhere.
        """
        if config.inputs is not None:
            return config.inputs, config.sequence_length or tokens_of(config.inputs(1)) or 1
        found = None
        for dataset in (self.train_dataset, self.eval_dataset):
            dataset = next(iter(dataset.values()), None) if isinstance(dataset, dict) else dataset
            found = found or find_batches(*self._rows_and_collator(dataset))
        if found is not None and isinstance(found[0](1), Mapping):
            return self._of_wanted_length(*found, config.sequence_length)
        generated = None if found is None else tokens_to_generate(self, found[0].sample)
        if config.sequence_length is None and generated is None:
            raise ValueError("The sequence length cannot be read from the dataset; give OSDPConfig(sequence_length=...).")
        if found is not None and self.args.process_index == 0:
            _log.warning(
                "%s makes its batches in the step itself, as by generation: the estimate is that of the model's own loss, without what it"
                " takes to make them; a lower memory_limit leaves room.", type(self).__name__,
            )  # fmt: skip
        return None, config.sequence_length or largest_of_ranks(generated)

    def _of_wanted_length(self, batches: Batches, looked: Looked, sequence_length: int | None) -> tuple[Inputs, int]:
        """The batches with rows as long as they are asked to be, or as the longest that any rank found."""
        tokens = largest_of_ranks(batches.tokens or 1)
        if sequence_length is None and not looked.is_whole and batches.tokens and self.args.process_index == 0:
            _log.warning(
                "Planned for %d tokens, the longest of %d samples that were looked at; where longer ones come, give"
                " OSDPConfig(sequence_length=...).", tokens, looked.seen,
            )  # fmt: skip
        wanted = sequence_length or tokens
        return replace(batches, wanted_tokens=wanted if batches.tokens else None), wanted

    def _rows_and_collator(self, dataset: Any) -> tuple[Any, Any]:
        """A dataset with the columns that the Trainer keeps, and what makes batches of its rows."""
        if type(self).get_train_dataloader is not _Stock.get_train_dataloader:
            return dataset, self.data_collator
        if transformers.trainer.is_datasets_available() and isinstance(dataset, transformers.trainer.datasets.Dataset):
            return self._remove_unused_columns(dataset), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator)

    def _kept_batch_size(self) -> int | None:
        """Samples of a micro-batch where the loss may depend on which samples share one; None leaves them to the planner."""
        reason = batch_coupling(self)
        if reason is None:
            return None
        size = samples_of_step(self.args) // (self.args.gradient_accumulation_steps * self.args.world_size)
        if self.args.process_index == 0:
            _log.warning(
                "%s, so micro-batches stay at %d samples; OSDPConfig(micro_batch_size=...) sets another size.",
                reason, size,
            )  # fmt: skip
        return size

    def _optimizer_spec(self) -> OptimizerSpec:
        """What the optimizer of this training will hold."""
        device_type = self.args.device.type
        if self.optimizer is not None:
            return spec_of_optimizer(self.optimizer, device_type=device_type)
        if self.optimizer_cls_and_kwargs is not None:
            cls, options = self.optimizer_cls_and_kwargs
            return spec_of_optimizer(cls([torch.nn.Parameter(torch.zeros(1))], **options), device_type=device_type)
        return spec_of_trainer_name(self.args.optim.value, device_type=device_type)

    # ---------------------------------------------------------------------------------- where the stock Trainer falls short

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """The arguments of the accelerator, with the plan's plugin."""
        options = super()._build_accelerator_args(**kwargs)
        if self._osdp is not None:
            options["fsdp_plugin"] = self._plugin()
            options["cpu"] = self.args.device.type == "cpu"
        return options

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As stock, from shards: after an evaluation the model still shows gathered parameters of the units that are kept."""
        if self._osdp is not None:
            free_gathered(self.model if model is None else model)
        return super().create_optimizer(model)

    def _has_mixed_mesh_grads(self, model: torch.nn.Module) -> bool:
        """The Trainer's own path for several meshes does not unscale fp16 gradients; the accelerator's does."""
        return False if self._osdp is not None else super()._has_mixed_mesh_grads(model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As stock, which writes no loadable model where checkpoints are sharded; here a call by the user always does."""
        sharded = self._osdp is not None and self._writes_shards()
        if not sharded or _internal_call:
            super().save_model(output_dir, _internal_call)
        else:
            self._save(output_dir or self.args.output_dir, state_dict=self.accelerator.get_state_dict(self.model))
            if self.args.push_to_hub:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        if self._osdp is not None:
            wait_for_ranks()  # stock goes on to collectives while rank 0 writes

    # ------------------------------------------------------------------------------------------------------- measuring

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As stock; then the estimate is printed beside what was measured, and `osdp_report.json` is written.

        A restart by `torchrun --max-restarts` or a SLURM requeue goes on from the last complete checkpoint. After SIGTERM on any rank
        a checkpoint is saved, and the process ends with exit code 143.

        Raises:
            CheckpointError: the checkpoint that was asked for is damaged, or of another model.
            torch.OutOfMemoryError: with the unit, the figures and the next plan; not where `on_oom="replan"` starts all ranks again.
        """
        if self._osdp is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        try:
            with oom.training(), mixing_explained():
                output = super().train(self._checkpoint_to_resume(resume_from_checkpoint), *args, **kwargs)
        finally:
            self._stop.abandon()  # where an error ended training
        self._writer.wait()
        self._keep_limit(Path(self.args.output_dir))
        if self._steps.measured:
            measured = self._steps.summary()
            announce_result(self._run, measured, output_dir=self.args.output_dir, is_rank_zero=self.is_world_process_zero())
        self._stop.exit()
        return output


Trainer.__init__ = planning_at_the_end(Trainer.__init__)


def with_osdp(trainer_class: type[transformers.Trainer]) -> type[transformers.Trainer]:
    """Return a Trainer class that shards as a plan says, made from any subclass of `transformers.Trainer`.

    ```python
    trainer = with_osdp(SFTTrainer)(model=model, args=args, train_dataset=dataset, osdp=OSDPConfig(memory_limit="8GiB"))
    ```

    Args:
        trainer_class: such as TRL's `SFTTrainer`; its constructor then takes `osdp=` too.

    Raises:
        ValueError: it is no subclass of `transformers.Trainer`.
    """
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, _Stock):
        raise ValueError(f"with_osdp takes a subclass of transformers.Trainer; {trainer_class!r} is none.")
    if issubclass(trainer_class, Trainer):
        return trainer_class
    if issubclass(Trainer, trainer_class):
        return Trainer
    members = {"__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__, "__qualname__": trainer_class.__qualname__}
    return type(trainer_class.__name__, (trainer_class, Trainer), members)


class _TrainersAccelerator(OSDPAccelerator):
    """The Trainer knows where its steps begin and end, and reports them itself."""

    reports_steps = False


@contextmanager
def _accelerator_class(cls: type) -> Iterator[None]:
    """Let the Trainer create this class: it has no argument for it."""
    stock = transformers.trainer.Accelerator
    transformers.trainer.Accelerator = cls
    try:
        yield
    finally:
        transformers.trainer.Accelerator = stock
