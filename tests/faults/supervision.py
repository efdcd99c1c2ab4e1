"""Measure what a user sees when a rank fails, and after how many seconds: the plain launcher compared with hf_osdp.

    python tests/faults/supervision.py [--only CASE ...] [--modes plain,ours] [--limit 60]

Each case runs a minimal gloo script of 2 ranks (4 on two emulated machines) twice: with torch only, and with the entry
points of hf_osdp. Seconds count from the fault to the exit of the launcher's last process; `> 60` means that the
limit ended it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO

import psutil
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

GROUP_TIMEOUT_S = 45
"""Timeout of the process group in the partition cases; torch's defaults are 600 s (NCCL) and 1800 s (gloo)."""
STOP_S = 60
_SIGNS = (
    r"(?m)^error: .*|SIGTERM: .*",
    r"rank\s+: \d+ \(local_rank: \d+\)\s+exitcode\s+: -9 .*",
    r"(?:hf_osdp: )?(?:Restarted|Rank \d+ on |Out of memory on rank ).*",
    r"(?:hf_osdp: |error: |\w+Error: |Rank \d+ on ).*(?:missing|differ|[Dd]ifferent).*",
    r"(?:\w+\.)*\w*(?:Error|Exception): (?!Command ).*",
    r"Signal \d+ \(SIG\w+\) received.*",
    r"Sending process .*",
)
"""Patterns of lines that name a fault, the most specific first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    title: str
    launcher: str = "torchrun"
    """Launcher: `torchrun`, `accelerate`, `none` (ranks as started by srun) or `machines`."""
    options: tuple[str, ...] = ()
    """Options of the launcher."""


CASES = {
    "early": Case(title="a rank raises before the group forms"),
    "raises": Case(title="a rank raises in training"),
    "raises-accelerate": Case(title="the same under accelerate launch", launcher="accelerate"),
    "killed": Case(title="a rank is killed (SIGKILL)"),
    "killed-none": Case(title="the same without a launcher that watches (srun)", launcher="none"),
    "stopped": Case(title=f"a rank is stopped (SIGSTOP) for {STOP_S} s"),
    "sigterm-rank": Case(title="SIGTERM to one rank"),
    "sigterm-launcher": Case(title="SIGTERM to the launcher"),
    "restart": Case(title="a rank is killed, --max-restarts 1", options=("--max-restarts=1",)),
    "oom": Case(title="out of memory on one rank, --max-restarts 1", options=("--max-restarts=1",)),
    "versions": Case(title="another package version on one rank"),
    "interface": Case(title="a wrong GLOO_SOCKET_IFNAME"),
    "models": Case(title="ranks build different models"),
    "alone": Case(title="rank 0 alone gathers the model's weights"),
    "cut-off": Case(title="2 x 2 ranks, one machine cut off", launcher="machines", options=("--nodes=2", "--ranks=2")),
    "partition": Case(
        title="ranks 1 and 2 of 3 cannot reach each other", launcher="machines", options=("--nodes=3", "--ranks=1")
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--modes", default="plain,ours", help="plain, ours, or both")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a case may take after its fault")
    parser.add_argument("--as-rank", nargs=3, metavar=("CASE", "MODE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        run_rank(*options.as_rank)
        return 0
    modes = options.modes.split(",")
    print("| behaviour |", *(f"{mode} | s |" for mode in modes))
    print("|", "--- | " * (1 + 2 * len(modes)))
    for name in options.only:
        found = [run_case(name, mode, options.limit) for mode in modes]
        cells = (f"`{one['message']}` | {one['seconds']} |" for one in found)
        print(f"| {CASES[name].title} |", *cells, flush=True)
    return 0


def run_case(name: str, mode: str, limit_s: float, *, one_gpu: bool = False) -> dict[str, str]:
    """Run one case. Return the message, the seconds since the fault, of which it may take `limit_s`, and all output.

    With `one_gpu`, in mode `ours` alone, ranks share this machine's GPU over NCCL.
    """
    case = CASES[name]
    limit_s += STOP_S if name == "stopped" else 0
    with tempfile.TemporaryDirectory(prefix="supervision_") as text:
        folder = Path(text)
        with (folder / "output").open("wb") as output:
            processes = start(case, name, mode, folder, output, one_gpu=one_gpu)
            fault = folder / "fault"
            began = time.time()
            while any(process.poll() is None for process in processes) and time.time() < began + 120 + limit_s:
                if name == "sigterm-launcher" and (folder / "training").exists() and not fault.exists():
                    fault.write_text(str(time.time()))
                    processes[0].send_signal(signal.SIGTERM)
                if fault.exists() and time.time() > float(fault.read_text() or "inf") + limit_s:
                    break
                time.sleep(0.05)
            ended, at = all(process.poll() is not None for process in processes), time.time()
            for process in processes:
                end(process)
        said = (folder / "output").read_text(errors="replace")
        seconds = at - float(fault.read_text()) if fault.exists() else at - began
    return {"seconds": f"{seconds:.1f}" if ended else f"> {limit_s:.0f}", "message": message(said), "output": said}


def start(
    case: Case, name: str, mode: str, folder: Path, output: IO[bytes], *, one_gpu: bool = False
) -> list[subprocess.Popen]:
    script = [__file__, "--as-rank", name, mode, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env |= {"SUPERVISION_ONE_GPU": "1"} if one_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    env["GLOO_SOCKET_IFNAME"] = "nowhere0" if name == "interface" else "lo"
    places: list[dict[str, str]] = [{}]
    match case.launcher:
        case "torchrun":
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *case.options]
        case "accelerate":
            config = f"--config_file={ROOT / 'accelerate_configs/osdp_cpu.yaml'}"
            words = ["-m", "accelerate.commands.launch", config, "--num_processes=2", "--main_process_port=0"]
        case "machines":
            words = [str(ROOT / "benchmarks/two_machines/emulate.py"), *case.options, "--"]
        case _:
            from tests.helpers.distributed import free_port

            words, port = [], free_port()
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            places = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    how = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
    return [subprocess.Popen([sys.executable, *words, *script], env={**env, **place}, **how) for place in places]


def end(process: subprocess.Popen) -> None:
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for one in family:
        if one.is_running():
            one.send_signal(signal.SIGCONT)
            one.kill()
    process.kill()
    process.wait()


def message(said: str) -> str:
    """Return the line that names the fault."""
    for sign in _SIGNS:
        if found := re.search(sign, said):
            return " ".join(found.group().split())[:300]
    return "none"


def run_rank(name: str, mode: str, folder_text: str) -> None:
    """Form the process group, train, and cause the fault of the case."""
    rank, folder = int(os.environ["RANK"]), Path(folder_text)
    first, odd = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0", rank == 1
    if "SUPERVISION_ONE_GPU" in os.environ:  # makes NCCL treat each rank as a separate machine
        os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")

    def fault() -> None:
        (folder / "fault.new").write_text(str(time.time()))
        (folder / "fault.new").replace(folder / "fault")

    if name == "early" and odd:
        fault()
        raise_error()
    if name in ("versions", "interface", "models") and rank == 0:
        fault()
    form_group(name, mode, odd)
    if mode == "ours":
        from hf_osdp.distributed import restart
        from hf_osdp.distributed.consensus import require_same_run

        require_same_run(torch.nn.Linear(3 if name == "models" and odd else 2, 2))
        noted = restart.limit_after_oom(2**62)
        limit = noted if noted < 2**62 else "none"
    if name == "models":
        model = torch.nn.Linear(3 if odd else 2, 2)
        for parameter in torch.nn.parallel.DistributedDataParallel(model).parameters():
            dist.all_reduce(parameter.data)
    faults: dict[str, Callable[[], object]] = {
        "raises": raise_error,
        **dict.fromkeys(("killed", "restart"), lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "oom": lambda: out_of_memory(mode),
        "stopped": stop_process,
        "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "cut": lambda: subprocess.run(["ip", "link", "set", "veth0", "down"], check=True),
        "partition": lambda: subprocess.run(
            "ip neigh replace 10.77.0.3 lladdr 02:00:00:00:00:99 dev veth0 nud permanent".split(), check=True
        ),
    }
    act = faults.get(name.split("-")[0]) if name != "sigterm-launcher" else None
    culprit = 2 if name == "cut-off" else 1
    if name == "alone" and rank == 0:
        fault()
        gather_alone(mode)
    seconds = 3600 if act or name == "alone" else 8
    train(mode, folder, lambda: (fault(), act()) if act and rank == culprit and first else None, seconds=seconds)
    if name in ("restart", "oom") and rank == 0:
        ours = f"hf_osdp: Restarted and trained to the end, limit {limit}" if mode == "ours" else ""
        print(ours or "trained to the end", flush=True)


def form_group(name: str, mode: str, odd: bool) -> None:
    if name in ("partition", "cut-off"):  # a script may set this itself
        dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    elif mode == "plain":
        dist.init_process_group("gloo")
    if mode == "ours":
        if name == "versions" and odd:
            import transformers

            transformers.__version__ = "5.0.0"
        from hf_osdp.sharding.environment import form_process_group

        form_process_group(needed=True)


def train(mode: str, folder: Path, act: Callable[[], object], *, seconds: float) -> None:
    """Take steps of 50 ms; the fault occurs in the tenth."""
    device = "cuda" if "SUPERVISION_ONE_GPU" in os.environ else "cpu"
    ones, until, step = torch.ones(1, device=device), time.monotonic() + seconds, 0
    stop = None
    if mode == "ours":
        from hf_osdp import StopSignal

        stop = StopSignal()
        stop.start()
    while True:
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1" and step == 10
        ends = time.monotonic() > until or restarted or (folder / "resumed").exists()
        over = torch.tensor([float(ends)], device=device)
        dist.all_reduce(over)
        if over.item():
            break
        dist.all_reduce(ones)
        time.sleep(0.05)
        step += 1
        if step == 10:
            (folder / "training").touch()
            act()
        if stop is not None and stop.agreed():
            print(f"SIGTERM: saves after step {step} and ends", file=sys.stderr, flush=True)
            break
    if stop is not None:
        stop.finish()
        stop.exit()


def stop_process() -> None:
    """Stop this process by SIGSTOP; a helper process continues it later."""
    helper = f"import os, signal, time; time.sleep({STOP_S}); os.kill({os.getpid()}, signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-c", helper])
    os.kill(os.getpid(), signal.SIGSTOP)
    Path(sys.argv[-1], "resumed").touch()


def out_of_memory(mode: str) -> None:
    if mode == "ours":
        from hf_osdp.distributed import restart

        restart.note_limit(2**30)
    raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB.")


def gather_alone(mode: str) -> None:
    """Gather parameters on one rank only, as `model.state_dict()` called on one rank does."""
    if mode == "ours":
        from hf_osdp.distributed import process_group

        process_group.ALL_CALL_S = 20
        process_group.require_all("Linear.state_dict")
    dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))


def raise_error() -> None:
    raise KeyError("the reason")


if __name__ == "__main__":
    sys.exit(main())
