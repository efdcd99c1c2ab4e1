"""Precision, micro-batch sizes, what each strategy offers each unit, and optimizers that need whole parameters."""

from dataclasses import replace

import pytest

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.description import DType, ParameterSpec
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.optimizers import ADAFACTOR
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.space import batches, search_spaces
from hf_osdp.planner.split import ModelSplit, OperatorSplit
from hf_osdp.planner.training_job import Precision, TrainingJob, divisors
from tests.helpers.descriptions import transformer, ways, with_frozen
from tests.helpers.hardware import bare_preset, host_of, toy_hardware
from tests.helpers.problems import problem

WEIGHT = ParameterSpec(name="w", shape=(2,), dtype=DType.FLOAT32)
ONCE, TWICE = (Batch(micro_batch_size=1, accumulation_steps=steps) for steps in (1, 2))
JOB = TrainingJob(global_batch_size=32)
SAVING = replace(JOB, recompute=False)
HOST = host_of(10**9, to_device=1e4, to_host=2e4, update=5e3)
SAVE, AGAIN, OFFLOAD, AGAIN_OFFLOAD = Activations.BASIC
PLAIN = transformer(layers=2)
SENT = [replace(s, own_saved_bytes=s.saved_bytes, sent_bytes=s.saved_bytes) for s in PLAIN.segments]
DESCRIPTION = replace(
    PLAIN,
    segments=tuple(replace(s, recomputed=ways(s)) if s.unit > 1 else replace(s, sent_bytes=Affine()) for s in SENT),
)
"""Two blocks that can be run again in backward, or offloaded, after a root and an embedding that cannot."""


def devices(per_node: int, *, nodes: int = 1) -> Hardware:
    return bare_preset("a100-40", nodes=nodes, devices_per_node=per_node)


def spaces(batch, job=JOB, *, hardware=None, host=None, strategy=Strategy.OSDP):
    hardware = replace(hardware or devices(4), host=host)
    return search_spaces(problem(DESCRIPTION, hardware, job, strategy=strategy), batch)


def test_micro_batch_sizes_fill_the_global_batch_largest_first():
    assert TrainingJob(global_batch_size=24).micro_batch_sizes(2) == (12, 6, 4, 3, 2, 1)
    assert TrainingJob(global_batch_size=24, micro_batch_size=3).micro_batch_sizes(2) == (3,)
    found = [(b.micro_batch_size, b.accumulation_steps) for b in batches(TrainingJob(global_batch_size=8), 2)]
    assert found == [(4, 1), (2, 2), (1, 4)]
    assert [b.accumulation_steps for b in batches(TrainingJob(global_batch_size=8, micro_batch_size=1), 2)] == [4]


@pytest.mark.timeout(20)
def test_large_numbers_take_no_time():
    assert len(divisors(2**40)) == 41 and divisors(2**40 - 87)[-1] == 2**40 - 87
    assert TrainingJob(global_batch_size=2**40).micro_batch_sizes(8)[0] == 2**37
    names = [OperatorSplit(fqn=f"m{i}", slices=2) for i in range(20_000)]
    with pytest.raises(ValueError, match="'m7' is split 2 times"):
        ModelSplit(sliced=(*names, names[7]))


def test_precision_names_give_gathered_and_reduced_dtypes():
    assert Precision.named("no") == Precision.named("fp32") == Precision()
    for name, dtype in (("no", DType.FLOAT32), ("bf16", DType.BFLOAT16), ("fp16", DType.FLOAT16)):
        precision = Precision.named(name)
        assert (precision.gathered_dtype(WEIGHT), precision.reduced_dtype(WEIGHT)) == (dtype, DType.FLOAT32)
    assert Precision(compute=DType.BFLOAT16).reduced_dtype(WEIGHT) is DType.BFLOAT16
    autocast, kept = Precision.named("bf16", autocast=True), replace(WEIGHT, keeps_dtype=True)
    assert autocast.gathered_dtype(WEIGHT) is Precision.named("bf16").reduced_dtype(kept) is DType.FLOAT32
    assert autocast.on(1) == autocast and autocast.on(2) == Precision.named("bf16")
    alone = problem(transformer(), bare_preset("rtx-4090"), TrainingJob(global_batch_size=8, precision=autocast))
    assert alone.job.precision == autocast
    assert replace(alone, hardware=bare_preset("rtx-4090", devices_per_node=2)).job.precision == Precision.named(
        "bf16"
    )


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.OSDP])
@pytest.mark.parametrize("batch", [ONCE, TWICE])
def test_single_strategies_are_parts_of_the_osdp_space(strategy, batch):
    """A single strategy does the same with every unit."""
    hardware = devices(4, nodes=2)
    (everything,) = spaces(batch, hardware=hardware, host=HOST)
    for space in spaces(batch, hardware=hardware, host=HOST, strategy=strategy):
        assert len({(choice.reduce_every_micro_step, choice.on_host) for choices in space for choice in choices}) == 1
        assert all(set(choices) <= set(allowed) for choices, allowed in zip(space, everything, strict=True))


def test_hsdp_and_two_stages_need_groups_in_between():
    assert len(spaces(ONCE, SAVING, hardware=devices(8), strategy=Strategy.HSDP)) == 2
    for count in (1, 2, 3):
        with pytest.raises(ValueError, match=f"strategy=hsdp needs a group size between 1 and {count}"):
            spaces(ONCE, SAVING, hardware=devices(count), strategy=Strategy.HSDP)
    (space,) = spaces(ONCE, SAVING, hardware=devices(4, nodes=2), strategy=Strategy.TWO_STAGE)
    assert {(choice.shard_size, choice.stage_size) for choices in space for choice in choices} == {(8, 4)}
    for hardware in (devices(1, nodes=8), devices(8), devices(1)):
        message = r"strategy=two_stage needs several nodes of several devices, not [18] of [18]; use fsdp"
        with pytest.raises(ValueError, match=message):
            spaces(ONCE, SAVING, hardware=hardware, strategy=Strategy.TWO_STAGE)
    (everything,) = spaces(ONCE, SAVING, hardware=devices(4, nodes=4))
    staged = {(c.shard_size, c.stage_size) for choices in everything for c in choices if c.stage_size > 1}
    assert staged == {(8, 4), (16, 4)}, "whole nodes, several of them"


FREE, FIXED = {True, False}, {False}
OFFERED = {
    # what the root and the embedding, and then the blocks, may choose: of activations, holding gradients, the host
    "one micro-step": (dict(batch=ONCE, job=SAVING), {SAVE}, FIXED, FIXED),
    "accumulation": (dict(batch=TWICE, job=SAVING), {SAVE}, FREE, FIXED),
    "reduced in every micro-step": (dict(batch=TWICE, job=replace(SAVING, reduce_every_micro_step=True)), {SAVE},
        FIXED, FIXED),
    "held in all": (dict(batch=TWICE, job=replace(SAVING, reduce_every_micro_step=False)), {SAVE}, {True}, FIXED),
    "held, with one micro-step": (dict(batch=ONCE, job=replace(SAVING, reduce_every_micro_step=False)), {SAVE}, FIXED,
        FIXED),
    "one process": (dict(batch=TWICE, job=SAVING, hardware=devices(1)), {SAVE}, set(), FIXED),
    "recomputation": (dict(batch=ONCE), {SAVE, AGAIN}, FIXED, FIXED),
    "recomputation of all": (dict(batch=ONCE, job=replace(JOB, recompute=True)), {AGAIN}, FIXED, FIXED),
    "a host": (dict(batch=ONCE, host=HOST), set(Activations.BASIC), FIXED, FREE),
    "states on the host": (dict(batch=ONCE, host=HOST, job=replace(JOB, host_offload=True)), set(Activations.BASIC),
        FIXED, {True}),
    "states on the device": (dict(batch=ONCE, host=HOST, job=replace(JOB, host_offload=False)), set(Activations.BASIC),
        FIXED, FIXED),
    "activations on the host": (dict(batch=ONCE, host=HOST, job=replace(JOB, offload_activations=True)),
        {OFFLOAD, AGAIN_OFFLOAD}, FIXED, FREE),
    "activations on the device": (dict(batch=ONCE, host=HOST, job=replace(JOB, offload_activations=False)),
        {SAVE, AGAIN}, FIXED, FREE),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "activations", "held", "on_host"), OFFERED.values(), ids=OFFERED)
def test_space_offers_what_job_and_unit_allow(asked, activations, held, on_host):
    (space,) = spaces(**asked)
    assert [{c.activations for c in choices} for choices in space] == [{SAVE}, {SAVE}, activations, activations]
    units = [{not c.reduce_every_micro_step for c in choices if not c.is_replica} for choices in space]
    assert units == [held] * 4, "replicas do not choose"
    assert [{c.on_host for c in choices} for choices in space] == [on_host] * 4


def test_single_strategies_decide_for_all_blocks_or_none():
    found = [[{c.activations for c in choices} for choices in space] for space in spaces(ONCE, strategy=Strategy.FSDP)]
    assert found == [[{SAVE}] * 4, [{SAVE}, {SAVE}, {AGAIN}, {AGAIN}]]
    assert len(spaces(TWICE, strategy=Strategy.FSDP)) == 4, "with all gradients held, and with none"
    assert len(spaces(TWICE, strategy=Strategy.FSDP, host=HOST)) == 24


WHOLE = TrainingJob(global_batch_size=4, optimizer=ADAFACTOR)
FOUR = toy_hardware(1, 4, intra=(1e-6, 1e8))


def test_search_offers_replicas_of_trained_every_layout_of_frozen():
    root, embedding, first, second, *others = transformer().units
    units = (root, embedding, with_frozen(first), with_frozen(second), *others)
    case = problem(replace(transformer(), units=units), FOUR, WHOLE)
    for batch in batches(WHOLE, 4):
        for space in search_spaces(case, batch):
            for unit, layouts in zip(case.description.units, space, strict=True):
                sizes = {layout.shard_size for layout in layouts}
                assert sizes == ({1} if unit.trainable_numel else {1, 2, 4})


@pytest.mark.parametrize(("shape", "dtype", "nbytes"), [
    ((8, 6), DType.FLOAT32, 4 * 14), ((8, 6, 4), DType.BFLOAT16, 4 * (48 + 32)), ((8, 6), DType.FLOAT64, 8 * 14),
    ((7,), DType.BFLOAT16, 4 * 7), ((), DType.FLOAT32, 4), ((0, 3), DType.FLOAT32, 0),
])  # fmt: skip
def test_factored_states_take_a_row_and_a_column(shape, dtype, nbytes):
    parameter = ParameterSpec(name="p", shape=shape, dtype=dtype)
    assert ADAFACTOR.state_bytes(parameter, 1) == ADAFACTOR.saved_bytes(parameter) == nbytes
