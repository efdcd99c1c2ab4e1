"""Training batches with pictures for vision-language models: pixels as the model's processor gives them, and a
placeholder token for each row of features that the model makes of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import DescriptionError
from ..modeling.batch import inner_configs, training_batch, without_adapters
from .fake_model import fake_copy
from .known_values import KnownValues, on_fake_tensors

Pixels = Callable[[int], dict[str, Any]]
"""Function from a number of samples to the inputs that hold their pictures."""

_ANY_SIZE = 448
"""Largest height and width of a picture for a model that takes every size."""
_PLACEHOLDERS = ("image_token_id", "image_token_index", "image_patch_id")
_SEEN = ("cross_attention_mask", "image_attention_mask")
"""Masks of pictures to which the text attends."""
_FOUND: dict[tuple[object, ...], tuple[int, int]] = {}
"""The form of pictures of a kind of model, with its rows of features: a model is described once for each split."""
_STARTS = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The pictures of each sample."""

    number: int
    size: tuple[int, int]
    """Height and width in pixels."""
    tokens: int
    """Placeholder tokens of one picture; 0 if the model attends to pictures from the text."""

    def __str__(self) -> str:
        """Return for example `1 picture of 336 x 336 (576 tokens) a sample`."""
        several = self.number > 1
        tokens = f" ({self.tokens} tokens{' each' if several else ''})" if self.tokens else ""
        return f"{self.number} picture{'s' * several} of {self.size[0]} x {self.size[1]}{tokens} a sample"


class UsualBatch:
    """Function from a number of samples to the usual training batch of a transformers model, with pictures if it
    takes them.

    Raise ValueError if `images` are asked for and the model takes none, DescriptionError if its inputs are not known
    or the samples are too short for the pictures.
    """

    def __init__(self, model: nn.Module, sequence_length: int, images: int | None = None) -> None:
        """Find the inputs of a model with `images` pictures a sample; None is one if the model takes pictures."""
        self._text, self._model = training_batch(model, sequence_length), without_adapters(model)
        self._pixels: Pixels | None = None
        self.pictures: Pictures | None = None
        """The pictures of each sample; None if there are none."""
        if not takes_pictures(self._model):
            if images:
                raise ValueError(
                    f"images={images}, but {type(self._model).__name__} takes no pictures; leave images out."
                )
            return
        if images != 0:
            found = _found(self._model, images or 1, sequence_length)
            self._pixels, self.pictures = found or (None, None)
        if images and self.pictures is None:
            raise DescriptionError(
                f"The pictures that {type(self._model).__name__} takes are not known; pass inputs, a function from"
                " samples to keyword arguments, or images=0."
            )
        needed = 0 if self.pictures is None else self.pictures.number * (self.pictures.tokens + 1)
        if sequence_length <= needed:
            raise DescriptionError(
                f"sequence_length={sequence_length} has no room for {self.pictures}; use at least {needed + 1}, or"
                " images=0 for batches without pictures."
            )

    @property
    def content(self) -> str:
        """The pictures, or that there are none though the model takes them; empty for other models."""
        if self.pictures is not None:
            return str(self.pictures)
        takes = "pixel_values" in inspect.signature(self._model.forward).parameters
        return "no pictures" if takes and "pixel_values" not in self._text(1) else ""

    def __call__(self, samples: int) -> dict[str, Any]:
        batch = dict(self._text(samples))
        if not takes_pictures(self._model):
            return batch
        config: Any = self._model.config
        marks = torch.zeros_like(batch["input_ids"])
        if self._pixels is not None and self.pictures is not None:
            batch |= self._pixels(samples)
            start = _first_of(config, _STARTS)
            for number in range(self.pictures.number):
                first = 1 + number * (self.pictures.tokens + 1)
                marks[:, first : first + max(1, self.pictures.tokens)] = 1
                if start is not None:
                    batch["input_ids"][:, first - 1] = start
            if (placeholder := _first_of(config, _PLACEHOLDERS)) is not None:
                batch["input_ids"][marks == 1] = placeholder
        arguments = inspect.signature(self._model.forward).parameters
        for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):  # which tokens are of pictures
            if name in arguments:
                batch[name] = marks.clone()
        return batch


def takes_pictures(model: nn.Module) -> bool:
    """Return whether the forward of a transformers model takes pictures with tokens: in the place of some, or seen by
    all.
    """
    arguments = inspect.signature(model.forward).parameters.keys()
    placeholder = _first_of(getattr(model, "config", None), _PLACEHOLDERS)
    return {"input_ids", "pixel_values"} <= arguments and (placeholder is not None or not arguments.isdisjoint(_SEEN))


def _first_of(config: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _found(model: Any, images: int, sequence_length: int) -> tuple[Pixels, Pictures] | None:  # noqa: ANN401
    """Return the first form of pictures of which the model makes features, and what a sample then has."""
    arguments = inspect.signature(model.forward).parameters
    takes_any = "image_grid_thw" in arguments or (
        "image_sizes" in arguments and not getattr(model.config, "image_grid_pinpoints", None)
    )
    vision = _Vision.of(model.config, _ANY_SIZE if takes_any else None)
    if vision is None:
        return None
    if not arguments.keys().isdisjoint(_SEEN):
        pixels = _attended(model, vision, images, sequence_length)
        return pixels, Pictures(number=images, size=vision.size, tokens=0)
    attention = getattr(model.config, "_attn_implementation", None)
    kind = type(model), model.config.to_json_string(use_diff=False), attention, images
    known = _FOUND.get(kind)
    for number, pixels in enumerate(_forms(model, vision, images)):
        if known is None or known[0] == number:
            rows = _rows_of_features(model, pixels(1)) if known is None else known[1]
            if rows and rows % images == 0:
                _FOUND[kind] = number, rows
                return pixels, Pictures(number=images, size=vision.size, tokens=rows // images)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vision:
    """Sizes of the part that sees."""

    config: Any
    size: tuple[int, int]
    channels: int
    patch: int

    @classmethod
    def of(cls, config: Any, most: int | None) -> _Vision | None:  # noqa: ANN401
        """Read the sizes from the vision tower's configuration, under whatever name it has; `most` limits them."""
        found, patch = next(((inner, size) for inner in inner_configs(config) if (size := _patch(inner))), (None, 0))
        if found is None:
            return None
        merged = next((name for name in ("spatial_merge_size", "pooling_kernel_size") if name in vars(found)), "")
        merge = getattr(found, merged, None) or 1
        side = getattr(found, "image_size", None) or _ANY_SIZE
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        height, width = (min(height, most), min(width, most)) if most else (height, width)
        whole = patch * merge if merged else 1
        rounded = (max(height // whole, 1) * whole, max(width // whole, 1) * whole)
        channels = getattr(found, "num_channels", None) or getattr(found, "in_channels", None) or 3
        return cls(config=found, size=rounded, channels=channels, patch=patch)


def _patch(config: Any) -> int | None:  # noqa: ANN401
    value = getattr(config, "patch_size", None)
    value = value[-1] if isinstance(value, (list, tuple)) else value
    return value if isinstance(value, int) else None


def _attended(model: Any, vision: _Vision, images: int, sequence_length: int) -> Pixels:  # noqa: ANN401
    """Return the pictures of a model whose text attends to them: all tiles of each, with masks."""
    tiles = getattr(vision.config, "max_num_tiles", None)
    seen = (images,) if tiles is None else (images, tiles)
    dtype = torch.float64 if model.dtype is torch.float64 else torch.float32
    taken = inspect.signature(model.forward).parameters

    def pixels(samples: int) -> dict[str, Any]:
        ones = partial(torch.ones, dtype=torch.long)
        made = {
            "pixel_values": torch.full((samples, *seen, vision.channels, *vision.size), 0.5, dtype=dtype),
            "aspect_ratio_ids": ones(samples, images), "aspect_ratio_mask": ones(samples, *seen),
            **dict.fromkeys(_SEEN, ones(samples, sequence_length, *seen)),
        }  # fmt: skip
        return {name: value for name, value in made.items() if name in taken}

    return pixels


def _forms(model: Any, vision: _Vision, images: int) -> Iterator[Pixels]:  # noqa: ANN401
    """Yield the forms of pictures to try: patches with their grids, patches of each picture, tiles, pictures."""
    (height, width), channels, patch = vision.size, vision.channels, vision.patch
    rows, columns, values = height // patch, width // patch, channels * patch**2
    pooled = (-(-rows // 2), -(-columns // 2))
    taken = inspect.signature(model.forward).parameters
    dtype = torch.float64 if model.dtype is torch.float64 else torch.float32

    def form(*shape: int, by_sample: bool = False, patches: int = 0) -> Pixels:
        """Return pixels of this shape for each picture, with what else of pictures the forward takes."""

        def pixels(samples: int) -> dict[str, Any]:
            number = samples * images
            first = (samples, images) if by_sample else (number * (patches or 1),)
            others = {
                "image_grid_thw": torch.tensor([[1, rows, columns]] * number),
                "image_merge_sizes": torch.ones(number, dtype=torch.long),
                "image_sizes": torch.tensor([vision.size] * number),
                "spatial_shapes": torch.tensor([[rows, columns]] * number),
                "pixel_attention_mask": torch.ones(number, rows * columns, dtype=torch.long),
                "image_position_ids": torch.cartesian_prod(*map(torch.arange, (rows, columns))).repeat(number, 1, 1),
                "image_grids": torch.tensor([[*pooled, *pooled]] * number),
                "image_token_pooling": torch.arange(number * 8 * pooled[0] * pooled[1]).view(-1, 4) % (rows * columns),
            }
            names = (
                () if by_sample
                else ("image_grid_thw", "image_merge_sizes", "image_grids", "image_token_pooling") if patches
                else ("image_sizes", "spatial_shapes", "pixel_attention_mask", "image_position_ids")
            )  # fmt: skip
            # some models leave out pictures that are all zero
            made = {"pixel_values": torch.full((*first, *shape), 0.5, dtype=dtype)}
            return made | {name: others[name] for name in names if name in taken}

        return pixels

    if "image_grid_thw" in taken:
        times = getattr(vision.config, "temporal_patch_size", None) or 1
        for shape in ((times * values,), (values,), (2 * values,), (channels, patch, patch)):
            yield form(*shape, patches=rows * columns)
    if "spatial_shapes" in taken or "image_position_ids" in taken:
        yield form(rows * columns, values)
    if "image_token_pooling" in taken:  # of a whole picture and one crop of it, four patches become a token
        yield form(rows * columns, values, patches=2)
    pinpoints = getattr(model.config, "image_grid_pinpoints", None)
    count_tiles = getattr(sys.modules[type(model).__module__], "image_size_to_num_patches", None)
    if pinpoints and count_tiles is not None:
        yield form(count_tiles(vision.size, pinpoints, height), channels, height, width)
    plain = form(channels, height, width)
    yield lambda samples: {"pixel_values": plain(samples)["pixel_values"]}
    yield plain
    yield form(channels, height, width, by_sample=True)


def _rows_of_features(model: nn.Module, pixels: Mapping[str, Any]) -> int:
    """Return how many rows of features a model makes of pictures, one for each placeholder; 0 if it does not take
    them.
    """
    mode, known = FakeTensorMode(allow_non_fake_inputs=True), KnownValues(alone=True)
    with on_fake_tensors(mode, known, gradients=False):
        owner: Any = next((m for m in fake_copy(model, mode).modules() if hasattr(m, "get_image_features")), None)
        if owner is None:
            return 0
        taken = inspect.signature(owner.get_image_features).parameters
        given = {name: value for name, value in known.fakes_of(pixels, mode).items() if name in taken}
        try:
            features = owner.get_image_features(**given)
        except Exception:  # a model can raise any exception for pictures of another form
            return 0
        pooled = getattr(features, "pooler_output", None)
        features = pooled if pooled is not None else getattr(features, "last_hidden_state", features)
        if isinstance(features, tuple) and features and not isinstance(features[0], torch.Tensor):
            features = features[0]
        parts = [features] if isinstance(features, torch.Tensor) else features
        return sum(part.shape[:-1].numel() for part in parts)
