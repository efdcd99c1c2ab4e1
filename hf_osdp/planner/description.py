"""The description of a model: an ordered list of units, and the segments of one micro-batch through them.

Pure values: nothing here needs torch, a model or a process group.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ..errors import refuse_first
from .affine import Affine, Envelope
from .block_forms import BlockForms
from .split import WHOLE_BLOCKS, ModelSplit


class DType(str, Enum):
    """Element types of parameters, gradients and activations."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        return "float" in self.value


_MOST_ELEMENTS = 2**50
_MOST_NAMES = 4
_PEFT_PREFIX = "base_model.model."
_CALL = re.compile(r"[A-Za-z_][\w.:]{0,99}#\d{1,6}")
_ITEMSIZE = {
    DType.FLOAT64: 8, DType.INT64: 8, DType.FLOAT32: 4, DType.INT32: 4, DType.BFLOAT16: 2, DType.FLOAT16: 2,
    DType.INT16: 2, DType.INT8: 1, DType.UINT8: 1, DType.BOOL: 1,
}  # fmt: skip


class GatherSpan(str, Enum):
    """How long FSDP2 holds a unit's gathered parameters."""

    USE = "use"
    """While the unit runs: a transformer block, an embedding, a head."""
    STEP = "step"
    """From the first use in forward to the end of backward: the root, and weights that embedding and head share."""

    def reshards(self, asked: bool) -> bool:
        """Return whether parameters are freed after forward; other spans than `USE` leave a layout no choice."""
        return asked and self is GatherSpan.USE


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """A policy to recompute a unit's forward in backward: only its input and the outputs of the named operators are
    saved.
    """

    saved_calls: tuple[str, ...] = ()
    """Operators of the unit's forward whose outputs are saved: name and index among calls of that name, such as
    `addmm#0`.
    """
    share: float = 1.0
    """Work relative to a full recomputation, by a rough rate of FLOPs and bytes; for tables."""
    names: tuple[str, ...] = ()
    """Names of the saved calls for tables: modules of products (`c_attn`), else operators."""

    def __post_init__(self) -> None:
        unsafe = next((call for call in self.saved_calls if call.startswith("_to_copy#") or "_#" in call), None)
        different = len(set(self.saved_calls)) == len(self.saved_calls)
        refuse_first({
            f"share={self.share} of a recomputation must be from 0 to 1.": not 0 <= self.share <= 1,
            f"saved_calls={self.saved_calls!r} must be different calls of operators, such as 'addmm#0'.":
                not (different and all(map(_CALL.fullmatch, self.saved_calls))),
            f"saved_calls has {unsafe!r}, but outputs of casts and in-place operators cannot be saved.": unsafe,
        })  # fmt: skip

    def describe(self) -> str:
        """Return short text for tables: `recompute`, `recompute 0.4: saves c_attn, attention`."""
        if not self.saved_calls:
            return "recompute"
        shown = ", ".join(self.names[:_MOST_NAMES]) + (
            f" and {more} more" if (more := len(self.names) - _MOST_NAMES) > 0 else ""
        )
        return f"recompute {self.share:.2g}: saves {shown or f'{len(self.saved_calls)} operators'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter. A tied parameter is listed once, under its first name."""

    name: str
    """Fully qualified name in the whole model."""
    shape: tuple[int, ...]
    dtype: DType
    requires_grad: bool = True
    keeps_dtype: bool = False
    """Whether mixed precision keeps the dtype when the parameter is gathered and reduced, as batch norm needs."""
    is_embedding: bool = False
    """Whether it is the weight of an embedding, possibly shared with a vocabulary projection."""
    packs: int = 0
    """Elements that packed bytes stand for; 0 for a parameter that is not packed."""

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"Parameter {self.name} has a negative size: {self.shape}.")
        if self.numel > _MOST_ELEMENTS:
            raise ValueError(
                f"Parameter {self.name} has {self.numel:.3g} elements; it must have at most {_MOST_ELEMENTS}."
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def sharded_bytes(self, shard_size: int) -> int:
        """Return the bytes of rank 0's shard in the parameter's own dtype."""
        return self.sharded_numel(shard_size) * self.dtype.itemsize

    def sharded_numel(self, shard_size: int) -> int:
        """Return the elements of rank 0's shard: ceil(d / g) of the sharded dimension, padding included."""
        if not self.numel:
            return 0
        size = self.shape[shard_dim(self.shape, shard_size)] if self.shape else 1
        return -(-size // shard_size) * (self.numel // size)

    def shard_numels(self, shard_size: int) -> tuple[int, ...]:
        """Return the distinct numbers of elements on the ranks, rank 0's first: full chunks of rows, and a last
        partial chunk.
        """
        full = self.sharded_numel(shard_size)
        return (full, rest) if full and (rest := math.prod(self.shape) % full) else (full,)


def shard_dim(shape: Sequence[int], shard_size: int) -> int:
    """Return the dimension along which FSDP2 shards a parameter of this shape.

    This is dimension 0, unless padding would add at least half to a stack of matrices, such as 8 experts on 16 ranks.
    Then it is the first other dimension that divides evenly, if there is one. Its further copy (`UnitBytes.copy_out`)
    takes as much memory as such padding does in the gathered parameters and their buffer, and states are smaller.
    """
    if len(shape) < 3 or 2 * shard_size * -(-shape[0] // shard_size) < 3 * shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % shard_size == 0), 0)


def shown_name(fqn: str) -> str:
    """Return a unit's name for tables and messages: without the prefix of peft's wrappers, `(root)` for the root,
    `transformer.h.0-3` for four blocks.
    """
    names = [name.removeprefix(_PEFT_PREFIX) for name in fqn.split("+")]
    start, _, first = names[0].rpartition(".")
    if first.isdecimal() and names[1:] == [f"{start}.{int(first) + i}" for i in range(1, len(names))] != []:
        return f"{names[0]}-{int(first) + len(names) - 1}"
    return "+".join(names) or "(root)"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitDescription:
    """Modules whose parameters FSDP2 gathers at once."""

    fqn: str
    """Name of the unit: the module's name, `""` for the root, names joined by `+` for modules that share weights."""
    module_names: tuple[str, ...]
    """Modules given to `fully_shard` together."""
    class_name: str
    span: GatherSpan
    parameters: tuple[ParameterSpec, ...]
    shared: tuple[tuple[str, ...], ...] = ()
    """Every name of each tied parameter, for example `(("transformer.wte.weight", "lm_head.weight"),)`."""
    ends_late: bool = False
    """Whether no input of a unit that trains needs a gradient, as of an embedding: autograd does not tell
    FSDP2 when the unit's backward has ended, so that it is freed and reduced at the end of the whole backward."""

    def __post_init__(self) -> None:
        if not self.module_names or not all(self.shared):
            raise ValueError(f"Unit {self.label!r} needs at least one module, and each tied parameter a name.")

    @property
    def label(self) -> str:
        """Name for tables and messages."""
        return shown_name(self.fqn)

    @property
    def trainable(self) -> tuple[ParameterSpec, ...]:
        return tuple(p for p in self.parameters if p.requires_grad)

    @property
    def numel(self) -> int:
        """Parameters as a user counts them: those that packed bytes stand for."""
        return sum(p.packs or p.numel for p in self.parameters)

    @property
    def trainable_numel(self) -> int:
        return sum(p.numel for p in self.trainable)

    @property
    def can_end_late(self) -> bool:
        return self.span is not GatherSpan.STEP and bool(self.trainable)

    @property
    def reduced_at_end(self) -> bool:
        """Whether the unit is freed and reduced at the end of backward."""
        return self.ends_late or self.span is GatherSpan.STEP

    @property
    def keeps_dtype(self) -> bool:
        """Whether mixed precision keeps the dtype of all parameters; a unit never mixes such parameters with
        others.
        """
        return bool(self.parameters) and all(p.keeps_dtype for p in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """Forward or backward of one segment on one device, without communication."""

    peak_bytes: Envelope = Envelope()
    """Highest live bytes above the phase's start, without gathered parameters. Forward includes the saved activations.
    Backward is relative to the end of the segment's forward; it includes the incoming gradient and the unsharded
    gradients of the segment's parameters."""
    adding_bytes: Envelope | None = None
    """The same in backward where autograd adds each gradient to a held one as it comes, if that is less."""
    matmul_flops: Affine = Affine()
    """Floating-point operations in matrix products."""
    attention_flops: Affine = Affine()
    """Floating-point operations in fused attention, without those that a causal mask leaves out."""
    product_bytes: Affine = Affine()
    """Bytes read and written by matrix products and fused attention."""
    traffic_bytes: Affine = Affine()
    """Bytes read and written by all other operations."""
    operators: Affine = Affine()
    """CPU time of the operators that torch dispatches, as a multiple of a mean operator's."""
    seconds: Affine | None = None
    """Measured time of the phase on the device; None estimates it by the roofline of FLOPs and traffic."""

    @property
    def flops(self) -> Affine:
        """Floating-point operations in matrix products and attention."""
        return self.matmul_flops.plus(self.attention_flops)

    def with_peaks(self, change: Callable[[Envelope], Envelope]) -> PhaseCost:
        """Return the phase with its peaks changed."""
        adding = None if self.adding_bytes is None else change(self.adding_bytes)
        return replace(self, peak_bytes=change(self.peak_bytes), adding_bytes=adding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the forward pass that belongs to one unit, in execution order."""

    unit: int
    """Index into `ModelDescription.units`."""
    saved_bytes: Affine = Affine()
    """Live bytes that forward adds and backward removes: saved activations with the segment's output."""
    held_bytes: Affine = Affine()
    """Bytes of a segment between blocks that forward frees, unless recomputed blocks hold them to run again (T5's
    position bias).
    """
    own_saved_bytes: Affine = Affine()
    """The part of the saved bytes that the device frees if they are sent, because no other segment holds them."""
    sent_bytes: Affine = Affine()
    """Bytes copied to the host if saved activations are there; more than that frees if other segments hold some."""
    gradient_bytes: Affine = Affine()
    """Gradient of the segment's input, live when its backward ends; the backward of the preceding segment takes it."""
    arrival_bytes: Affine = Affine()
    """Live bytes when the last gradient of a parameter has come, without these gradients: more than `gradient_bytes`
    where backward goes on, as that of a norm does for its input after that of its weight.
    """
    kept_bytes: Affine = Affine()
    """Bytes that stay live after backward until the next step: what its modules store as attributes, such as
    RecurrentGemma's state, with all that autograd holds for them.
    """
    gradients: tuple[str, ...] = ()
    """Parameters gathered for the whole step whose gradients are live from this segment's backward on."""
    forward: PhaseCost = PhaseCost()
    backward: PhaseCost = PhaseCost()
    recomputed: tuple[RecomputedSegment, ...] = ()
    """The segment under each policy to recompute it, from the one that saves only the input to the one that saves
    most.
    """

    def under(self, recomputation: Recomputation | None) -> Segment:
        """Return the costs under a policy to recompute; an unknown one has the costs of the first, if there is one."""
        if recomputation is None or not self.recomputed:
            return self
        return next(
            (policy.costs for policy in self.recomputed if policy.recomputation == recomputation),
            self.recomputed[0].costs,
        )

    def each(self, change: Callable[[Segment], Segment]) -> Segment:
        """Return the segment with `change` applied to its costs under every policy to recompute."""
        return replace(
            change(self), recomputed=tuple(replace(policy, costs=change(policy.costs)) for policy in self.recomputed)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedSegment:
    """A segment under one policy to recompute it."""

    recomputation: Recomputation
    costs: Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription(BlockForms):
    """A model as the planner sees it, at one sequence length and compute dtype."""

    model_name: str
    model_class: str
    block_classes: tuple[str, ...]
    split: ModelSplit = WHOLE_BLOCKS
    """Splits of the model before its units were found."""
    sequence_length: int
    compute_dtype: DType
    """Dtype of gathered parameters and activations in the trace."""
    units: tuple[UnitDescription, ...]
    """In the order of first execution; the root, with all parameters outside other units, comes first."""
    segments: tuple[Segment, ...]
    """In forward order; backward runs them in reverse."""
    buffer_bytes: int = 0
    """Buffers of the module (never sharded), in bytes."""
    other_bytes: int = 0
    """Other models on the device during the whole step, such as a reference model, in bytes."""
    input_bytes: Affine = Affine()
    """The batch on the device."""
    output_bytes: Affine = Affine()
    """Outputs of forward beside the loss, such as logits; they count if the training loop holds them."""
    trace: str = "none"
    """How activations were found: `fake tensors, device cpu, attention sdpa`."""
    timing: str = "estimated"
    """How the times of blocks were found: `measured with 1, 2, 4 samples`."""
    recomputed_by_others: bool = False
    """Whether the model or its script recomputes blocks, and not the plan."""

    def __post_init__(self) -> None:
        counts, units = Counter(unit.fqn for unit in self.units), range(len(self.units))
        twice = next((shown_name(fqn) for fqn, count in counts.items() if count > 1), None)
        unknown = next((segment.unit for segment in self.segments if segment.unit not in units), None)
        refuse_first({
            f"sequence_length={self.sequence_length} must be at least 1.": self.sequence_length < 1,
            f"Unit {twice!r} is listed twice.": twice is not None,
            f"A segment belongs to unit {unknown}, but the model has {len(units)} units.":
                unknown is not None,  # a damaged file may have other indices
        })  # fmt: skip

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def recomputable(self) -> frozenset[int]:
        """Indices of the units whose activations can be recomputed in backward."""
        return frozenset(segment.unit for segment in self.segments if segment.recomputed)

    @property
    def recomputations(self) -> tuple[tuple[Recomputation, ...], ...]:
        """Policies to recompute each unit, taken from its first segment."""
        first = {
            segment.unit: tuple(policy.recomputation for policy in segment.recomputed)
            for segment in reversed(self.segments)
        }
        return tuple(first.get(index, ()) for index in range(len(self.units)))

    @property
    def fingerprint(self) -> str:
        """Hash of the units and their parameters (names, shapes, dtypes); models with equal fingerprints can share
        a plan.
        """
        content = [
            (u.fqn, u.module_names, [(p.name, p.shape, p.dtype, p.requires_grad) for p in u.parameters])
            for u in self.units
        ]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:16]
