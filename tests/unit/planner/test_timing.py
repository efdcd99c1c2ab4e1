"""Seconds of a step: what overlap hides, what it cannot, and what accumulation multiplies."""

from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.timing import (
    HostTransfer,
    UnitTimer,
    Windows,
    estimate_time,
    host_transfers,
    phase_affine,
    unit_time,
    unit_work,
)
from hf_osdp.planner.cost.units import UnitSeconds
from hf_osdp.planner.decision import Batch, UnitLayout, layouts_for
from hf_osdp.planner.description import DType, GatherSpan, ModelDescription, PhaseCost, Segment
from hf_osdp.planner.hardware import DDP_OPERATORS, Backend, FsdpOverhead, Hardware, Link
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.training_job import OptimizerStep, Precision, TrainingJob
from tests.helpers.descriptions import transformer, ways
from tests.helpers.hardware import bare_preset, host_of

COLLECTIVES = dict(gather_forward=4.0, gather_backward=4.0, reduce_scatter=3.0, all_reduce=2.0)
TERMS = UnitSeconds(**COLLECTIVES, copy_forward=0.5, copy_backward=0.75, optimizer=0.25)
ONCE, FIVE = (Batch(micro_batch_size=1, accumulation_steps=steps) for steps in (1, 5))
REDUCING = UnitLayout(shard_size=2, reshard_after_forward=True)
HOLDING = replace(REDUCING, reduce_every_micro_step=False)
JOB = TrainingJob(global_batch_size=20)
TRANSFER = HostTransfer(out=6.0, back_beside=5.0, traffic=0.125)
HOST = host_of(10**12, to_device=1e9, to_host=1e9, update=1e10)
AWAITED = HostTransfer(out=6.0, back_before=5.0, traffic=0.125)
"""As the input of a recomputed unit is."""
EXPOSED = {
    "no window": (dict(), 4 + 4 + 3 + 2),
    "wide windows": (dict(forward=100.0, backward=100.0), 0), "accumulation": (dict(batch=FIVE), 5 * (4 + 4 + 3) + 2),
    # one all-reduce between replicas
    "accumulation of whole gradients": (dict(batch=FIVE, layout=HOLDING), 5 * (4 + 4) + 3 + 2),
    "a window in each micro-step": (dict(batch=FIVE, backward=8.0), 5 * 4 + 0 * 4 + 1),
    # 4 + 3 fit beside 8, with 2 more not
    "a window of whole gradients": (dict(batch=FIVE, layout=HOLDING, backward=3.0), 5 * 4 + 4 * 1 + (4 + 3 + 2 - 3)),
    "transfer without windows": (dict(transfer=TRANSFER), (4 + 6) + (4 + 3 + 2) + 5),
    "the way out shares forward with the gather": (dict(transfer=TRANSFER, forward=7.0, backward=100.0), 4 + 6 - 7),
    "the way back shares backward with gather and reduction": (dict(transfer=TRANSFER, forward=100.0, backward=13.0),
        5 + (4 + 3 + 2) - 13),
    "recomputation waits for its input": (dict(transfer=AWAITED, forward=100.0, backward=100.0), 5),
    "and hides the rest": (dict(transfer=AWAITED, forward=100.0, backward=8.0), 5 + (4 + 3 + 2 - 8)),
    # 5 + 4 + 3 fit beside 13
    "a transfer in each micro-step": (dict(transfer=TRANSFER, batch=FIVE, forward=7.0, backward=13.0),
        5 * (4 + 6 - 7) + (5 + 4 + 3 + 2 - 13)),
    "an awaited transfer in each": (dict(transfer=AWAITED, batch=FIVE, forward=100.0, backward=100.0), 5 * 5),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "exposed_s"), EXPOSED.values(), ids=EXPOSED)
def test_unit_time_exposes_what_no_window_hides(asked, exposed_s):
    given = {"batch": ONCE, "layout": REDUCING, "transfer": HostTransfer(), **asked}
    batch, layout, transfer = (given.pop(name) for name in ("batch", "layout", "transfer"))
    windows = Windows(**given)
    time = unit_time(TERMS, layout, windows, 1.0, batch, transfer)
    steps = batch.accumulation_steps
    on_the_way = steps * (4 + 4 + transfer.out + transfer.back_beside + transfer.back_before)
    assert time.exposed_s == exposed_s
    assert time.communication_s == on_the_way + (1 if layout is HOLDING else steps) * 3 + 2
    assert (time.compute_s, time.optimizer_s) == (steps, 0.25)
    assert time.copy_s == steps * (1.25 + transfer.traffic)
    assert time.total_s == time.compute_s + time.exposed_s + time.copy_s + time.optimizer_s


def hardware(backend: Backend = Backend.NCCL, **device: float) -> Hardware:
    found = replace(bare_preset("a100-40", devices_per_node=4), backend=backend)
    return replace(found, device=replace(found.device, **device))


def phase_s(phase: PhaseCost, samples: int, machine: Hardware) -> float:
    return phase_affine(phase, transformer(), machine)(samples)


def compute_s(description, machine, samples, kept=Activations.SAVE) -> tuple[float, ...]:
    return unit_work(description, machine, samples, kept)[0]


def test_phase_is_a_roofline_plus_dispatch_where_nothing_overlaps():
    phase = PhaseCost(matmul_flops=Affine(per_sample=19.5e12), traffic_bytes=Affine(constant=1555e9))
    assert phase_s(phase, 2, hardware()) == pytest.approx(2.0 + 1.0)
    dispatched = replace(phase, operators=Affine(constant=300, per_sample=10))
    assert phase_s(dispatched, 2, hardware(Backend.GLOO, operator_s=1e-3)) == pytest.approx(3.0 + 320e-3)
    assert phase_s(dispatched, 2, hardware(operator_s=1e-3)) == pytest.approx(3.0), "queued ahead"


def launching(operators: float) -> tuple[ModelDescription, Hardware]:
    """A transformer with so many operators in each pass, and a GPU beside a CPU that issues one in a millisecond."""

    def issued(phase: PhaseCost) -> PhaseCost:
        return replace(phase, operators=Affine(constant=operators))

    plain = transformer()

    def both(costs: Segment) -> Segment:
        return replace(costs, forward=issued(costs.forward), backward=issued(costs.backward))

    return replace(plain, segments=tuple(s.each(both) for s in plain.segments)), hardware(operator_s=1e-3)


def test_gpu_waits_where_issuing_takes_longer_than_work():
    """The CPU goes on issuing while the device computes and waits for messages."""
    work = sum(compute_s(transformer(), hardware(), 4))
    batch, layouts = Batch(micro_batch_size=4, accumulation_steps=1), everywhere(transformer(), 1)
    alone = replace(hardware(), devices_per_node=1)
    passes = 2 * len(transformer().segments)

    def step_s(operators: float, machine: Hardware = alone) -> float:
        description, gpu = launching(operators)
        gpu = replace(machine, device=gpu.device)
        return estimate_time(description, layouts, gpu, JOB, batch).step_s

    hidden = 0.5 * work / passes / 1e-3  # operators of a pass that take the CPU half as long as all the work
    assert step_s(hidden) == step_s(0.0)
    assert step_s(4 * hidden) - step_s(hidden) == pytest.approx(work)
    slow = replace(hardware(), intra_node=Link(latency_s=1.0, bytes_per_s=1e12, source="made up"))
    messages = estimate_time(transformer(), layouts, slow, JOB, batch).total("exposed_s")
    assert messages > work
    waits = 0.5 * messages / passes / 1e-3
    assert step_s(waits, slow) == step_s(0.0, slow), "messages are waited for meanwhile"


def test_phase_counts_attention_rate_and_bytes_of_products():
    amounts = {"matmul_flops": 19.5e12, "attention_flops": 5e12, "product_bytes": 1555e9}
    phase = PhaseCost(**{name: Affine(per_sample=amount) for name, amount in amounts.items()})
    assert phase.flops == Affine(per_sample=24.5e12)
    assert phase_s(phase, 1, hardware()) == pytest.approx(1 + 5 / 19.5), "by default it has the rate of products"
    device = {"attention_flops_per_s": 10e12, "product_traffic": 0.25}
    assert phase_s(phase, 1, hardware(**device)) == pytest.approx(1 + 5 / 10 + 0.25)
    assert phase_s(phase, 1, hardware(**{**device, "attention_flops_per_s": 1e15})) == pytest.approx(1.25 + 5 / 19.5)


def test_gpu_waits_for_fsdp2_and_optimizer_on_slow_cpu():
    """Gathers and reductions of each micro-step, and a step of the optimizer; less where units are not freed; copies
    and gradients of replicas.
    """
    description, queueing = transformer(), FsdpOverhead.issued(1.0)
    slow, layouts = hardware(operator_s=1.0), everywhere(description, 4)

    def queued_s(units: list[UnitLayout], batch: Batch, job: TrainingJob = JOB) -> float:
        return estimate_time(description, units, slow, job, batch).total("compute_s")

    units = [description.units[index] for index in sorted({segment.unit for segment in description.segments})]
    gathers = sum(queueing.gather(len(unit.parameters), 0) for unit in units)
    again = sum(queueing.gather(len(unit.parameters), 0) for unit in units if unit.span is GatherSpan.USE)
    reduces = sum(queueing.reduce(len(unit.trainable), 0) for unit in units)
    update = sum(queueing.updates[OptimizerStep.FUSED](len(unit.trainable), 0) for unit in units)
    assert queued_s(layouts, ONCE) == pytest.approx(gathers + again + reduces + update, rel=1e-3)
    assert queued_s(layouts, FIVE) == pytest.approx(5 * (gathers + again + reduces) + update, rel=1e-3)
    kept = everywhere(description, 4, keep=True)
    assert queued_s(kept, ONCE) == pytest.approx(gathers + reduces + update, rel=1e-3)
    held = [replace(layout, reduce_every_micro_step=False) for layout in kept]
    assert queued_s(held, FIVE) == pytest.approx(5 * gathers + reduces + update, rel=1e-3)

    flattens = sum(queueing.flatten(len(unit.trainable), 0) for unit in units)
    copies = sum(queueing.copy(len(unit.parameters), 0) for unit in units)
    replicas, lower = everywhere(description, 1), replace(JOB, precision=Precision.named("bf16"))
    assert queued_s(replicas, FIVE) == pytest.approx(5 * flattens + update, rel=1e-3), "nothing to copy"
    assert queued_s(replicas, FIVE, lower) == pytest.approx(5 * (copies + flattens) + update, rel=1e-3)
    mixed = [*replicas[:2], *layouts[2:]]
    assert queued_s(replicas, FIVE) < queued_s(mixed, FIVE) < queued_s(layouts, FIVE)

    time, gpu = (estimate_time(description, replicas, machine, lower, FIVE) for machine in (slow, hardware()))
    assert time.total("waits_s") == pytest.approx(time.total("compute_s") - gpu.total("compute_s"))
    assert gpu.total("waits_s") == 0
    ddp = slow.running(DDP_OPERATORS)
    stock, tensors = ddp.queueing, sum(len(unit.parameters) for unit in units)
    ddp_s = estimate_time(description, replicas, ddp, lower, FIVE).total("compute_s")
    each_s = 5 * (stock.copy.tensor_s + stock.flatten.tensor_s)  # DDP under autocast casts each weight by itself
    assert ddp_s == pytest.approx(each_s * tensors + stock.updates[OptimizerStep.FUSED](tensors, 0), rel=1e-3)

    one, job = replace(slow, devices_per_node=1), replace(JOB, precision=Precision.named("bf16", autocast=True))
    alone_s = estimate_time(description, replicas, one, job, ONCE).total("compute_s")
    assert alone_s < 1, "autocast takes operators alone"


def test_rate_of_unknown_dtype_is_refused_with_the_known():
    titan = bare_preset("titan-rtx", devices_per_node=2)
    with pytest.raises(HardwareError, match=r"float64 rate of TITAN RTX is not known \(known: .*float32"):
        unit_work(replace(transformer(), compute_dtype=DType.FLOAT64), titan, 1)


def everywhere(description: ModelDescription, g: int, *, keep: bool = False) -> list[UnitLayout]:
    return [layouts_for(unit.span, (g,), reshard_after_forward=not keep)[0] for unit in description.units]


def test_nothing_overlaps_on_gloo():
    description, gloo = transformer(), hardware(Backend.GLOO)
    assert set(unit_work(description, gloo, 4)[1]) == {Windows()}
    time = estimate_time(description, everywhere(description, 4), gloo, JOB, ONCE)
    assert time.total("exposed_s") == time.total("communication_s") > 0


def test_windows_on_nccl_are_segment_before_and_own_backward():
    description = transformer(layers=3)
    _, windows = unit_work(description, hardware(), 4)
    embedding, *middle, _ = description.segments
    forward = [phase_s(s.forward, 4, hardware()) for s in (embedding, *middle)]
    backward = phase_s(middle[0].backward, 4, hardware())
    assert windows[:2] == (Windows(), Windows())
    assert windows[2:] == tuple(Windows(forward=before, backward=backward) for before in forward[:3])


def recomputable(layers: int = 3) -> ModelDescription:
    """A transformer whose blocks, run again in backward, take another forward there."""
    description = transformer(layers=layers)

    def again(segment: Segment) -> Segment:
        forward, backward = segment.forward, segment.backward
        names = ("matmul_flops", "traffic_bytes")
        parts = {name: getattr(backward, name).plus(getattr(forward, name)) for name in names}
        recomputed = ways(replace(segment, backward=replace(backward, **parts)))
        return replace(segment, recomputed=recomputed if segment.unit > 1 else ())

    return replace(description, segments=tuple(map(again, description.segments)))


def test_recompute_adds_forward_and_window_to_its_unit_alone():
    description = recomputable()
    assert description.recomputable == {2, 3, 4}
    both = (Activations.SAVE, Activations.RECOMPUTE)
    (saved, short), (again, long) = (unit_work(description, hardware(), 4, kept) for kept in both)
    forward = [phase_s(s.forward, 4, hardware()) for s in description.segments[1:-1]]
    assert again[:2] == saved[:2], "the root and the shared embedding cannot be run again"
    assert again[2:] == pytest.approx([seconds + more for seconds, more in zip(saved[2:], forward, strict=True)])
    assert [w.forward for w in long] == [w.forward for w in short]
    longer = [w.backward + more for w, more in zip(short[2:], forward, strict=True)]
    assert [w.backward for w in long[2:]] == pytest.approx(longer)


def test_host_transfers_take_the_own_bytes_over_the_link():
    sizes = {"own_saved_bytes": Affine(per_sample=8e6), "sent_bytes": Affine(per_sample=8e6)}
    again = {name: Affine(per_sample=2e6) for name in sizes}
    blocks = transformer()
    segments = (
        replace(s, **sizes, recomputed=ways(replace(s, **again))) if s.unit > 1 else s for s in blocks.segments
    )
    description = replace(blocks, segments=tuple(segments))
    host = host_of(10**12, to_device=2e9, to_host=1e9, update=1e9)
    machine = replace(hardware(), host=host)
    rate = machine.device.memory_bytes_per_s
    save, recompute, offload, recompute_offload = Activations.BASIC
    wanted = dict.fromkeys((save, recompute), HostTransfer())
    wanted[offload] = HostTransfer(out=24e-3, back_beside=12e-3, traffic=2 * 24e6 / rate)
    wanted[recompute_offload] = HostTransfer(out=6e-3, back_before=3e-3, traffic=2 * 6e6 / rate)
    for activations, transfer in wanted.items():
        transfers = host_transfers(description, machine, 3, activations)
        assert {transfers[index] for index in description.recomputable} == {transfer}
        assert transfers[0].out == transfers[0].back_beside == 0.0, "the root's stay"
    with pytest.raises(HardwareError, match=r"host of .* is not known"):
        host_transfers(description, hardware(), 3, offload)


def test_timer_gives_equal_times_whatever_was_asked_before():
    """Beside a slow CPU, whose queue must not depend on the layout that came first."""
    description = recomputable()
    slow = replace(hardware(operator_s=1e-4), host=HOST)
    plain = UnitLayout(shard_size=4, reshard_after_forward=True)
    changes = (dict(shard_size=1), dict(on_host=True), dict(shard_size=1, on_host=True), {}, dict(shard_size=2))
    layouts = [replace(plain, **change) for change in changes]
    alone = [UnitTimer(description, slow, JOB, FIVE)(3, layout) for layout in layouts]
    for order in (layouts, layouts[::-1]):
        timer = UnitTimer(description, slow, JOB, FIVE)
        found = {layout: timer(3, layout) for layout in order}
        assert [found[layout] for layout in layouts] == alone
