"""Built-in model shapes, for planning if a model's configuration can be read neither from the hub nor from its cache.

`catalogue.json` holds the fields that determine tensors and their sizes; other fields have transformers' defaults.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The part of a model's configuration that planning needs."""

    name: str
    """Its id on the hub."""
    same: tuple[str, ...] = ()
    """Ids of models of the same shape, such as fine-tuned ones."""
    parameters: int
    """Elements of all parameters; tied ones count once."""
    published: str
    """The published count, rounded: `8.03B`."""
    published_by: str
    source: str
    model_type: str
    fields: dict[str, Any]

    @property
    def config(self) -> PreTrainedConfig:
        from transformers import AutoConfig

        config: PreTrainedConfig = AutoConfig.for_model(self.model_type, **copy.deepcopy(self.fields))
        config._name_or_path = self.name
        return config


@cache
def catalogue() -> Mapping[str, Shape]:
    """Return all shapes by their hub ids."""
    rows = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))
    return MappingProxyType(
        {row["name"]: Shape(fields=row.pop("config"), same=tuple(row.pop("same", ())), **row) for row in rows}
    )


@cache
def shape_names() -> Mapping[str, Shape]:
    """Return the shapes by all of their ids, in lower case, with and without the organisation."""
    ids = {name.lower(): shape for shape in catalogue().values() for name in (shape.name, *shape.same)}
    return MappingProxyType({name.rpartition("/")[2]: shape for name, shape in ids.items()} | ids)


def find_shape(model_id: str) -> Shape | None:
    """Return the shape of a hub id in any case, with or without the organisation; None if there is none."""
    return shape_names().get(model_id.lower())
