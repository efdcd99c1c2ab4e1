"""Measure how long training waits while a checkpoint is written, in each layout and with Accelerate's functions.

    python benchmarks/checkpoint_saving.py [--saves 5] [--layers 8] [--width 512] [--folder DIR]

A GPT-2 is sharded over two gloo ranks, with AdamW and its states. Each round saves in every way in turn, with one
training step between, so that all ways run under the same conditions. Times are from the call to its return, on the
slower rank. Our functions also compute checksums, flush and rename the folder; Accelerate's do not. The time of the
background ends when the folder has its final name.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_osdp.checkpoint.states import load_loop  # noqa: E402
from hf_osdp.checkpoint.writer import CheckpointWriter  # noqa: E402
from hf_osdp.distributed.stop import StopSignal  # noqa: E402
from tests.helpers.checkpointed import save_loop  # noqa: E402
from tests.helpers.distributed import run_ranks  # noqa: E402

RANKS = 2
STOCK = "Accelerate, in shards"
OURS = "in shards"
BACKGROUND = "in shards, in the background"
WHOLE = "whole"
ASKED = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="folder to write to; default: the system's temporary folder")
    options = parser.parse_args()
    from benchmarks.checkpoint_saving import measure as by_name  # not __main__.measure, because ranks import it

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        times = run_ranks(by_name, RANKS, folder, options.saves, options.layers, options.width, timeout_s=1800)
    slower = {way: [max(pair) for pair in zip(*(rank[way] for rank in times), strict=True)] for way in times[0]}
    show(slower, saves=options.saves)


def measure(folder: str, saves: int, layers: int, width: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of save and of a step, on one rank."""
    from accelerate import PartialState

    PartialState(cpu=True)
    model, optimizer = training(layers, width)
    writer = CheckpointWriter(in_background=True)
    save = functools.partial(save_loop, model=model, optimizer=optimizer, others={}, progress={})
    ways: dict[str, Callable[[Path], None]] = {
        STOCK: functools.partial(save_by_accelerate, model=model, optimizer=optimizer),
        OURS: lambda place: save(CheckpointWriter(), place, sharded=True),
        BACKGROUND: lambda place: save(writer, place, sharded=True),
        WHOLE: lambda place: save(CheckpointWriter(), place, sharded=False),
    }
    others = (
        "load, in shards",
        "a step",
        "a step beside the background",
        "background in all",
        f"{ASKED} x asking whether to stop",
    )
    times: dict[str, list[float]] = {name: [] for name in (*ways, *others)}
    for number in range(saves):
        for way, write in ways.items():
            place = Path(folder) / f"checkpoint-{number}"
            began = timed(lambda write=write, place=place: write(place), times[way])
            step = "a step beside the background" if way == BACKGROUND else "a step"
            timed(lambda: train_step(model, optimizer), times[step])
            if way == BACKGROUND:
                writer.wait()
                times["background in all"].append(time.perf_counter() - began)
            if way == OURS:
                timed(lambda place=place: load_loop(place, model, optimizer, others={}), times["load, in shards"])
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place)
            dist.barrier()
    with StopSignal() as stop:
        for _ in range(saves):
            timed(lambda: [stop.agreed() for _ in range(ASKED)], times[f"{ASKED} x asking whether to stop"])
    return times


def timed(act: Callable[[], object], into: list[float]) -> float:
    """Append the seconds of `act`, started when all ranks are ready; return its start time."""
    dist.barrier()
    began = time.perf_counter()
    act()
    into.append(time.perf_counter() - began)
    return began


def training(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer after one step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers, n_embd=width, n_head=8, n_positions=64, vocab_size=8192, bos_token_id=0, eos_token_id=0
        )
    )
    for block in model.transformer.h:
        fully_shard(block)
    model = fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take one step with a sample of 64 tokens."""
    ids = torch.randint(0, 8192, (1, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save_by_accelerate(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save with the functions that `Accelerator.save_state` calls under FSDP2."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(
        process_index=dist.get_rank(), num_processes=RANKS, is_fsdp2=True, wait_for_everyone=dist.barrier
    )
    save_fsdp_model(plugin, accelerator, model, str(place))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(place))


def show(times: dict[str, list[float]], *, saves: int) -> None:
    """Print a table."""
    base = statistics.median(times[OURS])
    table = Table(
        title=f"Seconds on {RANKS} gloo ranks, torch {torch.__version__}, {saves} rounds", title_justify="left"
    )
    table.add_column("what")
    for name in ("median", "least", "beside ours in shards"):
        table.add_column(name, justify="right")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        table.add_row(name, f"{middle:.3f}", f"{min(seconds):.3f}", f"{middle / base:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
