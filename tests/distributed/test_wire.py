"""Fewer bits on the wire: what is decoded, and ranks that stay equal; `cases/steps.py` trains without rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_osdp.distributed.collectives import BackendTransport, TransportReduceScatter
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.distributed.wire import EncodedReplicas, WireTransport, decode, encode
from hf_osdp.errors import OSDPError
from hf_osdp.planner.hardware import Link
from hf_osdp.planner.presets import preset
from hf_osdp.planner.wire import PIECE_ELEMENTS, WireFormat
from hf_osdp.preparation.config import OSDPConfig
from tests.helpers.checkpointed import whole
from tests.helpers.fake_step import fake_process_group
from tests.helpers.models import tiny_model
from tests.helpers.sampling import slow_but
from tests.helpers.training import Case, loop_of

from .cases.steps import by_wire
from .test_integration_trainer import PlannedTrainer, arguments, assert_close, history, tokens, trained_by_stock

BF16, INT8, INT4 = WireFormat
WIDTH = 64
LARGEST_ERROR = {BF16: 2**-8, INT8: 0.5 / 127, INT4: 0.5 / 7 * 32**0.5}
"""Of a value, as a share of its block's largest; one that was turned is a sum of 32 errors over the root of 32."""


def sent(values: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    codes = torch.full((wire.nbytes(values.numel()),), 255, dtype=torch.uint8)
    encode(values, codes, wire)
    decoded = torch.full_like(values, 9.0)
    decode(codes, decoded, wire)
    return decoded


@pytest.mark.parametrize("wire", WireFormat)
@pytest.mark.parametrize("elements", [0, 1, 127, 256, 1000, PIECE_ELEMENTS + 5])
def test_each_value_is_within_its_block_s_precision(wire, elements):
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0)) * 1e-4
    decoded = sent(values, wire)
    size = max(1, elements) if wire is BF16 else wire.block_size
    blocks = zip(values.split(size), decoded.split(size), strict=True)
    for before, after in list(blocks)[-3:] if elements else ():
        assert (before - after).abs().max() <= LARGEST_ERROR[wire] * before.abs().max() * (
            32**0.5 if wire is INT4 else 1
        )
    total = torch.ones(elements)
    codes = torch.empty(wire.nbytes(elements), dtype=torch.uint8)
    encode(values, codes, wire)
    decode(codes, total, wire, add=True)
    assert torch.equal(total, 1 + decoded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", [INT8, INT4])
def test_values_of_other_dtypes_are_coded_as_their_float32(wire, dtype):
    values = torch.randn(256 * 64 + 3, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = sent(values.float(), wire)
    assert torch.equal(sent(values, wire), expected.to(dtype))
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(sent(values.float(), wire), expected), "the script's default makes no difference"
    finally:
        torch.set_default_dtype(torch.float32)


def test_large_value_takes_less_precision_where_values_are_turned():
    """A gradient with outliers: 4 bits with the Hadamard matrix beat 4 bits without."""
    values = torch.randn(2**14, generator=torch.Generator().manual_seed(1))
    values[::100] *= 50
    scales = values.view(-1, 128)[: 2**14 // 128].abs().amax(dim=1, keepdim=True) / 7
    plain = (values.view(-1, 128) / scales).round() * scales
    small = values.abs() < 4
    error = (sent(values, INT4) - values)[small].norm() / values[small].norm()
    assert error < 0.8 * (plain.view(-1) - values)[small].norm() / values[small].norm()


@pytest.mark.parametrize("wire", WireFormat)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so_for_a_gradient_scaler(wire, bad):
    values = torch.ones(600)
    values[300] = bad
    decoded = sent(values, wire)
    assert not decoded.isfinite().all() and decoded[:128].isfinite().all()
    assert torch.equal(sent(torch.zeros(300), wire), torch.zeros(300))


@pytest.mark.on_ranks(3, shared=True)
def test_collectives_give_all_ranks_equal_bits_near_exact_result():
    world, rank = dist.get_world_size(), dist.get_rank()
    for wire in WireFormat:
        within = {BF16: 0.01, INT8: 0.02, INT4: 0.2}[wire]
        sends = WireTransport(BackendTransport(coalesces=False), wire)
        for elements in (1, 2, 700, 3000):
            mine = [
                torch.randn(elements, generator=torch.Generator().manual_seed(10 * elements + r)) for r in range(world)
            ]
            mean, reduced = sum(mine) / world, mine[rank].clone()
            sends.all_reduce(reduced, dist.ReduceOp.AVG, dist.group.WORLD)
            everyone = [torch.empty_like(reduced) for _ in range(world)]
            dist.all_gather(everyone, reduced)
            assert all(torch.equal(reduced, other) for other in everyone)
            assert (reduced - mean).norm() <= within * sum(one.norm() for one in mine)
            output = torch.empty(world * elements)
            assert (sends.all_gather([output], [mine[rank]], dist.group.WORLD, async_op=True)).wait()
            assert (output - torch.cat(mine)).norm() <= within * torch.cat(mine).norm()
            whole = [torch.cat([one * (part + 1) for part in range(world)]) for one in mine]
            part = torch.empty(elements)
            sends.reduce_scatter([part], [whole[rank].clone()], dist.ReduceOp.SUM, dist.group.WORLD)
            assert (part - world * mean * (rank + 1)).norm() <= within * (rank + 1) * sum(one.norm() for one in mine)


def test_bytes_of_several_dtypes_and_other_operations_are_refused():
    sends = WireTransport(BackendTransport(coalesces=False), INT8)
    with pytest.raises(OSDPError, match="gathered as bytes, which no wire format can round"):
        sends.all_gather([torch.empty(2, dtype=torch.uint8)], [torch.empty(1, dtype=torch.uint8)], None)
    with pytest.raises(ValueError, match=r"by SUM or AVG, not .*"):
        sends._reduce([torch.ones(1)], dist.ReduceOp.MAX, None)


def test_error_in_an_all_reduce_between_replicas_comes_through():
    """Such as out of memory: torch looks the group up to log it."""

    class Full:
        def all_reduce(self, *args: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with fake_process_group(2), pytest.raises(torch.OutOfMemoryError):
        dist.all_reduce(torch.ones(1), group=EncodedReplicas(group=dist.group.WORLD, transport=Full()))


# ---- in training


def assert_same_on_all_ranks(name: str, tensor: torch.Tensor) -> None:
    everyone = [torch.empty_like(tensor) for _ in range(4)]
    dist.all_gather(everyone, tensor.contiguous())
    assert all(torch.equal(tensor, other) for other in everyone), name


@pytest.mark.parametrize("wire", slow_but(WireFormat, daily=(INT4,)))
@pytest.mark.on_ranks(4, nodes=2, shared=True)
def test_replicas_and_gathered_parameters_stay_equal_to_the_bit(wire):
    torch.set_default_dtype(torch.float32)
    loop, _ = loop_of(Case(layout="mixed", world=4, change=partial(by_wire, wire=wire), max_norm=None))
    for step in range(9):
        loop.step(step % 4)
    assert loop.losses[-1] < loop.losses[0]
    for name, parameter in loop.model.named_parameters():
        assert_same_on_all_ranks(name, whole(parameter.detach()))
    loop.model.unshard()
    for name, parameter in loop.model.named_parameters():
        if not isinstance(parameter, DTensor):
            assert_same_on_all_ranks(name, parameter.data)


# ---- under the Trainer


def gpt2(**options: int) -> torch.nn.Module:
    return tiny_model("gpt2", layers=2, width=WIDTH, **options)


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[str, list[float]]:
    return history(trained_by_stock(tmp_path_factory.mktemp("one"), gpt2()))


@pytest.mark.on_ranks(2, nodes=2, init=False)
def test_trainer_sends_what_the_planner_chose_saves_masters_and_resumes(tmp_path, stock):
    """Two machines of one rank: near the stock run; the resumed half sends what the whole run sent."""
    slow = replace(preset("cpu", nodes=2), inter_node=Link(latency_s=1e-4, bytes_per_s=1e6, source="made up"))
    osdp = OSDPConfig(hardware=slow, memory_limit="1GiB", strategy="fsdp", communication="int4")

    def trained(checkpoint: str | None = None) -> PlannedTrainer:
        args = arguments(str(tmp_path), per_device_train_batch_size=4, save_strategy="steps", save_steps=2)
        trainer = PlannedTrainer(model=gpt2(), args=args, train_dataset=tokens(), osdp=osdp)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    trainer = trained()
    wires = {wire for unit in trainer._run.plan.units for wire in unit.formats.items()}
    assert wires == {("gather", INT8), ("reduce", INT4)}
    found = history(trainer)
    assert_close(found, stock, 0.03)
    with pytest.raises(AssertionError):
        assert_close(found, stock, 1e-9)  # it did round
    assert_close(history(trained(str(tmp_path / "checkpoint-2"))), {"loss": found["loss"][2:]}, 1e-12)


# ---- collectives


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.on_ranks(4, nodes=2, shared=True)
def test_two_stages_reduce_to_sum_or_mean_however_it_is_asked_for(in_place):
    """FSDP2 asks gloo for sums and NCCL for means; `cases/layouts.py` gathers in stages."""
    stages, rank = Meshes("cpu").stages(4, 2), dist.get_rank()
    scatter = TransportReduceScatter(BackendTransport(coalesces=False, reduces_in_place=in_place), stages)
    given = [torch.rand(4 * 37, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(4)]
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 4), (dist.ReduceOp(dist.ReduceOp.AVG), 4)):
        output = torch.empty(37, dtype=torch.float64)
        assert scatter(output, given[rank].clone(), dist.group.WORLD, op) is None, "FSDP2 waits for nothing"
        torch.testing.assert_close(output, sum(given).view(4, 37)[rank] / divisor, rtol=1e-14, atol=0)
