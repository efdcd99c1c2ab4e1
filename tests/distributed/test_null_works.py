"""All that touches works, on a backend whose works are null where NCCL's are (torch 2.8 and later)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hf_osdp.distributed.collectives import BackendTransport, TwoStageAllGather, TwoStageReduceScatter, transport_of
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.collective_clock import CollectiveClock, of_last_rank
from hf_osdp.measurement.machine import measure_hardware
from hf_osdp.planner.presets import preset
from hf_osdp.sharding.gradients import OSDPGradScaler
from tests.distributed.test_collectives import gathered, scattered
from tests.distributed.test_recalibrate import LIMIT, loop, plain_loop, trained
from tests.distributed.test_weight_reads import reference, run_cases
from tests.helpers import null_works
from tests.helpers.checkpointed import Leg, folders, run_leg, uninterrupted, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.training import Trained, train_alone, train_by_layout

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library() -> str:
    return null_works.extension()


class _Touching(TorchDispatchMode):
    """Waits for whatever a collective returns, as the clock once did."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for work in result if isinstance(result, tuple) else ():
            if isinstance(work, torch.ScriptObject):
                work.wait()
        return result


def step_under(mode: str, path: str) -> None:
    """One all-reduce that asks for no work, under a dispatch mode."""
    null_works.form(path, store=dist.HashStore(), rank=0, world_size=1)
    values = torch.ones(4096)
    with _Touching() if mode == "touching" else CollectiveClock(torch.device("cpu")):
        assert dist.all_reduce(values) is None


@pytest.mark.parametrize(("mode", "code"), [("touching", -11), ("clock", 0)])
def test_clock_survives_null_works_that_end_a_process_when_touched(library, mode, code):
    program = f"from tests.distributed.test_null_works import step_under; step_under({mode!r}, {library!r})"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr


# ---------------------------------------------------------------------------------------------------------- collectives


def timed_calls(path: str) -> list[tuple[str, int, bool]]:
    null_works.form(path)
    whole, part = torch.ones(2048), torch.ones(1024)
    with CollectiveClock(torch.device("cpu")) as clock:
        for async_op in (False, True):
            works = [
                dist.all_reduce(whole, async_op=async_op),
                dist.all_gather_into_tensor(whole, part, async_op=async_op),
                dist.reduce_scatter_tensor(part, whole, async_op=async_op),
            ]
            assert all((work is not None) == async_op for work in works)
    return [(call.collective.value, call.nbytes, call.seconds > 0) for call in of_last_rank(clock.calls())]


def test_clock_times_collectives_with_and_without_works(library):
    expected = [(name, 8192, True) for name in ("all_reduce", "all_gather", "reduce_scatter")] * 2
    assert run_ranks(timed_calls, 2, library, init=False) == [expected] * 2


def staged(path: str) -> dict[str, object]:
    """Two stages over 2 x 2 ranks by the backend's own collectives, coalesced or not, under the clock as in a step."""
    null_works.form(path)
    stages = Meshes("cpu").stages(4, 2)
    assert isinstance(transport_of(stages.within, "cpu"), BackendTransport)
    found: dict[str, object] = {}
    with CollectiveClock(torch.device("cpu")) as clock:
        for coalesces in (True, False):
            way = BackendTransport(coalesces=coalesces)
            for async_op in (True, False):
                found[f"gather {coalesces} {async_op}"] = gathered(TwoStageAllGather(stages, way), torch.float32, async_op)
            for op in ("sum", "avg"):
                found[f"scatter {coalesces} {op}"] = scattered(TwoStageReduceScatter(stages, way), torch.float64, op) < 1e-14
    return {**found, "timed": len(clock.calls())}


def test_two_stages_gather_and_reduce_without_works(library):
    for found in run_ranks(staged, 4, library, init=False, nodes=2):
        assert found.pop("timed") == 8
        assert len(found) == 8 and all(found.values()), found


# ------------------------------------------------------------------------------------------------------------- training


def train(path: str) -> dict[str, Trained]:
    """Layouts of units, reads of weights, clipping, whole states."""
    null_works.form(path)
    meshes = Meshes("cpu")
    with CollectiveClock(torch.device("cpu")):
        layouts = {layout: train_by_layout("gpt2", layout, meshes) for layout in ("mixed", "everything")}
        ahead = train_by_layout("gpt2", "two_stage", meshes, async_gathers=True)
    return {**layouts, "two_stage": ahead, **run_cases(("gpt2-penalties-mixed",))}


def test_training_equals_one_process(library):
    found = run_ranks(train, 4, library, init=False, nodes=2)[0]
    expected = train_alone("gpt2")
    for name, trained_here in found.items():
        errors = trained_here.worst_error(reference("gpt2", "penalties", 1) if "penalties" in name else expected)
        assert max(errors.values()) < 1e-12, (name, errors)


def scaled(path: str) -> list[float]:
    """Rank 1's gradient is infinite: no rank may step."""
    null_works.form(path)
    scaler, weight = OSDPGradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for bad in (True, False):
        scaler.scale((weight * (float("inf") if bad and dist.get_rank() else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*weight.tolist(), scaler.get_scale()]


def test_scaler_skips_a_step_on_all_ranks(library):
    assert run_ranks(scaled, 2, library, init=False) == [[0.0, 0.0, 0.0, 2.0]] * 2


# --------------------------------------------------------------------------------------------------------- checkpoints

LEGS = [
    Leg(steps=2, layout="mixed", in_background=True),
    Leg(steps=1, layout="zero3", sharded=False),
    Leg(steps=1, layout="everything"),
]  # fmt: skip


def leg(path: str, *arguments: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    null_works.form(path)
    return run_leg(*arguments)


def test_checkpoints_go_on_exactly(library, tmp_path):
    places, losses = folders(tmp_path, LEGS), []
    for number, one in enumerate(LEGS):
        ranks = run_ranks(leg, 2, library, one, places[number], places[number + 1], number, init=False)
        losses += ranks[0][0]
    want, weights = uninterrupted(4)
    assert losses == pytest.approx(want, abs=1e-12)
    assert worst(ranks[0][1], weights) < 1e-12


# --------------------------------------------------------------------------------------------------------- whole runs


def measured(path: str) -> tuple:
    null_works.form(path)
    return measure_hardware(device_type="cpu", seconds=0.2).timings


def test_links_are_measured(library):
    found = run_ranks(measured, 4, library, init=False, nodes=2)
    assert len({repr(timings) for timings in found}) == 1
    assert {timing.group_size for timing in found[0]} == {2, 4}


def trainer_run(path: str, folder: str, recalibrate: bool) -> dict[str, object]:
    """The Trainer plans by itself and, where asked to, tries its plan; each run's first steps are under the clock."""
    from hf_osdp.planning.config import OSDPConfig

    null_works.form(path)
    hardware = preset("cpu", devices_per_node=2)
    osdp = OSDPConfig(recalibrate=recalibrate, hardware=hardware, memory_limit=LIMIT, operator_splitting=False, compare=False)
    plan, losses, _, trainer = trained(folder, osdp)
    trainer.save_model(f"{folder}/last")
    return {
        "losses": losses,
        "trials": [trial.observed.collectives for trial in trainer._run.rounds],
        "sharded": any(unit.shard_size > 1 for unit in plan.units),
    }


@pytest.mark.parametrize("recalibrate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer_runs_and_saves(library, tmp_path, recalibrate):
    for rank in run_ranks(trainer_run, 2, library, str(tmp_path), recalibrate, init=False):
        assert len(rank["losses"]) == 4 and all(loss > 0 for loss in rank["losses"])
        assert rank["sharded"] and all(rank["trials"]) and bool(rank["trials"]) == recalibrate
    assert (tmp_path / "last" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "osdp_report.json").read_text())["measured"]["collectives"]


def loops(path: str, folder: str) -> list[object]:
    """A plain loop that tries its plan, and an Accelerate loop; the latter gives the process group up."""
    null_works.form(path)
    return [plain_loop()["measured"].collectives, loop(folder)["measured"].collectives]


@pytest.mark.slow
def test_loops_run(library, tmp_path):
    assert all(all(rank) for rank in run_ranks(loops, 2, library, str(tmp_path), init=False))
