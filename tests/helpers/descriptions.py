"""Model descriptions made by hand or at random, for tests that need no torch."""

from __future__ import annotations

import random
from dataclasses import replace

from hf_osdp.planner.affine import Affine, Envelope
from hf_osdp.planner.description import (
    DType,
    GatherSpan,
    ModelDescription,
    ParameterSpec,
    PhaseCost,
    Recomputation,
    RecomputedSegment,
    Segment,
    UnitDescription,
)


def linear_envelope(*, constant: float = 0.0, per_sample: float = 0.0) -> Envelope:
    """The peak of a single moment."""
    return Envelope(pieces=(Affine(constant=constant, per_sample=per_sample),))


def transformer(
    *, layers: int = 4, hidden: int = 64, vocabulary: int = 512, sequence_length: int = 32,
    dtype: DType = DType.FLOAT32,
) -> ModelDescription:  # fmt: skip
    """A decoder with tied embeddings, its costs from the usual formulas."""
    token = sequence_length * hidden * dtype.itemsize
    logits = sequence_length * vocabulary * 4
    root = _unit("", GatherSpan.STEP, {"positions": (sequence_length, hidden), "norm": (hidden,)}, dtype)
    tied = _unit("embedding+head", GatherSpan.STEP, {"embedding.weight": (vocabulary, hidden)}, dtype)
    rows = {"qkv": 3 * hidden, "out": hidden, "up": 4 * hidden}
    block = {**{name: (number, hidden) for name, number in rows.items()}, "down": (hidden, 4 * hidden)}
    shapes = [{f"layers.{i}.{name}": shape for name, shape in block.items()} for i in range(layers)]
    blocks = [_unit(f"layers.{i}", GatherSpan.USE, of, dtype) for i, of in enumerate(shapes)]
    weights = 12 * hidden * hidden
    middle = Segment(
        unit=0,
        saved_bytes=Affine(per_sample=17 * token),
        gradient_bytes=Affine(per_sample=token),
        forward=_phase(0, 20 * token, 2 * weights * sequence_length, 60 * token),
        backward=_phase(weights * dtype.itemsize, 8 * token, 4 * weights * sequence_length, 90 * token),
    )
    matmul = 2 * vocabulary * hidden * sequence_length
    head = Segment(
        unit=0,
        saved_bytes=Affine(per_sample=logits),
        forward=_phase(0, 2 * logits, matmul, 6 * logits),
        backward=_phase(vocabulary * hidden * dtype.itemsize, 2 * logits, 2 * matmul, 6 * logits),
    )
    embedding = Segment(
        unit=0, saved_bytes=Affine(per_sample=token), forward=_phase(0, 2 * token), backward=_phase(0, 2 * token)
    )
    middles = (replace(middle, unit=2 + i) for i in range(layers))
    return ModelDescription(
        model_name="transformer", model_class="Transformer", block_classes=("Block",), compute_dtype=dtype,
        sequence_length=sequence_length, input_bytes=Affine(per_sample=16 * sequence_length),
        units=(root, tied, *blocks), segments=(replace(embedding, unit=1), *middles, replace(head, unit=1)),
    )  # fmt: skip


def with_frozen(unit: UnitDescription) -> UnitDescription:
    """The unit with all parameters frozen."""
    return replace(unit, parameters=tuple(replace(parameter, requires_grad=False) for parameter in unit.parameters))


def at_random(
    seed: int, *, kinds: int, blocks: int, tied: bool = False, recomputable: bool = False,
    stacks: bool = False, late: bool = False,
) -> ModelDescription:  # fmt: skip
    """A few blocks of `kinds` kinds in runs, with arbitrary bytes and times; the root may or may not come between.

    `tied` adds weights that are shared by an embedding, a head, and sometimes something between. `recomputable` blocks
    have costs for recomputation that have nothing to do with their others, and can offload some of what they save, or
    more. `stacks` makes each parameter two matrices, which more than two ranks shard along another dimension than 0.
    `late` lets some units end with the root.
    """
    dice = random.Random(seed)
    units = [_unit("", GatherSpan.STEP, {"root": (dice.randint(1, 40), dice.randint(1, 20))}, DType.FLOAT32)]
    segments = [_random_segment(dice, 0)] if dice.random() < 0.8 else []
    made = [
        ({f"w{j}": _random_shape(dice) for j in range(dice.randint(1, 2))}, _random_segment(dice, 0))
        for _ in range(kinds)
    ]
    again = [_random_ways(random.Random(seed + 1 + kind)) for kind in range(kinds)]
    own = [Affine(per_sample=random.Random(seed - 1 - kind).choice([500, 1000, 5000])) for kind in range(kinds)]
    for index in range(blocks):
        shapes, segment = made[index * kinds // blocks]
        shapes = {f"b{index}.{name}": shape for name, shape in shapes.items()}
        units.append(_unit(f"b{index}", GatherSpan.USE, shapes, DType.FLOAT32))
        segments.append(replace(segment, unit=len(units) - 1))
        if recomputable:
            kind = index * kinds // blocks
            sent, last = ({"own_saved_bytes": size, "sent_bytes": size} for size in (own[kind], own[kind - 1]))
            others = (replace(way, unit=len(units) - 1, **sent) for way in again[kind])
            segments[-1] = replace(segments[-1], recomputed=ways(*others), **last)
        if dice.random() < 0.1:
            segments.append(_random_segment(dice, 0))
    if tied:
        shared = _unit("tied", GatherSpan.STEP, {"tied.w": _random_shape(dice)}, DType.FLOAT32)
        units.append(replace(shared, shared=(("tied.w", "head.w"),)))
        between = [dice.randint(1, len(segments) - 1)] if dice.random() < 0.3 and len(segments) > 1 else []
        for place in (len(segments), *between, dice.choice([0, 1])):
            segments.insert(place, _random_segment(dice, len(units) - 1))
    if dice.random() < 0.8:
        segments.append(_random_segment(dice, 0))
    segments = _with_gradients(random.Random(seed), units, segments)
    dice_of_late = random.Random(seed)
    for index, unit in enumerate(units) if late else ():
        ends_late = unit.span is not GatherSpan.STEP and dice_of_late.random() < 0.3
        units[index] = replace(unit, ends_late=ends_late)
    for index, unit in enumerate(units) if stacks else ():
        two = tuple(replace(p, shape=(2, 12, -(-p.numel // 24))) for p in unit.parameters)
        units[index] = replace(unit, parameters=two)
    if recomputable and segments[-1].unit == 0 and dice.random() < 0.5:
        # blocks that are recomputed hold something that the model lets go of in the end
        held = Affine(constant=dice.randint(0, 5000), per_sample=dice.randint(0, 2000))
        segments[-1] = replace(segments[-1], held_bytes=held)
    return ModelDescription(
        model_name=f"random {seed}", model_class="Random", block_classes=("Block",), sequence_length=1,
        compute_dtype=DType.FLOAT32, units=tuple(units), segments=tuple(segments),
    )  # fmt: skip


def ways(*costs: Segment) -> tuple[RecomputedSegment, ...]:
    """Return policies to recompute a block that cost this much: the first saves its input, each other one operator."""
    ways = (Recomputation(saved_calls=(f"op#{number}",) if number else ()) for number in range(len(costs)))
    return tuple(RecomputedSegment(recomputation=way, costs=one) for way, one in zip(ways, costs, strict=True))


def _random_ways(dice: random.Random) -> list[Segment]:
    return [_random_segment(dice, 0) for _ in range(dice.choice([1, 1, 2, 3]))]


def _with_gradients(dice: random.Random, units: list[UnitDescription], segments: list[Segment]) -> list[Segment]:
    """Segments that say of some parameters gathered for the whole step where their gradients come."""
    names = [p.name for unit in units if unit.span is GatherSpan.STEP for p in unit.parameters if dice.random() < 0.5]
    stretches = [i for i, segment in enumerate(segments) if units[segment.unit].span is GatherSpan.STEP]
    for name in names if stretches else ():
        index = dice.choice(stretches if dice.random() < 0.8 else range(len(segments)))
        segments[index] = replace(segments[index], gradients=(*segments[index].gradients, name))
    return segments


def _random_shape(dice: random.Random) -> tuple[int, int]:
    return dice.randint(1, 60), dice.randint(1, 40)


def _random_segment(dice: random.Random, unit: int) -> Segment:
    saved = dice.choice([0, 200, 2000, 20000])
    return Segment(
        unit=unit,
        saved_bytes=Affine(per_sample=dice.randint(0, saved)),
        gradient_bytes=Affine(per_sample=dice.randint(0, 500)),
        forward=_phase(0, saved + dice.randint(0, 1000), dice.randint(0, 10**6), dice.randint(0, 10**5)),
        backward=_phase(dice.randint(0, 4000), dice.randint(0, 2000), dice.randint(0, 10**6), dice.randint(0, 10**5)),
    )


def _unit(fqn: str, span: GatherSpan, shapes: dict[str, tuple[int, ...]], dtype: DType) -> UnitDescription:
    parameters = tuple(ParameterSpec(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items())
    kind = "Block" if span is GatherSpan.USE else "Root"
    names = tuple(fqn.split("+"))
    return UnitDescription(fqn=fqn, module_names=names, class_name=kind, span=span, parameters=parameters)


def _phase(constant: int, per_sample: int, flops: int = 0, traffic: int = 0) -> PhaseCost:
    return PhaseCost(
        peak_bytes=linear_envelope(constant=constant, per_sample=per_sample),
        matmul_flops=Affine(per_sample=flops),
        traffic_bytes=Affine(per_sample=traffic),
    )
