"""Costs of transformer blocks by formula, for models that cannot be traced.

Activations of a layer follow Korthikanti et al. 2022 (arXiv 2205.05198), equation 2: s b h (34 + 5 a s / h) bytes in 16 bit,
for s tokens, b samples, width h and a heads. FLOPs are 2 per parameter and token, and 4 s² h for attention; backward
takes twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import DescriptionError
from ..planner.affine import Affine, Envelope
from ..planner.description import GatherSpan, PhaseCost, Segment, UnitDescription

SOURCE = "arXiv 2205.05198, equation 2"


def formula_segments(
    units: Sequence[UnitDescription],
    block_classes: Sequence[str],
    config: object,
    *,
    tokens: int,
    itemsize: int,
    checkpointed: bool = False,
) -> tuple[Segment, ...]:
    """Return the segments of a stack of transformer blocks: the root's embedding, each unit used, the root's loss.

    Units that are no blocks but span their use are embedding and head, of one product at most; what these save counts with the root's.
    Logits are in float32, in which the loss is taken. A configuration without width or number of heads raises DescriptionError.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    if not isinstance(width, int) or not isinstance(heads, int):
        raise DescriptionError(
            "The model can neither be traced nor be described by formula: its configuration has no hidden_size and"
            " num_attention_heads. Pass inputs that its forward accepts."
        )
    hidden = tokens * width * itemsize
    equation_2 = tokens * width * (34 + 5 * heads * tokens / width) * itemsize / 2
    logits = tokens * (getattr(text, "vocab_size", 0) or 0) * 4

    def segment(
        index: int, saved: float, forward: float, backward: float, *, flops: float = 0.0, traffic: float = 0.0, passes: int = 2
    ) -> Segment:
        """Make a segment of costs a sample; gradients of its parameters are live in backward."""
        gradients = units[index].trainable_numel * itemsize
        return Segment(
            unit=index,
            saved_bytes=Affine(per_sample=saved),
            forward=_phase(0, forward, flops, traffic),
            backward=_phase(gradients, backward, passes * flops, passes * traffic),
        )

    used = []
    for index, unit in enumerate(units):
        if unit.span is not GatherSpan.USE:
            continue
        flops = 2.0 * unit.numel * tokens
        if unit.class_name not in block_classes:
            used.append(segment(index, 0, hidden, hidden, flops=flops))
            continue
        # in backward, gradients of the wide intermediate and of the input; beside them what is recomputed
        saved, again, passes = (hidden, equation_2, 3) if checkpointed else (equation_2, 0, 2)
        flops += 4.0 * tokens**2 * width
        used.append(segment(index, saved, saved + 8 * hidden, 16 * hidden + again, flops=flops, traffic=2 * equation_2, passes=passes))
    return segment(0, hidden, 2 * hidden, 2 * hidden), *used, segment(0, logits, 3 * logits, 2 * logits)


def _phase(constant: float, peak: float, flops: float, traffic: float) -> PhaseCost:
    return PhaseCost(
        peak_bytes=Envelope.linear(constant=constant, per_sample=peak),
        matmul_flops=Affine(per_sample=flops),
        traffic_bytes=Affine(per_sample=traffic),
    )
