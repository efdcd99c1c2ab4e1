"""The training job: precision, optimizer, batch, and the choices that the user fixed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, get_args

from ..errors import refuse_first
from .description import DType, ParameterSpec
from .lengths import Lengths
from .placement import STATE_OPTIONS, HostOptions

Communication = Literal["exact", "bf16", "int8", "int4"]
"""Names of the formats in which values are sent, from fine to coarse."""
FORMATS: tuple[Communication, ...] = get_args(Communication)
EXACT: Communication = "exact"
"""Communication in the original dtype."""
_MOST_SAMPLES, _MOST_STATES = 2**40, 1000


def formats_up_to(coarsest: Communication) -> tuple[Communication, ...]:
    """Return the formats that are allowed if the user allows `coarsest` (`OSDPConfig.communication`), exact first."""
    return FORMATS[: FORMATS.index(coarsest) + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Mixed precision: dtypes of FSDP2's gathered parameters and reduced gradients, or autocast of one process."""

    compute: DType | None = None
    """Dtype of gathered parameters and activations; None keeps the dtype of each parameter."""
    reduce: DType | None = None
    """Dtype of the gradient reduction; None takes the compute dtype."""
    autocast: bool = False
    """One process computes in `compute` under `torch.autocast`.

    Parameters and gradients keep their dtype; cast copies are activations.
    """

    def gathered_dtype(self, parameter: ParameterSpec) -> DType:
        """Return the dtype of the unsharded parameter and of its unreduced gradient."""
        keeps = parameter.keeps_dtype or self.autocast or not parameter.dtype.is_floating
        return parameter.dtype if keeps else self.compute or parameter.dtype

    def reduced_dtype(self, parameter: ParameterSpec) -> DType:
        """Return the dtype in which the gradient is reduced."""
        return (
            parameter.dtype
            if parameter.keeps_dtype or self.autocast
            else self.reduce or self.gathered_dtype(parameter)
        )

    def on(self, world_size: int) -> Precision:
        """Return the precision on `world_size` ranks: only a single rank uses autocast; on several, FSDP2 casts."""
        return replace(self, autocast=False) if self.autocast and world_size > 1 else self

    @classmethod
    def named(cls, name: str, *, autocast: bool = False) -> Precision:
        """Return a precision by Accelerate's name: `no` keeps dtypes; `bf16` and `fp16` compute in that dtype and
        reduce in float32.

        With `autocast`, one process casts by `torch.autocast`.

        Raises:
            ValueError: the name is not known.
        """
        if name in ("no", "fp32"):
            return cls()
        lower = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16}
        if name not in lower:
            raise ValueError(f"mixed_precision={name!r} is not known; use no, bf16 or fp16.")
        return cls(compute=lower[name], reduce=DType.FLOAT32, autocast=autocast)


class OptimizerStep(str, Enum):
    """Implementation of an optimizer step in torch, which determines the step's temporary memory."""

    FOREACH = "foreach"
    FOR_LOOP = "for_loop"
    FUSED = "fused"

    @property
    def options(self) -> dict[str, bool]:
        """Keyword arguments of torch's optimizers for this implementation."""
        return {"foreach": False} if self is OptimizerStep.FOR_LOOP else {self.value: True}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """Storage of an optimizer state tensor that is not in its parameter's dtype."""

    bytes_per_element: float
    """Bytes of one element, scales of quantized blocks included."""
    is_least: bool = False
    """Whether elements have at least the size of the parameter's dtype: float32 for a parameter in bf16, float64
    for one in float64.
    """
    factored: bool = False
    """Whether a matrix has one vector for its rows and one for its columns instead of a whole state."""
    table_bytes: int = 0
    """Bytes of the code table of each tensor."""
    block_size: int = 1
    """Elements of a quantized block.

    A shard without whole blocks, or below `least_elements`, is in the parameter's dtype.
    """
    least_elements: int = 0
    short_blocks: bool = False
    """Whether the last block of a shard may be shorter."""

    def __post_init__(self) -> None:
        refuse_first({
            f"StateFormat.bytes_per_element={self.bytes_per_element} must lie above 0, and at most at 16.":
                not 0 < self.bytes_per_element <= 16,
            f"StateFormat.block_size={self.block_size} must be at least 1.": self.block_size < 1,
        })  # fmt: skip

    def nbytes(self, elements: int, dtype: DType) -> int:
        """Return the bytes of a state of a shard with these elements of a parameter with this dtype."""
        missing = -elements % self.block_size
        if elements < self.least_elements or (missing and not self.short_blocks):
            return elements * dtype.itemsize
        held = elements * max(self.bytes_per_element, dtype.itemsize if self.is_least else 0)
        return round(held + 4 * missing / self.block_size) + self.table_bytes

    def numels(self, parameter: ParameterSpec, shard_size: int) -> tuple[int, ...]:
        """Return the distinct numbers of elements that ranks hold."""
        if not self.factored or len(parameter.shape) < 2 or not parameter.numel:
            return parameter.shard_numels(shard_size)
        return (parameter.numel // parameter.shape[-1] + parameter.numel // parameter.shape[-2],)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer's states and its step."""

    name: str = "adamw"
    states: int = 2
    """State tensors in the parameter's dtype: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD."""
    formats: tuple[StateFormat, ...] = ()
    """Further state tensors in other formats, such as the two of an 8-bit Adam."""
    step: OptimizerStep = OptimizerStep.FUSED
    loop_scratch: float = 2.0
    """Temporaries of a step in a loop, as a multiple of the largest shard."""
    needs_whole: bool = False
    """Whether the update needs whole parameters; units with trained parameters are then replicated."""
    matrices: tuple[tuple[int, ...], ...] = ()
    """Shapes of matrices whose update each rank computes whole, gathered in bf16 if they are sharded."""
    least_quantized: int = 0
    """Parameters with fewer elements (unsharded) have their states in float32."""
    keeps_embeddings: bool = False
    """Whether embeddings of any size have their states in float32."""

    def __post_init__(self) -> None:
        if not 0 <= self.states <= _MOST_STATES:
            raise ValueError(f"OptimizerSpec.states={self.states} must be from 0 to {_MOST_STATES}.")

    @property
    def is_quantized(self) -> bool:
        """Whether states are quantized in blocks."""
        return any(form.block_size > 1 for form in self.formats)

    @property
    def looks_at_whole(self) -> bool:
        """Whether the update of an element depends on other elements of its parameter."""
        return self.needs_whole or bool(self.matrices)

    @property
    def steps_parts(self) -> bool:
        """Whether the update of an operator is the same if it is cut in parts."""
        return not self.looks_at_whole and not any(form.short_blocks for form in self.formats)

    def formats_of(self, parameter: ParameterSpec) -> tuple[StateFormat, ...]:
        """Return the formats of a parameter's states."""
        plain = parameter.numel < self.least_quantized or (parameter.is_embedding and self.keeps_embeddings)
        return (FLOAT32_STATE,) * len(self.formats) if plain else self.formats

    def with_block_size(self, elements: int) -> OptimizerSpec:
        """Return the optimizer with quantized blocks of `elements`, each with a float32 scale."""
        formats = (
            replace(
                form,
                block_size=elements,
                bytes_per_element=form.bytes_per_element - 4 / form.block_size + 4 / elements,
            )
            for form in self.formats
        )
        return replace(self, formats=tuple(formats))

    def state_bytes(self, parameter: ParameterSpec, shard_size: int) -> int:
        """Return the bytes of a parameter's states on the fullest rank: the last one, if its rows do not fill whole
        quantized blocks.
        """
        return sum(self.state_tensors(parameter, shard_size))

    def state_tensors(self, parameter: ParameterSpec, shard_size: int) -> tuple[int, ...]:
        """Return the bytes of each state tensor of a parameter on the fullest rank."""
        plain = [parameter.sharded_bytes(shard_size)] * self.states
        sizes = ((form, form.numels(parameter, shard_size)) for form in self.formats_of(parameter))
        return (
            *plain,
            *(max(form.nbytes(elements, parameter.dtype) for elements in shards) for form, shards in sizes),
        )

    def gathered_bytes(self, parameter: ParameterSpec, shard_size: int) -> int:
        """Return the bytes of a parameter's update that a shard group gathers in a step; 0 if the update needs only
        the rank's own rows.
        """
        return (
            2 * shard_size * parameter.sharded_numel(shard_size)
            if shard_size > 1 and parameter.shape in self.matrices
            else 0
        )

    def matrix_scratch(self, parameter: ParameterSpec, shard_size: int) -> int:
        """Return the temporaries of a whole update (Newton-Schulz) in bytes: the update, and in bf16 two r x c and
        two r x r matrices, r ≤ c.
        """
        if parameter.shape not in self.matrices:
            return 0
        update = self.gathered_bytes(parameter, shard_size) or parameter.numel * parameter.dtype.itemsize
        return update + 4 * (parameter.numel + min(parameter.shape) ** 2)

    def saved_bytes(self, parameter: ParameterSpec) -> int:
        """Return the bytes of a parameter's states in a checkpoint, which has quantized states in float32."""
        whole = (
            parameter.numel * 4 if f.block_size > 1 else f.nbytes(sum(f.numels(parameter, 1)), parameter.dtype)
            for f in self.formats
        )
        return parameter.numel * self.states * parameter.dtype.itemsize + sum(whole)

    def traffic_per_element(self) -> float:
        """Return the reads and writes per element of a step in float32, `2 (1 + s) + 1`: parameter and s states both
        ways, the gradient once.
        """
        others = sum(form.bytes_per_element for form in self.formats if not form.factored) / 4
        return 2 * (1 + self.states + others) + 1


FLOAT32_STATE = StateFormat(bytes_per_element=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions(HostOptions):
    """Decisions that a user may take from the planner; None leaves one to the planner."""

    micro_batch_size: int | None = None
    """Samples that one process runs at once; default: the planner decides."""
    reduce_every_micro_step: bool | None = None
    """True reduce-scatters gradients in each micro-step, and replicas all-reduce once, in the last; False reduces only
    in the last; None lets the planner decide."""
    recompute: bool | None = None
    """Recompute the activations of every block in backward, or of none; default: the planner decides for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob(Decisions):
    """Settings of a training that change memory or time, without model and devices."""

    global_batch_size: int
    """Samples of one optimizer step over all ranks. The planner never changes it."""
    precision: Precision = Precision()
    optimizer: OptimizerSpec = OptimizerSpec()
    holds_outputs: bool = False
    """Whether the loop keeps the model's outputs from forward through backward (`out = model(...);
    out.loss.backward()`).
    """
    clips_gradients: bool = False
    """Whether gradients are clipped by their norm before each optimizer step."""
    communication: Communication = EXACT
    """The coarsest format in which parameters and gradients may be sent, used where it is faster."""
    lengths: Lengths | None = None
    """Lengths of samples, which change seconds alone; None if all are as long as the longest."""

    def __post_init__(self) -> None:
        everything, states = STATE_OPTIONS
        refuse_first({
            f"{states}=True has no effect: {everything}=True moves all states to the host; leave one out.":
                {everything, states} <= set(self.asked),
            f"global_batch_size={self.global_batch_size} must be at least 1 and at most {_MOST_SAMPLES}.":
                not 1 <= self.global_batch_size <= _MOST_SAMPLES,
            f"micro_batch_size={self.micro_batch_size} must be at least 1.":
                self.micro_batch_size is not None and self.micro_batch_size < 1,
        })  # fmt: skip

    def micro_batch_sizes(self, world_size: int) -> tuple[int, ...]:
        """Return the micro-batch sizes that give the global batch on `world_size` ranks, largest first; ValueError
        if there is none.
        """
        per_rank, rest = divmod(self.global_batch_size, world_size)
        if rest:
            nearest = [str(count * world_size) for count in (per_rank, per_rank + 1) if count]
            raise ValueError(
                f"global_batch_size={self.global_batch_size} does not divide by {world_size} processes; use"
                f" {' or '.join(nearest)}."
            )
        if self.micro_batch_size is None:
            return divisors(per_rank)[::-1]
        if per_rank % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} does not divide the {per_rank} samples of each rank"
                f" (global_batch_size={self.global_batch_size} over {world_size} processes); use a divisor of"
                f" {per_rank}, or None."
            )
        return (self.micro_batch_size,)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))
