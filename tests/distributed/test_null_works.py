"""All that touches works, on a backend whose works are null where NCCL's are (torch 2.8 and later)."""

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed.collectives import (
    BackendTransport,
    TransportAllGather,
    TransportReduceScatter,
    unit_collectives,
)
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.timing import CollectiveClock, of_last_rank
from hf_osdp.sharding.gradients import OSDPGradScaler
from tests.distributed.test_collectives import gathered, scattered
from tests.distributed.test_weight_reads import reference, run_cases
from tests.helpers import null_works
from tests.helpers.checkpointed import Leg, folders, run_leg, uninterrupted, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.training import assert_trained_alike, train_alone, train_by_layout

pytestmark = pytest.mark.slow  # the tests with CUDA's software have such works from NCCL itself


@pytest.fixture(scope="module")
def library() -> str:
    return null_works.extension()


on_two, on_two_nodes = pytest.mark.on_ranks(2, init=False), pytest.mark.on_ranks(4, init=False, nodes=2)


@on_two
def test_clock_times_collectives_with_and_without_works(library):
    null_works.form(library)
    whole, part = torch.ones(2048), torch.ones(1024)
    with CollectiveClock(torch.device("cpu")) as clock:
        for async_op in (False, True):
            works = [
                dist.all_reduce(whole, async_op=async_op),
                dist.all_gather_into_tensor(whole, part, async_op=async_op),
                dist.reduce_scatter_tensor(part, whole, async_op=async_op),
            ]
            assert all((work is not None) == async_op for work in works)
    timed = [(call.collective.value, call.nbytes, call.seconds > 0) for call in of_last_rank(clock.calls())]
    assert timed == [(name, 8192, True) for name in ("all_reduce", "all_gather", "reduce_scatter")] * 2


@on_two_nodes
def test_two_stages_gather_and_reduce_without_works(library):
    """By the backend's own collectives, coalesced or not, under the clock as in a step."""
    null_works.form(library)
    stages = Meshes("cpu").stages(4, 2)
    assert isinstance(unit_collectives(dist.group.WORLD, "cpu", stages)[0].between, BackendTransport)
    with CollectiveClock(torch.device("cpu")) as clock:
        for coalesces in (True, False):
            way = BackendTransport(coalesces=coalesces)
            for async_op in (True, False):
                assert gathered(TransportAllGather(way, stages), torch.float32, async_op), (coalesces, async_op)
            for op in ("sum", "avg"):
                assert scattered(TransportReduceScatter(way, stages), torch.float64, op) < 1e-14, (coalesces, op)
    assert len(clock.calls()) == 8


@on_two_nodes
def test_training_equals_one_process(library):
    """Layouts of units, reads of weights, clipping, whole states."""
    null_works.form(library)
    meshes = Meshes("cpu")
    with CollectiveClock(torch.device("cpu")):
        layouts = [train_by_layout("gpt2", layout, meshes) for layout in ("mixed", "everything")]
    for trained_here in (*layouts, train_by_layout("gpt2", "two_stage", meshes, async_gathers=True)):
        assert_trained_alike(trained_here, lambda: train_alone("gpt2"))
    for trained_here in run_cases(("gpt2-penalties-mixed",)).values():
        assert_trained_alike(trained_here, lambda: reference("gpt2", "penalties", 1))


@on_two
def test_scaler_skips_a_step_on_all_ranks(library):
    """Rank 1's gradient is infinite: no rank may step."""
    null_works.form(library)
    scaler, weight = OSDPGradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for bad in (True, False):
        scaler.scale((weight * (float("inf") if bad and dist.get_rank() else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [*weight.tolist(), scaler.get_scale()] == [0.0, 0.0, 0.0, 2.0]


LEGS = [
    Leg(steps=2, layout="mixed", in_background=True),
    Leg(steps=1, layout="zero3", sharded=False),
    Leg(steps=1, layout="everything"),
]  # fmt: skip


def leg(path: str, *arguments: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    null_works.form(path)
    return run_leg(*arguments)


@pytest.mark.slow
def test_checkpoints_go_on_exactly(library, tmp_path):
    places, losses = folders(tmp_path, LEGS), []
    for number, one in enumerate(LEGS):
        ranks = run_ranks(leg, 2, library, one, places[number], places[number + 1], number, init=False)
        losses += ranks[0][0]
    want, weights = uninterrupted(4)
    assert losses == pytest.approx(want, abs=1e-12)
    assert worst(ranks[0][1], weights) < 1e-12
