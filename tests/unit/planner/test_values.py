"""Every dataclass of the planner is a frozen value: nobody changes one, adds to one, or mixes up its fields."""

import importlib
import inspect
import pkgutil
from dataclasses import fields, is_dataclass

import hf_osdp.planner

BY_IDENTITY = ("Candidate", "Option", "UnitGroup")
"""Large, and the same objects again and again: they are compared by identity, and cache what follows from them."""


def test_planner_values_are_frozen_slotted_and_keyword_only():
    found = pkgutil.walk_packages(hf_osdp.planner.__path__, "hf_osdp.planner.")
    modules = [importlib.import_module(one.name) for one in found if not one.ispkg]
    classes = [(m, cls) for m in modules for _, cls in inspect.getmembers(m, inspect.isclass)]
    values = [cls for m, cls in classes if is_dataclass(cls) and cls.__module__ == m.__name__]
    assert len(values) > 30
    for cls in values:
        assert cls.__dataclass_params__.frozen, cls
        assert ("__slots__" in vars(cls)) is (cls.__name__ not in BY_IDENTITY), cls
        assert all(field.kw_only for field in fields(cls) if field.init), cls
