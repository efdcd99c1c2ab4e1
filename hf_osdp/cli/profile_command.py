"""`hf-osdp profile`: measure this machine, and a model's blocks on it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .cases import load_config, names_in, of_this_machine
from .options import stated
from .output import Output

_SIZES = "1,2,4"


def profile(
    flags: dict[str, Any],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the profile goes, as JSON.")],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Also time this model's blocks: hub id, local folder or config.json.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of one sample, for MODEL.")] = None,
    micro_batch_sizes: Annotated[
        str, typer.Option(metavar="N,N,...", help="Sizes to time MODEL at; the plan's should lie between them.")
    ] = _SIZES,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(metavar="cpu|cuda", help="What to measure; CUDA where torch sees it.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="S", help="About how long to measure.")] = 10.0,
) -> None:
    """Measure this machine: matrix products, memory, collectives, host link, and a model's blocks. The plan is as good as they are.

    Alone it measures one process. To measure collectives, start as many processes as will train:
    torchrun --nproc-per-node 8 -m hf_osdp profile MODEL --sequence-length 1024 --output profile.json
    """
    screen, sizes = Output(output=output), _sizes(micro_batch_sizes)
    if model is not None and sequence_length is None:
        raise ValueError("MODEL is timed at one sequence length; give --sequence-length.")
    own = {"--sequence-length": sequence_length is not None, "--micro-batch-sizes": micro_batch_sizes != _SIZES}
    if model is None and (useless := [*(name for name, is_stated in own.items() if is_stated), *stated(flags)]):
        raise ValueError(f"{useless[0]} is about MODEL's blocks, but there is no MODEL; name one, or leave it out.")
    import torch.distributed as dist

    from ..measurement.block_times import TimedModel
    from ..measurement.machine import measure_profile
    from ..planner.job import Precision
    from ..report.run_tables import profile_tables
    from ..sharding.environment import form_process_group

    timed = None
    device_type, precision = of_this_machine(device, flags["precision"])
    if model is not None and sequence_length is not None:
        timed = TimedModel(
            model_or_config=load_config(model), sequence_length=sequence_length, micro_batch_sizes=sizes,
            compute_dtype=Precision.named(precision).compute, activation_checkpointing=flags["activation_checkpointing"],
            compile=flags["compile"], auto_class=flags["auto_class"], block_classes=names_in(flags["block_classes"]) or None,
        )  # fmt: skip
    started = time.perf_counter()
    form_process_group(needed=False, device_type=device_type)
    try:
        with screen.working("Measuring"):
            found = measure_profile(device_type=device_type, seconds=seconds, model=timed)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if os.environ.get("RANK", "0") != "0":
        return
    found.save(output)
    blocks = f", blocks with precision {precision}" if timed else ""
    screen.print(*profile_tables(found), f"Measured in {time.perf_counter() - started:.0f} s{blocks}. Profile: {output}")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--micro-batch-sizes {text!r} must be whole numbers of at least 1 with commas between, for example 1,2,4.")
    return sizes
