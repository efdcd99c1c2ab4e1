"""Cheap bounds on the peak, so that most questions are answered without solving an integer program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ..cost.memory import SegmentBytes, peak_of_terms
from ..cost.units import UnitBytes
from ..decision import Batch, UnitLayout
from ..description import Activations, ModelDescription
from ..job import TrainingJob
from .stages import Line, Option


def peak_floor(description: ModelDescription, line: Line, job: TrainingJob, batch: Batch) -> int:
    """Bytes below which no plan's peak lies: every unit takes the least of each term, whichever choice it is from.

    Every moment is a sum of terms with positive sign, so that the floor holds for each of them.
    """
    terms: dict[int, UnitBytes] = {}
    kept: dict[int, set[Activations]] = {}
    for group in line.groups:
        least = {f.name: min(getattr(o.bytes, f.name) for o in group.options) for f in fields(UnitBytes)}
        least["cast_buffer"] = min(0 if o.bytes.kept else o.bytes.cast_buffer for o in group.options)  # what is kept is not cast again
        terms |= dict.fromkeys(group.units, UnitBytes(**least))
        kept |= {unit: {o.choice.activations for o in group.options} for unit in group.units}
    segments = [SegmentBytes.least(s, description.units[s.unit].span, batch.micro_batch_size, kept[s.unit]) for s in description.segments]
    return peak_of_terms(description, [terms[i] for i in range(len(terms))], segments, job, batch)


def frugal_choices(line: Line) -> dict[int, UnitLayout]:
    """For each unit the option that needs least memory; most often no plan needs less."""
    units = sum(len(group.units) for group in line.groups)
    return {unit: min(group.options, key=lambda o: _need(o, units)).choice for group in line.groups for unit in group.units}


def in_order(choices: dict[int, UnitLayout]) -> Sequence[UnitLayout]:
    """Choices by unit index as a list."""
    return [choices[index] for index in range(len(choices))]


def _need(option: Option, units: int) -> tuple[int, float]:
    """Bytes where so many units take the option: what stays is there for all of them, what passes for one."""
    transient = max(option.gather_peak + option.bytes.reduce_tail, option.backward_peak + option.bytes.prefetched)
    stays = option.bytes.held + option.left_by_forward + option.left_by_backward
    return units * stays + max(transient, option.forward_peak, option.copy_out_peak), option.seconds
