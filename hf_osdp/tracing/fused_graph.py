"""Predict the kernels that Inductor makes of a graph, with the bytes that each allocates, frees and moves, without
generating code.

Inductor fuses elementwise operators and reductions, whose intermediate values stay in registers. Only these values
have memory: outputs of the graph, inputs and outputs of library kernels such as matrix products, and values that one
fused kernel passes to another. Kernels run in the order of the graph, unless Inductor estimates a lower peak for
another order (`torch._inductor.memory`). A fused kernel writes into an input of the same size that nothing else reads.
docs/compiled.md lists the rules and the tests of them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from .work import PhaseRecord

aten = torch.ops.aten

_REDUCTIONS = frozenset({
    aten.all, aten.amax, aten.amin, aten.any, aten.argmax, aten.argmin, aten.max, aten.mean, aten.min, aten.prod,
    aten.std, aten.sum,
    aten.var, aten.var_mean,
})  # fmt: skip
Nodes = dict[fx.Node, None]
"""A set that keeps its order."""


@dataclass(eq=False, kw_only=True)
class FusedKernel:
    """One kernel: an operator of a library, or several fused operators."""

    is_fused: bool
    nodes: list[fx.Node]
    """Values that it computes and other kernels could read."""
    reads: Nodes
    """Buffers and graph inputs that it reads."""
    writes: list[fx.Node] = field(default_factory=list)
    """Buffers that it writes and others read."""
    scratch_bytes: int = 0
    """Bytes of outputs that nothing reads."""
    frees: list[fx.Node] = field(default_factory=list)
    """Buffers and inputs that nothing reads after it; the caller may still hold the inputs."""
    reuses: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """For each output written in place, the freed buffer whose memory it reuses."""
    work: PhaseRecord = field(default_factory=PhaseRecord)


class FusedGraph:
    """The kernels of a graph, in the order in which they run.

    Args:
        graph: forward or backward of a compiled function, as AOTAutograd passes it to Inductor; values are in
            `meta["val"]`.
        device_type: `"cpu"` or `"cuda"`; on the CPU each concatenation is a separate kernel.
    """

    def __init__(self, graph: fx.Graph, device_type: str = "cpu") -> None:
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.outputs: Sequence[Any] = next(node for node in graph.nodes if node.op == "output").args[0]
        self._graph, self._device_type = graph, device_type
        self.owner: dict[fx.Node, fx.Node] = self._owners()
        """For each node, the node that owns its memory: itself, or the buffer or input that it is a view of."""
        self._returned = {self.owner[node] for node in self.outputs if isinstance(node, fx.Node)}
        self._buffers = self._find_buffers()
        self._sources: dict[fx.Node, Nodes] = {}
        """For each value that a kernel computes, the buffers and inputs that it is computed from."""
        kernels = self._grouped()
        by_graph, by_memory = _scheduled(kernels, lambda kernel: 0), _least_memory_first(kernels, self._returned)
        orders = [self._with_frees(order) for order in (by_graph, by_memory)]
        self.kernels = min(
            orders, key=functools.partial(peak_bytes, in_place=False)
        )  # of equal peaks the first, as Inductor does

    def _owners(self) -> dict[fx.Node, fx.Node]:
        found: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            if node.op != "output":
                source = node.args[0] if node.op == "call_function" and _is_view(node) else None
                found[node] = found[source] if isinstance(source, fx.Node) else node
        return found

    def _find_buffers(self) -> set[fx.Node]:
        """Return the nodes whose values have memory."""
        found = self._returned | {node for node in self.owner if node.op != "call_function"}
        for node, owner in self.owner.items():
            if node.op == "call_function" and node is owner and not _is_item(node):
                if not self._is_fused(node):
                    found |= {node, *(self.owner[source] for source in node.all_input_nodes)}
                elif _is_reduction(node):
                    found.add(node)
                found |= {part for part in node.users if node in found and _is_item(part)}
        return found

    def _grouped(self) -> list[FusedKernel]:
        """Group nodes into kernels: fused nodes between two library kernels that pass values on or read the same
        buffer.
        """
        depth: dict[fx.Node, int] = {}
        """For each node, the most kernels before it that later nodes cannot join."""
        kernels: dict[FusedKernel, None] = {}
        kernel_of: dict[fx.Node, FusedKernel] = {}
        touching: dict[tuple[int, bool, fx.Node], FusedKernel] = {}
        """The kernel, by its depth, whether readers can join it, and each node that it reads or computes."""
        for node in self._graph.nodes:
            sources = [self.owner[source] for source in node.all_input_nodes] if node.op == "call_function" else []
            depth[node] = max(
                (depth[s] + (s in kernel_of and not self._is_joinable(s) and not _is_item(node)) for s in sources),
                default=0,
            )
            if node.op != "call_function" or node is not self.owner[node]:
                continue
            if _is_item(node) and sources[0] in kernel_of:
                kernel_of[sources[0]].nodes.append(node)
                kernel_of[node] = kernel_of[sources[0]]
                self._sources[node] = self._sources[sources[0]]
                continue
            self._sources[node] = {
                source: None for s in sources for source in ((s,) if s in self._buffers else self._sources[s])
            }
            if node not in self._buffers:
                continue
            kernel = FusedKernel(is_fused=self._is_fused(node), nodes=[node], reads=dict(self._sources[node]))
            if kernel.is_fused:
                place = depth[node], self._is_joinable(node)
                for other in {k: None for read in kernel.reads if (k := touching.get((*place, read))) is not None}:
                    kernel = replace(kernel, nodes=other.nodes + kernel.nodes, reads=other.reads | kernel.reads)
                    del kernels[other]
                touching |= {(*place, touched): kernel for touched in (*kernel.reads, *kernel.nodes)}
            kernels[kernel] = None
            kernel_of |= dict.fromkeys(kernel.nodes, kernel)
        return [self._completed(kernel, kernel_of) for kernel in kernels]

    def _completed(self, kernel: FusedKernel, kernel_of: dict[fx.Node, FusedKernel]) -> FusedKernel:
        """Remove values that only the kernel itself reads from its outputs and inputs, and count its FLOPs and
        bytes.
        """
        own = set(kernel.nodes)
        elsewhere = {
            source for node, other in kernel_of.items() if other is not kernel for source in self._sources[node]
        }
        tensors = [node for node in kernel.nodes if isinstance(_value(node), torch.Tensor)]  # not tuples
        kernel.writes = [node for node in tensors if node in self._returned or node in elsewhere]
        kernel.reads = {node: None for node in kernel.reads if node not in own}
        moved = sum(map(nbytes, (*kernel.reads, *kernel.writes)))
        if kernel.is_fused:
            kernel.work.traffic_bytes = moved
            return kernel
        node = kernel.nodes[0]
        kernel.scratch_bytes = max(0, nbytes(node) - sum(map(nbytes, kernel.writes)))
        record = PhaseRecord()
        args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
        operator_, result = node.target, _value(node)
        if (
            not isinstance(operator_, OpOverload) and args and isinstance(args[0], OpOverload)
        ):  # wrapped with its random state
            operator_, args, result = args[0], args[1:], result[-1] if isinstance(result, tuple) else result
        if isinstance(operator_, OpOverload):
            record.count(operator_, args, kwargs, result)
        record.traffic_bytes = record.traffic_bytes or (0 if record.flops else moved)
        kernel.work = record
        return kernel

    def _with_frees(self, order: Sequence[FusedKernel]) -> list[FusedKernel]:
        """Return copies of the kernels with the buffers that each frees and reuses."""
        kernels = [replace(kernel) for kernel in order]
        last = {node: kernel for kernel in kernels for node in kernel.reads}
        for kernel in kernels:
            kernel.frees = [node for node in kernel.reads if last[node] is kernel and node not in self._returned]
            kernel.reuses = {}
            readers = {freed: sum(freed in self._sources[node] for node in kernel.nodes) for freed in kernel.frees}
            reusable = [
                freed
                for freed in kernel.frees
                if readers[freed] == 1 and not freed.name.startswith(("primals_", "tangents_"))
            ]
            for node in kernel.writes if kernel.is_fused else ():
                if (same := next((freed for freed in reusable if nbytes(freed) == nbytes(node)), None)) is not None:
                    kernel.reuses[node] = same
                    reusable.remove(same)
        return kernels

    def _is_fused(self, node: fx.Node) -> bool:
        target = _operator(node).target
        concatenates = isinstance(target, OpOverload) and target._overloadpacket is aten.cat
        return _is_fused_operator(target) and not (concatenates and self._device_type == "cpu")

    def _is_joinable(self, node: fx.Node) -> bool:
        """Return whether a node's readers may run in its kernel."""
        return self._is_fused(node) and not (_is_reduction(node) and not _is_row_reduction(node))


def _least_memory_first(kernels: Sequence[FusedKernel], returned: Collection[fx.Node]) -> list[FusedKernel]:
    """Order kernels so that the next one is the ready kernel that increases live memory least."""
    unread: dict[fx.Node, set[FusedKernel]] = defaultdict(set)
    for kernel in kernels:
        for node in kernel.reads:
            unread[node].add(kernel)

    def growth(kernel: FusedKernel) -> int:
        last = [
            node for node in kernel.reads if len(unread[node]) == 1 and node not in returned and _is_freeable(node)
        ]
        return sum(map(nbytes, kernel.writes)) - sum(map(nbytes, last))

    def mark_done(kernel: FusedKernel) -> None:
        for node in kernel.reads:
            unread[node].discard(kernel)

    return _scheduled(kernels, growth, mark_done)


def _scheduled(
    kernels: Sequence[FusedKernel],
    key: Callable[[FusedKernel], int],
    mark_done: Callable[[FusedKernel], None] = lambda kernel: None,
) -> list[FusedKernel]:
    """Order kernels so that each comes after those it reads from; of the ready kernels, the first with the lowest
    key runs next.
    """
    makers = {node: kernel for kernel in kernels for node in kernel.writes}
    waits_for = {kernel: {makers[node] for node in kernel.reads if node in makers} - {kernel} for kernel in kernels}
    order: list[FusedKernel] = []
    while waits_for:
        kernel = min((ready for ready, before in waits_for.items() if not before), key=key)
        del waits_for[kernel]
        for before in waits_for.values():
            before.discard(kernel)
        mark_done(kernel)
        order.append(kernel)
    return order


def peak_bytes(kernels: Sequence[FusedKernel], *, in_place: bool = True) -> int:
    """Return the peak of live bytes while kernels run in this order, relative to the start."""
    live = peak = 0
    for kernel in kernels:
        reused = kernel.reuses if in_place else {}
        live += sum(nbytes(node) for node in kernel.writes if node not in reused)
        peak = max(peak, live + kernel.scratch_bytes)
        live -= sum(nbytes(node) for node in kernel.frees if node not in reused.values() and _is_freeable(node))
    return peak


def _is_freeable(node: fx.Node) -> bool:
    """Return whether Inductor counts a buffer as freed after its last use; it does not for parameters and inputs of
    forward.
    """
    return not node.name.startswith("primals_")


def nbytes(node: fx.Node) -> int:
    """Return the bytes of a node's value; if it is a tuple, of all its tensors."""
    return _bytes_of(_value(node))


def _bytes_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(known_sizes(value.shape)) * value.element_size()
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def known_sizes(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    """Return sizes as integers: a random generator's state has symbolic sizes with a hint, even if shapes are
    static.
    """
    return [size if isinstance(size, int) else int(size.node.hint or 0) for size in sizes]


def _value(node: fx.Node) -> Any:  # noqa: ANN401
    return node.meta.get("val")


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return not _is_item(node)
    return isinstance(node.target, OpOverload) and node.target.is_view


def _is_item(node: fx.Node) -> bool:
    """Return whether a node is one of several outputs of an operator and no view."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.op == "call_function" and not _is_view(source)


def _operator(node: fx.Node) -> fx.Node:
    """Return the node of the operator that computes a node's value, perhaps beside others."""
    return node.args[0] if _is_item(node) else node  # type: ignore[return-value]


@functools.cache
def _is_fused_operator(target: object) -> bool:
    """Return whether Inductor generates code for an operator, which it does not for matrix products and similar
    operators.
    """
    from torch._functorch.partitioners import get_default_op_list
    from torch._inductor import lowering

    if not isinstance(target, OpOverload):
        return False
    packet = target._overloadpacket
    if packet in get_default_op_list().compute_intensive_ops:
        return False
    return target in lowering.lowerings and not {target, packet} & set(lowering.fallbacks)


def _is_reduction(node: fx.Node) -> bool:
    target = _operator(node).target
    return isinstance(target, OpOverload) and target._overloadpacket in _REDUCTIONS


def _is_row_reduction(node: fx.Node) -> bool:
    """Return whether a reduction is over the last dimension only, so that elementwise operators on both sides run
    in its kernel.
    """
    node = _operator(node)
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    size = _value(node.args[0]).dim() if isinstance(node.args[0], fx.Node) else 0
    return {dim % max(1, size) for dim in ([dims] if isinstance(dims, int) else dims or ())} == {size - 1}
