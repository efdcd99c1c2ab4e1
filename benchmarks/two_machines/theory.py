"""Bytes that one optimizer step of a plan sends from a node to others, computed from the plan.

A ring over g ranks sends (g - 1)/g of a tensor's B bytes over each of its hops; a hop counts for the node that it
leaves. One unit with G gathers, S reduce-scatters and, if it is replicated, one all-reduce sends

    G · gather + S · reduce-scatter + all-reduce
    flat:        gather = (g - 1)/g · B a hop, in rings of g neighbouring ranks; reduce-scatter twice that
    two stages:  the same with B / L bytes, in rings of ranks with the same place in each node; stages inside nodes
    send none all-reduce:  2 (r - 1)/r · B / g a hop, in rings of the r ranks that hold the same shard

G is 2 per micro-step if parameters are freed after forward, else 1; FSDP2 keeps the root's parameters until backward.
gloo's reduce-scatter is an all-reduce whose other parts are dropped. With low-bit communication, B is the bytes of
codes and scales, and a reduce-scatter is an exchange, which sends as much as a gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hf_osdp.planner.decision import Batch
from hf_osdp.planner.description import GatherSpan, ModelDescription, UnitDescription
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.wire import WireFormat

ETHERNET_HEADER, IP_HEADER, TCP_HEADER = 14, 20, 32
"""Header bytes of each packet; TCP's include timestamps (RFC 791, 9293, 7323)."""


def bytes_sent(plan: Plan, description: ModelDescription, ranks_per_node: int, *, reduced_itemsize: int = 4) -> int:
    """Return the bytes that the node with the most traffic sends for parameters and gradients in one optimizer step,
    without headers.

    Args:
        plan: the plan that runs, in the parameters' own dtype.
        description: the plan's model.
        ranks_per_node: ranks are numbered node by node.
        reduced_itemsize: bytes per element of a gradient that is sent unencoded.
    """
    batch = plan.batch
    total: Counter[int] = Counter()
    for unit in description.units:
        total.update(
            _unit_bytes(unit, plan.decision(unit.fqn), batch, plan.world_size, ranks_per_node, 2 * reduced_itemsize)
        )
    return round(max(total.values(), default=0))


def with_headers(payload: int, *, mtu: int, packet_bytes: int) -> float:
    """Return the bytes that the interface counts for `payload` bytes that are both sent and received.

    TCP passes packets of up to `packet_bytes`, in full segments of the MTU, to the interface; each counts with one
    header. Each received packet is acknowledged with another header. With 1500 and 16384 bytes this adds 0.83 %.
    """
    headers = ETHERNET_HEADER + IP_HEADER + TCP_HEADER
    segment = mtu - IP_HEADER - TCP_HEADER
    data = (packet_bytes - headers) // segment * segment
    return payload * (1 + 2 * headers / data)


def _unit_bytes(
    unit: UnitDescription, decision: UnitDecision, batch: Batch, world: int, per_node: int, itemsize: int
) -> dict[int, float]:
    """Return the bytes that each node sends for one unit; a reduce-scatter sends `itemsize` bytes per element,
    including laps.
    """
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
    """Return the bytes of a tensor in a group, encoded if it has a wire format."""
    return wire.gathered_bytes(elements, ranks) if wire else elements * itemsize


def _ring_bytes(groups: Iterable[range], per_node: int, nbytes: float) -> dict[int, float]:
    """Return the bytes that each node sends for one lap of `nbytes` in every group."""
    sent: Counter[int] = Counter()
    for ranks in groups:
        nodes = [rank // per_node for rank in ranks]
        for node, following in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            if node != following:
                sent[node] += (len(ranks) - 1) / len(ranks) * nbytes
    return sent
