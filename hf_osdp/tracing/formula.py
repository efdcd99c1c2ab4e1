"""Costs of transformer blocks by formula, for models that cannot be traced.

Activations of a layer follow Korthikanti et al. 2022 (arXiv 2205.05198), equation 2: s b h (34 + 5 a s / h) bytes in 16 bit,
for s tokens, b samples, width h and a heads. FLOPs are 2 per parameter and token, and 4 s² h for attention; backward
takes twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import DescriptionError
from ..planner.affine import Affine, Envelope
from ..planner.description import GatherSpan, PhaseCost, Segment, UnitDescription

SOURCE = "arXiv 2205.05198, equation 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """What the formula needs to know."""

    tokens: int
    """Of one sample."""
    width: int
    heads: int
    vocabulary: int
    itemsize: int
    """Bytes of an activation's element."""

    @classmethod
    def of(cls, config: object, *, tokens: int, itemsize: int) -> TransformerShape:
        """Read a transformers configuration.

        Raises:
            DescriptionError: it has no width or no number of heads.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        width, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
        if not isinstance(width, int) or not isinstance(heads, int):
            raise DescriptionError(
                "The model can neither be traced nor be described by formula: its configuration has no hidden_size and"
                " num_attention_heads. Pass inputs that its forward accepts."
            )
        return cls(tokens=tokens, width=width, heads=heads, vocabulary=getattr(text, "vocab_size", 0) or 0, itemsize=itemsize)

    @property
    def hidden_bytes(self) -> int:
        """One tensor of hidden states, for one sample."""
        return self.tokens * self.width * self.itemsize

    @property
    def saved_bytes(self) -> float:
        """Equation 2 for one sample, scaled from 16 bit to the element's size."""
        return self.tokens * self.width * (34 + 5 * self.heads * self.tokens / self.width) * self.itemsize / 2

    @property
    def logits_bytes(self) -> int:
        """Logits of one sample in float32, in which the loss is taken."""
        return self.tokens * self.vocabulary * 4


def formula_segments(
    units: Sequence[UnitDescription], block_classes: Sequence[str], shape: TransformerShape, *, checkpointed: bool = False
) -> tuple[Segment, ...]:
    """Return the segments of a stack of transformer blocks: the root's embedding, each unit used, the root's loss.

    Args:
        units: the model's units in execution order.
        block_classes: which of them are blocks; other units that span their use are embedding and head.
        shape: the transformer's dimensions.
        checkpointed: blocks keep their input alone and run again in backward (equation 2 is then part of backward's peak).
    """
    gradient = units[0].trainable_numel * shape.itemsize
    used = [
        _block(index, unit, shape, checkpointed) if unit.class_name in block_classes else _matrix(index, unit, shape)
        for index, unit in enumerate(units)
        if unit.span is GatherSpan.USE
    ]
    hidden, logits = shape.hidden_bytes, shape.logits_bytes
    return _root(hidden, 2 * hidden, gradient), *used, _root(logits, 3 * logits, gradient)


def _root(saved: int, forward_peak: int, gradient: int) -> Segment:
    return Segment(
        unit=0,
        saved_bytes=Affine(per_sample=saved),
        forward=PhaseCost(peak_bytes=Envelope.linear(per_sample=forward_peak)),
        backward=PhaseCost(peak_bytes=Envelope.linear(constant=gradient, per_sample=2 * saved)),
    )


def _block(index: int, unit: UnitDescription, shape: TransformerShape, checkpointed: bool) -> Segment:
    """Describe a block; gradients of the wide intermediate and of its input are live in backward beside the parameters' gradients."""
    flops = 2.0 * unit.numel * shape.tokens + 4.0 * shape.tokens**2 * shape.width
    transient = 8 * shape.hidden_bytes
    saved, recomputed = (shape.hidden_bytes, shape.saved_bytes) if checkpointed else (shape.saved_bytes, 0)
    passes = 3 if checkpointed else 2
    return Segment(
        unit=index,
        saved_bytes=Affine(per_sample=saved),
        forward=PhaseCost(
            peak_bytes=Envelope.linear(per_sample=saved + transient),
            matmul_flops=Affine(per_sample=flops),
            traffic_bytes=Affine(per_sample=2 * shape.saved_bytes),
        ),
        backward=PhaseCost(
            peak_bytes=Envelope.linear(constant=unit.trainable_numel * shape.itemsize, per_sample=2 * transient + recomputed),
            matmul_flops=Affine(per_sample=passes * flops),
            traffic_bytes=Affine(per_sample=2 * passes * shape.saved_bytes),
        ),
    )


def _matrix(index: int, unit: UnitDescription, shape: TransformerShape) -> Segment:
    """Describe an embedding or a head: one product at most; what it saves is counted with the root's."""
    flops, hidden = 2.0 * unit.numel * shape.tokens, shape.hidden_bytes
    gradient = unit.trainable_numel * shape.itemsize
    return Segment(
        unit=index,
        forward=PhaseCost(peak_bytes=Envelope.linear(per_sample=hidden), matmul_flops=Affine(per_sample=flops)),
        backward=PhaseCost(peak_bytes=Envelope.linear(constant=gradient, per_sample=hidden), matmul_flops=Affine(per_sample=2 * flops)),
    )
