"""Keep real values of small tensors for fake ones, so that a model can read them: masks, counts, branches.

The integers and masks of a batch are known, and so is everything computed only from them. A mask whose values are not
known counts as all true, a number as finite. Real tensors that a loss uses, such as those of a reference model, become
fake ones.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ..modeling.batch import plain_batch, same_random_numbers, traceable
from ..modeling.replaced import replaced
from .python_values import python_values
from .tensors import DEVICE, call_operator, fake_like, is_dtensor, tensors_in

aten = torch.ops.aten

_MAX_KNOWN = 2**22
"""Most elements of integers and masks for which real values are computed, which takes milliseconds."""
_MAX_KNOWN_FLOATS = 2**12
"""Most elements of floating-point tensors: it includes lengths and sample weights, but not activations."""
_UNKNOWN = object()
_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""For each operator that fails on fake tensors torch logs a stack, which the exception has too."""
_LIKE_FIRST = frozenset(
    {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full}
)
"""Operators that use the shape and dtype of their first argument, but not its values."""
_UNINITIALISED = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided}
)
"""Operators that allocate uninitialised memory; integers in it count as zeros, which a model overwrites before it
reads them.
"""
_DRAWN = 1 - 2**-7
"""Assumed value of a single uniform random number, which decides whether something runs: LayerDrop leaves a layer out
below a threshold, LyCORIS adapters run above one."""
_INDEXING = frozenset(
    {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index, aten._unsafe_index_put}
)
"""Operators whose second argument is a list of indices."""


class KnownValues(TorchDispatchMode):
    """Compute data-dependent operators on fake tensors, and if `alone`, collectives as if this process were the only
    one.

    Enter it by `on_fake_tensors`, right after the `FakeTensorMode`, so that the modes above see each operator once,
    with the memory of its result.
    """

    def __init__(self, *, alone: bool, max_floats: int = _MAX_KNOWN_FLOATS) -> None:
        super().__init__()
        self._alone = alone
        self._is_small = functools.partial(_is_small, max_floats=max_floats)
        self._max_bytes = 8 * max(_MAX_KNOWN, max_floats)
        self._values: dict[int, tuple[torch.UntypedStorage, weakref.ref[torch.UntypedStorage]]] = {}
        """Real and fake storages by fake storage, so that views share values and see what is written through other
        views.
        """
        self._fakes = WeakIdKeyDictionary()
        """Fake tensors of the real tensors that operators received."""

    def store(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Store a tensor's values, unless it is too large; its views share them."""
        storage = fake.untyped_storage()
        if not self._is_small(fake) or storage.nbytes() > self._max_bytes or real.device.type == "meta":
            return
        key = storage._cdata
        with _disable_current_modes():
            values = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            self._values[key] = values, weakref.ref(storage, lambda _: self._values.pop(key, None))
            once = tuple(
                slice(0, 1) if stride == 0 else slice(None) for stride in fake.stride()
            )  # expanded elements share memory
            value = self.value(fake)
            assert value is not None
            value[once].copy_(real.detach()[once])

    def fakes_of(
        self, batch: Mapping[str, Any], mode: FakeTensorMode, floating_dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Return a batch with fake tensors in new mappings; floating-point ones get `floating_dtype` if given."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            made = fake_like(tensor, mode, floating_dtype)
            self.store(made, tensor)
            return made

        fakes: dict[str, Any] = tree_map_only(torch.Tensor, fake, plain_batch(batch))
        return fakes

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor, in memory that its views share; None if they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor.detach() if tensor.device == DEVICE and self._is_small(tensor) else None
        storage = tensor.untyped_storage()
        known, _ = self._values.get(storage._cdata, (None, None))
        if known is None or known.nbytes() != storage.nbytes():  # storages of parameters are resized
            return None
        with (
            _disable_current_modes(),
            temporarily_clear_interpreter_stack(),
        ):  # inside vmap no operator without tensors can run
            return torch.empty(0, dtype=tensor.dtype).set_(
                known, tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def knows_all(self, tensors: Iterable[torch.Tensor]) -> bool:
        return all(tensor.untyped_storage()._cdata in self._values for tensor in tensors)

    def with_fakes(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return an operator's arguments with real tensors replaced by fake ones, whose memory is not counted."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            if tensor not in self._fakes:
                with _disable_current_modes():  # so that its memory is not counted
                    self._fakes[tensor] = fake_like(tensor, mode)
                self.store(self._fakes[tensor], tensor)
            made: torch.Tensor = self._fakes[tensor]
            return made

        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": DEVICE}
        fresh = func is aten.lift_fresh.default  # its argument is a new tensor
        if not fresh and not all(isinstance(tensor, FakeTensor) for tensor in tensors_in((args, kwargs))):
            args, kwargs = tree_map_only(torch.Tensor, fake, (args, kwargs))
        return args, kwargs

    def count(self, mask: torch.Tensor, shape: torch.Size) -> int:
        """Count the true elements of a mask, expanded to this shape; if its values are not known, count all
        elements.
        """
        values = self.value(mask)
        if values is None:
            return shape.numel()
        with _disable_current_modes():
            return int(values.expand(shape).count_nonzero())

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if any(map(is_dtensor, types)):
            return NotImplemented
        with torch._C.DisableTorchFunction():  # so that reading shapes does not go through function modes
            return self._run(func, args, kwargs or {})

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        packet = func._overloadpacket
        if func.namespace == "c10d" and self._alone:
            return self._as_if_alone(func, args)
        if packet in _FALLBACKS:
            real = self._computed(func, args, kwargs)
            return (
                _FALLBACKS[packet](self, *args, **kwargs)
                if real is _UNKNOWN
                else tree_map_only(torch.Tensor, self.fake_of, real)
            )
        indexed = args
        if packet in _INDEXING:
            indexed = (args[0], [position for index in args[1] for position in self._positions(index)], *args[2:])
        if packet is aten.split_with_sizes:
            indexed = (args[0], _sizes_that_fit(args[0], args[1], *args[2:], **kwargs), *args[2:])
        result = call_operator(func, indexed, kwargs)
        self._propagate(func, args, kwargs, result)
        return result

    def _propagate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Store an operator's real result if all its arguments are known; else forget the values of what it writes."""
        if func.is_view and isinstance(args[0], FakeTensor):
            return
        made = list(tensors_in(result))
        real = self._computed(func, args, kwargs) if made and all(map(self._is_small, made)) else _UNKNOWN
        if real is _UNKNOWN and func in ASSUMED and self._is_small(made[-1]):
            with _disable_current_modes():
                self.store(made[-1], ASSUMED[func](made[-1].shape, *args))
            return
        if func is aten.rand.default and made[0].numel() == 1:
            with _disable_current_modes():
                real = torch.full(made[0].shape, _DRAWN, dtype=made[0].dtype)
        if real is _UNKNOWN:
            for tensor in _written(func, args, kwargs) if func._schema.is_mutable else ():
                self._values.pop(tensor.untyped_storage()._cdata, None)
            return
        for fake, value in zip(made, tensors_in(real), strict=True):
            if fake.untyped_storage()._cdata not in self._values:
                self.store(fake, value)

    def _computed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Return the operator's result for known values, else `_UNKNOWN`."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _UNKNOWN
        with _disable_current_modes(), torch.no_grad():
            if func._overloadpacket in _LIKE_FIRST | _UNINITIALISED and args and isinstance(args[0], torch.Tensor):
                # its values do not matter
                args = (torch.zeros((), dtype=args[0].dtype).expand(args[0].shape), *args[1:])
            if any(self.value(tensor) is None for tensor in tensors_in((args, kwargs))):
                return _UNKNOWN
            try:
                result = func(
                    *tree_map_only(torch.Tensor, self.value, args), **tree_map_only(torch.Tensor, self.value, kwargs)
                )
            except (
                RuntimeError,
                IndexError,
            ):  # for example token ids of another vocabulary, which are harmless in a trace
                return _UNKNOWN
            if func._overloadpacket in _UNINITIALISED:
                return _UNKNOWN if result.is_floating_point() or result.is_complex() else result.zero_()
            return result

    def fake_of(self, real: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor with known values."""
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=DEVICE)
        self.store(fake, real)
        return fake

    def _positions(self, index: object) -> list[Any]:
        """Return an index unchanged; for a mask return the positions of its true elements, one tensor for each of
        its dimensions.
        """
        if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        return [_empty(self.count(index, index.shape)) for _ in range(index.dim())]

    def _as_if_alone(self, func: OpOverload, args: tuple[Any, ...]) -> object:
        """Compute a collective: the output is the input, repeated to fill it."""
        from torch._C._distributed_c10d import FakeWork

        inputs = list(tensors_in(args[1]))  # none if it works in place
        for tensor in tensors_in(args[0]) if inputs else ():
            source, target = self.value(inputs[0]), self.value(tensor)
            if len(inputs) > 1 or source is None or target is None or target.numel() % source.numel():
                self._values.pop(tensor.untyped_storage()._cdata, None)
                continue
            with _disable_current_modes():
                target.view(-1, source.numel()).copy_(source.reshape(1, -1))
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


@contextmanager
def on_fake_tensors(mode: FakeTensorMode, known: KnownValues, *, gradients: bool = True) -> Iterator[None]:
    """Run a model on a mode's tensors: transformers makes no masks for unknown positions, and each run draws the same
    random numbers.
    """
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
        traceable(),
        same_random_numbers(),
        replaced(_FAKE_TENSOR_LOG, disabled=True),
        mode,
        python_values(known.value),
        known,
    ):
        yield


def is_known(func: OpOverload, result: object) -> bool:
    """Return whether an operator's result would be known if its arguments were."""
    packet = func._overloadpacket
    made = list(tensors_in(result))
    is_empty = packet in _UNINITIALISED and any(each.is_floating_point() or each.is_complex() for each in made)
    is_small = not func.is_view and not is_empty and all(map(_is_small, made))
    return is_small or packet in _FALLBACKS or packet in _INDEXING


def _is_small(tensor: torch.Tensor, max_floats: int = _MAX_KNOWN_FLOATS) -> bool:
    return tensor.numel() <= (max_floats if tensor.is_floating_point() or tensor.is_complex() else _MAX_KNOWN)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            yield from tensors_in(args[number] if number < len(args) else kwargs.get(argument.name))


def _spread_evenly(shape: torch.Size, scores: torch.Tensor, k: int, dim: int = -1, *args: object) -> torch.Tensor:
    """Return the indices of the k largest as if all were chosen equally often, as experts are by tokens."""
    moved = torch.empty(shape, device="meta").movedim(dim, -1).shape
    return (torch.arange(shape.numel()) % scores.shape[dim]).view(moved).movedim(-1, dim)


ASSUMED: dict[OpOverload, Callable[..., torch.Tensor]] = {
    aten.all.default: lambda shape, *args: torch.ones(shape, dtype=torch.bool),
    aten.isnan.default: lambda shape, *args: torch.zeros(shape, dtype=torch.bool),
    aten.isinf.default: lambda shape, *args: torch.zeros(shape, dtype=torch.bool),
    aten.topk.default: _spread_evenly,
}
"""Functions from the shape of an operator's last result, and its arguments, to the values that are assumed where those
of the arguments are not known: what code checks before it goes on, and which experts tokens visit.
"""


# Fallback results if values are not known.


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=DEVICE)


def _scalar(known: KnownValues, tensor: torch.Tensor) -> bool | int | float:
    """Return False or 1: code can divide by 1, and a layer's random drop (LayerDrop) compares against a smaller
    threshold.
    """
    return False if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1


def _nonzero(known: KnownValues, tensor: torch.Tensor) -> torch.Tensor:
    """Return as many positions as elements, all 0 if they are few: that is an expert that exists."""
    if tensor.numel() > _MAX_KNOWN_FLOATS:
        return _empty(tensor.numel(), tensor.dim())
    with _disable_current_modes():
        positions = torch.zeros(tensor.numel(), tensor.dim(), dtype=torch.int64)
    return known.fake_of(positions)


def _sizes_that_fit(tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> Sequence[int]:
    """Return the sizes of parts, equal ones in place of unknown ones, which are all 1: tokens of each expert."""
    total, parts = tensor.shape[dim], len(sizes)
    if sum(sizes) == total or set(sizes) != {1}:
        return sizes
    return [total // parts + (part < total % parts) for part in range(parts)]


def _unique(known: KnownValues, tensor: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
    """Return every element as unique, with the inverse and the counts."""
    return tensor.new_empty(tensor.numel()), _empty(*tensor.shape), _empty(tensor.numel())


def _unique_slices(
    known: KnownValues, tensor: torch.Tensor, dim: int, *args: object, **kwargs: object
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(tensor), _empty(tensor.shape[dim]), _empty(tensor.shape[dim])


def _bincount(
    known: KnownValues, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    return _empty(max(1, minlength)) if weights is None else weights.new_empty(max(1, minlength))


def _ctc_loss(
    known: KnownValues,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: object,
    target_lengths: Sequence[int] | torch.Tensor,
    *args: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss for each sample, and log probabilities of every prefix of its target with blanks in between."""
    if isinstance(target_lengths, torch.Tensor):
        values = known.value(target_lengths)
        with _disable_current_modes():
            target_lengths = [targets.shape[-1]] if values is None else values.tolist()
    frames, samples, _ = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, frames, 2 * max(target_lengths) + 1)


_FALLBACKS: dict[object, Callable[..., object]] = {
    aten._local_scalar_dense: _scalar,
    aten.equal: lambda known, tensor, other: False,
    aten.nonzero: _nonzero,
    aten.masked_select: lambda known, tensor, mask: tensor.new_empty(
        known.count(mask, torch.broadcast_shapes(tensor.shape, mask.shape))
    ),
    aten._unique2: _unique,
    aten.unique_consecutive: _unique,
    aten.unique_dim: _unique_slices,
    aten.unique_dim_consecutive: _unique_slices,
    aten.repeat_interleave: lambda known, repeats, output_size=None: _empty(
        repeats.numel() if output_size is None else output_size
    ),
    aten.bincount: _bincount,
    aten._ctc_loss: _ctc_loss,
    aten._ctc_loss_backward: lambda known, grad, log_probs, *args: torch.empty_like(log_probs),
}
