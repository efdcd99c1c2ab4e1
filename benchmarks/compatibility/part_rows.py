"""Rows: ranks that run different modules in a step."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from .data import COUNT, tokens, waves
from .models import VOCABULARY, made, wav2vec2
from .row import Figures, row
from .side import Side, trained

_GROUP = "Ranks that run different modules"
_PIXELS, _IMAGE_TOKENS = 16, 4
_UNUSED = {"ddp_find_unused_parameters": True}


class _Tasks(nn.Module):
    """Blocks of one shape, of which the last is the task's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.own = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, task: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for block in (*self.blocks, self.own[0 if task is None else int(task[0])]):
            hidden = block(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


@row(
    "a block for each task; ranks train and evaluate different ones",
    _GROUP,
    config={"block_classes": "_Block"},
    daily=True,
)
def _tasks(side: Side) -> Figures:
    torch.manual_seed(0)
    data = [{**sample, "task": torch.tensor(number // 2 % 2)} for number, sample in enumerate(tokens())]

    def evaluated(trainer: Any) -> dict[str, float]:
        return {
            "eval_loss": trainer.evaluate(data[:16])["eval_loss"],
            "predicted_loss": trainer.predict(data[:16]).metrics["test_loss"],
        }

    options = {
        "train_sampling_strategy": "sequential",
        "average_tokens_across_devices": False,
        "prediction_loss_only": True,
    }
    return trained(side, _Tasks(), data, then=evaluated, **options, **_UNUSED)


def _pictures() -> list[dict[str, torch.Tensor]]:
    """Return samples of which every fourth has a picture."""
    pixels = torch.randn(COUNT, 3, _PIXELS, _PIXELS, generator=torch.Generator().manual_seed(3))
    samples = tokens(vocabulary=VOCABULARY - 1)
    for sample, picture in list(zip(samples, pixels, strict=True))[::4]:
        sample["input_ids"][1 : 1 + _IMAGE_TOKENS] = VOCABULARY - 1
        sample["labels"][1 : 1 + _IMAGE_TOKENS] = -100
        sample["pixel_values"] = picture
    return samples


def _collated(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}
    pictures = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
    return {**batch, **({"pixel_values": torch.stack(pictures)} if pictures else {})}


@row("a vision-language model; some batches have no picture", _GROUP)
def _some_pictures(side: Side) -> Figures:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=_PIXELS, patch_size=8),
        text_config=transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY,
                                             max_position_embeddings=64),
        image_token_id=VOCABULARY - 1, vision_feature_layer=-1, image_seq_length=_IMAGE_TOKENS,
    )  # fmt: skip
    model = made(transformers.LlavaForConditionalGeneration, config)
    options = {"remove_unused_columns": False, "train_sampling_strategy": "sequential"}
    return trained(side, model, _pictures(), given={"data_collator": _collated}, **options, **_UNUSED)


@row("Wav2Vec2 with LayerDrop; each rank draws its own layers", _GROUP)
def _layer_drop(side: Side) -> Figures:
    model = wav2vec2()
    model.config.layerdrop = 0.4
    return trained(side, model, waves(), average_tokens_across_devices=False, **_UNUSED)
