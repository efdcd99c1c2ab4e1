"""What Inductor makes of a graph: kernels with what each allocates, frees and moves, without generating code.

Inductor fuses elementwise operators and reductions: what passes between them stays in registers. Only some values have memory: outputs of
the graph, what a product or another kernel of a library reads or writes, and what two fused kernels pass on. Kernels run in the order of
the graph, or in another one where Inductor's own estimate finds less live at once so (`torch._inductor.memory`), and a fused kernel writes
into an input of the same size that nothing else reads. docs/compiled.md has the rules with the tests that hold them.
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

from .recorder import PhaseRecord

aten = torch.ops.aten

_REDUCTIONS = frozenset({
    aten.all, aten.amax, aten.amin, aten.any, aten.argmax, aten.argmin, aten.max, aten.mean, aten.min, aten.prod, aten.std, aten.sum,
    aten.var, aten.var_mean,
})  # fmt: skip
Nodes = dict[fx.Node, None]
"""A set that keeps its order."""


@dataclass(eq=False, kw_only=True)
class FusedKernel:
    """One kernel: an operator of a library, or some that are fused."""

    is_fused: bool
    nodes: list[fx.Node]
    """What it computes and others could read."""
    reads: Nodes
    """Buffers, and inputs of the graph."""
    writes: list[fx.Node] = field(default_factory=list)
    """Buffers that others read."""
    scratch_bytes: int = 0
    """Of outputs that nobody reads."""
    frees: list[fx.Node] = field(default_factory=list)
    """Buffers and inputs that nobody reads after it; others may hold the inputs."""
    takes_over: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Of what it writes, the freed buffer in whose memory it does."""
    flops: int = 0
    traffic_bytes: int = 0


class FusedGraph:
    """The kernels of a graph, in the order in which they run.

    Args:
        graph: forward or backward of a compiled function, as AOTAutograd hands it to Inductor; values are in `meta["val"]`.
        device_type: `"cpu"` or `"cuda"`: on the CPU concatenations are kernels of their own.
    """

    def __init__(self, graph: fx.Graph, device_type: str = "cpu") -> None:
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.outputs: Sequence[Any] = next(node for node in graph.nodes if node.op == "output").args[0]
        self._graph, self._device_type = graph, device_type
        self.owner: dict[fx.Node, fx.Node] = self._owners()
        """Of each node, the one in whose memory its value lies: itself, or the buffer or input that it is a view of."""
        self._returned = {self.owner[node] for node in self.outputs if isinstance(node, fx.Node)}
        self._buffers = self._find_buffers()
        self._sources: dict[fx.Node, Nodes] = {}
        """Of what a kernel computes, the buffers and inputs that it reads, through what stays in registers."""
        kernels = self._grouped()
        orders = [self._with_frees(order(kernels, self._returned)) for order in (_in_graph_order, _least_memory_first)]
        self.kernels = min(orders, key=functools.partial(peak_bytes, in_place=False))  # the first of equals, as Inductor does

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
            if node.op == "call_function" and node is owner and not _is_part(node):
                if not self._is_fused(node):
                    found |= {node, *(self.owner[source] for source in node.all_input_nodes)}
                elif _is_reduction(node):
                    found.add(node)
                found |= {part for part in node.users if node in found and _is_part(part)}
        return found

    def _grouped(self) -> list[FusedKernel]:
        """Put nodes that run in one kernel together: those that pass values on, or read the same, between two library kernels."""
        depth: dict[fx.Node, int] = {}
        """Of each node, how many kernels that nothing fuses on come before it, at most."""
        kernels: dict[FusedKernel, None] = {}
        kernel_of: dict[fx.Node, FusedKernel] = {}
        touching: dict[tuple[int, bool, fx.Node], FusedKernel] = {}
        """By depth, whether others fuse on, and what it reads or computes, the kernel."""
        for node in self._graph.nodes:
            sources = [self.owner[source] for source in node.all_input_nodes] if node.op == "call_function" else []
            depth[node] = max((depth[s] + (s in kernel_of and not self._fuses_on(s) and not _is_part(node)) for s in sources), default=0)
            if node.op != "call_function" or node is not self.owner[node]:
                continue
            if _is_part(node) and sources[0] in kernel_of:
                kernel_of[sources[0]].nodes.append(node)
                kernel_of[node] = kernel_of[sources[0]]
                self._sources[node] = self._sources[sources[0]]
                continue
            self._sources[node] = {one: None for s in sources for one in ((s,) if s in self._buffers else self._sources[s])}
            if node not in self._buffers:
                continue
            kernel = FusedKernel(is_fused=self._is_fused(node), nodes=[node], reads=dict(self._sources[node]))
            if kernel.is_fused:
                place = depth[node], self._fuses_on(node)
                for other in {k: None for one in kernel.reads if (k := touching.get((*place, one))) is not None}:
                    kernel = replace(kernel, nodes=other.nodes + kernel.nodes, reads=other.reads | kernel.reads)
                    del kernels[other]
                touching |= {(*place, one): kernel for one in (*kernel.reads, *kernel.nodes)}
            kernels[kernel] = None
            kernel_of |= dict.fromkeys(kernel.nodes, kernel)
        return [self._closed(kernel, kernel_of) for kernel in kernels]

    def _closed(self, kernel: FusedKernel, kernel_of: dict[fx.Node, FusedKernel]) -> FusedKernel:
        """Leave out what a kernel computes and only itself reads, and count its work."""
        own = set(kernel.nodes)
        elsewhere = {one for node, other in kernel_of.items() if other is not kernel for one in self._sources[node]}
        tensors = [node for node in kernel.nodes if isinstance(_value(node), torch.Tensor)]  # and no outputs of several
        kernel.writes = [node for node in tensors if node in self._returned or node in elsewhere]
        kernel.reads = {node: None for node in kernel.reads if node not in own}
        moved = sum(map(nbytes, (*kernel.reads, *kernel.writes)))
        if kernel.is_fused:
            kernel.traffic_bytes = moved
            return kernel
        node = kernel.nodes[0]
        kernel.scratch_bytes = max(0, nbytes(node) - sum(map(nbytes, kernel.writes)))
        record = PhaseRecord()
        args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
        operator_, result = node.target, _value(node)
        if not isinstance(operator_, OpOverload) and args and isinstance(args[0], OpOverload):  # one that keeps a random state beside it
            operator_, args, result = args[0], args[1:], result[-1] if isinstance(result, tuple) else result
        if isinstance(operator_, OpOverload):
            record.count(operator_, args, kwargs, result)
        kernel.flops, kernel.traffic_bytes = record.matmul_flops, record.traffic_bytes or (0 if record.matmul_flops else moved)
        return kernel

    def _with_frees(self, order: Sequence[FusedKernel]) -> list[FusedKernel]:
        """Return copies of the kernels with what each frees and writes over."""
        kernels = [replace(kernel) for kernel in order]
        last = {node: kernel for kernel in kernels for node in kernel.reads}
        for kernel in kernels:
            kernel.frees = [node for node in kernel.reads if last[node] is kernel and node not in self._returned]
            kernel.takes_over = {}
            readers = {one: sum(one in self._sources[node] for node in kernel.nodes) for one in kernel.frees}
            left = [one for one in kernel.frees if readers[one] == 1 and not one.name.startswith(("primals_", "tangents_"))]
            for node in kernel.writes if kernel.is_fused else ():
                if (same := next((one for one in left if nbytes(one) == nbytes(node)), None)) is not None:
                    kernel.takes_over[node] = same
                    left.remove(same)
        return kernels

    def _is_fused(self, node: fx.Node) -> bool:
        if _is_part(node):
            node = node.args[0]  # type: ignore[assignment]
        concatenates = isinstance(node.target, OpOverload) and node.target._overloadpacket is aten.cat
        return _fused_operator(node.target) and not (concatenates and self._device_type == "cpu")

    def _fuses_on(self, node: fx.Node) -> bool:
        """Whether what reads a node may run in its kernel."""
        return self._is_fused(node) and not (_is_reduction(node) and not _is_of_rows(node))


def _in_graph_order(kernels: Sequence[FusedKernel], returned: Collection[fx.Node]) -> list[FusedKernel]:
    """Run each kernel as early as the graph has its first node."""
    return _scheduled(kernels, lambda kernel: 0)


def _least_memory_first(kernels: Sequence[FusedKernel], returned: Collection[fx.Node]) -> list[FusedKernel]:
    """Run of the kernels that can run the one that adds least to what is live."""
    unread: dict[fx.Node, set[FusedKernel]] = defaultdict(set)
    for kernel in kernels:
        for node in kernel.reads:
            unread[node].add(kernel)

    def growth(kernel: FusedKernel) -> int:
        last = [node for node in kernel.reads if len(unread[node]) == 1 and node not in returned and _is_freeable(node)]
        return sum(map(nbytes, kernel.writes)) - sum(map(nbytes, last))

    def done(kernel: FusedKernel) -> None:
        for node in kernel.reads:
            unread[node].discard(kernel)

    return _scheduled(kernels, growth, done)


def _scheduled(
    kernels: Sequence[FusedKernel], key: Callable[[FusedKernel], int], done: Callable[[FusedKernel], None] = lambda kernel: None
) -> list[FusedKernel]:
    """Order kernels so that each comes after what it reads; of those that can run, the first with the lowest key goes first."""
    makers = {node: kernel for kernel in kernels for node in kernel.writes}
    waits = {kernel: {makers[node] for node in kernel.reads if node in makers} - {kernel} for kernel in kernels}
    order: list[FusedKernel] = []
    while waits:
        kernel = min((one for one, before in waits.items() if not before), key=key)
        del waits[kernel]
        for before in waits.values():
            before.discard(kernel)
        done(kernel)
        order.append(kernel)
    return order


def peak_bytes(kernels: Sequence[FusedKernel], *, in_place: bool = True) -> int:
    """Return the most bytes that kernels in this order have above those at the start."""
    live = peak = 0
    for kernel in kernels:
        over = kernel.takes_over if in_place else {}
        live += sum(nbytes(node) for node in kernel.writes if node not in over)
        peak = max(peak, live + kernel.scratch_bytes)
        live -= sum(nbytes(node) for node in kernel.frees if node not in over.values() and _is_freeable(node))
    return peak


def _is_freeable(node: fx.Node) -> bool:
    """Whether Inductor takes it that a buffer's memory is free after its last use; that of parameters and inputs of forward is not."""
    return not node.name.startswith("primals_")


def nbytes(node: fx.Node) -> int:
    """Return the bytes of a node's value, of all tensors where it has several."""
    return _bytes_of(_value(node))


def _bytes_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(known_sizes(value.shape)) * value.element_size()
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def known_sizes(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    """Return sizes as numbers: those of a random generator's state are symbols with a hint, even where shapes are static."""
    return [size if isinstance(size, int) else int(size.node.hint or 0) for size in sizes]


def _value(node: fx.Node) -> Any:  # noqa: ANN401
    return node.meta.get("val")


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return not _is_part(node)
    return isinstance(node.target, OpOverload) and node.target.is_view


def _is_part(node: fx.Node) -> bool:
    """Whether a node is one of several outputs of an operator that are no views."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.op == "call_function" and not _is_view(source)


@functools.cache
def _fused_operator(target: object) -> bool:
    """Whether Inductor has code of its own for an operator, and it is no product or the like."""
    from torch._functorch.partitioners import get_default_op_list
    from torch._inductor import lowering

    if not isinstance(target, OpOverload):
        return False
    packet = target._overloadpacket
    if packet in get_default_op_list().compute_intensive_ops:
        return False
    return target in lowering.lowerings and not {target, packet} & set(lowering.fallbacks)


def _is_reduction(node: fx.Node) -> bool:
    if _is_part(node):
        node = node.args[0]  # type: ignore[assignment]
    return isinstance(node.target, OpOverload) and node.target._overloadpacket in _REDUCTIONS


def _is_of_rows(node: fx.Node) -> bool:
    """Whether a reduction adds up the last dimension alone, so that elementwise operators on both sides run in its kernel."""
    if _is_part(node):
        node = node.args[0]  # type: ignore[assignment]
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    size = _value(node.args[0]).dim() if isinstance(node.args[0], fx.Node) else 0
    return {dim % max(1, size) for dim in ([dims] if isinstance(dims, int) else dims or ())} == {size - 1}
