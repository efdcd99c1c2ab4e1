"""Live bytes by what they are: who allocated a storage says what it holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum
from types import FrameType

import torch

from .allocation_log import AllocationLog
from .live_bytes import CUDA_BLOCK_BYTES, LiveBytes, plain_tensors, storage_of


class Kind(str, Enum):
    """What bytes are, as `MemoryBreakdown` names them."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    GATHERED = "gathered"
    BUFFERS = "buffers"
    MODEL_BUFFERS = "model_buffers"


_BY_FUNCTION = {
    ("_fsdp_collectives.py", "foreach_all_gather"): Kind.GATHERED,
    ("_fsdp_collectives.py", "foreach_all_gather_copy_out"): Kind.GATHERED,
    ("_fsdp_collectives.py", "foreach_reduce"): Kind.BUFFERS,
    ("_fsdp_param.py", "init_all_gather_outputs"): Kind.GATHERED,
    ("_fsdp_param.py", "alloc_all_gather_outputs"): Kind.GATHERED,
    ("_fsdp_param.py", "init_unsharded_param"): Kind.GATHERED,
    ("_fsdp_param.py", "to_accumulated_grad_if_needed"): Kind.GRADIENTS,
    ("_fsdp_param.py", "accumulate_unsharded_grad_if_needed"): Kind.GRADIENTS,
}
"""Functions of torch/distributed/fsdp/_fully_shard, and what their allocations are."""


class Ledger(LiveBytes):
    """`LiveBytes` that keeps a sum for each kind, and what the sums were when the total was highest.

    What FSDP2 allocates is told by the function that does; in a reduction the first storage is the buffer that is sent
    and the others become gradients. Everything else that operators make is activations: saved tensors, workspace,
    gradients before they are reduced.
    """

    def __init__(self, *, block_bytes: int = CUDA_BLOCK_BYTES, device_type: str | None = None, log: AllocationLog | None = None) -> None:
        super().__init__(block_bytes=block_bytes, device_type=device_type, log=log)
        self._kinds: dict[int, Kind] = {}
        self._sums = dict.fromkeys(Kind, 0)
        self._sums_at_peak = dict(self._sums)
        self._tracked_as: Kind | None = None

    @property
    def at_peak(self) -> dict[Kind, int]:
        """Bytes of each kind when the peak was reached."""
        return dict(self._sums_at_peak)

    def reset_peak(self) -> None:
        """Forget the peak: it starts again from what is alive now."""
        super().reset_peak()
        self._sums_at_peak = dict(self._sums)

    def track_as(self, kind: Kind, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count tensors that were made outside, as `track` does, under a kind."""
        self._tracked_as = kind
        try:
            self.track(tensors)
        finally:
            self._tracked_as = None

    def relabel(self, kind: Kind, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors under another kind from now on."""
        for tensor in tensors:
            for key in {storage._cdata for local in plain_tensors(tensor) if (storage := storage_of(local)) is not None}:
                if key in self._kinds:
                    self._sums[self._kinds[key]] -= self._sizes[key]
                    self._sums[kind] += self._sizes[key]
                    self._kinds[key] = kind

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        before, peak = self._sizes.get(key, 0), self._peak_bytes
        if key not in self._kinds:
            self._kinds[key] = self._tracked_as or self._kind_of_allocation()
        super()._note_storage(storage)
        self._sums[self._kinds[key]] += self._sizes[key] - before
        if self._peak_bytes > peak:
            self._sums_at_peak = dict(self._sums)

    def _forget(self, key: int) -> None:
        self._sums[self._kinds.pop(key)] -= self._sizes[key]
        super()._forget(key)

    def _kind_of_allocation(self) -> Kind:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            kind = _BY_FUNCTION.get((code.co_filename.rpartition("/")[2], code.co_name))
            if kind is not None:
                return self._part_of_reduction(frame) if code.co_name == "foreach_reduce" else kind
            if "/torch/optim/" in code.co_filename:
                return Kind.BUFFERS
            frame = frame.f_back
        return Kind.ACTIVATIONS

    def _part_of_reduction(self, frame: FrameType) -> Kind:
        return Kind.GRADIENTS if frame.f_locals.get("reduce_scatter_input") is not None else Kind.BUFFERS
