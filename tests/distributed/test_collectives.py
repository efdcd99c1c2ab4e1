"""Collectives of our own: every byte where it belongs, whatever the dtype and the number of nodes."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed.collectives import BackendTransport, TransportAllGather, TransportReduceScatter
from hf_osdp.distributed.mesh import Meshes, find_topology
from hf_osdp.planner.plan import Plan, UnitDecision
from tests.helpers.fake_step import fake_process_group

TRANSPORTS = {
    "coalesced": partial(BackendTransport, coalesces=True), "one by one": partial(BackendTransport, coalesces=False),
    "in place": partial(BackendTransport, coalesces=False, reduces_in_place=True),
}  # fmt: skip
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8)
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "wrapped avg": dist.ReduceOp(dist.ReduceOp.AVG)}
NUMEL = 37
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def gathered(gather, dtype: torch.dtype, async_op: bool) -> bool:
    """Whether each rank's shard lies in its place; the input is a view of the output, as FSDP2's is."""
    world, rank = dist.get_world_size(), dist.get_rank()
    output = torch.full((world * NUMEL,), 7, dtype=dtype)
    given = output.narrow(0, rank * NUMEL, NUMEL)
    given.copy_(shard(rank, dtype))
    work = gather(output, given, dist.group.WORLD, async_op)
    assert (work is not None) == async_op and (work is None or isinstance(work, dist.Work))
    if work is not None:
        work.wait()
    return torch.equal(output, torch.cat([shard(r, dtype) for r in range(world)]))


def shard(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(NUMEL) + 5 * rank).to(dtype)


def scattered(scatter, dtype: torch.dtype, op: str) -> float:
    """Largest difference from the sum or mean of all ranks' inputs, against one that is exact."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = [
        torch.rand(world * NUMEL, generator=torch.Generator().manual_seed(r), dtype=torch.float64).to(dtype)
        for r in range(world)
    ]
    output = torch.empty(NUMEL, dtype=dtype)
    assert scatter(output, inputs[rank].clone(), dist.group.WORLD, OPS[op]) is None, "FSDP2 waits for nothing"
    exact = sum(value.double() for value in inputs).view(world, NUMEL)[rank] / (1 if op == "sum" else world)
    return (output.double() - exact).abs().max().item()


@pytest.mark.on_ranks(6, nodes=3, shared=True)
def test_two_stages_and_one_put_every_byte_in_its_place():
    world_size = 6
    topology, rank = find_topology(), dist.get_rank()
    assert (topology.nodes, topology.ranks_per_node) == (world_size // 2, 2)
    stages = Meshes("cpu").stages(world_size, topology.ranks_per_node)
    assert dist.get_process_group_ranks(stages.between) == [r for r in range(world_size) if r % 2 == rank % 2]
    assert dist.get_process_group_ranks(stages.within) == [rank - rank % 2, rank - rank % 2 + 1]
    for name, make in TRANSPORTS.items():
        gather, scatter = TransportAllGather(make(), stages), TransportReduceScatter(make(), stages)
        for dtype in DTYPES:
            for async_op in (False, True):
                assert gathered(gather, dtype, async_op), (name, dtype, async_op)
            for op in OPS if dtype in TOLERANCE else ():
                assert scattered(scatter, dtype, op) < TOLERANCE[dtype], (name, dtype, op)
    for dtype, op in product(TOLERANCE, OPS):
        error = scattered(TransportReduceScatter(TRANSPORTS["in place"]()), dtype, op)
        assert error < TOLERANCE[dtype], ("one stage", dtype, op)


def test_stages_of_half_the_world():
    """Four nodes of two."""

    def plan(*layouts: tuple[int, int]) -> Plan:
        units = tuple(
            UnitDecision(fqn=f"u{i}", shard_size=g, stage_size=stage, reshard_after_forward=True)
            for i, (g, stage) in enumerate(layouts)
        )
        return Plan(
            world_size=8, strategy="osdp", units=units, micro_batch_size=1, accumulation_steps=1, model_fingerprint=""
        )

    with fake_process_group(8):
        meshes = Meshes("cpu")
        meshes.prepare(plan((4, 2), (8, 2), (1, 1)))
        stages = meshes.stages(4, 2)
        ranks = [dist.get_process_group_ranks(group) for group in (stages.between, stages.within)]
        assert ranks == [[0, 2], [0, 1]]
        assert meshes.stages(8, 2).within is stages.within, "both layouts have the same groups inside a node"
        assert meshes.mesh(8).get_group() is dist.group.WORLD
