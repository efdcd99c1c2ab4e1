"""Cases of the four experiments, and the machines for which plans are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_osdp.planner.hardware import GB, Backend, Hardware, HostSpec
from hf_osdp.planner.presets import CUBLAS_BYTES, preset
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
    limit_bytes: int
    """Limit per device."""
    devices: int = 8
    equal_batch_size: int | None = None
    """Global batch of the comparison at an equal batch; None takes the baseline's best."""
    precision: str = "no"
    tokens: bool = False
    """Whether rates are in tokens per second, not in samples."""
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


def chosen(cases: tuple[Case, ...], experiments: tuple[int, ...]) -> tuple[Case, ...]:
    """Return the cases of the experiments."""
    return tuple(case for case in cases if case.experiment in experiments)


NAMED = "v100-pcie-32"
"""Device with PCIe 3.0 links as in the original experiment; its 32 GiB leave room for a limit of 16 GiB for
tensors.
"""
HOST_MEMORY_BYTES = 128 * GIB
HOST_BYTES_PER_S = 128 * GB
HOST_SOURCE = "six channels of DDR4-2666, the line rate of one socket (Intel Xeon Platinum 8168, product page)"


def named_machine(case: Case) -> Hardware:
    """Return hardware from data sheets, for planning only. The limit is that of torch's allocator, as in measurements,
    so the context and communicators are not part of it. Only a single device moves states to its host."""
    hardware = preset(NAMED, devices_per_node=case.devices)
    hardware = replace(hardware, device=replace(hardware.device, reserved_bytes=CUBLAS_BYTES, communicator_bytes=0))
    return replace(hardware, host=(hardware.host or _named_host(hardware)) if case.devices == 1 else None)


def _named_host(hardware: Hardware) -> HostSpec:
    """Return a host with the same link as between devices; on such machines both are PCIe 3.0 with 16 lanes."""
    rate = hardware.intra_node.bytes_per_s
    return HostSpec(
        memory_bytes=HOST_MEMORY_BYTES, to_device_bytes_per_s=rate, to_host_bytes_per_s=rate,
        update_bytes_per_s=HOST_BYTES_PER_S,
        source=f"{hardware.intra_node.source}; {HOST_SOURCE}",
    )  # fmt: skip


def as_one_of(measured: Hardware, devices: int, *, workspace_bytes: int) -> Hardware:
    """Return hardware of `devices` devices like the measured one, connected by an emulated PCIe 3.0 link.

    Args:
        measured: a single device.
        devices: number of devices.
        workspace_bytes: bytes that libraries keep in torch's allocator; nothing else reserved counts towards the
            limit.
    """
    link = preset(NAMED).intra_node
    device = replace(measured.device, reserved_bytes=workspace_bytes, communicator_bytes=0)
    return replace(
        measured, device=device, nodes=1, devices_per_node=devices, intra_node=link, inter_node=link,
        backend=Backend.NCCL, timings=(),
        host=measured.host if devices == 1 else None,
    )  # fmt: skip
