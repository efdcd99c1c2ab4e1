"""`Trainer`: `transformers.Trainer` that shards each unit of the model by a plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import transformers.trainer
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from transformers import Trainer as StockTrainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from ..checkpoint.writer import on_every_rank
from ..distributed.process_group import require_all
from ..distributed.said_once import say_uncaught_once
from ..distributed.stop import StopSignal
from ..errors import InfeasibleError
from ..modeling.build import disable_cache
from ..modeling.replaced import replaced
from ..modeling.split.apply import only_loss_read
from ..modeling.units import canonical_name
from ..planner.plan import Plan
from ..preparation.announce import plan_and_announce
from ..preparation.config import OSDPConfig
from ..preparation.evaluation import FittedEvaluation
from ..preparation.plan_run import PlannedRun
from ..sharding.between_steps import mixing_explained
from ..sharding.environment import prepare_precision, prepare_to_plan
from ..sharding.micro_batches import micro_batches, pad_token_of
from ..sharding.state import free_gathered
from ..sharding.unit_order import called_alone
from .accelerator import OSDPAccelerator
from .plugin import requested_plugin
from .trainer_checkpoints import Events, TrainerCheckpoints, under_plan
from .trainer_facts import job_of_trainer, refuse_changes
from .trainer_loss import MicroBatchRule, adds_up, planned_arguments, warn
from .trainer_predictions import Predicted, evaluating, predict_in_parts


class Trainer(TrainerCheckpoints):
    """`transformers.Trainer` that shards each unit of the model by a plan.

    The first call of `train`, `evaluate` or `predict` makes the plan, or `plan` before that. The samples of one
    optimizer step stay as the arguments set them (`per_device_train_batch_size` × `gradient_accumulation_steps` ×
    processes), and so do the batches that are loaded; the planner chooses how many samples run at once.

    Args:
        *args: as for `transformers.Trainer`.
        osdp: True turns OSDP on; an `OSDPConfig` or a mapping of its fields turns it on with these options; False is
            the stock Trainer; None turns it on if the launcher or `TrainingArguments(fsdp_config={"osdp": {...}})`
            asks for it. Options not set here come from `fsdp_config`, then from the launcher.
        **kwargs: as for `transformers.Trainer`.

    Raises:
        ValueError: an option cannot be used, or an argument is not supported under a plan.
        InfeasibleError: no plan meets the memory limit.
    """

    on_by_default = False
    """Whether OSDP is on if no configuration says so, as under `hf_osdp.run`."""

    _asked: OSDPConfig | Mapping[str, object] | bool | None = None
    """The argument `osdp`."""
    _rule: MicroBatchRule
    """What the plan's micro-batches may be; known with the plan."""
    _evaluation: FittedEvaluation | None = None
    """How the evaluation in progress runs; None outside of one."""
    _waiting: list[dict[str, Any]]
    """The batches of the step that have been loaded."""
    _without_cache: Sequence[Any] = ()
    """Configurations of the model's parts whose cache is off while it runs under the plan."""
    _moves: RemovableHandle | None = None
    """Moves the model to the device if it runs before the plan."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        for other in order[order.index(Trainer) + 1 : order.index(StockTrainer)]:
            if issubclass(other, StockTrainer) and other not in Trainer.__mro__:
                raise TypeError(
                    f"{cls.__name__} lists hf_osdp's Trainer before {other.__name__}, whose methods it would hide;"
                    f" write class {cls.__name__}({other.__name__}, Trainer), or use with_osdp({other.__name__})."
                )
        if "osdp" not in inspect.signature(cls.__init__).parameters:
            cls.__init__ = _with_osdp_argument(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self, *args: Any, osdp: OSDPConfig | Mapping[str, object] | bool | None = None, **kwargs: Any
    ) -> None:
        say_uncaught_once()
        if osdp is not None:
            self._asked = osdp
        self._stop = StopSignal()
        super().__init__(*args, **kwargs)

    @property
    def plan(self) -> Plan | None:
        """The plan that runs. If there is none yet, it is made for `train_dataset`: read this on all ranks. None if
        OSDP is off, or before an evaluation without `train_dataset`.
        """
        if self._osdp is not None and self._run is None and self.train_dataset is not None:
            require_all("trainer.plan")
            self._planned_run()
        return None if self._run is None else self._run.plan

    def _planned_run(self, evaluated: DataLoader[Any] | None = None) -> PlannedRun:
        """Return the plan with its values, made now if there is none: for training, or for a loader that is evaluated
        if there is no `train_dataset`.
        """
        if self._run is not None:
            return self._run
        if self._moves is not None:
            self._moves.remove()
        prepare_to_plan(self.model)
        job, rule = job_of_trainer(self, None if self.train_dataset is not None else evaluated)
        prepare_precision(self.model, job.precision)
        try:
            run = self._run = plan_and_announce(self.model, job)
        except InfeasibleError as error:
            if rule.kept is not None:  # why the planner could not choose smaller micro-batches
                error.args = (f"{error} {rule.kept}",)
            raise
        if self.args.auto_find_batch_size:
            warn(
                self.args, "auto_find_batch_size=True was switched off: the plan sets %d samples at once on each"
                " process, which fit by its estimate.", run.plan.micro_batch_size,
            )  # fmt: skip
        self.accelerator.use_plan(run)
        self.is_fsdp_enabled |= self.accelerator.is_fsdp2  # also a single process with host offload
        if self.place_model_on_device and not self.is_fsdp_enabled:
            super()._move_model_to_device(self.model, self.args.device)
        self._rule = rule
        stop = self._stop if job.config.save_on_sigterm else None
        self.callback_handler.call_event = Events(self.callback_handler.call_event, stop)  # type: ignore[method-assign]
        return run

    @contextmanager
    def _as_planned(self, run: PlannedRun) -> Iterator[None]:
        """Let the stock Trainer see the plan's arguments."""
        # transformers has switched off the model's own cache, not those of its parts
        switched = [] if self.args.use_cache else disable_cache(self.model)
        configs = [*self._without_cache, *switched]
        try:
            with (
                replaced(self.args, **planned_arguments(self.args, *self._rule.loaded(run.plan))),
                replaced(self, _train_batch_size=self.args.train_batch_size, _without_cache=configs),
            ):
                yield
        finally:
            for config in switched:
                config.use_cache = True

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as the stock Trainer, with the configuration of a model that may cache."""
        with ExitStack() as stack:
            for config in self._without_cache:
                stack.enter_context(replaced(config, use_cache=True))
            super()._save(output_dir, state_dict)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move as the stock Trainer, but only after planning, which decides which units are kept on the host."""
        if self._osdp is None or self._run is not None:
            super()._move_model_to_device(model, device)
            return

        def move(module: nn.Module, args: object) -> None:  # TRL may compute with it in `__init__`
            if module is model:  # and not its copy
                super(Trainer, self)._move_model_to_device(model, device)

        self._moves = model.register_forward_pre_hook(move)

    def create_accelerator_and_postprocess(self) -> None:
        """Create as the stock Trainer, with an `OSDPAccelerator` for the merged options if OSDP is on."""
        plugin = requested_plugin(self._asked, self.args, self.model, on_by_default=self.on_by_default)
        if plugin is None:
            super().create_accelerator_and_postprocess()
            return
        own = {"fsdp_plugin": plugin, "cpu": self.args.device.type == "cpu"}
        # the stock Trainer has no argument for the class
        with replaced(transformers.trainer, Accelerator=lambda **given: OSDPAccelerator(**{**given, **own})):
            super().create_accelerator_and_postprocess()
        self._osdp = self.accelerator.config
        self.is_fsdp_enabled = False  # until the plan is made: others let the accelerator prepare their models

    @under_plan
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create as the stock Trainer, after freeing parameters that an evaluation left gathered, so that it holds
        shards.
        """
        free_gathered(self.model if model is None else model)
        return super().create_optimizer(model)

    @under_plan
    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Return False: the stock code for several meshes does not unscale fp16 gradients, the accelerator does."""
        return False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as the stock Trainer; a user's call writes a loadable model even if checkpoints are sharded, unlike
        stock.
        """
        if self._osdp is None or not self.is_fsdp_enabled or (_internal_call and self._writes_shards()):
            super().save_model(output_dir, _internal_call)
            return
        state = self.accelerator.get_state_dict(self.model)

        def save() -> None:
            if self.args.should_save:
                with _full_weights(self.model, state):  # a subclass may write these instead of the state dict
                    self._save(output_dir or self.args.output_dir, state_dict=state)

        on_every_rank(save)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], torch.Tensor | int | None]:
        """Load a step's batches as the stock Trainer; those of a step that a callback has ended are left out."""
        self._waiting = []
        return super().get_batch_samples(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Train as the stock Trainer, but run the plan's micro-batches, all with the step's last batch.

        Until then batches wait, and their loss is 0.
        """
        run = self._run
        if run is None or not self._rule.cuts_steps_of(run):
            return super().training_step(model, inputs, num_items_in_batch)
        self._waiting.append(inputs)
        if len(self._waiting) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        plan, means, pad_token = run.plan, self._rule.averages or num_items_in_batch is None, pad_token_of(model)
        parts = micro_batches(batches, plan.micro_batch_size, run.budget, averages=means, pad_token=pad_token)
        # losses of batches that the stock Trainer adds up weigh as those of the arguments' size
        scale = self._rule.loaded(plan)[0] / self._rule.size if adds_up(self, num_items_in_batch) else 1.0
        losses, backward = [], self.accelerator.backward
        for number, (part, share) in enumerate(parts, 1):
            weight = share * scale if means else 1.0
            if not weight:  # no sample has a label, of which the mean is not a number
                part = {**part, "labels": torch.zeros_like(part["labels"])}
            weighted = replaced(self.accelerator, backward=lambda loss, w=weight, **rest: backward(loss * w, **rest))
            with weighted, nullcontext() if number == len(parts) else self.accelerator.no_sync(model=model):
                losses.append(super().training_step(model, part, num_items_in_batch) * weight)
        return torch.stack(losses).sum()

    @under_plan
    def compute_loss_context_manager(self) -> ExitStack:
        """Return the stock Trainer's context, which also explains an error of a loss that mixes shards with whole
        tensors.
        """
        context = super().compute_loss_context_manager()
        context.enter_context(mixing_explained(in_loss=True))
        return context

    @under_plan
    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate as the stock Trainer, under a plan: for training, or without data for that, for this loader."""
        require_all("Evaluating")
        run, alone = self._planned_run(dataloader), kwargs.get("prediction_loss_only", (*args, None, None)[1])
        keeps = not (self.args.prediction_loss_only if alone is None else alone)
        with self._as_planned(run), evaluating(self, run.evaluation, dataloader, keeps=keeps):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Predicted:
        """Predict as the stock Trainer, in parts where a whole batch does not fit."""
        step = functools.partial(
            super().prediction_step, model, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys
        )
        if self._evaluation is None:
            return step(inputs=inputs)
        with only_loss_read(model) if prediction_loss_only else nullcontext():
            return predict_in_parts(self, step, inputs, self._evaluation)

    @under_plan
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as the stock Trainer; print estimate and measurement of the first steps, and write `osdp_report.json`.

        A restart by `torchrun --max-restarts` or a SLURM requeue continues from the last complete checkpoint. SIGTERM
        on any rank saves a checkpoint and exits with code 143.

        Raises:
            CheckpointError: the requested checkpoint is damaged, or of another model.
            torch.OutOfMemoryError: names the unit, the sizes and a lower limit; not raised if `on_oom="replan"`
            restarts all ranks.
        """
        if self._run is None and self.train_dataset is None:
            self.get_train_dataloader()  # raises as stock, unless a subclass makes its own
        run = self._planned_run()
        self.accelerator.project_configuration.project_dir = self.args.output_dir  # for the report
        refuse_changes(self.args, run, self._rule.samples)
        self._requested_batch_size = self.args.per_device_train_batch_size
        try:
            with self._as_planned(run), self.accelerator.out_of_memory_explained(), mixing_explained(in_loss=False):
                output = super().train(self._checkpoint_to_resume(resume_from_checkpoint), *args, **kwargs)
        finally:
            self._stop.abandon()  # in case an error ended training
            if (meter := self.accelerator.meter) is not None:
                meter.discard()
        self._finish_checkpoints()
        if meter is not None:
            meter.finish()  # reports a short training
        self._stop.exit()
        return output


def with_osdp(trainer_class: type[StockTrainer]) -> type[StockTrainer]:
    """Return a Trainer class that shards by a plan, made from any subclass of `transformers.Trainer`.

    ```python
    trainer = with_osdp(SFTTrainer)(model=model, args=args, train_dataset=dataset,
                                    osdp=OSDPConfig(memory_limit="8GiB"))
    ```

    Args:
        trainer_class: for example TRL's `SFTTrainer`; the constructor of the result also takes `osdp=`.

    Raises:
        ValueError: `trainer_class` is not a subclass of `transformers.Trainer`.
    """
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, StockTrainer):
        raise ValueError(f"with_osdp needs a subclass of transformers.Trainer; {trainer_class!r} is not one.")
    if issubclass(trainer_class, Trainer):
        return trainer_class
    if issubclass(Trainer, trainer_class):
        return Trainer
    return type(
        trainer_class.__name__, (trainer_class, Trainer),
        {name: getattr(trainer_class, name) for name in ("__module__", "__doc__", "__qualname__")},
    )  # fmt: skip


def _with_osdp_argument(init: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` that also takes `osdp=`, for our Trainer's below."""

    @functools.wraps(init)
    def taking(self: Any, *args: Any, osdp: object = None, **kwargs: Any) -> None:  # noqa: ANN401
        if osdp is not None:
            self._asked = osdp
        init(self, *args, **kwargs)

    return taking


@contextmanager
def _full_weights(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace a sharded model's parameters in this context by the full tensors of `state`, on this process only and
    between steps.
    """
    hidden: list[tuple[nn.Module, str, nn.Parameter]] = []
    for name, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            whole = state.get(canonical_name(f"{name}.{leaf}".lstrip(".")))
            if parameter is not None and whole is not None:
                hidden.append((module, leaf, parameter))
                module._parameters[leaf] = nn.Parameter(whole, requires_grad=False)
    try:
        with called_alone(model):  # a model card of sentence-transformers has an example's output
            yield
    finally:
        for module, leaf, parameter in hidden:
            module._parameters[leaf] = parameter
