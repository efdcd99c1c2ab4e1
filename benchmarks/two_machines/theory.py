"""Bytes that one optimizer step of a plan sends from a node to others, from the plan alone.

A ring over g ranks passes (g - 1)/g of a tensor's B bytes over each of its hops; a hop counts for the node that it leaves.
One unit sends, with its G gathers, S reduce-scatters and, where it is replicated, one all-reduce,

    G · gather + S · reduce-scatter + all-reduce
    flat:        gather = reduce-scatter = (g - 1)/g · B a hop, in rings of g neighbouring ranks
    two stages:  the same in rings of the same place in each node, of B / L bytes; the stages inside nodes send none
    all-reduce:  2 (r - 1)/r · B / g a hop, in rings of the r ranks that hold the same shard

A plan of local steps sends 2 (M - 1)/M · B a machine in each synchronisation of M machines, and of that the H-th part a step.

What is sent in fewer bits has the bytes of its codes and scales in place of B. G is 2 a micro-step where parameters are freed after
forward, else 1: FSDP2 keeps what the root holds until backward. gloo's own reduce-scatter is an all-reduce of which it drops the rest:
2 (g - 1)/g · B a hop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hf_osdp.planner.decision import Batch
from hf_osdp.planner.description import GatherSpan, ModelDescription, UnitDescription
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.wire import WireFormat

ETHERNET_HEADER, IP_HEADER, TCP_HEADER = 14, 20, 32
"""Bytes before each packet's data; TCP's with its timestamps (RFC 791, 9293, 7323)."""


def bytes_sent(
    plan: Plan, description: ModelDescription, ranks_per_node: int, *, stock_reduce_scatter: bool = False, reduced_itemsize: int = 4
) -> int:
    """Bytes of parameters and gradients that the node which sends most sends in one optimizer step, without headers.

    Args:
        plan: what runs, in the parameters' own dtype.
        description: its model.
        ranks_per_node: ranks are numbered node by node.
        stock_reduce_scatter: gradients are reduced by gloo's own reduce-scatter.
        reduced_itemsize: bytes of an element of a gradient that is sent as it is.
    """
    if (local := plan.local_steps) is not None:  # each machine has the whole model, and sends it in a ring's two laps
        elements = sum(p.numel for unit in description.units for p in unit.trainable)
        nbytes = _sent(local.wire, elements // plan.world_size, local.machines, 4) * plan.world_size
        return round(2 * (local.machines - 1) / local.machines * nbytes / local.steps)
    batch = plan.batch
    total: Counter[int] = Counter()
    for unit in description.units:
        itemsize = (2 if stock_reduce_scatter else 1) * reduced_itemsize
        total.update(_unit_bytes(unit, plan.decision(unit.fqn), batch, plan.world_size, ranks_per_node, itemsize))
    return round(max(total.values(), default=0))


def with_headers(payload: int, *, mtu: int, packet_bytes: int) -> float:
    """Bytes that the interface counts for so much data, sent and received alike.

    A packet is handed to the interface whole, up to `packet_bytes` in full segments of the MTU, and counts with one header;
    the node that receives as much acknowledges each packet with another. At 1500 and 16384 that is 0.83 %.
    """
    headers = ETHERNET_HEADER + IP_HEADER + TCP_HEADER
    segment = mtu - IP_HEADER - TCP_HEADER
    data = (packet_bytes - headers) // segment * segment
    return payload * (1 + 2 * headers / data)


def _unit_bytes(unit: UnitDescription, decision: UnitDecision, batch: Batch, world: int, per_node: int, itemsize: int) -> dict[int, float]:
    """What one unit makes each node send; a reduce-scatter sends `itemsize` bytes an element, laps included."""
    g, places = decision.shard_size, decision.stage_size
    whole = sum(g * p.sharded_numel(g) for p in unit.parameters)
    reduced = sum(g * p.sharded_numel(g) for p in unit.parameters if p.requires_grad)
    frees = decision.reshard_after_forward and unit.span is GatherSpan.USE
    scatters = batch.accumulation_steps if decision.reduce_every_micro_step else 1
    gathered = _sent(decision.gather_wire, whole // places, g // places, 4)
    scattered = _sent(decision.reduce_wire, reduced // places, g // places, itemsize)
    passes = batch.accumulation_steps * (2 if frees else 1) * gathered + scatters * scattered
    shards = [range(start + place, start + g, places) for start in range(0, world, g) for place in range(places)]
    replicas = [range(start, world, g) for start in range(g)]
    sent = Counter(_ring_bytes(shards, per_node, passes))
    sent.update(_ring_bytes(replicas, per_node, 2 * _sent(decision.replica_wire, reduced // g, world // g, 4)))
    return sent


def _sent(wire: WireFormat | None, elements: int, ranks: int, itemsize: int) -> int:
    """Bytes of a tensor in a group, encoded where it has a format."""
    return wire.gathered_bytes(elements, ranks) if wire else elements * itemsize


def _ring_bytes(groups: Iterable[range], per_node: int, nbytes: float) -> dict[int, float]:
    """One lap of `nbytes` in each group at once, by the node that sends."""
    sent: Counter[int] = Counter()
    for ranks in groups:
        nodes = [rank // per_node for rank in ranks]
        for node, following in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            if node != following:
                sent[node] += (len(ranks) - 1) / len(ranks) * nbytes
    return sent
