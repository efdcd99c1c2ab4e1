"""A machine with one better figure makes no plan slower."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.timing import UnitTimer
from hf_osdp.planner.description import ModelDescription, Segment
from hf_osdp.planner.hardware import Hardware, Link
from hf_osdp.planner.problem import PlanningProblem
from tests.helpers.random_problems import spaces, wide
from tests.helpers.sampling import slow_but

EQUAL = 1e-9


def better(hardware: Hardware) -> Iterator[tuple[str, Hardware]]:
    """Machines with one figure twice as good."""

    def links(of) -> Hardware:
        return replace(hardware, intra_node=of(hardware.intra_node), inter_node=of(hardware.inter_node))

    def sooner(link: Link) -> Link:
        return replace(link, latency_s=link.latency_s / 2)

    def wider(link: Link) -> Link:
        shared = link.shared_bytes_per_s and 2 * link.shared_bytes_per_s
        return replace(link, bytes_per_s=2 * link.bytes_per_s, shared_bytes_per_s=shared)

    def device(**changes) -> Hardware:
        return replace(hardware, device=replace(hardware.device, **changes))

    own, host = hardware.device, hardware.host
    yield (
        "FLOP/s",
        device(
            flops_per_s={dtype: 2 * rate for dtype, rate in own.flops_per_s.items()},
            attention_flops_per_s=own.attention_flops_per_s and 2 * own.attention_flops_per_s,
        ),
    )
    yield "memory", device(memory_bytes_per_s=2 * own.memory_bytes_per_s)
    yield "CPU", device(operator_s=own.operator_s / 2)
    yield "latency", links(sooner)
    yield "bandwidth", links(wider)
    if host is not None:
        rates = ("to_device_bytes_per_s", "to_host_bytes_per_s", "update_bytes_per_s")
        yield "host", replace(hardware, host=replace(host, **{name: 2 * getattr(host, name) for name in rates}))


def check(asked: PlanningProblem, dice: random.Random) -> None:
    """No plan's seconds grow, nor the CPU's for any choice. Those of one unit may: its gather overlaps the forward of
    the segment before, which may gain more than its own.
    """
    description, hardware, job = asked.description, asked.hardware, asked.job
    for (batch, space), (figure, machine) in itertools.product(spaces(asked), better(hardware)):
        before, after = (UnitTimer(description, one, job, batch) for one in (hardware, machine))
        for index, own in enumerate(space):
            for layout in dice.sample(own, min(20, len(own))):
                old, new = before(index, layout), after(index, layout)
                # where no plan waits, the CPU's seconds are left out
                assert not old.issued_s or new.issued_s <= old.issued_s * (1 + EQUAL), figure
        for _ in range(10):
            layouts = [dice.choice(own) for own in space]
            assert after.estimate(layouts).step_s <= before.estimate(layouts).step_s * (1 + EQUAL), figure


def issuing(description: ModelDescription, seed: int, numbers: Sequence[int] = (0, 5, 50, 500)) -> ModelDescription:
    """The model with operators, so that a GPU may wait for the CPU; equal segments have equal numbers."""

    def changed(costs):
        dice = random.Random(f"{seed} {costs.saved_bytes} {costs.forward}")
        forward, backward = (Affine(constant=dice.choice(numbers)) for _ in range(2))
        return replace(
            costs,
            forward=replace(costs.forward, operators=forward),
            backward=replace(costs.backward, operators=backward),
        )

    def saved(segment: Segment) -> Segment:
        """Forward is the same whether a block is recomputed or not, as in a trace."""
        forms = (replace(form, costs=replace(form.costs, forward=segment.forward)) for form in segment.recomputed)
        return replace(segment, recomputed=tuple(forms))

    return replace(description, segments=tuple(saved(segment).each(changed) for segment in description.segments))


@pytest.mark.parametrize("first", slow_but(range(0, 500, 10), daily=(0,)))
def test_better_figure_makes_no_random_plan_slower(first):
    for seed in range(first, first + 10):
        asked, dice = wide(seed), random.Random(seed)
        check(replace(asked, description=issuing(asked.description, seed)), dice)
