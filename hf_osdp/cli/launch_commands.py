"""`hf-osdp config` and `run`: the accelerate configuration of a machine, and a script under a plan."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..quantities import parse_limit
from .cases import of_this_machine

FILE = Path("osdp.yaml")
_HEAD = """\
# As `hf-osdp config` writes it. A script starts under a plan, unchanged, with:
#   {launch}
# Other options of OSDPConfig, such as strategy, plan or recalibrate, go beside `osdp: true`. State dicts: FULL_STATE_DICT or, for large
# models, SHARDED_STATE_DICT.
"""


def config(
    flags: dict[str, Any],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the configuration goes.")] = FILE,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(metavar="cpu|cuda", help="What to train on; CUDA where torch sees it.")
    ] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes on each machine; else one for each GPU that is here, two on the CPU.")
    ] = None,
    num_nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Machines.")] = 1,
    main_address: Annotated[str | None, typer.Option(metavar="HOST[:PORT]", help="Of the first machine, where there are several.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write the accelerate configuration for a machine, and show the line that launches a script with it."""
    import torch

    kind, precision = of_this_machine(device, flags["precision"])
    here = torch.cuda.device_count() if kind == "cuda" else min(2, os.cpu_count() or 1)
    if not (processes := devices_per_node or here):
        raise ValueError("--device cuda: torch sees no GPU here; give --devices-per-node, the number of them in each machine.")
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
        typer.echo(f"on the first machine, with --machine_rank 1{' and so on' if num_nodes > 2 else ''} on the others.")


def launch_file(
    device: str, nodes: int, devices_per_node: int, precision: str, options: Mapping[str, object], *, path: Path, main_address: str | None
) -> tuple[str, str]:
    """Return the text of an accelerate configuration, and the line that launches a script with it from the path.

    `options` stand beside `osdp: true`; `main_address` is HOST or HOST:PORT of the first of several machines.
    """
    import yaml

    on_cpu = {"use_cpu": True} if device == "cpu" else {}
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",  # of the CPU, too: what starts several processes
        **on_cpu,
        "num_machines": nodes,
        "num_processes": nodes * devices_per_node,
        "machine_rank": 0,
        **_meeting(nodes, main_address),
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


def _meeting(num_nodes: int, address: str | None) -> dict[str, Any]:
    if num_nodes == 1:
        if address is not None:
            raise ValueError(f"--main-address {address} has no effect on one machine; leave it out, or give --num-nodes.")
        return {"main_process_port": 0}
    host, _, port = (address or "").partition(":")
    if not host or not (port or "29500").isdecimal():
        raise ValueError(f"--num-nodes {num_nodes} needs --main-address HOST or HOST:PORT, by which the others reach the first machine.")
    return {"main_process_ip": host, "main_process_port": int(port or 29500), "rdzv_backend": "static", "same_network": True}


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script; what follows are its arguments.")],
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The accelerate configuration.")] = FILE,
) -> None:
    """Train a script that does not know hf_osdp under a plan, as `accelerate launch -m hf_osdp.run` does."""
    for path, remedy in ((config, "write it with hf-osdp config, or name another with --config"), (Path(script), "name a script")):
        if not path.is_file():
            raise ValueError(f"There is no file {path}; {remedy}.")
    command = ["-m", "accelerate.commands.launch", "--config_file", str(config), "-m", "hf_osdp.run", script, *context.args]
    os.execv(sys.executable, [sys.executable, *command])
