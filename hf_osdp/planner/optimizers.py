"""What optimizers hold that are known by a name: those of torch, torchao, bitsandbytes and transformers' Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import Remedy, nearest
from .placement import STATE_OPTIONS
from .training_job import FLOAT32_STATE, OptimizerSpec, OptimizerStep, StateFormat

_REFUSED = {
    "shampoo": "preconditions with each whole matrix, in states of other shapes",
    "soap": "preconditions with each whole matrix, in states of other shapes",
    "galore": "projects each whole matrix, with states of other shapes",
    "lbfgs": "needs dot products over all parameters, and runs forward and backward again",
    "sparseadam": "needs sparse gradients",
    "lomo": "updates while backward runs, before gradients are reduced",
    "apollo": "projects gradients at random, differently on each rank",
    "paged": "keeps states in CUDA's unified memory, whose place the driver chooses",
    "8bit": "holds its states in blocks that are quantized together",
    "4bit": "holds its states in blocks that are quantized together",
}
"""Part of an optimizer's name in lower case → why it cannot run under a plan."""
NEEDS_WHOLE = ("adafactor", "lamb", "lars", "muon")
"""Parts of names of optimizers that use norms, factors or products of whole parameters; a trial decides about others.
"""
ADVICE = "use an element-wise optimizer such as AdamW, Adam, SGD or RMSprop"
_PAGED_ADVICE = "use the one that is not paged, or AdamW with OSDPConfig(offload_optimizer=True)"
_LOW_BIT_ADVICE = "use torchao's AdamW8bit (optim='adamw_torch_8bit'), which quantizes each shard by itself"
_EIGHT_BITS = StateFormat(bytes_per_element=1 + 4 / 256, block_size=256, least_elements=4096)
_FOUR_BITS = StateFormat(bytes_per_element=0.5 + 4 / 128, block_size=128, least_elements=4096, table_bytes=64)
LOW_BIT = {
    "adamw8bit": OptimizerSpec(
        name="adamw8bit", states=0, formats=(replace(_EIGHT_BITS, table_bytes=1024),) * 2, step=OptimizerStep.FOR_LOOP
    ),
    "adamwfp8": OptimizerSpec(
        name="adamwfp8", states=0, formats=(_EIGHT_BITS,) * 2, step=OptimizerStep.FOR_LOOP, loop_scratch=0.0
    ),
    "adamw4bit": OptimizerSpec(
        name="adamw4bit", states=0, formats=(_FOUR_BITS,) * 2, step=OptimizerStep.FOR_LOOP, loop_scratch=6.5
    ),
}
"""torchao's optimizers: codes, a float32 scale per block, and the code table. `loop_scratch` is what their steps
allocate, compiled for the CPU (torch 2.13)."""
SMALL_STATES = (
    LOW_BIT["adamw8bit"],
    Remedy("states of 8 bits (optim='adamw_torch_8bit')", "states of 8 bits (--optimizer adamw8bit)"),
)
"""An optimizer that holds less than AdamW, and the remedy that names it."""
_OF_BITSANDBYTES = {
    "adam": (2, 3.0, 5.0), "ademamix": (3, 4.0, 9.3), "momentum": (1, 2.0, 2.3), "lion": (1, 3.0, 5.0),
    "rmsprop": (1, 4.0, 3.0),
    "adagrad": (1, 4.0, 3.0),
}  # fmt: skip
"""bitsandbytes' algorithms (0.50.2): state tensors, and `loop_scratch` of a step on the CPU in 32 and in 8 bits."""


def bitsandbytes_spec(
    algorithm: str, bits: int, *, device_type: str = "cuda", least_quantized: int = 4096
) -> OptimizerSpec:
    """Return one of bitsandbytes' optimizers: states in float32, or codes of 8 bits with a float32 scale per block.

    Its GPU kernels need no temporaries. All parameters share two tables of 1 KiB.
    """
    states, *scratch = _OF_BITSANDBYTES[algorithm]
    return OptimizerSpec(
        name=f"{algorithm}_bnb_{bits}bit",
        states=0,
        formats=(replace(_EIGHT_BITS, least_elements=0, short_blocks=True) if bits == 8 else FLOAT32_STATE,) * states,
        step=OptimizerStep.FOR_LOOP,
        loop_scratch=scratch[bits == 8] if device_type == "cpu" else 0.0,
        least_quantized=least_quantized if bits == 8 else 0,
    )


def bitsandbytes_of_trainer(name: str, *, device_type: str = "cuda") -> OptimizerSpec:
    """Return the optimizer of `TrainingArguments(optim=name)`, for names of `BITSANDBYTES`.

    The Trainer keeps the states of embeddings in float32.
    """
    spec = bitsandbytes_spec(*BITSANDBYTES[name], device_type=device_type)
    return replace(spec, keeps_embeddings=spec.is_quantized)


BITSANDBYTES = {
    "adamw_bnb_8bit": ("adam", 8), "adamw_8bit": ("adam", 8), "lion_8bit": ("lion", 8), "lion_32bit": ("lion", 32),
    "rmsprop_bnb_8bit": ("rmsprop", 8), "rmsprop_bnb": ("rmsprop", 32), "rmsprop_bnb_32bit": ("rmsprop", 32),
    "ademamix_8bit": ("ademamix", 8), "ademamix": ("ademamix", 32),
}  # fmt: skip
"""Algorithm and bits of bitsandbytes' optimizers by their names in `TrainingArguments.optim`."""
ADAFACTOR = OptimizerSpec(
    name="adafactor", states=0, formats=(StateFormat(bytes_per_element=4, is_least=True, factored=True),),
    step=OptimizerStep.FOR_LOOP,
    needs_whole=True,
)  # fmt: skip
"""transformers' Adafactor without a first moment, as its Trainer makes it."""
TORCH_STATES = {
    "adamw": 2,
    "adam": 2,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "sgd": 0,
    "adagrad": 1,
    "rmsprop": 1,
    "adadelta": 2,
    "asgd": 1,
}
"""State tensors for each parameter, as `torch.optim` keeps them by default."""
_TORCH_IN_TRAINER = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `TrainingArguments.optim` that name optimizers of torch."""
OF_TRAINER = {
    **{
        name: OptimizerSpec(name=name.partition("_")[0], states=TORCH_STATES[name.partition("_")[0]])
        for name in _TORCH_IN_TRAINER
    },
    "adamw_torch_8bit": LOW_BIT["adamw8bit"].with_block_size(256),
    "adamw_torch_4bit": LOW_BIT["adamw4bit"].with_block_size(256),
    **{name: bitsandbytes_of_trainer(name) for name in BITSANDBYTES},
    "adafactor": ADAFACTOR,
}
"""`TrainingArguments.optim` → what the optimizer holds.

transformers sets blocks of 256 elements; torchao's AdamW4bit has 128.
"""
MUON = "muon"
"""torch's Muon for the matrices of a model's blocks, whose shapes only the model tells, beside AdamW for the rest."""
NEED_MODEL = frozenset({MUON})
"""Names of optimizers whose states only a model tells (`sharding/optimizers/`)."""
SHORT_NAMES = {
    "adamw": OptimizerSpec(), "momentum": OptimizerSpec(name="momentum", states=1),
    "sgd": OptimizerSpec(name="sgd", states=0), **LOW_BIT, "adafactor": ADAFACTOR,
}  # fmt: skip
"""Optimizers by the names of the command line."""


def reason_against(*names: str) -> str | None:
    """Return why an optimizer with these names, of classes or of `optim`, cannot run, and the remedy; None if no
    name is refused.
    """
    found = next(((name.lower(), part) for name in names for part in _REFUSED if part in name.lower()), None)
    if found is None:
        return None
    advice = _PAGED_ADVICE if found[1] == "paged" else _LOW_BIT_ADVICE if "bit" in found[0] else ADVICE
    return f"{_REFUSED[found[1]]}, which a plan does not allow; {advice}"


def upper_bound(specs: Sequence[OptimizerSpec]) -> OptimizerSpec:
    """Return what several optimizers of one model hold at most, as if the one that holds most had all parameters.

    Matrices are identified by their shapes, so that those of the same shape in another optimizer count as well.
    """
    most = max(specs, key=OptimizerSpec.traffic_per_element)
    return replace(
        most,
        step=max(specs, key=lambda spec: (not spec.matrices, spec.traffic_per_element())).step,
        loop_scratch=max(spec.loop_scratch for spec in specs),
        needs_whole=any(spec.needs_whole for spec in specs),
        matrices=tuple(sorted({shape for spec in specs for shape in spec.matrices})),
    )


def knows_trainer_name(name: str) -> bool:
    """Return whether a name is enough to know what an optimizer holds, or that it is refused."""
    return name in OF_TRAINER or reason_against(name) is not None


def spec_of_trainer_name(name: str, *, device_type: str) -> OptimizerSpec:
    """Return what the optimizer that `TrainingArguments(optim=...)` names will hold; raise ValueError for an
    unknown name.
    """
    if name not in OF_TRAINER:
        reason = reason_against(name) or f"is not known to work under a plan; use one of {', '.join(OF_TRAINER)}"
        raise ValueError(f"optim={name!r} {reason}.")
    if name in BITSANDBYTES:
        return bitsandbytes_of_trainer(name, device_type=device_type)
    spec = OF_TRAINER[name]
    return (
        replace(spec, step=step_of(name.endswith("_fused") or None, None, device_type))
        if name in _TORCH_IN_TRAINER
        else spec
    )


def step_of(fused: bool | None, foreach: bool | None, device_type: str) -> OptimizerStep:
    """Return how the step runs; torch's default is foreach on accelerators and a for-loop on the CPU."""
    if fused:
        return OptimizerStep.FUSED
    if foreach or (foreach is None and fused is None and device_type != "cpu"):
        return OptimizerStep.FOREACH
    return OptimizerStep.FOR_LOOP


def spec_of_name(name: str, *, device_type: str) -> OptimizerSpec:
    """Return what an optimizer holds by its short name or by the Trainer's; raise ValueError for an unknown name."""
    key = name.lower()
    if key in SHORT_NAMES:
        return SHORT_NAMES[key]
    names = tuple(dict.fromkeys([*SHORT_NAMES, *NEED_MODEL, *OF_TRAINER]))
    if key not in OF_TRAINER and (near := nearest(key, names)) and "paged" not in key:
        raise ValueError(f"optimizer={name!r} is not known{near}; use one of {', '.join(names)}.")
    return spec_of_trainer_name(key, device_type=device_type)


def impossible_places(optimizer: OptimizerSpec, against_unit_steps: str | None) -> dict[str, str]:
    """Return the options that an optimizer rules out, each with the line for a user who asked for it."""
    name = optimizer.name
    plain = optimizer.is_quantized and (
        f"States on the host are plain tensors, and {name}'s are quantized; leave the offload out, or use AdamW."
    )
    whole = optimizer.looks_at_whole and (
        f"{name} needs whole parameters at once, which host and device do not have; leave host_offload out, or use"
        " AdamW."
    )
    steps = against_unit_steps and f"offload_optimizer=True, but {against_unit_steps}; leave it out, or use AdamW."
    reasons = zip(STATE_OPTIONS, (plain or whole, plain or steps), strict=True)
    return {option: reason for option, reason in reasons if reason}
