"""What the planner passes on are values: nobody changes one, adds to one, or mixes up its fields."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import fields, is_dataclass

import pytest

import hf_osdp.planner

MODULES = [importlib.import_module(found.name) for found in pkgutil.walk_packages(hf_osdp.planner.__path__, "hf_osdp.planner.")]
VALUES = [
    cls
    for module in MODULES
    for _, cls in inspect.getmembers(module, lambda found: inspect.isclass(found) and is_dataclass(found))
    if cls.__module__ == module.__name__
]
BY_IDENTITY = ("Group", "Option")
"""Large, and the same objects again and again: they are compared by identity, and remember what was asked of them."""


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__qualname__)
def test_it_is_frozen_slotted_and_made_by_keywords(cls):
    assert cls.__dataclass_params__.frozen and ("__slots__" in vars(cls)) is (cls.__name__ not in BY_IDENTITY)
    assert all(field.kw_only for field in fields(cls) if field.init)


def test_there_are_some():
    assert len(VALUES) > 40
