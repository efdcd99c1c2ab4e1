"""`Job`: the options and the known facts of one run, made once by its caller and passed down whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import refuse_first
from ..modeling.batch import Inputs, Loss
from ..planner.affine import Affine
from ..planner.cost.evaluation import EvaluationLoop, Generation
from ..planner.description import GatherSpan, ModelDescription, Segment
from ..planner.lengths import Lengths
from ..planner.optimizers import impossible_places
from ..planner.placement import ACTIVATION_OPTION
from ..planner.training_job import Decisions, OptimizerSpec, Precision, TrainingJob
from .config import OSDPConfig

_IGNORED_WITH_CHECKPOINTING = (("recompute", False), ("split_vocabulary", True), (ACTIVATION_OPTION, True))
"""Options that have no effect if all blocks are recomputed."""

_MOST_DEALT_TOKENS = 2**22
"""Most tokens of a step, padded to the longest, that each rank gathers to deal them: some 100 MB of ids and masks."""


OTHER_TENSORS = "tensors of the program"
"""Among the other models: all else that this process has on the device when planning starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The output folder of a run, and what the run writes to it."""

    path: str | Path
    saves: bool = True
    """Whether checkpoints are written during training."""
    states: bool = True
    """Whether checkpoints hold optimizer states."""
    adapters: bool = False
    """Whether checkpoints hold only trained parameters, as those of peft do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A run's evaluation as its arguments have it."""

    loop: EvaluationLoop
    inputs: Inputs
    """Returns a batch of the longest samples."""
    sequence_length: int
    outputs: Loss
    """Computes the loss of a batch, and the outputs that the loop keeps."""
    against_cuts: str | None = None
    """Why a batch cannot be cut into parts with equal results; None if it can."""
    averages: bool = False
    """Losses are means over samples; else they add up."""
    moves: bool = False
    """It is not the user who says when outputs go to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Models beside the trained one that only run forward, and can be sharded over all ranks."""

    whole_bytes: int
    sharded_bytes: int
    """Of one rank."""
    gathers_bytes: int
    """Most that a forward gathers."""
    gathered_bytes: tuple[int, ...]
    """Of each unit that a forward gathers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run to plan: the user's options with the run's sizes filled in, and the facts that its caller knows."""

    config: OSDPConfig
    world_size: int
    device_type: str
    """`cpu` or `cuda`."""
    precision: Precision
    """With `autocast` if the run is one process, which can train without FSDP2."""
    optimizer: OptimizerSpec
    inputs: Inputs | None = None
    """Returns a batch of the data for a number of samples; None makes a batch for a transformers model."""
    cuts_by_length: bool = False
    """The loop can cut a step's samples by length, under a budget of tokens."""
    deals_samples: bool = False
    """If the loop cuts by length, it may deal the samples of all ranks among them: its loss is a mean over all."""
    lengths: Lengths | None = None
    """Lengths of the data's samples, if they are known and differ."""
    loss: Loss | None = None
    """Computes the loop's loss of a batch; None is the model's own loss."""
    other_models: Mapping[str, int] = field(default_factory=dict)
    """Bytes that other models occupy on the device throughout, by name."""
    models_beside: Beside | None = None
    """Those of the other models that can be sharded."""
    shards_beside: bool = False
    """They are."""
    holds_outputs: bool = False
    """The training loop may keep the model's outputs through backward."""
    clips_gradients: bool = False
    """Each step clips the norm of all gradients."""
    against_unit_steps: str | None = None
    """Why the optimizer cannot step unit by unit; None if it can."""
    activation_checkpointing: bool = False
    """Blocks will be recomputed in backward; not needed for a model that already has checkpointing switched on."""
    reads_loss_alone: bool = False
    """In training, the loop gives labels to forward and reads only the loss from its outputs."""
    trains: bool = True
    """The model is trained, not only evaluated."""
    evaluation: Evaluation | None = None
    """The run's evaluation; None if there is none, or what it runs is not known."""
    rollouts: tuple[Generation, int] | None = None
    """What a step generates to train on, and for how many samples of a process at once."""
    folder: RunFolder | None = None
    """The run's output folder; None if unknown."""
    capability: tuple[int, int] | None = None
    """Compute capability of the device; None is that of this machine's GPU."""

    @property
    def deals(self) -> bool:
        """Whether samples are dealt: not if each rank would gather too many."""
        tokens = (self.config.global_batch_size or 0) * (self.config.sequence_length or 0)
        return self.deals_samples and self.world_size > 1 and tokens <= _MOST_DEALT_TOKENS

    def with_others(self, description: ModelDescription) -> ModelDescription:
        """Return the model with the other models on the device. Gathers of those in shards come while it computes its
        loss, at the latest when all is there that backward needs.
        """
        every, beside = sum(self.other_models.values()), self.models_beside
        if beside is None or not self.shards_beside:
            return replace(description, other_bytes=every)
        gathers, units = Affine(constant=beside.gathers_bytes), description.units
        last = len(description.segments) - 1

        def gathering(costs: Segment) -> Segment:
            return replace(costs, forward=replace(costs.forward, peak_bytes=costs.forward.peak_bytes.plus(gathers)))

        segments = tuple(
            segment.each(gathering) if index == last or units[segment.unit].span is GatherSpan.STEP else segment
            for index, segment in enumerate(description.segments)
        )
        others = max(0, every - beside.whole_bytes)  # which may share tensors with the trained model
        return replace(description, other_bytes=others + beside.sharded_bytes, segments=segments)

    @property
    def under_fsdp(self) -> Job:
        """The same with FSDP2's mixed precision instead of autocast; only FSDP2 can keep units on the host."""
        return replace(self, precision=replace(self.precision, autocast=False))

    def asking(self, **options: Any) -> Job:
        """Return the same run with other options of the user."""
        return replace(self, config=replace(self.config, **options))

    def training(self) -> TrainingJob:
        """Return what the planner searches for, with the decisions that the user made; raise ValueError if options and
        facts contradict each other, an option has no effect, or the batch does not divide.
        """
        config, impossible = self.config, impossible_places(self.optimizer, self.against_unit_steps)
        refuse_first({reason: True for option, reason in impossible.items() if option in config.asked} | {
            f"{option}={value} has no effect with activation checkpointing of all blocks; leave one of the two out.":
                self.activation_checkpointing and getattr(config, option) is value
            for option, value in _IGNORED_WITH_CHECKPOINTING
        })  # fmt: skip
        assert config.global_batch_size is not None
        decided = {field.name: getattr(config, field.name) for field in fields(Decisions)}
        decided |= dict.fromkeys(impossible, False)
        training = TrainingJob(
            global_batch_size=config.global_batch_size, precision=self.precision, optimizer=self.optimizer,
            holds_outputs=self.holds_outputs, clips_gradients=self.clips_gradients,
            communication=config.communication, lengths=self.lengths,
            **decided,
        )  # fmt: skip
        training.micro_batch_sizes(self.world_size)
        return training
