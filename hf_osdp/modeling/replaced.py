"""Replace attributes of modules, classes and objects for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Set attributes in this context; restore or remove them afterwards."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)
