"""Cases of the four experiments at their real sizes, and small versions (twins) of the first three for the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_osdp.planner.training_job import Precision

GIB = 2**30
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a memory limit and a number of devices."""

    experiment: int
    name: str
    config_class: str
    """Name of the configuration class in transformers; `sizes` are its arguments."""
    architecture: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    block_classes: tuple[str, ...] | None = None
    sequence_length: int
    """Tokens per sample; 1 for images."""
    limit_bytes: int | None
    """Limit per device; None takes the middle between what full sharding and DDP need for this model at one sample."""
    devices: int = 8
    equal_batch_size: int | None = None
    """Global batch of the comparison at an equal batch; None takes the baseline's best."""
    precision: str = "no"
    tokens: bool = False
    """Whether rates are in tokens per second, not in samples."""
    rates: bool = True
    """Whether rates are shown; False if the machine is so busy that only ratios are meaningful."""
    remark: str = ""

    @property
    def compute(self) -> Precision:
        return Precision.named(self.precision)

    def config(self) -> Any:
        """Return the model's configuration."""
        import transformers

        return getattr(transformers, self.config_class)(**self.sizes, architectures=[self.architecture])


def _gpt2(layers: int, width: int, heads: int, vocabulary: int = 50257, positions: int = 1024) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary, "n_positions": positions}
    return {"config_class": "GPT2Config", "architecture": "GPT2LMHeadModel",
            "sizes": {**sizes, **_NO_DROPOUT, "bos_token_id": 0, "eos_token_id": 0}}  # fmt: skip


def _opt(layers: int, width: int, heads: int, vocabulary: int = 50272) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "ffn_dim": 4 * width,
        "word_embed_proj_dim": width, "vocab_size": vocabulary, "dropout": 0.0,
    }  # fmt: skip
    return {"config_class": "OPTConfig", "architecture": "OPTForCausalLM", "sizes": sizes}


def _swin(
    width: int, depths: tuple[int, ...], heads: int, *, image: int, window: int, patch: int = 4
) -> dict[str, Any]:
    """Return the arguments of a Swin case, whose width doubles in each stage."""
    sizes = {
        "embed_dim": width, "depths": list(depths), "num_heads": [heads * 2**stage for stage in range(len(depths))],
        "image_size": image, "window_size": window, "patch_size": patch, "drop_path_rate": 0.0,
    }  # fmt: skip
    return {"config_class": "SwinConfig", "architecture": "SwinForImageClassification", "sizes": sizes,
            "block_classes": ("SwinLayer",)}  # fmt: skip


CASES = (
    Case(
        experiment=1, name="GPT-2, 48 x 1536", **_gpt2(48, 1536, 24), sequence_length=512, limit_bytes=8 * GIB,
        remark="The original OSDP has 192.26 against 158.05 of full sharding here, 1.22 times, with 8057 of 8192 MB against 5657"  # noqa: E501
        " (its own units, devices and code: only the ratio compares).",
    ),
    Case(
        experiment=2, name="OPT-30B, first 8 layers", **_opt(8, 7168, 56), sequence_length=512, limit_bytes=16 * GIB,
        precision="fp16",
        remark="The original OSDP has 1261.98 against 453.18 of full sharding here, of which a factor of 2 is batch size.",  # noqa: E501
    ),
    Case(
        experiment=3, name="deep and narrow, GPT-2 96 x 1024", **_gpt2(96, 1024, 16), sequence_length=512,
        limit_bytes=8 * GIB,
        precision="fp16",
    ),
    Case(
        experiment=3, name="shallow and wide, GPT-2 4 x 8192", **_gpt2(4, 8192, 64), sequence_length=512,
        limit_bytes=16 * GIB,
        precision="fp16",
    ),
    Case(
        experiment=3, name="a mix, Swin of 512 to 4096", **_swin(512, (2, 2, 42, 4), 16, image=192, window=6),
        sequence_length=1, limit_bytes=12 * GIB, precision="fp16",
        remark="Depths and widths of SwinV2-G; SwinV2 itself does not run in float16 without autocast.",
    ),
    Case(
        experiment=4, name="OPT-6.7B, states on the host", **_opt(32, 4096, 32), sequence_length=512,
        limit_bytes=32 * GIB, devices=1,
        precision="fp16", tokens=True, equal_batch_size=8,
        remark="fairseq's page on full sharding has about 310 words/s for 13B parameters on one V100 with everything offloaded.",  # noqa: E501
    ),
)  # fmt: skip

_TWIN = {"sequence_length": 64, "limit_bytes": None, "devices": 2, "rates": False}
TWINS = (
    Case(experiment=1, name="twin of GPT-2 48 x 1536: 6 x 192", **_gpt2(6, 192, 3, vocabulary=6282, positions=64),
         **_TWIN),
    Case(experiment=2, name="twin of 8 layers of OPT-30B: 8 x 224", **_opt(8, 224, 7, vocabulary=1571), **_TWIN),
    Case(experiment=3, name="deep and narrow: 24 x 96", **_gpt2(24, 96, 3, vocabulary=2048, positions=64), **_TWIN),
    Case(experiment=3, name="shallow and wide: 2 x 512", **_gpt2(2, 512, 8, vocabulary=2048, positions=64), **_TWIN),
    Case(
        experiment=3, name="a mix: Swin of 32 to 256", **_swin(32, (1, 1, 4, 1), 2, image=64, window=2),
        **{**_TWIN, "sequence_length": 1},
    ),
)  # fmt: skip


def chosen(cases: tuple[Case, ...], experiments: tuple[int, ...]) -> tuple[Case, ...]:
    """Return the cases of the experiments."""
    return tuple(case for case in cases if case.experiment in experiments)
