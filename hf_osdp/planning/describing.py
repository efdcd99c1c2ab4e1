"""The model of a run → its description, in the way that is nearest to what will run."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ..errors import CheckpointingError, DescriptionError
from ..modeling.batch import Inputs, Loss, training_batch
from ..planner.description import ModelDescription
from ..planner.split import ModelSplit
from ..tracing.describe import describe, is_by_formula
from .config import OSDPConfig

if TYPE_CHECKING:
    from .plan_run import RunFacts

_log = logging.getLogger(__name__)


class Describer:
    """Describes the model with the loop's own batches and loss where these can be traced, else with the model's usual batch."""

    def __init__(self, model: nn.Module, config: OSDPConfig, facts: RunFacts) -> None:
        """
        Args:
            model: not yet sharded.
            config: what the user asked for.
            facts: what the caller knows about the run.
        """
        self._model, self._config, self._facts = model, config, facts
        self._ways: list[tuple[Inputs | None, Loss | None]] = [(config.inputs, None) if config.inputs else (facts.inputs, facts.loss)]
        if config.inputs is None and facts.inputs is not None and _has_usual_batch(model):
            self._ways.append((None, None))

    def describe(self, split: ModelSplit) -> ModelDescription:
        """Describe the model as it is when split so.

        Raises:
            DescriptionError: it cannot be described in any way.
        """
        while len(self._ways) > 1:
            try:
                description = self._described(split, *self._ways[0])
            except CheckpointingError:
                raise
            except DescriptionError as error:
                if not split.is_none:
                    raise
                reason = str(error)
            else:
                if not is_by_formula(description):
                    return description
                reason = description.trace
            _log.warning(
                "What %s computes from its batches cannot be traced (%s): the estimate is that of the model's own loss on %d tokens;"
                " a lower memory_limit leaves room for what is missing.",
                "the loop's own loss" if self._facts.loss else "the model",
                reason,
                self._facts.sequence_length,
            )
            del self._ways[0]
        return self._described(split, *self._ways[0])

    def _described(self, split: ModelSplit, inputs: Inputs | None, loss: Loss | None) -> ModelDescription:
        facts = self._facts
        description = describe(
            self._model,
            sequence_length=facts.sequence_length,
            block_classes=self._config.block_classes,
            compute_dtype=facts.precision.compute,
            autocast=facts.precision.autocast,
            device_type=facts.device_type,
            activation_checkpointing=facts.activation_checkpointing,
            inputs=inputs,
            loss=loss,
            split=split,
        )
        return replace(description, other_bytes=sum(facts.other_models.values()))


def _has_usual_batch(model: nn.Module) -> bool:
    """Whether a batch can be made for the model without data."""
    try:
        training_batch(model, 1)
    except (DescriptionError, AttributeError):
        return False
    return True
