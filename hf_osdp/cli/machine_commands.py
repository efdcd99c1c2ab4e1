"""`hf-osdp config` and `profile`: write an accelerate configuration, measure a machine."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..quantities import parse_limit
from .cases import load_config, names_in
from .options import count, option
from .output import Output

FILE = Path("osdp.yaml")
_HEAD = """\
# Written by `hf-osdp config`. To run an unchanged script under a plan:
#   {launch}
# Other options of OSDPConfig, such as strategy or plan, go next to `osdp: true`. State dicts: FULL_STATE_DICT or, for large
# models, SHARDED_STATE_DICT.
"""  # noqa: E501


def _of_this_machine(device: str | None, precision: str | None) -> tuple[str, str]:
    """Return the device type, `cpu` or `cuda`, and the mixed precision; this machine's defaults replace None."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    computes_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return device, precision or ("bf16" if computes_bf16 else "no")


def config(
    flags: dict[str, Any],
    output: Annotated[Path, option("FILE", "Write the configuration to this file.")] = FILE,
    device: Annotated[
        Literal["cpu", "cuda"] | None, option("cpu|cuda", "Device to train on; default: CUDA if torch finds it.")
    ] = None,
    devices_per_node: Annotated[
        int | None, count("Processes per machine; default: one per GPU of this machine, two on the CPU.")
    ] = None,
    num_nodes: Annotated[int, count("Machines.")] = 1,
    main_address: Annotated[str | None, option("HOST[:PORT]", "Address of the first of several machines.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write an accelerate configuration for a machine, and print the command that starts a script with it."""
    import torch
    import yaml

    kind, precision = _of_this_machine(device, flags["precision"])
    here = torch.cuda.device_count() if kind == "cuda" else min(2, os.cpu_count() or 1)
    if not (processes := devices_per_node or here):
        raise ValueError(
            "--device cuda: torch finds no GPU here; give --devices-per-node, the number of GPUs per machine."
        )
    if (memory_limit := flags["memory_limit"]) is not None:
        parse_limit(memory_limit, name="--memory-limit")
    if output.exists() and not force:
        raise ValueError(f"{output} is there already; give --force to overwrite it, or another --output.")
    host, _, port = (main_address or "").partition(":")
    if (num_nodes > 1) != bool(host) or not (port or "0").isdecimal():
        raise ValueError(
            f"--num-nodes {num_nodes} with --main-address {main_address}: give both for several machines, or neither;"
            " the address is HOST or HOST:PORT of the first machine."
        )
    several = {"main_process_ip": host, "main_process_port": int(port or 29500), "rdzv_backend": "static"}
    on_cpu = {"use_cpu": True} if kind == "cpu" else {}
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",  # on the CPU too: it makes accelerate start several processes
        **on_cpu,
        "num_machines": num_nodes,
        "num_processes": num_nodes * processes,
        "machine_rank": 0,
        **({"main_process_port": 0} if num_nodes == 1 else {**several, "same_network": True}),
        "mixed_precision": precision,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_sharding_strategy": {
                "osdp": True, **on_cpu, **({"memory_limit": memory_limit} if memory_limit else {})
            },
        },
    }  # fmt: skip
    rank = "--machine_rank 0 " if num_nodes > 1 else ""
    launch = f"accelerate launch --config_file {shlex.quote(str(output))} {rank}-m hf_osdp.run train.py ARGUMENTS..."
    output.write_text(_HEAD.format(launch=launch) + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    machines = f", on each of {num_nodes} machines with its own --machine_rank" if num_nodes > 1 else ""
    typer.echo(
        f"{output}: {num_nodes * processes} processes on {kind}, precision {precision}. Start a script{machines} with:"
        f"\n{launch}"
    )


def profile(
    flags: dict[str, Any],
    output: Annotated[Path, option("FILE", "Write the profile to this file, as JSON.")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Also time this model's blocks: hub id, local folder or config.json."),
    ] = None,
    sequence_length: Annotated[int | None, count("Tokens per sample, for MODEL.")] = None,
    micro_batch_sizes: Annotated[
        str, option("N,N,...", "Sizes to time MODEL at; the plan's should be within their range.")
    ] = "1,2,4",
    device: Annotated[
        Literal["cpu", "cuda"] | None, option("cpu|cuda", "Device to measure; default: CUDA if torch finds it.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Approximate time to measure, in seconds.")
    ] = 10.0,
) -> None:
    """Measure this machine: matrix products, memory, collectives, host link, and a model's blocks.

    Started alone, it measures one process. To measure collectives, start as many processes as will train:
    torchrun --nproc-per-node 8 -m hf_osdp profile MODEL --sequence-length 1024 --output profile.json
    """
    screen = Output(output=output)
    if (model is None) != (sequence_length is None):
        raise ValueError(
            "Blocks of a MODEL are timed at one sequence length; give MODEL and --sequence-length, or neither."
        )
    import torch.distributed as dist

    from ..distributed.launcher import launched_rank
    from ..measurement.block_times import TimedModel
    from ..measurement.machine import measure_profile
    from ..planner.training_job import Precision
    from ..report.tables import profile_parts
    from ..sharding.environment import form_process_group

    timed = None
    device_type, precision = _of_this_machine(device, flags["precision"])
    sizes: Any = tuple(int(size) if size.isdecimal() else size for size in names_in(micro_batch_sizes))
    if model is not None and sequence_length is not None:
        timed = TimedModel(
            model_or_config=load_config(model), sequence_length=sequence_length,
            micro_batch_sizes=sizes,
            compute_dtype=Precision.named(precision).compute,
            activation_checkpointing=bool(flags["recompute"]),
            compile=flags["compile"], auto_class=flags["auto_class"],
            block_classes=names_in(flags["block_classes"]) or None,
        )  # fmt: skip
    started = time.perf_counter()
    form_process_group(needed=False, device_type=device_type)
    try:
        with screen.working("Measuring"):
            found = measure_profile(device_type=device_type, seconds=seconds, model=timed)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if launched_rank():
        return
    found.save(output)
    used = f"Blocks: precision {precision}. " if timed else ""
    screen.print(*profile_parts(found), f"Measured in {time.perf_counter() - started:.0f} s. {used}Profile: {output}")
