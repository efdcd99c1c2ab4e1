"""`hf-osdp config`, `run` and `profile`: write an accelerate configuration, run a script under a plan, measure a
machine.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..quantities import parse_limit
from .cases import load_config, names_in
from .options import count, option, stated
from .output import Output

FILE = Path("osdp.yaml")
_SIZES = "1,2,4"
_HEAD = """\
# Written by `hf-osdp config`. To run an unchanged script under a plan:
#   {launch}
# Other options of OSDPConfig, such as strategy, plan or recalibrate, go next to `osdp: true`. State dicts: FULL_STATE_DICT or, for large
# models, SHARDED_STATE_DICT.
"""  # noqa: E501


def of_this_machine(device: str | None, precision: str | None) -> tuple[str, str]:
    """Return the device type, `cpu` or `cuda`, and the mixed precision; this machine's defaults replace None."""
    import torch

    from ..preparation.preflight import bf16_on

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return device, precision or ("bf16" if bf16_on(None, device) else "no")


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

    kind, precision = of_this_machine(device, flags["precision"])
    here = torch.cuda.device_count() if kind == "cuda" else min(2, os.cpu_count() or 1)
    if not (processes := devices_per_node or here):
        raise ValueError(
            "--device cuda: torch finds no GPU here; give --devices-per-node, the number of GPUs per machine."
        )
    if (memory_limit := flags["memory_limit"]) is not None:
        parse_limit(memory_limit, name="--memory-limit")
    if output.exists() and not force:
        raise ValueError(f"{output} is there already; give --force to overwrite it, or another --output.")
    options = {"memory_limit": memory_limit} if memory_limit else {}
    text, launch = launch_file(kind, num_nodes, processes, precision, options, path=output, main_address=main_address)
    output.write_text(text, encoding="utf-8")
    where = f"{num_nodes} x {processes}" if num_nodes > 1 else str(processes)
    typer.echo(f"{output}: {where} processes on {kind}, precision {precision}. Start a script with:\n{launch}")
    if num_nodes > 1:
        typer.echo(
            f"on the first machine, with --machine_rank 1{' and so on' if num_nodes > 2 else ''} on the others."
        )


def launch_file(
    device: str,
    nodes: int,
    devices_per_node: int,
    precision: str,
    options: Mapping[str, object],
    *,
    path: Path,
    main_address: str | None,
) -> tuple[str, str]:
    """Return the text of an accelerate configuration, and the command that starts a script with the file at `path`.

    `options` go next to `osdp: true`; `main_address` is HOST or HOST:PORT of the first of several machines.
    """
    import yaml

    on_cpu = {"use_cpu": True} if device == "cpu" else {}
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",  # on the CPU too: it makes accelerate start several processes
        **on_cpu,
        "num_machines": nodes,
        "num_processes": nodes * devices_per_node,
        "machine_rank": 0,
        **_rendezvous(nodes, main_address),
        "mixed_precision": precision,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_sharding_strategy": {"osdp": True, **on_cpu, **options},
        },
    }
    rank = "--machine_rank 0 " if nodes > 1 else ""
    launch = f"accelerate launch --config_file {shlex.quote(str(path))} {rank}-m hf_osdp.run train.py ARGUMENTS..."
    return _HEAD.format(launch=launch) + yaml.safe_dump(content, sort_keys=False), launch


def _rendezvous(num_nodes: int, address: str | None) -> dict[str, Any]:
    if num_nodes == 1:
        if address is not None:
            raise ValueError(
                f"--main-address {address} has no effect on one machine; leave it out, or give --num-nodes."
            )
        return {"main_process_port": 0}
    host, _, port = (address or "").partition(":")
    if not host or not (port or "29500").isdecimal():
        raise ValueError(
            f"--num-nodes {num_nodes} needs --main-address HOST or HOST:PORT, the address of the first machine."
        )
    return {
        "main_process_ip": host,
        "main_process_port": int(port or 29500),
        "rdzv_backend": "static",
        "same_network": True,
    }


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script, followed by its arguments.")],
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The accelerate configuration.")] = FILE,
) -> None:
    """Run an unchanged training script under a plan, like `accelerate launch -m hf_osdp.run`."""
    for path, remedy in (
        (config, "write it with hf-osdp config, or name another with --config"),
        (Path(script), "name a script"),
    ):
        if not path.is_file():
            raise ValueError(f"There is no file {path}; {remedy}.")
    command = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(config),
        "-m",
        "hf_osdp.run",
        script,
        *context.args,
    ]
    os.execv(sys.executable, [sys.executable, *command])


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
    ] = _SIZES,
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
    if not re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", micro_batch_sizes.replace(" ", "")):
        rule = "must be whole numbers of at least 1, separated by commas, for example 1,2,4."
        raise ValueError(f"--micro-batch-sizes {micro_batch_sizes!r} {rule}")
    if model is not None and sequence_length is None:
        raise ValueError("MODEL is timed at one sequence length; give --sequence-length.")
    own = {"--sequence-length": sequence_length is not None, "--micro-batch-sizes": micro_batch_sizes != _SIZES}
    if model is None and (useless := [*(name for name, is_stated in own.items() if is_stated), *stated(flags)]):
        raise ValueError(
            f"{useless[0]} concerns MODEL's blocks, but no MODEL was given; give one, or leave the option out."
        )
    import torch.distributed as dist

    from ..distributed.launcher import launched_rank
    from ..measurement.block_times import TimedModel
    from ..measurement.machine import measure_profile
    from ..planner.training_job import Precision
    from ..report.run_tables import profile_tables
    from ..sharding.environment import form_process_group

    timed = None
    device_type, precision = of_this_machine(device, flags["precision"])
    if model is not None and sequence_length is not None:
        timed = TimedModel(
            model_or_config=load_config(model), sequence_length=sequence_length,
            micro_batch_sizes=tuple(map(int, micro_batch_sizes.split(","))),
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
    blocks = f", blocks with precision {precision}" if timed else ""
    screen.print(
        *profile_tables(found), f"Measured in {time.perf_counter() - started:.0f} s{blocks}. Profile: {output}"
    )
