"""Replace attributes of modules, classes and objects, or set variables of a context, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def replaced(owner: object, /, **values: object) -> Iterator[None]:
    """Set attributes in this context; restore or remove them afterwards.

    Those of an object are written to its `__dict__`: a frozen dataclass refuses to set its own, and a module that
    `torch.compile` returned sets those of the module inside.
    """
    own, is_class = vars(owner), isinstance(owner, type)
    put = partial(setattr, owner) if is_class else own.__setitem__
    remove = partial(delattr, owner) if is_class else own.__delitem__
    before = {name: own[name] for name in values if name in own}
    for name, value in values.items():
        put(name, value)
    try:
        yield
    finally:
        for name in values:
            remove(name)
        for name, value in before.items():
            put(name, value)


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a variable this value inside the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
