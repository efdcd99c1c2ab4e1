"""What the training asks of every unit: precision, optimizer, batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from .description import DType, ParameterSpec
from .local_steps import LocalSteps
from .wire import WireFormat

_MOST_SAMPLES = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """FSDP2's mixed precision, what gathered parameters and reduced gradients are held in; or one process's autocast."""

    compute: DType | None = None
    """Dtype of gathered parameters and activations; None keeps each parameter's own."""
    reduce: DType | None = None
    """Dtype of the gradient reduction; None takes the compute dtype."""
    autocast: bool = False
    """One process computes in `compute` under `torch.autocast`: parameters and gradients keep their dtype, copies count as activations."""

    def gathered_dtype(self, parameter: ParameterSpec) -> DType:
        """Dtype of the unsharded parameter and of its unreduced gradient."""
        return parameter.dtype if parameter.keeps_dtype or self.autocast else self.compute or parameter.dtype

    def reduced_dtype(self, parameter: ParameterSpec) -> DType:
        """Dtype in which the gradient crosses the links."""
        return parameter.dtype if parameter.keeps_dtype or self.autocast else self.reduce or self.gathered_dtype(parameter)

    def on(self, world_size: int) -> Precision:
        """Return what runs on so many ranks: autocast is for one alone, several leave the casts to FSDP2."""
        return replace(self, autocast=False) if self.autocast and world_size > 1 else self

    @classmethod
    def named(cls, name: str, *, autocast: bool = False) -> Precision:
        """Return `no` (own dtype), `bf16` or `fp16` (compute in it, reduce in float32), as Accelerate names them.

        With `autocast`, `torch.autocast` computes in less than the own dtype. Raises ValueError for another name.
        """
        if name in ("no", "fp32"):
            return cls()
        lower = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16}
        if name not in lower:
            raise ValueError(f"mixed_precision={name!r} is not known; use no, bf16 or fp16.")
        return cls(compute=lower[name], reduce=DType.FLOAT32, autocast=autocast)


class OptimizerStep(str, Enum):
    """How torch runs an optimizer step; it decides the step's scratch memory."""

    FOREACH = "foreach"
    FOR_LOOP = "for_loop"
    FUSED = "fused"

    @property
    def options(self) -> dict[str, bool]:
        """What torch's optimizers are told for it."""
        return {"foreach": False} if self is OptimizerStep.FOR_LOOP else {self.value: True}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """How an optimizer holds a state tensor otherwise than in its parameter's dtype."""

    bytes_per_element: float
    """With the scales of quantized blocks."""
    is_least: bool = False
    """They are the parameter's where those are more: the state of a parameter in bf16 is in float32, that of one in float64 too."""
    factored: bool = False
    """Kept as one vector for the rows and one for the columns, where a parameter has both."""
    table_bytes: int = 0
    """Of each tensor, whatever its size: the table of the values that codes stand for."""
    block_size: int = 1
    """A shard is held so where it has whole blocks and `least_elements`; else in the parameter's dtype."""
    least_elements: int = 0
    short_blocks: bool = False
    """The last block of a shard may be shorter than the others."""

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_element <= 16:
            raise ValueError(f"StateFormat.bytes_per_element={self.bytes_per_element} must lie above 0, and at most at 16.")
        if self.block_size < 1:
            raise ValueError(f"StateFormat.block_size={self.block_size} must be at least 1.")

    def nbytes(self, elements: int, dtype: DType) -> int:
        """Return the bytes of the state of a shard of a parameter of this dtype."""
        missing = -elements % self.block_size
        if elements < self.least_elements or (missing and not self.short_blocks):
            return elements * dtype.itemsize
        held = elements * max(self.bytes_per_element, dtype.itemsize if self.is_least else 0)
        return round(held + 4 * missing / self.block_size) + self.table_bytes

    def numels(self, parameter: ParameterSpec, shard_size: int) -> tuple[int, ...]:
        """Return the different numbers of elements that ranks hold."""
        if not self.factored or len(parameter.shape) < 2 or not parameter.numel:
            return parameter.shard_numels(shard_size)
        return (parameter.numel // parameter.shape[-1] + parameter.numel // parameter.shape[-2],)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What an optimizer holds for a parameter's shard, and how it steps."""

    name: str = "adamw"
    states: int = 2
    """Tensors kept for each parameter, in its dtype: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD."""
    formats: tuple[StateFormat, ...] = ()
    """Those kept beside them in another form, such as the two of an 8-bit Adam."""
    step: OptimizerStep = OptimizerStep.FUSED
    loop_scratch: float = 2.0
    """Temporaries of a step in a loop for one parameter, in tensors of its shard's size."""
    needs_whole: bool = False
    """It looks at whole parameters, so that units with any that it trains are replicated."""
    matrices: tuple[tuple[int, ...], ...] = ()
    """Shapes of matrices of which it gathers each update whole in bf16 where they are sharded: Muon's."""
    least_quantized: int = 0
    """Parameters of fewer elements, counted whole, have their states in float32."""
    keeps_embeddings: bool = False
    """So have embeddings, of any size."""

    def __post_init__(self) -> None:
        if self.states < 0:
            raise ValueError(f"OptimizerSpec.states={self.states} must not be negative.")

    @property
    def is_quantized(self) -> bool:
        """Whether states are held in blocks that are quantized together."""
        return any(form.block_size > 1 for form in self.formats)

    @property
    def looks_at_whole(self) -> bool:
        """Whether the update of an element depends on others of its parameter."""
        return self.needs_whole or bool(self.matrices)

    @property
    def takes_slices(self) -> bool:
        """Whether it updates an operator in slices as it does a whole one."""
        return not self.looks_at_whole and not any(form.short_blocks for form in self.formats)

    def formats_of(self, parameter: ParameterSpec) -> tuple[StateFormat, ...]:
        """Return the formats of a parameter's states."""
        plain = parameter.numel < self.least_quantized or (parameter.is_embedding and self.keeps_embeddings)
        return (_FLOAT32,) * len(self.formats) if plain else self.formats

    def with_block_size(self, elements: int) -> OptimizerSpec:
        """Return the same with quantized blocks of so many elements, each with a float32 scale."""
        formats = (
            replace(form, block_size=elements, bytes_per_element=form.bytes_per_element - 4 / form.block_size + 4 / elements)
            for form in self.formats
        )
        return replace(self, formats=tuple(formats))

    def state_bytes(self, parameter: ParameterSpec, shard_size: int) -> int:
        """Return the bytes of a parameter's states on the rank that holds most: the last, where its rows fill no whole quantized blocks."""
        return sum(self.state_tensors(parameter, shard_size))

    def state_tensors(self, parameter: ParameterSpec, shard_size: int) -> tuple[int, ...]:
        """Return the bytes of each of a parameter's state tensors, as `state_bytes` adds them up."""
        plain = [parameter.sharded_bytes(shard_size)] * self.states
        sizes = ((form, form.numels(parameter, shard_size)) for form in self.formats_of(parameter))
        return (*plain, *(max(form.nbytes(elements, parameter.dtype) for elements in shards) for form, shards in sizes))

    def gathered_bytes(self, parameter: ParameterSpec, shard_size: int) -> int:
        """Return the bytes of a parameter's update as the ranks of a shard group gather it in a step; 0 where it needs no others' rows."""
        return 2 * shard_size * parameter.sharded_numel(shard_size) if shard_size > 1 and parameter.shape in self.matrices else 0

    def matrix_scratch(self, parameter: ParameterSpec, shard_size: int) -> int:
        """Return the bytes of Newton-Schulz: the update, and in bf16 two of r rows and c columns and two of r rows and columns, r ≤ c."""
        if parameter.shape not in self.matrices:
            return 0
        update = self.gathered_bytes(parameter, shard_size) or parameter.numel * parameter.dtype.itemsize
        return update + 4 * (parameter.numel + min(parameter.shape) ** 2)

    def saved_bytes(self, parameter: ParameterSpec) -> int:
        """Return the bytes of a parameter's states in a checkpoint, where quantized ones are float32."""
        whole = (parameter.numel * 4 if f.block_size > 1 else f.nbytes(sum(f.numels(parameter, 1)), parameter.dtype) for f in self.formats)
        return parameter.numel * self.states * parameter.dtype.itemsize + sum(whole)

    def traffic_per_element(self, itemsize: int = 4) -> float:
        """Return how often a step moves an element: parameter and states are read and written, the gradient is read, `2 (1 + s) + 1`."""
        return 2 * (1 + self.states + sum(form.bytes_per_element for form in self.formats if not form.factored) / itemsize) + 1


_FLOAT32 = StateFormat(bytes_per_element=4)
_EIGHT_BITS = StateFormat(bytes_per_element=1 + 4 / 256, block_size=256, least_elements=4096)
_FOUR_BITS = StateFormat(bytes_per_element=0.5 + 4 / 128, block_size=128, least_elements=4096, table_bytes=64)
LOW_BIT = {
    "adamw8bit": OptimizerSpec(
        name="adamw8bit", states=0, formats=(replace(_EIGHT_BITS, table_bytes=1024),) * 2, step=OptimizerStep.FOR_LOOP
    ),
    "adamwfp8": OptimizerSpec(name="adamwfp8", states=0, formats=(_EIGHT_BITS,) * 2, step=OptimizerStep.FOR_LOOP, loop_scratch=0.0),
    "adamw4bit": OptimizerSpec(name="adamw4bit", states=0, formats=(_FOUR_BITS,) * 2, step=OptimizerStep.FOR_LOOP, loop_scratch=6.5),
}
"""Of torchao's optimizers: codes, a float32 scale a block, and the table of what codes mean. Scratch is what their steps allocate,
compiled for the CPU (torch 2.13)."""
_OF_BITSANDBYTES = {
    "adam": (2, 3.0, 5.0), "ademamix": (3, 4.0, 9.3), "momentum": (1, 2.0, 2.3), "lion": (1, 3.0, 5.0), "rmsprop": (1, 4.0, 3.0),
    "adagrad": (1, 4.0, 3.0),
}  # fmt: skip
"""State tensors of a parameter by bitsandbytes' names of algorithms, and what a step on the CPU allocates, in 32 and 8 bits (0.50.2)."""


def bitsandbytes_spec(algorithm: str, bits: int, *, device_type: str = "cuda", least_quantized: int = 4096) -> OptimizerSpec:
    """Return what one of bitsandbytes' optimizers holds: states in float32, or codes of 8 bits with a float32 scale a block.

    Its kernels for GPUs need no scratch. All parameters share two tables of 1 KiB.
    """
    states, *scratch = _OF_BITSANDBYTES[algorithm]
    return OptimizerSpec(
        name=f"{algorithm}_bnb_{bits}bit",
        states=0,
        formats=(replace(_EIGHT_BITS, least_elements=0, short_blocks=True) if bits == 8 else _FLOAT32,) * states,
        step=OptimizerStep.FOR_LOOP,
        loop_scratch=scratch[bits == 8] if device_type == "cpu" else 0.0,
        least_quantized=least_quantized if bits == 8 else 0,
    )


def bitsandbytes_of_trainer(name: str, *, device_type: str = "cuda") -> OptimizerSpec:
    """Return what `TrainingArguments(optim=name)` makes, one of `BITSANDBYTES`; the Trainer keeps embeddings' states in float32."""
    spec = bitsandbytes_spec(*BITSANDBYTES[name], device_type=device_type)
    return replace(spec, keeps_embeddings=spec.is_quantized)


BITSANDBYTES = {
    "adamw_bnb_8bit": ("adam", 8), "adamw_8bit": ("adam", 8), "lion_8bit": ("lion", 8), "lion_32bit": ("lion", 32),
    "rmsprop_bnb_8bit": ("rmsprop", 8), "rmsprop_bnb": ("rmsprop", 32), "rmsprop_bnb_32bit": ("rmsprop", 32),
    "ademamix_8bit": ("ademamix", 8), "ademamix": ("ademamix", 32),
}  # fmt: skip
"""Algorithm and bits of bitsandbytes' optimizers by their names in `TrainingArguments.optim`."""
ADAFACTOR = OptimizerSpec(
    name="adafactor", states=0, formats=(StateFormat(bytes_per_element=4, is_least=True, factored=True),), step=OptimizerStep.FOR_LOOP,
    needs_whole=True,
)  # fmt: skip
"""transformers' Adafactor without a first moment, as its Trainer makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """All of a training that bears on memory and time, model and devices aside."""

    global_batch_size: int
    """Samples of one optimizer step over all ranks; fixed by the user, never changed by the planner."""
    precision: Precision = Precision()
    optimizer: OptimizerSpec = OptimizerSpec()
    micro_batch_size: int | None = None
    """Fixed micro-batch size, or None to let the planner choose it."""
    reduce_every_micro_step: bool | None = None
    """Fixed choice of when all gradients are reduced, or None to let the planner choose for each unit (with `GatherSpan.CALLS`: always)."""
    recompute: bool | None = None
    """Recompute the activations of every block in backward, of none, or None to let the planner choose for each."""
    host_offload: bool | None = None
    """The same for states on the host, of use only where the hardware has a host beside the device."""
    offload_optimizer: bool | None = None
    """The same for optimizer states alone, of units whose parameters are on the device."""
    offload_activations: bool | None = None
    """The same for activations that wait on the host for backward."""
    holds_outputs: bool = False
    """The loop keeps the model's outputs from forward through backward (`out = model(...); out.loss.backward()`)."""
    clips_gradients: bool = False
    """Gradients are clipped by their norm before each optimizer step."""
    step_in_backward: bool = False
    """Units may step in backward, in plans without accumulation: nothing reads gradients between backward and the step."""
    communication: WireFormat | None = None
    """The coarsest format in which parameters and gradients may cross a link, where that is faster; None sends them as they are."""
    local_steps: LocalSteps | None = None
    """Machines train apart between synchronisations; the hardware is then one machine with the link to others. None: they do not."""
    correction_bytes: int = 0
    """Added to every moment: what was found beside the estimate of an earlier plan, see `planner/cost/correction.py`."""

    def __post_init__(self) -> None:
        for name in ("reduce_every_micro_step", "recompute", "host_offload", "offload_optimizer", "offload_activations"):
            if (value := getattr(self, name)) is not None and not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is not a switch; use True, False, or None to leave it to the planner.")
        if self.host_offload and self.offload_optimizer:
            raise ValueError("offload_optimizer=True has no effect beside host_offload=True, which has all states there; leave one out.")
        if not 1 <= self.global_batch_size <= _MOST_SAMPLES:
            raise ValueError(f"global_batch_size={self.global_batch_size} must be at least 1 and at most {_MOST_SAMPLES}.")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={self.micro_batch_size} must be at least 1.")

    def all_ranks(self, world_size: int) -> int:
        """Return the ranks that share the global batch, where so many share the model: those of all machines under local steps."""
        return world_size * (1 if self.local_steps is None else self.local_steps.machines)

    def micro_batch_sizes(self, world_size: int) -> tuple[int, ...]:
        """Return the sizes that fill the global batch in whole micro-steps on `world_size` ranks, the largest first; ValueError if none."""
        world_size = self.all_ranks(world_size)
        per_rank, rest = divmod(self.global_batch_size, world_size)
        if rest:
            nearest = [str(count * world_size) for count in (per_rank, per_rank + 1) if count]
            raise ValueError(
                f"global_batch_size={self.global_batch_size} does not divide by {world_size} processes; use {' or '.join(nearest)}."
            )
        if self.micro_batch_size is None:
            return divisors(per_rank)[::-1]
        if per_rank % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} does not divide the {per_rank} samples of each rank"
                f" (global_batch_size={self.global_batch_size} over {world_size} processes); use a divisor of {per_rank}, or None."
            )
        return (self.micro_batch_size,)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors in ascending order, in the square root of `number` steps."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))
