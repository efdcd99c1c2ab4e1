"""Memory that CUDA kernels of an operator take from the allocator while they run, by the sizes in their source.

Read in torch 2.11 and 2.13; sizes agree with the allocator's count on CUDA's software (tests/cuda_software).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from ..planner.affine import Affine, ScratchMoment
from .attention import ASSUMED_CAPABILITY, Capability, capability_here

aten = torch.ops.aten


class Processors(NamedTuple):
    """The multiprocessors of a device, for whose number kernels are cut."""

    number: int
    threads: int
    """Threads that one can hold at once."""


_LARGEST = {
    (7, 0): Processors(80, 2048), (7, 5): Processors(72, 1024), (8, 0): Processors(108, 2048),
    (8, 6): Processors(84, 1536), (8, 9): Processors(142, 1536), (9, 0): Processors(132, 2048),
    (10, 0): Processors(148, 2048), (12, 0): Processors(188, 1536),
}  # fmt: skip
"""The largest device of each compute capability: V100, TITAN RTX, A100, A40, L40S, H100 and H200, B200, RTX PRO 6000.
Sources: NVIDIA's data sheets; threads: table of compute capabilities, CUDA C++ Programming Guide 13.0."""


def processors_of(capability: Capability | None) -> Processors:
    """Return the most multiprocessors of a device with this compute capability; without one, those of this machine's
    GPU.
    """
    if capability is None and capability_here() is not None:
        here = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Processors(here.multi_processor_count, here.max_threads_per_multi_processor)
    asked = capability or ASSUMED_CAPABILITY
    return _LARGEST.get(asked) or _LARGEST[max((known for known in _LARGEST if known <= asked), default=(7, 0))]


class Growth(NamedTuple):
    """A kernel's own bytes by its number of rows: none below `least`, then `growing`, up to the highest of `most`."""

    least: int
    growing: Affine
    most: tuple[Affine, ...]

    def moment(self, live: Affine, rows: Affine) -> ScratchMoment:
        """Return the moment as a function of samples, from live bytes and rows as functions of samples."""

        def by_samples(by_rows: Affine) -> Affine:
            return rows.scaled(by_rows.per_sample, constants=True).plus(Affine(constant=by_rows.constant))

        least = (self.least - rows.constant) / rows.per_sample if rows.per_sample > 0 else 0.0
        if rows.per_sample <= 0 and rows.constant < self.least:
            return ScratchMoment(live=live, least=0.0, growing=Affine(), most=(Affine(),))
        return ScratchMoment(
            live=live, least=least, growing=by_samples(self.growing), most=tuple(map(by_samples, self.most))
        )


class KernelScratch(NamedTuple):
    """The own memory of one kernel's call."""

    rows: int
    growth: Growth


def kernel_scratch(func: OpOverload, args: tuple[Any, ...], processors: Processors) -> KernelScratch | None:
    """Return the memory that the kernel of an operator takes while it runs; None if it is not known to take any."""
    formula = _FORMULAS.get(func)
    return None if formula is None else formula(args, processors)


def _row_sum(args: tuple[Any, ...], processors: Processors) -> KernelScratch | None:
    """Return the buffer in which blocks of threads meet when they sum over rows, as for the gradient of a bias.

    With v elements a load, w x h threads in a block and c blocks for each output, it is 4 v w c bytes for each output
    (8 in float64). Blocks share an output from 256 rows a thread on: c is the number that fills the device, but at
    least 16 and at most 256 rows go to each thread. Source: setReduceConfig and global_memory_size in
    ATen/native/cuda/Reduce.cuh.
    """
    tensor, dims = args[0], args[1]
    kept = tensor.shape[len(dims or ()) :]
    outputs = kept.numel()
    if (
        not dims
        or not tensor.is_floating_point()
        or not kept
        or not outputs
        or sorted(dim % tensor.dim() for dim in dims) != list(range(len(dims)))
        or not tensor[(0,) * len(dims)].is_contiguous()
    ):
        return None
    vector = next(size for size in (4, 2, 1) if outputs % size == 0)
    columns, threads = outputs // vector, 512 // vector
    columns_2 = min(threads, 1 << (columns.bit_length() - 1))
    height = threads // min(columns_2, 32)
    width = min(columns_2, threads // height)
    grid = -(-columns // width)
    blocks = processors.number * (processors.threads // (width * height))
    if grid > blocks:
        return None
    block_bytes = max(4, tensor.element_size()) * outputs * width * vector
    growth = Growth(
        least=255 * height + 1,
        growing=Affine(constant=block_bytes, per_sample=block_bytes / (16 * height)),
        most=(
            Affine(constant=block_bytes * -(-blocks // grid)),
            Affine(constant=block_bytes, per_sample=block_bytes / (256 * height)),
        ),
    )
    return KernelScratch(tensor.numel() // outputs, growth)


def _embedding_gradient(args: tuple[Any, ...], _: Processors) -> KernelScratch:
    """Return what an embedding's gradient takes beside it for n > 3072 tokens: sums of at most 10 tokens with the same
    index, ⌊n / 10⌋ + min(n, V) rows in float32 for a table of V rows, and 3.1 n + 3 min(n, V) indices.

    Sources: embedding_dense_backward_cuda in ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu. Tables of some
    hundred rows take less.
    """
    gradient, indices, rows = args[:3]
    row, index = 4 * gradient.shape[-1], indices.element_size()
    for_each = row / 10 + 3.1 * index
    growth = Growth(
        least=3073,
        growing=Affine(per_sample=for_each + row + 3 * index),
        most=(Affine(constant=(row + 3 * index) * rows, per_sample=for_each),),
    )
    return KernelScratch(indices.numel(), growth)


_FORMULAS: dict[OpOverload, Callable[[tuple[Any, ...], Processors], KernelScratch | None]] = {
    aten.sum.dim_IntList: _row_sum,
    aten.embedding_dense_backward.default: _embedding_gradient,
}
