"""Cases of estimated against simulated peak memory: models, layouts, other ways to fit; the measurement of each."""

from __future__ import annotations

import itertools
import multiprocessing
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
import transformers
import yaml
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers.utils import logging

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.split.candidates import possible_splits
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import search
from hf_osdp.planner.space import search_spaces
from hf_osdp.planner.split import WHOLE_BLOCKS, ModelSplit
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.tracing.describe import describe
from tests.helpers.fake_step import simulate
from tests.helpers.problems import problem

TOKENS, SAMPLES = 512, 4
MODELS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
WORLDS = (2, 8, 64)
PER_NODE = {2: 2, 8: 4, 64: 8}
"""Ranks per node, for two-stage collectives."""
LAYOUTS = ("ddp", "zero2", "zero3", "two_stage", "hsdp", "mixed", "osdp")
"""Layouts.

`mixed` alternates choices between units; `osdp` is the search's plan half-way between the least memory and DDP's.
"""
WAYS = ("recompute", "mixed_ways")
"""Layouts with other decisions for units; the second has three micro-steps."""
SPLITS = {
    "operators": ("mixed", ("GPT-2 xl", "BERT large", "T5 base", "OPT 1.3B", "Llama 1B")),
    "slices": ("zero3", ("GPT-2 xl", "BERT large", "OPT 1.3B", "Llama 1B")),  # T5 reads the weight of its `wo`
    "loss_chunks": ("zero3", ("GPT-2 xl", "OPT 1.3B", "Llama 1B")),
}
"""Kinds of split, each with its layout and the models that are split this way."""
WAYS_WORLDS = (8, 64)
PRECISIONS = ("no", "bf16")
MEAN_AIM, WORST_AIM, UNDER_AIM = 0.005, 0.03, -0.01


class PlainModel(nn.Module):
    """A model that is not from transformers; most of its parameters are an embedding in the root."""

    def __init__(self, *, vocabulary: int = 100_000, width: int = 512, blocks: int = 6) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, 100)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(blocks)
        )

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden.mean(1)), labels)}

    @staticmethod
    def inputs(samples: int) -> dict[str, torch.Tensor]:
        return {
            "tokens": torch.zeros(samples, TOKENS, dtype=torch.long),
            "labels": torch.zeros(samples, dtype=torch.long),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One model and how it is trained; its cases share a description."""

    model: str
    precision: str
    checkpointing: bool = False
    split: str = ""
    """A key of `SPLITS`, or empty. Models that are split have 4 blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    model: str
    world: int
    layout: str
    precision: str
    checkpointing: bool
    split: str
    estimated_bytes: int
    simulated_bytes: int
    moment: str
    seconds: float

    @property
    def kind(self) -> str:
        """Return the layout, recomputation or split that the case tests."""
        return self.split or self.layout

    @property
    def error(self) -> float:
        return self.estimated_bytes / self.simulated_bytes - 1


Case = tuple[Setting, int, str]


def cases(only: str | None = None) -> list[Case]:
    """Return all cases, or only `layouts` or `ways`."""
    return [*(_layout_cases() if only != "ways" else ()), *(_ways_cases() if only != "layouts" else ())]


def sampled(work: Sequence[Case], count: int) -> list[Case]:
    """Return so many of the cases, evenly spread."""
    return [work[number * len(work) // count] for number in range(count)]


def _ways_cases() -> list[Case]:
    whole = [
        (Setting(model=m, precision=p), w, way)
        for m, p, w, way in itertools.product(MODELS, PRECISIONS, WAYS_WORLDS, WAYS)
    ]
    split = [
        (Setting(model=model, precision=precision, split=kind), world, layout)
        for kind, (layout, able) in SPLITS.items()
        for model, precision, world in itertools.product(able, PRECISIONS, WAYS_WORLDS)
    ]
    return [*whole, *split]


def _layout_cases() -> list[Case]:
    """Return every combination, except HSDP and two stages if the world has no group size for them."""
    return [
        (Setting(model=model, precision=precision, checkpointing=checkpointing), world, layout)
        for model, precision, checkpointing, world, layout in itertools.product(
            MODELS, PRECISIONS, (False, True), WORLDS, LAYOUTS
        )
        if layout not in ("hsdp", "two_stage") or world > 2
    ]


def run(work: Sequence[Case], *, jobs: int) -> list[Row]:
    """Simulate every case; each process caches its descriptions."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_quiet) as pool:
        futures = {pool.submit(measure, *case): number for number, case in enumerate(work)}
        done = track(as_completed(futures), total=len(work), description="simulating", console=Console(stderr=True))
        rows = {futures[future]: future.result() for future in done}
    return [rows[number] for number in range(len(work))]


def measure(setting: Setting, world: int, layout: str) -> Row:
    started = time.perf_counter()
    model, description = _description(setting)
    batch = Batch(micro_batch_size=SAMPLES, accumulation_steps=3 if layout == "mixed_ways" else 1)
    job = TrainingJob(
        global_batch_size=world * SAMPLES * batch.accumulation_steps, micro_batch_size=SAMPLES,
        precision=Precision.named(setting.precision),
    )  # fmt: skip
    plan = Plan.of(
        description, layout_choices(layout, description, job, world), batch, world_size=world, strategy=layout
    )
    estimate = estimate_memory(description, plan.layouts(description), world, job, batch)
    simulation = simulate(
        model, plan, description=description, job=job, device_type="cuda",
        activation_checkpointing=setting.checkpointing,
        inputs=getattr(model, "inputs", None),
    )  # fmt: skip
    return Row(
        **asdict(setting), world=world, layout=layout,
        estimated_bytes=estimate.peak_bytes, simulated_bytes=simulation.peak_bytes,
        moment=f"{estimate.peak.phase} of {estimate.peak.unit}", seconds=time.perf_counter() - started,
    )  # fmt: skip


def layout_choices(layout: str, description: ModelDescription, job: TrainingJob, world: int) -> list[UnitLayout]:
    if layout == "osdp":
        return _searched(description, job, world)
    if layout in WAYS:
        return _ways_choices(layout, description, job, world)
    strategy = {"zero3": "fsdp", "mixed": "osdp"}.get(layout, layout)
    asked = problem(description, _hardware(world), replace(job, recompute=False), strategy=strategy)
    spaces = search_spaces(asked, Batch(micro_batch_size=SAMPLES, accumulation_steps=1))
    space = spaces[len(spaces) // 2]
    return [
        options[3 * index % len(options)] if layout == "mixed" else options[0] for index, options in enumerate(space)
    ]


def _ways_choices(way: str, description: ModelDescription, job: TrainingJob, world: int) -> list[UnitLayout]:
    """Return choices with every block recomputed, or with decisions in cycles of different lengths, so that many
    combinations occur.
    """
    mixed = way == "mixed_ways"

    def kinds(index: int) -> tuple[Activations, ...]:
        own = (Activations(recomputation=way) for way in description.recomputations[index][1:])
        return (*Activations.BASIC, *own) if mixed else (Activations.RECOMPUTE,)

    return [
        replace(
            choice, on_host=mixed and index % 3 == 0, reduce_every_micro_step=not (mixed and index % 4 < 2),
            activations=kinds(index)[index % len(kinds(index))] if index in description.recomputable else Activations.SAVE,  # noqa: E501
        )
        for index, choice in enumerate(layout_choices("mixed" if mixed else "zero3", description, job, world))
    ]  # fmt: skip


def _hardware(world: int) -> Hardware:
    hardware = preset("a100-80", nodes=world // PER_NODE[world], devices_per_node=PER_NODE[world])
    return replace(hardware, host=None)  # only the device's memory is compared


def _searched(description: ModelDescription, job: TrainingJob, world: int) -> list[UnitLayout]:
    """Return the search's plan under a limit between what full sharding and DDP need."""
    batch = Batch(micro_batch_size=SAMPLES, accumulation_steps=1)
    ends = [
        estimate_memory(description, layout_choices(name, description, job, world), world, job, batch).peak_bytes
        for name in ("zero3", "ddp")
    ]
    hardware = _hardware(world)
    limit = hardware.limit_for(sum(ends) // 2 + hardware.unavoidable_bytes)
    return list(search(problem(description, hardware, job, limit)).plan.layouts(description))


@lru_cache(maxsize=4)
def _description(setting: Setting) -> tuple[transformers.PretrainedConfig | PlainModel, ModelDescription]:
    model = _model(setting)
    description = describe(
        model, sequence_length=_tokens(model), compute_dtype=Precision.named(setting.precision).compute,
        device_type="cuda",
        activation_checkpointing=setting.checkpointing, split=_split(setting.split, model),
        inputs=getattr(model, "inputs", None),
    )  # fmt: skip
    return model, description


def _model(setting: Setting) -> transformers.PretrainedConfig | PlainModel:
    architecture, config_class, sizes = MODELS[setting.model].values()
    if config_class is None:
        with torch.device("meta"):
            return PlainModel()
    return getattr(transformers, config_class)(**sizes | _of_split(setting, sizes), architectures=[architecture])


def _tokens(model: transformers.PretrainedConfig | PlainModel) -> int:
    """Return the tokens per sample; fewer if the model has fewer positions, or loops over them, which takes minutes
    to trace.
    """
    if hasattr(model, "lru_width"):
        return TOKENS // 8
    text = getattr(model, "text_config", None)
    return TOKENS if text is None else min(TOKENS, text.max_position_embeddings)


def _of_split(setting: Setting, sizes: dict) -> dict:
    """Return the changes to the sizes of a model that is split: 4 blocks."""
    if not setting.split:
        return {}
    blocks = 2 if "num_decoder_layers" in sizes else 4
    depths = ("n_layer", "num_hidden_layers", "num_layers", "num_decoder_layers")
    return {name: blocks for name in depths if name in sizes}


def _split(kind: str, config: transformers.PretrainedConfig) -> ModelSplit:
    """Return the finest of the splits of a kind that the model offers."""
    if not kind:
        return WHOLE_BLOCKS
    model = build_on_meta(config)
    offered = possible_splits(model, describe(model, sequence_length=TOKENS, recomputation=False))
    wanted = {
        "operators": lambda split: split.operators and not split.sliced and split.loss_chunks == 1,
        "slices": lambda split: split.operators and split.sliced,
        "loss_chunks": lambda split: not split.operators,
    }[kind]
    return [split for split in offered if wanted(split)][-1]


def _quiet() -> None:
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
