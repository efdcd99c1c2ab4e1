"""Trace compiled blocks on fake tensors: dynamo and AOTAutograd run, and Inductor's kernels are replaced by their
allocations.

The graphs of forward and backward are those that Inductor would receive; `activation_memory_budget` decides where the
joint graph is cut (`torch._functorch.partitioners`). No code is generated: each graph becomes a `FusedGraph`, which
allocates and frees as its kernels do.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import DescriptionError, DescriptionTimeoutError
from ...modeling.replaced import setting
from ...modeling.units import class_of
from ...planner.block_forms import BlockForms
from ...planner.description import Recomputation, UnitDescription
from ..cuda_kernels import CudaKernels
from ..fused_graph import FusedGraph, FusedKernel, known_sizes
from ..memory_tracker import MemoryTracker
from ..options import ModelRun
from ..recorder import Recorder
from ..tensors import DEVICE
from .compiled import COMPILER, is_changed

_BUDGETS = tuple(Recomputation(budget=budget) for budget in (0.13, 0.28, 0.53, 0.78))
"""Budgets traced in addition to 0 and 1: torch's partitioner finds only 4 to 6 different cuts of a block."""
_log = logging.getLogger(__name__)
_MAX_VARIANTS = 256
"""Most compilations of one forward that dynamo keeps: one for each batch size and budget."""


class TracedCompiler:
    """Compile forwards for a trace.

    Args:
        mode: the mode of the fake tensors.
        cuda: replaces CUDA's attention in a trace for CUDA; None for the CPU.
    """

    def __init__(self, mode: FakeTensorMode, cuda: CudaKernels | None = None) -> None:
        self._mode, self._cuda = mode, cuda
        self.memory: MemoryTracker | None = None
        """Records what compiled forwards and their backwards allocate and compute."""
        self._runs = 0
        """Number of graphs that ran."""
        self.backend = functools.cache(self._make_backend)

    def compile(self, module: nn.Module, forward: Callable[..., Any], budget: float) -> Callable[..., Any]:
        """Return a block's compiled forward; calling it raises FormError if compilation fails."""
        compiled = torch.compile(forward, backend=self.backend(budget), fullgraph=True, dynamic=False)
        name = class_of(module).__name__

        def run(*args: Any, **kwargs: Any) -> object:
            runs = self._runs
            with self._modes_disabled():
                try:
                    output: object = compiled(*args, **kwargs)
                except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
                    if isinstance(error, torch._dynamo.exc.TorchDynamoException) or "compiled frames" in str(error):
                        raise FormError(name, str(error) or type(error).__name__) from error
                    raise
            if self._runs == runs:
                raise FormError(name, "dynamo is switched off in this process")
            return output

        return run

    def _make_backend(self, budget: float) -> Callable[..., Any]:
        """Return dynamo's backend for a budget.

        Each budget has its own object, because dynamo's cache compares backends, not budgets.
        """
        from torch._inductor.compile_fx import compile_fx

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> object:
            for node in module.graph.nodes if self._cuda is not None else ():
                if node.target is F.scaled_dot_product_attention and self._cuda is not None:
                    node.target = self._cuda.call_attention
            module.recompile()
            with torch._functorch.config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
                return compile_fx(module, inputs, inner_compile=self._inner_compile)  # type: ignore[arg-type]

        return backend

    def _inner_compile(
        self, module: fx.GraphModule, inputs: object, **options: object
    ) -> Callable[[list[Any]], list[Any]]:
        """Return a function that allocates like a graph's kernels; it replaces Inductor's inner compilation."""
        graph = FusedGraph(module.graph, "cpu" if self._cuda is None else "cuda")
        run = functools.partial(self._run, graph)
        run._boxed_call = True  # type: ignore[attr-defined]  # it empties the list of its arguments
        return run

    def _run(self, graph: FusedGraph, args: list[Any]) -> list[Any]:
        self._runs += 1
        values: dict[fx.Node, Any] = dict(zip(graph.inputs, args, strict=True))
        args.clear()
        with self._modes_disabled(), torch.no_grad():
            for kernel in graph.kernels:
                self._launch(kernel, values)
            return [self._result(node, graph, values) if isinstance(node, fx.Node) else node for node in graph.outputs]

    def _launch(self, kernel: FusedKernel, values: dict[fx.Node, Any]) -> None:
        """Allocate what a kernel writes, and release what no later kernel reads."""
        with ExitStack() as stack:
            if isinstance(self.memory, Recorder):
                stack.enter_context(self.memory.kernel(kernel.work))
            for node in kernel.writes:
                values.pop(kernel.reuses.get(node), None)  # type: ignore[arg-type]
                like = node.meta["val"]
                values[node] = self._allocate(known_sizes(like.shape), known_sizes(like.stride()), like.dtype)
            scratch = self._allocate((kernel.scratch_bytes,), (1,), torch.uint8) if kernel.scratch_bytes else None
        del scratch
        for node in kernel.frees:
            values.pop(node, None)

    def _allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty_strided(shape, stride, dtype=dtype, device=DEVICE)
        if self.memory is not None:
            self.memory.track([made])
        return made

    def _result(self, node: fx.Node, graph: FusedGraph, values: dict[fx.Node, Any]) -> object:
        """Return an output of a graph: a buffer, an input, or a view of one of them."""
        owner, like = graph.owner[node], node.meta.get("val")
        source = values.get(owner)
        if node is owner or not isinstance(source, torch.Tensor) or not isinstance(like, torch.Tensor):
            return like if source is None else source
        if like.dtype is not source.dtype:
            source = source.view(like.dtype)
        return source.as_strided(like.shape, like.stride(), like.storage_offset())

    @contextmanager
    def _modes_disabled(self) -> Iterator[None]:
        """Disable the trace's modes except the fake tensor mode, because dynamo compiles nothing under them."""
        modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
        try:
            with _disable_current_modes(), self._mode:
                yield
        finally:
            for mode in reversed(modes):
                _push_mode(mode)


@contextmanager
def forms_in_trace(mode: FakeTensorMode, cuda: CudaKernels | None = None) -> Iterator[TracedCompiler]:
    """Let forwards that are made inside the context compile for a trace; arguments are those of `TracedCompiler`."""
    compiler = TracedCompiler(mode, cuda)
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), _MAX_VARIANTS)
    try:
        with setting(COMPILER, compiler.compile), torch._dynamo.config.patch(limits):
            yield compiler
    finally:
        if compiler.backend.cache_info().currsize:  # its code is of forwards that training compiles for real
            torch._dynamo.reset()


class FormError(DescriptionError):
    """A block that dynamo cannot compile as one graph."""

    def __init__(self, class_name: str, reason: str) -> None:
        self.class_name = class_name
        first = next((line.strip() for line in reason.splitlines() if line.strip()), "no reason was given")
        super().__init__(f"{class_name} does not compile as one graph ({first[:120].rstrip('.')}).")


def policies_of_form(forms: BlockForms, unit: UnitDescription) -> tuple[Recomputation, ...]:
    """Return the policies to recompute a compiled block partially; none if it runs as the model has it."""
    return _BUDGETS if is_changed(forms, unit) else ()


def forms_asked(run: ModelRun, classes: tuple[str, ...], model_name: str) -> BlockForms:
    """Return the forms of blocks of these classes; warn if they are to be compiled and there are none."""
    if run.compile and not classes:
        _log.warning(
            "%s has no blocks to compile; name their classes with block_classes, or leave compile out.", model_name
        )
    return BlockForms(compiled_classes=classes if run.compile else ())


def trace_in_forms(trace: Callable[[BlockForms], Any], units: Sequence[UnitDescription], forms: BlockForms) -> Any:  # noqa: ANN401  a `Trace`
    """Trace a model with as many of its blocks compiled as possible; the last call of `trace` has them."""
    while True:
        try:
            found = trace(forms)
            runs = Counter(segment.unit for segment in found.segments)
            for index, unit in enumerate(units):
                if is_changed(forms, unit) and (runs[index] > 1 or index in found.outside_reads):
                    reason = "it runs several times in a step, or its weights are read outside of it"
                    raise FormError(unit.class_name, reason)
            return found
        except Exception as error:
            if not forms.changed_blocks or isinstance(error, DescriptionTimeoutError):
                raise
            left: tuple[str, ...] = ()
            if isinstance(error, FormError) and forms.changes(error.class_name):
                _log.warning("%s These blocks run uncompiled.", error)
                left = tuple(name for name in forms.compiled_classes if name != error.class_name)
            else:
                name = type(error).__name__
                _log.warning("The model cannot be traced with compiled blocks (%s); they run uncompiled.", name)
                _log.debug("The trace with compiled blocks failed.", exc_info=True)
            forms = BlockForms(compiled_classes=left)
