"""`hf-osdp profile`: measure this machine, and a model's blocks on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .cases import load_config
from .options import AutoClass, BlockClasses, Checkpointing, PrecisionName
from .output import Output, check_folder, errors_in_one_line


def profile(
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the profile goes, as JSON.")],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Also time this model's blocks: hub id, local folder or config.json.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of one sample, for MODEL.")] = None,
    precision: PrecisionName = "no",
    activation_checkpointing: Checkpointing = False,
    micro_batch_sizes: Annotated[
        str, typer.Option(metavar="N,N,...", help="Sizes to time MODEL at; the plan's should lie between them.")
    ] = "1,2,4",
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(metavar="cpu|cuda", help="What to measure; CUDA where torch sees it.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="S", help="About how long to measure.")] = 10.0,
    block_classes: BlockClasses = None,
    auto_class: AutoClass = None,
) -> None:
    """Measure this machine: matrix products, memory, collectives, host link, and a model's blocks. The plan is as good as they are.

    Alone it measures one process. To measure collectives, start as many processes as will train:
    torchrun --nproc-per-node 8 -m hf_osdp profile MODEL --sequence-length 1024 --output profile.json
    """
    with errors_in_one_line():
        check_folder(output, "--output")
        sizes = _sizes(micro_batch_sizes)
        if model is not None and sequence_length is None:
            raise ValueError("MODEL is timed at one sequence length; give --sequence-length.")
        _refuse_without_model(
            model,
            {
                "--sequence-length": sequence_length is not None,
                "--precision": precision != "no",
                "--activation-checkpointing": activation_checkpointing,
                "--micro-batch-sizes": sizes != (1, 2, 4),
                "--block-classes": block_classes is not None,
                "--auto-class": auto_class is not None,
            },
        )
        names = [name.strip() for name in (block_classes or "").split(",") if name.strip()]
        options = {"activation_checkpointing": activation_checkpointing, "auto_class": auto_class, "block_classes": names or None}
        if model is not None:
            options |= {"model_or_config": load_config(model), "sequence_length": sequence_length, "micro_batch_sizes": sizes}
        _measure(output, device, seconds, precision, options if model is not None else {})


def _measure(output: Path, device: str | None, seconds: float, precision: str, options: dict[str, Any]) -> None:
    """Measure on all ranks; rank 0 shows and writes."""
    import torch

    from ..measurement.block_times import TimedModel
    from ..measurement.profile import measure_profile
    from ..planner.job import Precision
    from ..report.profile_table import profile_tables

    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    first = os.environ.get("RANK", "0") == "0"
    screen = Output(None)
    started = time.perf_counter()
    with _process_group(device_type), screen.working("Measuring"):
        model = TimedModel(compute_dtype=Precision.named(precision).compute, **options) if options else None
        found = measure_profile(device_type=device_type, seconds=seconds, model=model)
    if not first:
        return
    found.save(output)
    screen.print(*profile_tables(found))
    screen.print(f"Measured in {time.perf_counter() - started:.0f} s. Profile: {output}")


@contextmanager
def _process_group(device_type: str) -> Iterator[None]:
    """The group that torchrun or accelerate launch describe; without one this process is alone."""
    import torch
    import torch.distributed as dist

    from ..distributed.device import own_gpu
    from ..distributed.roll_call import roll_call

    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield
        return
    if device_type == "cuda" and torch.cuda.is_available():
        own_gpu()
    with roll_call():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" and torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sizes(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--micro-batch-sizes {text!r} must be whole numbers of at least 1 with commas between, for example 1,2,4.")
    return sizes


def _refuse_without_model(model: str | None, given: dict[str, bool]) -> None:
    if model is None and (useless := [name for name, is_given in given.items() if is_given]):
        raise ValueError(f"{useless[0]} is about MODEL's blocks, but there is no MODEL; name one, or leave it out.")
