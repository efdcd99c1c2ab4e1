"""Evaluations of a model made by hand."""

from __future__ import annotations

from dataclasses import replace

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.evaluation import EvaluatedModel, EvaluationLoop
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.preparation.evaluation import FittedEvaluation
from hf_osdp.preparation.job import Evaluation
from tests.helpers.descriptions import transformer
from tests.helpers.layouts import plan_of


def evaluation_of(*, world: int, outputs: int, layout: str = "zero3", moves: bool = False) -> FittedEvaluation:
    """An evaluation without a limit, which keeps so many bytes of a sample; `moves`: it may be changed."""
    description = replace(transformer(), output_bytes=Affine(per_sample=outputs))
    layouts = plan_of(description.units, world, layout).layouts(description)
    model = EvaluatedModel(
        description=description, layouts=layouts, world_size=world, job=TrainingJob(global_batch_size=8 * world)
    )
    loop = EvaluationLoop(batch_size=8, micro_batch_size=8, keeps_outputs=True, moved_after=None, samples=64 * world)
    asked = Evaluation(
        loop=loop, inputs=lambda samples: {}, sequence_length=1, outputs=lambda model, batch: None, moves=moves,
        against_cuts=None if moves else "its loss may depend on which samples are in a batch",
    )  # fmt: skip
    return FittedEvaluation(asked=asked, model=model, loop=loop, room_bytes=None, outside_bytes=0)
