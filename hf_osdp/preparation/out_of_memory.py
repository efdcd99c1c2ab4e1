"""Out of memory in spite of the plan: report where, by how much, and a lower limit; with `on_oom="replan"`, restart
under that limit.
"""

from __future__ import annotations

import logging
import re
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ..distributed import restart
from ..distributed.fsdp_internals import ParameterGroup, TrainingState, parameter_groups
from ..errors import one_line
from ..modeling.units import modules_by_name
from ..planner.description import GatherSpan, UnitDescription
from ..planner.hardware import Hardware
from ..planner.placement import HOST_OPTIONS
from ..planner.plan import Plan
from ..quantities import format_bytes

_MIN_REDUCTION = 0.05
"""The limit is lowered by at least this share: with fragmentation, or other processes on the device, the observed
peak is too low.
"""
_HOST_SIGNS = (
    "defaultcpuallocator: can't allocate memory",
    "error code 12 (cannot allocate memory)",
)  # c10/core/impl/alloc_cpu.cpp
_DEVICE_SIGNS = (
    # c10/cuda/CUDACachingAllocator.cpp; DataParallel raises it again as a RuntimeError (torch/_utils.py)
    "cuda out of memory",
    # cudaErrorMemoryAllocation, c10/cuda/CUDAException.cpp: AcceleratorError since 2.8, RuntimeError before
    "cuda error: out of memory",
    "hip error: out of memory",
    "_status_alloc_failed",  # of cuBLAS, cuSOLVER, cuSPARSE and cuDNN: aten/src/ATen/cuda/Exceptions.h
    "cudnn_status_internal_error_device_allocation_failed",  # cuDNN 9
    "failed to cuda calloc",  # NCCL src/include/alloc.h, under "unhandled cuda error"
    "cuda failure 2 'out of memory'",  # NCCL src/include/checks.h
    "cuda failure 'out of memory'",  # the same, as 2.28.9 wrote it on an H100
)
_CUDNN_ON_FULL_DEVICE = "cudnn_status_internal_error"
"""cuDNN 9.19 raised this on an H100 without free memory; it has other causes too."""
_FULL_BYTES = 64 * 2**20
"""With less free memory, a device is full for a library that needs workspaces of some MiB."""
_GATHERS = ("unshard", "wait_for_unshard", "pre_forward", "pre_backward")
_AUTOGRAD_FILE, _OPTIMIZER_FILE = "torch/autograd/graph.py", "torch/optim/"
_AMOUNT = r"(\d+(?:\.\d+)?) ([KMGT]iB|bytes)"
_REQUESTED = re.compile(f"[Tt]ried to allocate {_AMOUNT}")
_ALLOCATED = re.compile(f"Of the allocated memory {_AMOUNT} is allocated by PyTorch")
"""In the message of torch's allocator."""

_log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error reports that the device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    if any(sign in text for sign in (*_HOST_SIGNS, *_DEVICE_SIGNS)):
        return True
    return _CUDNN_ON_FULL_DEVICE in text and torch.cuda.is_initialized() and torch.cuda.mem_get_info()[0] < _FULL_BYTES


def is_of_host(error: BaseException) -> bool:
    """Return whether an out-of-memory error, as found by `is_out_of_memory`, is about the host's memory."""
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _HOST_SIGNS)


def place_of(error: BaseException, model: nn.Module, units: Sequence[UnitDescription]) -> str:
    """Return the moment of a training step in which an error was raised, with its unit if that is known."""
    by_name = modules_by_name(model)
    labels = {id(by_name[name]): unit.label for unit in units for name in unit.module_names}
    frames = [
        (frame, frame.f_code.co_filename.replace("\\", "/")) for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    in_backward = any(_AUTOGRAD_FILE in file for _, file in frames)
    for frame, file in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, ParameterGroup):
            moment = "gathering" if frame.f_code.co_name in _GATHERS else "reducing the gradients"
            return f"{moment} of {owner.label}"
        if isinstance(owner, nn.Module) and id(owner) in labels:
            return f"{'recomputation' if in_backward else 'forward'} of {labels[id(owner)]}"
        if _OPTIMIZER_FILE in file:
            return "the optimizer's step"
    if not in_backward:
        return "code between model and optimizer"
    begun = [m for m in model.modules() if any(g.state is TrainingState.PRE_BACKWARD for g in parameter_groups(m))]
    blocks = {id(by_name[name]) for unit in units if unit.span is GatherSpan.USE for name in unit.module_names}
    running = [labels[id(m)] for m in begun if id(m) in blocks]  # other units are in backward until the step ends
    return f"backward of {running[-1]}" if running else "backward"


def safer_limit(limit_bytes: int, plan: Plan, needed_bytes: int | None) -> int:
    """Return the limit to plan under after a plan that needed more than its estimate.

    Lower the limit by what the plan needed above its estimate, by at least a twentieth, and so far that the plan
    itself no longer fits: limit' = min(limit - max(needed - estimate, limit / 20), estimate - estimate / 20).
    `needed_bytes` is None if it is unknown.
    """
    estimate = plan.peak_bytes or limit_bytes
    over = max((needed_bytes or 0) - estimate, int(limit_bytes * _MIN_REDUCTION))
    return max(1, min(limit_bytes - over, int(estimate * (1 - _MIN_REDUCTION))))


@contextmanager
def out_of_memory_explained(handler: Callable[[], OutOfMemoryHandler | None]) -> Iterator[None]:
    """Let the handler that there is then, if there is one, explain out-of-memory errors raised in this context."""
    try:
        yield
    except Exception as error:
        if (found := handler()) is not None:
            found.handle(error)
        raise


class OutOfMemoryHandler:
    """Explain out-of-memory errors in one model's training, and restart all ranks if `on_oom="replan"`."""

    def __init__(
        self, model: nn.Module, plan: Plan, units: Sequence[UnitDescription],
        *, hardware: Hardware | None, on_oom: str, device: torch.device,
    ) -> None:  # fmt: skip
        """Take the model under its plan, and the hardware of the search; None for a plan that the user gave."""
        self._model, self._plan, self._units = model, plan, tuple(units)
        self._hardware, self._replans, self._device = hardware, on_oom == "replan", device

    def handle(self, error: BaseException) -> None:
        """Put an explanation into an out-of-memory error's message, once; record the next plan's limit if a
        launcher restarts all ranks.
        """
        if not is_out_of_memory(error) or hasattr(error, "explained_by_osdp"):
            return
        original = one_line(error)  # `explain` may change it
        try:
            text, limit_bytes = self.explain(error)
        except Exception:  # a failed explanation must not replace the error itself
            _log.warning("The out-of-memory error could not be explained.", exc_info=True)
            return
        obstacle = "there is no other plan" if limit_bytes is None else restart.reason_not_to_restart()
        if self._replans and limit_bytes is not None and obstacle is None:
            restart.note_limit(limit_bytes)
            text += " The launcher restarts all ranks with it."
        elif self._replans:
            text += f' on_oom="replan" cannot restart: {obstacle}.'
        elif obstacle is None:
            text += ' With on_oom="replan" the run continues with it.'
        error.explained_by_osdp = True  # type: ignore[attr-defined]
        error.args = (f"{text} ({original})",)

    def explain(self, error: BaseException) -> tuple[str, int | None]:
        """Return the explanation of an error in one line, and the limit for another plan if the plan was searched."""
        place = place_of(error, self._model, self._units)
        who = f"rank {dist.get_rank()} on {socket.gethostname()}" if dist.is_initialized() else socket.gethostname()
        if self._device.type == "cuda" and is_of_host(error):
            return (
                f"Out of host memory on {who} in {place}. Use fewer DataLoader workers,"
                f" {'=False, '.join(HOST_OPTIONS)}=False, or a machine or container with more memory."
            ), None
        requested, allocated = _bytes_in(_REQUESTED, str(error)), self._allocated(str(error))
        seen = "the allocated bytes are not known" + (
            f", {format_bytes(requested)} were requested" if requested else ""
        )
        if allocated is not None:
            seen = f"{format_bytes(allocated)} were allocated and {format_bytes(requested or 0)} more requested"
        peak = "an unknown amount" if self._plan.peak_bytes is None else format_bytes(self._plan.peak_bytes)
        limit_bytes = None if self._hardware is None else self._plan.memory_limit_bytes
        limit = "" if limit_bytes is None else f" of a limit of {format_bytes(limit_bytes)}"
        text = f"Out of memory on {who} in {place}: the plan was estimated to need {peak}{limit}, {seen}."
        if limit_bytes is None:
            return f"{text} The plan was given; plan again under a lower memory_limit.", None
        lower = safer_limit(limit_bytes, self._plan, None if allocated is None else allocated + (requested or 0))
        if 2 * lower < limit_bytes:
            return (
                f"{text} No estimate is so far off: other processes, or code that the plan does not know, hold or"
                " request the memory. Free it, or use smaller batches."
            ), None
        return f"{text} Plan again with memory_limit={lower}.", lower

    def _allocated(self, text: str) -> int | None:
        """Return the allocated bytes in torch's message, else its allocator's peak, plus what the device reserves."""
        reserved = 0 if self._hardware is None else self._hardware.outside_bytes(self._plan.communicators)
        allocated = _bytes_in(_ALLOCATED, text)
        if allocated is None and self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
        return None if allocated is None else allocated + reserved


def _bytes_in(pattern: re.Pattern[str], text: str) -> int | None:
    """Return the amount that a pattern finds in a message."""
    found = pattern.search(text)
    return None if found is None else int(float(found[1]) * 1024 ** "BKMGT".index(found[2][0].upper()))
