"""All that touches works, on a backend whose works are null where NCCL's are (torch 2.8 and later)."""

from dataclasses import replace

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
from hf_osdp.sharding.gradients import OSDPGradScaler
from tests.distributed.test_collectives import gathered, scattered
from tests.helpers import null_works
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.training import Trained, alone, assert_trained_alike, train

from .cases import CASES
from .test_checkpoints import CHAINS, go_on

pytestmark = pytest.mark.slow  # the tests with CUDA's software have such works from NCCL itself


@pytest.fixture(scope="module")
def library() -> str:
    return null_works.extension()


on_two, on_two_nodes = pytest.mark.on_ranks(2, init=False), pytest.mark.on_ranks(4, init=False, nodes=2)


@on_two_nodes
def test_two_stages_gather_and_reduce_without_works(library):
    """By the backend's own collectives, coalesced or not."""
    null_works.form(library)
    stages = Meshes("cpu").stages(4, 2)
    assert isinstance(unit_collectives(dist.group.WORLD, "cpu", stages)[0].between, BackendTransport)
    for coalesces in (True, False):
        way = BackendTransport(coalesces=coalesces)
        for async_op in (True, False):
            assert gathered(TransportAllGather(way, stages), torch.float32, async_op), (coalesces, async_op)
        for op in ("sum", "avg"):
            assert scattered(TransportReduceScatter(way, stages), torch.float64, op) < 1e-14, (coalesces, op)


@on_two_nodes
def test_training_equals_one_process(library):
    """Layouts of units, reads of weights, clipping, whole states."""
    null_works.form(library)
    meshes = Meshes("cpu")
    for name in ("gpt2, mixed", "gpt2, everything", "gpt2, two_stage, async", "read, gpt2, penalties, mixed on 4 "):
        assert_trained_alike(train(CASES[name], meshes=meshes), lambda name=name: alone(CASES[name].alone))


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


def leg(path: str, *arguments: object) -> Trained:
    null_works.form(path)
    return go_on(*arguments)


@pytest.mark.slow
def test_checkpoints_go_on_exactly(library, tmp_path):
    """The legs of two ranks."""
    name, losses = "in the background, whole, of every kind", []
    for number in range(len(CHAINS[name].legs)):
        ranks = run_ranks(leg, 2, library, name, number, str(tmp_path), init=False)
        losses += ranks[0].losses
    wanted = alone(replace(CHAINS[name].case, steps=len(losses)).alone)
    assert losses == pytest.approx(wanted.losses, abs=1e-12)
    assert worst(ranks[0].parameters, wanted.parameters) < 1e-12
