"""Training batches of Hugging Face models, their loss, and control of caches and random numbers in a forward."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import DescriptionError
from .replaced import replaced

Inputs = Callable[[int], Mapping[str, Any]]
"""Function from a number of samples to the keyword arguments of the module's forward."""

Loss = Callable[[nn.Module, dict[str, Any]], Any]
"""Function from a model and a batch to the loss, or to an output that holds it. It may change the batch."""

POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions")
"""Fields of configurations that limit positions."""
_TOKEN_LABELS = (
    "CausalLM",
    "LMHeadModel",
    "MaskedLM",
    "ConditionalGeneration",
    "TokenClassification",
    "ForPreTraining",
    "VisionText2Text",
)
_SAMPLE_LABELS = (
    "SequenceClassification", "ImageClassification", "AudioClassification", "VideoClassification", "MultipleChoice",
    "NextSentencePrediction", "XVector",
)  # fmt: skip
_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")
"""Inputs that can be made."""
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_dim")
"""Names of the number of values in a frame of a spectrogram."""
_FRAMES_PER_LETTER = 3
"""Speech has 50 frames and about 16 letters per second."""


def training_batch(model: nn.Module, sequence_length: int) -> Inputs:
    """Return a function that makes a batch of any number of samples for a transformers model, with labels, on the
    current device.

    Causal language models get packed batches without an attention mask, other text models get a mask.
    `sequence_length` is the number of tokens per sample, in both source and target, or of values of a waveform; images
    and spectrograms have the configuration's size. Raise DescriptionError if the model's kind of input is not known.
    """
    model = without_adapters(model)
    config, kind = _config_of(model), type(model).__name__
    arguments = frozenset(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    if main not in _INPUTS:
        raise DescriptionError(
            f"The inputs of {kind} ({main}) are not known; pass inputs, a function from samples to keyword arguments."
        )
    dtype = torch.float64 if getattr(model, "dtype", None) is torch.float64 else torch.float32

    def make(samples: int) -> dict[str, Any]:
        batch: dict[str, Any] = {main: _main_input(config, main, samples, sequence_length, dtype)}
        if kind.endswith("MultipleChoice"):
            batch[main] = batch[main][:, None].repeat(1, 2, 1)
        if "return_loss" in arguments:  # two towers, as CLIP has
            batch |= {
                "pixel_values": _main_input(config.vision_config, "pixel_values", samples, 0, dtype),
                "return_loss": True,
            }
        if _takes_mask(kind, main, arguments, batch[main], sequence_length):
            shape = batch[main].shape
            batch["attention_mask"] = torch.ones(shape if main == "input_ids" else shape[:2], dtype=torch.long)
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in arguments:
            batch["decoder_input_ids"] = torch.zeros(
                (samples, sequence_length), dtype=torch.long
            )  # as DataCollatorForSeq2Seq adds them
        batch |= _labels(model, kind, main, samples, sequence_length)
        if kind.endswith(_TOKEN_LABELS) and "next_sentence_label" in arguments:
            batch["next_sentence_label"] = torch.zeros(samples, dtype=torch.long)
        for name in _also_taken(model, kind, main) - batch.keys():
            batch[name] = _main_input(config, name, samples, sequence_length, dtype)
        if "use_cache" in arguments or getattr(config, "use_cache", False):
            batch["use_cache"] = False
        return batch

    return make


def _config_of(model: nn.Module) -> Any:  # noqa: ANN401
    """Return a transformers model's configuration; raise DescriptionError for other models, whose `config` may be
    None or a dict.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "__dict__"):
        raise DescriptionError(
            f"{type(model).__name__} is not a transformers model, so its inputs are not known; pass inputs, a function"
            " from samples to keyword arguments."
        )
    return config


def _takes_mask(kind: str, main: str, arguments: Container[str], given: torch.Tensor, sequence_length: int) -> bool:
    """Whether a batch has a mask: of tokens, except for packed ones, or of a spectrogram's frames."""
    if main == "input_features":
        return "attention_mask" in arguments and given.shape[1] == sequence_length
    return main == "input_ids" and not kind.endswith(("CausalLM", "LMHeadModel"))


def _also_taken(model: nn.Module, kind: str, main: str) -> set[str]:
    """Return further inputs that the forward needs: tokens beside pictures, pictures beside tokens."""
    parameters = inspect.signature(model.forward).parameters
    needed = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    if main == "pixel_values" and kind.endswith(_TOKEN_LABELS) and "input_ids" in parameters:
        needed.add("input_ids")
    if unknown := needed - set(_INPUTS) - {"labels"}:
        raise DescriptionError(
            f"The forward of {kind} needs {min(unknown)}, which is not known; pass inputs, a function from samples to"
            " keyword arguments."
        )
    return needed - {"labels"}


def _labels(model: Any, kind: str, main: str, samples: int, sequence_length: int) -> dict[str, torch.Tensor]:  # noqa: ANN401
    if kind.endswith("QuestionAnswering"):
        return {name: torch.zeros(samples, dtype=torch.long) for name in ("start_positions", "end_positions")}
    if kind.endswith("CTC"):
        frames = (
            int(model._get_feat_extract_output_lengths(sequence_length)) if main == "input_values" else sequence_length
        )
        return {"labels": torch.full((samples, max(1, frames // _FRAMES_PER_LETTER)), _plain_token(model.config))}
    if kind.endswith(_SAMPLE_LABELS):
        regression = getattr(model.config, "num_labels", 2) == 1
        return {"labels": torch.zeros(samples, dtype=torch.float32 if regression else torch.long)}
    return (
        {"labels": torch.zeros((samples, sequence_length), dtype=torch.long)} if kind.endswith(_TOKEN_LABELS) else {}
    )


def plain_batch(batch: Any) -> Any:  # noqa: ANN401
    """Return a batch whose mappings, nested ones too, are new dictionaries; everything else stays as it is."""
    return {name: plain_batch(value) for name, value in batch.items()} if isinstance(batch, Mapping) else batch


def with_row_length(batch: Any, length: int, changed: int) -> Any:  # noqa: ANN401
    """Return a batch whose dimensions of `length` tokens have another length: they are cut, or repeated. Labels that
    are numbers have one for each class, and stay.
    """

    def changed_tensor(tensor: torch.Tensor) -> torch.Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == length:
                tensor = tensor.index_select(dim, torch.arange(changed) % length)
        return tensor

    if changed == length:
        return batch
    found: Any = tree_map_only(torch.Tensor, changed_tensor, plain_batch(batch))  # torch looks into no other mapping
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    of_classes = isinstance(labels, torch.Tensor) and labels.is_floating_point()
    return {**found, "labels": labels} if of_classes else found


def output_of(model: nn.Module, batch: Mapping[str, Any], loss: Loss | None = None) -> object:
    """Return the output of a training step: the model's output, or the result of `loss`."""
    plain: dict[str, Any] = plain_batch(batch)
    return model(**plain) if loss is None else loss(model, plain)


def loss_of(output: object) -> torch.Tensor:
    """Return the loss in an output: `.loss`, `["loss"]`, a scalar, or the first of a tuple; else the sum of
    differentiable means.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if (
        loss is None
        and isinstance(output, tuple)
        and output
        and isinstance(output[0], torch.Tensor)
        and output[0].dim() == 0
    ):
        loss = output[0]
    if loss is None and isinstance(output, torch.Tensor):
        loss = output if output.dim() == 0 else output.mean()
    if loss is None:
        leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        parts = [leaf.mean() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not parts:
            raise DescriptionError(
                "The model's output has no loss and no differentiable tensor; pass inputs that include labels."
            )
        loss = sum(parts[1:], parts[0])
    return loss


_REPLACED: dict[str, tuple[str, Callable[..., object]]] = {
    # it would build T x T masks for packed sequences, as it cannot read the positions
    "transformers.masking_utils": ("find_packed_sequence_indices", lambda *args, **kwargs: None),
    # it would keep fake tensors, such as positions of pictures, for later steps
    "transformers.pytorch_utils": ("is_torchdynamo_compiling", lambda: True),
}
"""Functions of transformers that are replaced in a trace."""


@contextmanager
def traceable() -> Iterator[None]:
    """Replace functions of transformers that depend on values, or keep tensors in caches."""
    with ExitStack() as stack:
        for module, (name, function) in _REPLACED.items():
            if hasattr(found := sys.modules.get(module), name):
                stack.enter_context(replaced(found, **{name: function}))
        yield


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Seed all generators with 0 inside the context, so that all ranks draw the same numbers; restore them
    afterwards.
    """
    with random_states_kept():
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        yield


@contextmanager
def random_states_kept(devices: Iterable[torch.device | int] = ()) -> Iterator[None]:
    """Restore the random number generators of Python, NumPy, torch and the given CUDA devices after the context."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def check_sequence_length(model: nn.Module, sequence_length: int) -> None:
    """Raise ValueError if samples are empty or longer than a table of absolute positions."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length} must be at least 1.")
    config = getattr(model, "config", None)
    name = next((name for name in POSITION_LIMITS if isinstance(getattr(config, name, None), int)), None)
    embeddings = (
        (path.rpartition(".")[2], module) for path, module in model.named_modules() if isinstance(module, nn.Embedding)
    )
    table = next(
        (module for leaf, module in embeddings if leaf == "wpe" or ("position" in leaf and "relative" not in leaf)),
        None,
    )
    if name is None or table is None:
        return
    # RoBERTa numbers positions from after the padding index
    limit = getattr(config, name) - (0 if table.padding_idx is None else table.padding_idx + 1)
    if 0 < limit < sequence_length:
        raise ValueError(
            f"sequence_length={sequence_length} is more than the {limit} positions that {type(model).__name__} has"
            f" ({name}={getattr(config, name)}); use at most {limit}, or a configuration with more."
        )


def _main_input(config: Any, name: str, samples: int, sequence_length: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401
    if name == "input_ids":
        return _token_rows(config, samples, sequence_length)
    if name == "input_values":  # a waveform, or a spectrogram
        is_spectrogram = hasattr(config, "num_mel_bins") and hasattr(config, "max_length")
        shape = (config.max_length, config.num_mel_bins) if is_spectrogram else (sequence_length,)
        return torch.zeros(samples, *shape, dtype=dtype)
    if (
        name == "input_features"
    ):  # log-mel frames; Whisper's encoder takes all that it has positions for, and halves them
        bins = next((size for one in _BINS if (size := _size(config, one))), 80)
        positions = _size(config, "max_source_positions") if _size(config, "num_mel_bins") else None
        shape = (bins, 2 * positions) if isinstance(positions, int) else (sequence_length, bins)
        return torch.zeros(samples, *shape, dtype=dtype)
    size = _size(config, "image_size") or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.zeros(samples, _size(config, "num_channels") or 3, height, width, dtype=dtype)


def _size(config: Any, name: str) -> Any:  # noqa: ANN401
    """Return a size in a configuration, else in one inside it, of which those of vision come first."""
    if (own := getattr(config, name, None)) is not None:
        return own
    return next((size for inner in inner_configs(config) if (size := getattr(inner, name, None)) is not None), None)


def inner_configs(config: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield the configurations inside of one, at any depth, those of vision first."""
    inner = {name: value for name, value in vars(config).items() if hasattr(value, "to_dict")}
    for name in sorted(inner, key=lambda name: not any(word in name for word in ("vision", "visual", "image", "vit"))):
        yield inner[name]
        yield from inner_configs(inner[name])


def _token_rows(config: object, samples: int, length: int) -> torch.Tensor:
    """Make rows of a short question, two separators, a text and its end token, which some models look for."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    row: list[Any] = [_plain_token(text)] * length
    sep, end = getattr(text, "sep_token_id", None), getattr(text, "eos_token_id", None)
    end = end[0] if isinstance(end, (list, tuple)) and end else end
    known = range(
        getattr(text, "vocab_size", None) or 0
    )  # a configuration with a smaller vocabulary may have a default token outside it
    ends = [token for token in dict.fromkeys((sep, end)) if token in known]
    if length > 4:
        row[1:3] = [sep] * 2 if sep in known else row[1:3]
        row[length - len(ends) :] = ends
    return torch.tensor([row] * samples)


def _plain_token(config: object) -> int:
    """Return the first token of a vocabulary that is not one of the configuration's special tokens."""
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith(("token_id", "token_index", "token_ids")):
            special.update(value if isinstance(value, (list, tuple)) else [value])
    return next((token for token in range(getattr(config, "vocab_size", None) or 1) if token not in special), 0)


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the base model of a peft model, whose class determines inputs and loss; return any other model
    unchanged.
    """
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()
