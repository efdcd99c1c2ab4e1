"""Read published rows, and say of each whether its run can be estimated."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep

FOLDER = Path(__file__).with_name("data")
FILES = ("throughput.csv", "more_throughput.csv", "fms_memory.csv")

DEVICES = {
    "h100": "h100", "H100": "h100", "H100-80GB HBM3": "h100", "H100 (DGX)": "h100", "H100-80GB SXM": "h100",
    "a100-80": "a100-80", "A100-80G": "a100-80", "A100-SXM4-80G": "a100-80", "A100-SXM4-80GB": "a100-80",
    "A100": "a100-80", "A100-SXM4-80GB (DGX A100)": "a100-80",
    "a100-40": "a100-40", "A100-40G": "a100-40", "A100-SXM4-40GB": "a100-40", "A100-40GB SXM": "a100-40",
    "A100-SXM4-40GB (DGX A100)": "a100-40",
    "RTX 3090": "rtx-3090", "RTX 3090 (280 W, no NVLink, old board)": "rtx-3090",
    "RTX 4090": "rtx-4090", "RTX 4090 (PCIe4 x16, no P2P)": "rtx-4090", "RTX A6000": "a6000",
    "V100-SXM2-16GB": "v100-16", "V100-SXM2-32GB (DGX-1)": "v100-32", "B200": "b200",
    "B200 183G": "b200", "H100-80G SXM": "h100",
}  # fmt: skip
"""Presets by the devices' names in the rows; rows of other devices are not estimated."""
STRATEGIES = {
    "fsdp": "full shard", "FSDP": "full shard", "FSDP2": "full shard", "FSDP1 full_shard": "full shard",
    "FSDP1 ZeRO-3": "full shard", "HSDP": "hybrid", "DDP": "replicas", "DDP (apex)": "replicas",
    "FSDP1 NO_SHARD (DDP)": "replicas", "single": "replicas", "FSDP1 full shard (accelerate)": "full shard",
    "FSDP2 dp 16": "full shard",
}  # fmt: skip
IN_4_BITS = ("bf16+nf4 base", "bf16 + bnb nf4 base", "bf16-true + bnb nf4-dq", "nf4 base + bf16 LoRA")
"""Precisions of runs whose base is in 4 bits."""
PRECISIONS = ("bf16", "bf16, fp32 reduce", "bf16, bf16 reduce", "bf16-true", "bf16 autocast, fp32 params",
              "fp16 (apex O2)", "fp16 (amp)", "fp16 autocast, fp32 weights",
              "pure bf16 (parameters, gradients, moments)", *IN_4_BITS)  # fmt: skip
ATTENTION = {
    "flash": "sdpa", "sdpa": "sdpa", "SDPA": "sdpa", "SDPA flash v2": "sdpa", "SDPA/flex": "sdpa",
    "flash attention 2": "sdpa", "SDPA causal": "sdpa", "eager matmul-softmax": "eager",
    "flash-attn 2": "sdpa", "manual (torch 1.12)": "eager",
}  # fmt: skip
OPTIMIZERS = {
    "adamw": OptimizerSpec(), "AdamW": OptimizerSpec(), "FusedAdam": OptimizerSpec(),
    "AdamW (adamw_torch, foreach)": OptimizerSpec(step=OptimizerStep.FOREACH),
    "SGD momentum (timm benchmark default, unchecked)": OptimizerSpec(name="sgd", states=1),
}  # fmt: skip
ASSUMED = {"huggingface/accelerate PR 4022": {"attention": "flash-attn 2", "optimizer": "AdamW"}}
"""Fields that a source leaves out, as trl recommends and sets them."""
CHECKPOINTING = ("none", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published run."""

    number: int
    """Its line in the file, from 1."""
    file: str
    fields: dict[str, str]

    def __getitem__(self, name: str) -> str:
        assumed = next((more for source, more in ASSUMED.items() if self.fields["source"].startswith(source)), {})
        return self.fields.get(name) or assumed.get(name, "")

    def count(self, name: str, default: int = 1) -> int:
        return int(float(self[name])) if self[name] else default

    @property
    def device(self) -> str:
        """Name of the preset; empty if there is none."""
        return DEVICES.get(self["device"], "")

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of one device."""
        return float(self["tokens_per_s_per_gpu"])

    @property
    def is_in_4_bits(self) -> bool:
        return self["precision"] in IN_4_BITS

    @property
    def kind(self) -> str:
        """What is trained: experts, adapters of a base in 4 bits, adapters or all parameters."""
        if "experts" in self["model"]:
            return "experts"
        return "4 bits" if self.is_in_4_bits else "LoRA" if self["lora_rank"] else "full"

    @property
    def accumulation(self) -> int:
        """Micro-steps of an optimizer step; 0 if they are not published."""
        if not self["accumulation"] and "accumulation = 32/(bs*gpus)" in self["notes"]:
            return max(1, 32 // (self.count("micro_batch") * self.count("gpus")))
        return self.count("accumulation", 0)

    @property
    def is_fitted(self) -> bool:
        """Whether constants may be fitted on the row: every second line of a file."""
        return self.number % 2 == 1

    @property
    def label(self) -> str:
        parts = [
            self["model"],
            f"{self['seq']} tokens",
            f"{self['gpus']} x {self.device}",
            f"batch {self['micro_batch']}",
        ]
        parts += [f"LoRA {self['lora_rank']}"] if self["lora_rank"] else []
        parts += ["recomputed"] if self["checkpointing"] != "none" else []
        return ", ".join([*parts, *(["base in 4 bits"] if self.is_in_4_bits else [])])

    @property
    def why_not(self) -> str:
        """Why the run cannot be estimated; empty if it can."""
        notes = self["notes"]
        checks = (
            (not self["tokens_per_s_per_gpu"], "no rate of tokens is published"),
            ("UNPACKED" in notes or "unpacked" in notes, "real lengths are not published"),
            ("Transformer-XL" in self["model"], "transformers has no such model"),
            ("DeepSpeed" in self["strategy"] or "Megatron" in self["strategy"], "another framework's sharding"),
            ("fp8" in self["precision"].lower() or "mxfp8" in self["precision"], "products in 8 bits"),
            ("int4" in self["precision"] or "INT8" in self["precision"], "a base in another format of low precision"),
            (not self["device"] or not self.device, "no preset of this device"),
            ("power limited" in self["device"], "a device below its power"),
            (self["strategy"] not in STRATEGIES, f"strategy {self['strategy']}"),
            (self["precision"] not in PRECISIONS, f"precision {self['precision']}"),
            (not self["micro_batch"] or not self["layers"], "settings are not published"),
            ("WITHIN 3 %" in notes, "memory within 3 % of the card's, where the allocator takes time"),
            ("liger" in notes, "fused kernels (Liger)"),
            (self.is_in_4_bits and "experts" in self["model"], "experts in 4 bits"),
            ("vocabulary head" in notes, "a head over chosen tokens"),
            (not self["checkpointing"] or self["checkpointing"] not in CHECKPOINTING,
             f"recomputation {self['checkpointing'] or 'unknown'}"),
            (self["attention"] not in ATTENTION, f"attention {self['attention'] or 'unknown'}"),
            (self["compiled"] != "no", f"compiled: {self['compiled'] or 'unknown'}"),
            (self["optimizer"] not in OPTIMIZERS, f"optimizer {self['optimizer'] or 'unknown'}"),
            (not self.accumulation, "accumulation is not published"),
            ("interconnect not stated" in notes and self.device.startswith(("a100", "v100", "h100", "b200")),
             "with or without NVLink is not published"),
        )  # fmt: skip
        return next((reason for fails, reason in checks if fails), "")


def read_rows(folder: Path = FOLDER) -> list[Row]:
    """Return all rows of the files."""
    rows = []
    for name in FILES:
        with (folder / name).open(encoding="utf-8") as file:
            rows += [Row(number=n, file=name, fields=line) for n, line in enumerate(csv.DictReader(file), 1)]
    return rows
