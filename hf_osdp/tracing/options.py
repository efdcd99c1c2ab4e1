"""How a model runs in training, as its trace and the timing of its blocks take it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from ..modeling.batch import Inputs, Loss
from ..modeling.replaced import replaced
from ..modeling.wrapping import under_autocast
from ..planner.description import DType
from ..planner.split import WHOLE_BLOCKS, ModelSplit
from .attention import Capability


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """How a model runs in training."""

    sequence_length: int
    """Tokens of one sample."""
    block_classes: Sequence[str] | None = None
    """Class names of the blocks, see `find_units`; None finds them."""
    compute_dtype: DType | None = None
    """Dtype of gathered parameters and activations; None keeps the parameters' own."""
    autocast: bool = False
    """Compute in `compute_dtype` under `torch.autocast`, as one process does (`Precision.autocast`); parameters
    keep their dtypes.
    """
    device_type: str = "cpu"
    """`"cpu"` or `"cuda"`: decides the attention and dropout kernels and the allocation granularity."""
    capability: Capability | None = None
    """Compute capability of the CUDA device (`DeviceSpec.capability`), which decides the attention kernel. None uses
    this machine's GPU, or without one (8, 6), whose rules are the narrowest from Ampere on."""
    auto_class: Any = None
    """For a configuration, the class to build, see `build_on_meta`."""
    inputs: Inputs | None = None
    """A function from a number of samples to forward's keyword arguments, labels included, or to the batch of `loss`;
    None makes a training batch for a transformers model."""
    images: int | None = None
    """Pictures of each sample, if the batch is made; None is one for a model that takes them, 0 is only text."""
    loss: Loss | None = None
    """`loss(model, batch)` returns the loss, or an output that holds it, like `Trainer.compute_loss`; None runs
    `model(**batch)`. It may call the model more than once; its collectives are not sent."""
    activation_checkpointing: bool = False
    """The blocks will be recomputed in backward.

    Not needed if the model has activation checkpointing enabled already.
    """
    trains: bool = True
    """A backward follows. Else forward runs alone, in evaluation mode and without gradients."""
    compile: bool = False
    """The blocks' forwards will be compiled. A trace counts them as they are: compiled, they need less."""

    def __post_init__(self) -> None:
        if self.device_type not in ("cpu", "cuda"):
            raise ValueError(f"device_type={self.device_type!r} is not known; use cpu or cuda.")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The compute dtype as a `torch.dtype`."""
        return None if self.compute_dtype is None else getattr(torch, self.compute_dtype.value)

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """Dtype to which FSDP2 casts parameters and inputs; None if it does not cast them."""
        return None if self.autocast else self.torch_dtype

    @contextmanager
    def running(self, copied: nn.Module, original: nn.Module, device_type: str = "cpu") -> Iterator[None]:
        """Let a copy of the model run as in training: under autocast, also where the loss calls the original model, as
        trainers do with `self.model`.
        """
        with ExitStack() as stack:
            if self.autocast and self.torch_dtype is not None:
                forward = under_autocast(copied.forward, self.torch_dtype, device_type)
                stack.enter_context(replaced(copied, forward=forward))
            if self.loss is not None:
                stack.enter_context(replaced(original, forward=copied.__call__))
            yield

    @property
    def keywords(self) -> dict[str, Any]:
        """These options as keyword arguments."""
        return {field.name: getattr(self, field.name) for field in fields(ModelRun)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeOptions(ModelRun):
    """Options of `describe`: how the model will train, and what is traced."""

    recomputation: bool = True
    """Also trace each block as recomputed in backward, and on CUDA as offloaded to the host, so that the search can
    choose. Has no effect if all blocks are checkpointed. Parts of blocks (`split.operators`) are not traced as
    offloaded."""
    partial_recomputation: bool = True
    """Also trace selective recomputation, between saving everything and saving only the input; not needed to find
    the least memory.
    """
    seconds: float = 600.0
    """Most CPU time of a trace."""
    split: ModelSplit = WHOLE_BLOCKS
    """Split the model this way before describing it."""
