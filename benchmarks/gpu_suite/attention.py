"""Bytes that attention saves for backward, by kernel: real tensors compared with the trace."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from benchmarks.cuda_memory import allocated_bytes
from hf_osdp.distributed.device import prefer_expandable_segments
from hf_osdp.quantities import format_bytes
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.memory_tracker import MemoryTracker

from .step import Bench, step

AIM = 0.03
"""Largest allowed relative error of saved bytes."""
HEADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The properties that decide the kernel."""

    dtype: torch.dtype
    shared: int
    """Query heads per key-value head; more than 1 is grouped-query attention."""
    mask: str
    """Kind of mask: `causal`, `bool`, or a mask of the queries' dtype (`bias`)."""
    dropout: float
    head_size: int

    @property
    def text(self) -> str:
        gqa = f"GQA {self.shared}, " if self.shared > 1 else ""
        return f"{str(self.dtype)[6:]}, {gqa}{self.mask}, dropout {self.dropout:g}, head {self.head_size}"


class AttentionBlock(nn.Module):
    """Projections around torch's attention; a block for the planner."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, kept = HEADS * case.head_size, HEADS // case.shared * case.head_size
        self.case = case
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, kept), nn.Linear(width, kept)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        heads = [
            layer(hidden).unflatten(-1, (-1, self.case.head_size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, mask, **self.options())
        return self.out(mixed.transpose(1, 2).flatten(2))

    def options(self) -> dict[str, object]:
        return {
            "dropout_p": self.case.dropout,
            "is_causal": self.case.mask == "causal",
            "enable_gqa": self.case.shared > 1,
        }


class Attends(nn.Module):
    """A model of two such blocks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock(case) for _ in range(2))
        self.to(case.dtype)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, mask)
        return hidden.float().mean()


@step(
    part=1, expected_s=45, limit_s=150, rehearsal_s=15,
    proves="attention saves what the trace says, kernel by kernel: dtype, grouped queries, mask, dropout, head size",
)  # fmt: skip
def attention(bench: Bench) -> None:
    samples, length = (2, 64) if bench.rehearses else (2, 1024)
    prefer_expandable_segments()  # a block of a fixed segment may count up to 1 MiB more than its tensor needs
    wrong = []
    for case in cases(bench):
        try:
            kernel, measured = measured_bytes(case, samples, length, bench.device)
        except RuntimeError as error:  # no kernel supports it
            bench.row(attention=case.text, kernel="none", measured=str(error).splitlines()[0], traced="", error="")
            continue
        traced = traced_bytes(case, samples, length, bench.device)
        error = traced / measured - 1
        bench.row(
            attention=case.text,
            kernel=kernel,
            measured=format_bytes(measured),
            traced=format_bytes(traced),
            error=f"{error:+.1%}",
        )
        if abs(error) > AIM:
            wrong.append(f"{case.text} ({kernel}): {error:+.1%}")
    bench.aim(not wrong, f"{len(wrong)} saved bytes are off by more than {AIM:.0%}: {'; '.join(wrong)}")
    bench.note(
        f"A block of projections and attention, {samples} samples of {length} tokens, {HEADS} heads; bytes are what"
        " its forward leaves."
    )


def cases(bench: Bench) -> list[Case]:
    """Return the cases, without dropout on the CPU: there it draws a whole matrix of scores, which the trace raises
    for single samples.
    """
    dtypes = (torch.float32, torch.bfloat16) if bench.rehearses else (torch.float32, torch.bfloat16, torch.float16)
    dropouts = (0.0,) if bench.rehearses else (0.0, 0.1)
    sizes = (64,) if bench.rehearses else (64, 80, 128, 256)
    masks = ("causal", "bool", "bias")
    every = itertools.product(dtypes, (1, 4), masks, dropouts, sizes)
    found = [Case(dtype=d, shared=s, mask=m, dropout=p, head_size=h) for d, s, m, p, h in every]
    # Head sizes above 64 only without an explicit mask and without dropout, because these decide the kernel alone.
    return [case for case in found if case.head_size == 64 or (case.mask == "causal" and not case.dropout)]


def batch_of(case: Case, samples: int, length: int, device: torch.device) -> dict[str, torch.Tensor | None]:
    """Return hidden states, and the mask of a batch without padding."""
    hidden = torch.randn(samples, length, HEADS * case.head_size, dtype=case.dtype, device=device)
    seen = torch.ones(samples, 1, length, length, dtype=torch.bool, device=device).tril()
    masks = {"causal": None, "bool": seen, "bias": torch.zeros(seen.shape, dtype=case.dtype, device=device)}
    return {"hidden": hidden, "mask": masks[case.mask]}


def measured_bytes(case: Case, samples: int, length: int, device: torch.device) -> tuple[str, int]:
    """Return the kernel that torch chooses, and the bytes that the second block's forward leaves in memory."""
    block, batch = Attends(case).to(device).blocks[1], batch_of(case, samples, length, device)
    hidden = batch["hidden"].requires_grad_()
    heads = [torch.empty(samples, n, length, case.head_size, dtype=case.dtype, device=device, requires_grad=True)
             for n in (HEADS, HEADS // case.shared, HEADS // case.shared)]  # fmt: skip
    kernel = (
        SDPBackend(torch._fused_sdp_choice(*heads, batch["mask"], **block.options()))
        .name.lower()
        .replace("_attention", "")
    )
    del heads
    if device.type == "cpu":
        with MemoryTracker(block_bytes=1) as live:
            output = block(hidden, batch["mask"])
            left = live.current_bytes
        del output
        return kernel, left
    block(hidden, batch["mask"]).sum().backward()  # allocates the workspaces
    before = allocated_bytes()
    output = block(hidden, batch["mask"])
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    output.sum().backward()
    return kernel, left


def traced_bytes(case: Case, samples: int, length: int, device: torch.device) -> int:
    """Return the same bytes as in the description."""
    with torch.device("meta"):
        model = Attends(case)
    description = describe(
        model, sequence_length=length, device_type=device.type, recomputation=False, block_classes=("AttentionBlock",),
        inputs=lambda count: batch_of(case, count, length, torch.device("cpu")),
    )  # fmt: skip
    blocks = [index for index, unit in enumerate(description.units) if unit.class_name == "AttentionBlock"]
    return next(segment.saved_bytes.bytes(samples) for segment in description.segments if segment.unit == blocks[1])
