"""Compare the memory estimate with one real GPU that acts as rank 0 of 8.

    python benchmarks/gpu_memory.py
    python benchmarks/gpu_memory.py --quick
    python benchmarks/gpu_memory.py --limits
    python benchmarks/gpu_memory.py --limits --margin 0.2 --between 0 0.25
    python benchmarks/gpu_memory.py --layouts ddp mixed grouped
    python benchmarks/gpu_memory.py --json gpu_memory.json

With a process group that sends nothing, this process has the shards of rank 0 of 8. Layout, gathers, reductions and
the optimizer are those of FSDP2 and torch, on the device. There are two questions:

1. Layouts (DDP, ZeRO-2, ZeRO-3, HSDP, mixed, and ZeRO-3 with four blocks in a unit): the estimate against
   `max_memory_allocated` of a step. Aim: 1 % on average. `--layouts` measures those named alone, of more models in
   bf16.
2. Plans of the search under a limit that `torch.cuda.set_per_process_memory_fraction` enforces: at the least limit
   that the planner calls feasible, and between it and what DDP needs. No such plan may run out of memory, and of a
   limit of 4 GiB or more at least 98 % of what the margin leaves must be used. Beside them stands whether the plan
   runs in 97 % of its limit, and with segments that do not expand, whose count is the last line but one. `--limits`
   leaves the layouts out, and takes more models. `--margin` plans with this `memory_margin`.

The workspace of cuBLAS is in the same allocator; it is measured first and given to the planner as reserved memory.
Without a CUDA device, the program says so and measures nothing. The last line is the headline; the exit code is 1 if
an aim is missed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # Python adds only the script's own folder

import torch  # noqa: E402
import transformers  # noqa: E402

from benchmarks.cuda_memory import CudaMemory, Memory, Reading  # noqa: E402
from benchmarks.trial import Trial, sharded_copy  # noqa: E402
from hf_osdp.distributed.mesh import Meshes  # noqa: E402
from hf_osdp.modeling.batch import training_batch  # noqa: E402
from hf_osdp.modeling.build import build_on_meta  # noqa: E402
from hf_osdp.planner.cost.evaluate import estimate_plan  # noqa: E402
from hf_osdp.planner.decision import Batch  # noqa: E402
from hf_osdp.planner.description import ModelDescription  # noqa: E402
from hf_osdp.planner.grouping import grouped  # noqa: E402
from hf_osdp.planner.hardware import Hardware  # noqa: E402
from hf_osdp.planner.plan import Plan  # noqa: E402
from hf_osdp.planner.presets import preset  # noqa: E402
from hf_osdp.planner.problem import PlanningProblem, Strategy  # noqa: E402
from hf_osdp.planner.search.search import least_memory, search  # noqa: E402
from hf_osdp.planner.space import search_spaces  # noqa: E402
from hf_osdp.planner.training_job import Precision, TrainingJob  # noqa: E402
from hf_osdp.quantities import format_bytes  # noqa: E402
from hf_osdp.tracing.describe import describe  # noqa: E402
from tests.helpers.fake_step import fake_process_group  # noqa: E402
from tests.helpers.steps import batch_on, make_optimizer, train_step  # noqa: E402

WORLD = 8
STEPS = 3
"""Number of steps. The first creates the optimizer states, the last is measured; all must fit in memory."""
AIM_ERROR, AIM_USED, LARGE_BYTES = 0.01, 0.98, 4 * 2**30
BETWEEN = (0.0, 0.25, 0.6)
"""Limits, as fractions of the way from the least feasible one to what DDP needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A published model size and its batch."""

    config: str
    sizes: dict
    architecture: str
    sequence_length: int
    samples: int


MODELS = {
    "GPT-2 small": Model(config="GPT2Config", sizes={}, architecture="GPT2LMHeadModel", sequence_length=1024,
                         samples=4),
    "GPT-2 medium": Model(
        config="GPT2Config", sizes={"n_layer": 24, "n_embd": 1024, "n_head": 16}, architecture="GPT2LMHeadModel",
        sequence_length=1024, samples=4,
    ),
    "GPT-2 xl": Model(
        config="GPT2Config", sizes={"n_layer": 48, "n_embd": 1600, "n_head": 25}, architecture="GPT2LMHeadModel",
        sequence_length=1024, samples=1,
    ),
    "BERT large": Model(
        config="BertConfig", architecture="BertForMaskedLM", sequence_length=512, samples=8,
        sizes={"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "Llama 1B": Model(
        config="LlamaConfig", architecture="LlamaForCausalLM", sequence_length=1024, samples=1,
        sizes={"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
               "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    ),
}  # fmt: skip
MORE_MODELS = {
    "Llama 8B": Model(
        config="LlamaConfig", architecture="LlamaForCausalLM", sequence_length=2048, samples=1,
        sizes={"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
               "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "Qwen3 0.6B": Model(
        config="Qwen3Config", architecture="Qwen3ForCausalLM", sequence_length=2048, samples=2,
        sizes={"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
               "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "ViT base": Model(
        config="ViTConfig", architecture="ViTForImageClassification", sequence_length=1, samples=32,
        sizes={"num_labels": 1000},
    ),
    "8 experts": Model(
        config="MixtralConfig", architecture="MixtralForCausalLM", sequence_length=1024, samples=2,
        sizes={"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16,
               "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000},
    ),
}  # fmt: skip
"""Models of `--limits` and `--layouts`, beside MODELS: 8B parameters, a vocabulary of 150k, pictures, experts."""
LAYOUTS = ("ddp", "zero2", "zero3", "hsdp", "mixed", "grouped")
PRECISIONS = ("no", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """One layout without a limit, in bytes."""

    model: str
    precision: str
    layout: str
    estimated_bytes: int | None
    """Includes the libraries' workspaces; the measured bytes are None if memory did not suffice."""
    allocated_bytes: int | None
    reserved_bytes: int | None

    @property
    def error(self) -> float | None:
        return None if self.allocated_bytes is None else self.estimated_bytes / self.allocated_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRow:
    """One plan of the search under an enforced limit, in bytes."""

    model: str
    precision: str
    between: float
    limit_bytes: int
    room_bytes: int
    """What the margin leaves of the limit."""
    planned_bytes: int
    fits: bool
    allocated_bytes: int | None
    reserved_bytes: int | None
    retries: int | None = None
    """How often the allocator emptied its cache in all steps."""
    fits_97: bool = False
    """Whether the plan also runs in 97 % of its limit."""
    fits_fixed: bool = False
    """Whether the plan also runs with segments that do not expand."""

    @property
    def used(self) -> float | None:
        """Return the allocated share of what the margin leaves of the limit."""
        return None if self.allocated_bytes is None else self.allocated_bytes / self.room_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model in one precision, with the values that its cases share."""

    name: str
    precision: str
    description: ModelDescription
    job: TrainingJob
    trial: Trial
    meshes: Meshes
    margin: float | None = None
    """Share of the limit that plans leave free; None for the margin of every run on CUDA."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layouts of GPT-2 small in one precision, one limit")
    parser.add_argument("--limits", action="store_true", help="limits only, of more models in bf16")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="these layouts only, of more models in bf16")
    parser.add_argument("--models", nargs="+", choices=MODELS | MORE_MODELS, help="of these models only")
    parser.add_argument("--margin", type=float, metavar="SHARE", help="share of the limit that plans leave free")
    parser.add_argument("--between", type=float, nargs="+", metavar="PART", help="limits, as parts of the way from the"
                        " least feasible one to what DDP needs")  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing was measured.")
        return 0
    layouts: list[LayoutRow] = []
    limits: list[LimitRow] = []
    cases = (("GPT-2 small",), ("bf16",)) if options.quick else (MODELS, PRECISIONS)
    cases = ((*MODELS, *MORE_MODELS), ("bf16",)) if options.limits or options.layouts else cases
    for name, precision in itertools.product(options.models or cases[0], cases[1]):
        # One process for each, because a failed step leaves memory in the allocator.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            chosen = (("zero3", "mixed"), (0.0,)) if options.quick else (LAYOUTS, BETWEEN)
            chosen = ((), (*BETWEEN, 0.9)) if options.limits else chosen
            chosen = (options.layouts, ()) if options.layouts else chosen
            chosen = (chosen[0], options.between or chosen[1], options.margin)
            found = pool.submit(measure_on_cuda, name, precision, *chosen).result()
        layouts += found[0]
        limits += found[1]
        show(*found)
    if options.json:
        content = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "transformers": transformers.__version__,
            "layouts": [asdict(row) | {"error": row.error} for row in layouts],
            "limits": [asdict(row) | {"used": row.used} for row in limits],
        }  # fmt: skip
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(row.fits_fixed for row in limits)} of {len(limits)} plans run with segments that do not expand")
    line, met = headline(layouts, limits)
    print(line)
    return 0 if met else 1


# ---------------------------------------------------------------------------------------------------------- measuring


def measure_on_cuda(
    name: str, precision: str, layouts: Sequence[str], between: Sequence[float], margin: float | None = None
) -> tuple[list[LayoutRow], list[LimitRow]]:
    """Return all rows of one model in one precision on the first GPU; run this in a separate process."""
    transformers.logging.set_verbosity_error()
    memory = CudaMemory(Precision.named(precision))
    with fake_process_group(WORLD):
        model = (MODELS | MORE_MODELS)[name]
        setting = replace(setting_of(name, model, precision, memory.device), margin=margin)
        return measure(setting, memory, layouts, between)


def measure(
    setting: Setting, memory: Memory, layouts: Sequence[str], between: Sequence[float]
) -> tuple[list[LayoutRow], list[LimitRow]]:
    """Return all rows of a setting. Needs a process group of `WORLD` ranks that sends nothing."""
    return (
        [measure_layout(setting, memory, layout) for layout in layouts],
        [measure_limit(setting, memory, part, limit) for part, limit in limits_of(setting, memory, between)],
    )


def setting_of(name: str, model: Model, precision: str, device: torch.device) -> Setting:
    """Describe the model for CUDA, or for the CPU in a test."""
    config = getattr(transformers, model.config)(**model.sizes, architectures=[model.architecture])
    job = TrainingJob(
        global_batch_size=model.samples * WORLD, micro_batch_size=model.samples, precision=Precision.named(precision)
    )  # fmt: skip
    description = describe(
        config, sequence_length=model.sequence_length, compute_dtype=job.precision.compute, device_type=device.type
    )  # fmt: skip
    empty = build_on_meta(config)
    inputs = training_batch(empty, model.sequence_length)
    trial = Trial(model=empty, units=description.units, job=job, inputs=inputs, device=device)
    return Setting(
        name=name, precision=precision, description=description, job=job, trial=trial, meshes=Meshes(device.type)
    )


def measure_layout(setting: Setting, memory: Memory, layout: str) -> LayoutRow:
    """Measure one layout with all of the device's memory."""
    if layout == "grouped":
        description = grouped(setting.description, 4)
        setting = replace(setting, description=description, trial=replace(setting.trial, units=description.units))
    plan = plan_of(setting, layout)
    reading = attempt(plan, setting, memory, None)
    return LayoutRow(
        model=setting.name,
        precision=setting.precision,
        layout=layout,
        estimated_bytes=estimate_plan(plan, setting.description, setting.job).memory.peak_bytes
        + memory.workspace_bytes,
        allocated_bytes=None if reading is None else reading.allocated,
        reserved_bytes=None if reading is None else reading.reserved,
    )


def measure_limit(setting: Setting, memory: Memory, between: float, limit_bytes: int) -> LimitRow:
    """Measure the search's plan at its limit."""
    hardware = hardware_of(memory, setting.margin)
    plan = search(_problem(setting, hardware, limit_bytes)).plan
    reading = attempt(plan, setting, memory, limit_bytes)
    return LimitRow(
        model=setting.name,
        precision=setting.precision,
        between=between,
        limit_bytes=limit_bytes,
        room_bytes=hardware.room_bytes(limit_bytes),
        planned_bytes=plan.peak_bytes,
        fits=reading is not None,
        allocated_bytes=None if reading is None else reading.allocated,
        reserved_bytes=None if reading is None else reading.reserved,
        retries=None if reading is None else reading.retries,
        fits_97=attempt(plan, setting, memory, int(0.97 * limit_bytes)) is not None,
        fits_fixed=attempt(plan, setting, memory, limit_bytes, expandable=False) is not None,
    )


def limits_of(setting: Setting, memory: Memory, between: Sequence[float]) -> Iterator[tuple[float, int]]:
    """Yield limits from the planner's least feasible one to what DDP needs, up to the device's memory."""
    hardware = hardware_of(memory, setting.margin)
    least, most = (
        least_memory(_problem(setting, hardware, hardware.device.memory_bytes, name)) for name in ("osdp", "ddp")
    )
    for part in between:
        limit = int(least + part * (most - least))
        if limit <= memory.total_bytes:
            yield part, limit


def attempt(
    plan: Plan, setting: Setting, memory: Memory, limit_bytes: int | None, *, expandable: bool = True
) -> Reading | None:
    """Run a few steps under a limit and free everything; return None if memory did not suffice."""
    reading = None
    try:
        with memory.limited(limit_bytes, expandable=expandable):
            reading = _steps(plan, setting, memory)
    except torch.OutOfMemoryError:
        pass  # memory is freed below, because the traceback still holds the tensors here
    gc.collect()
    return reading


def headline(layouts: Sequence[LayoutRow], limits: Sequence[LimitRow]) -> tuple[str, bool]:
    """Return the last line, and whether every aim was met."""
    errors = [abs(row.error) for row in layouts if row.error is not None]
    mean, worst = (sum(errors) / len(errors), max(errors)) if errors else (float("inf"), float("inf"))
    failed = sum(not row.fits for row in limits)
    large = [row.used for row in limits if row.used is not None and row.limit_bytes >= LARGE_BYTES]
    used = min(large, default=None)
    met = mean <= AIM_ERROR and not failed and (used is None or used >= AIM_USED)
    share = (
        "no limit was 4 GiB or more"
        if used is None
        else f"at least {used:.1%} used of limits from 4 GiB less the margin (aim {AIM_USED:.0%})"
    )
    line = (
        f"estimate off by {mean:.2%} on average (aim {AIM_ERROR:.0%}), {worst:.2%} at worst, over {len(errors)} of"
        f" {len(layouts)} layouts;"
        f" {failed} of {len(limits)} feasible plans ran out of memory (aim 0); {share}"
    )
    return line, met


# ------------------------------------------------------------------------------------------------------------- pieces


def hardware_of(memory: Memory, margin: float | None) -> Hardware:
    """Return hardware of eight such devices, with a margin, by default that of every run on CUDA, because the limit is
    on reserved bytes.

    Only the libraries' workspaces share the allocator, because the process group has no communicator.
    """
    hardware = preset("h100", devices_per_node=WORLD)
    device = replace(
        hardware.device, memory_bytes=memory.total_bytes, reserved_bytes=memory.workspace_bytes, communicator_bytes=0
    )
    return replace(hardware, device=device, host=None).with_margin(margin)  # only the device's memory is compared


def plan_of(setting: Setting, layout: str) -> Plan:
    """Return a plan with one layout for all units; `mixed` alternates layouts."""
    batch = Batch(micro_batch_size=setting.job.micro_batch_size, accumulation_steps=1)
    strategy = {"zero3": "fsdp", "grouped": "fsdp", "mixed": "osdp"}.get(layout, layout)
    hardware = replace(preset("h100", devices_per_node=WORLD), host=None)  # everything stays on the device
    problem = _problem(setting, hardware, hardware.device.memory_bytes, strategy)
    problem = replace(problem, job=replace(problem.job, recompute=False))
    spaces = search_spaces(problem, batch)
    space = spaces[len(spaces) // 2]
    choices = [
        options[3 * index % len(options)] if layout == "mixed" else options[0] for index, options in enumerate(space)
    ]
    return Plan.of(setting.description, choices, batch, world_size=WORLD, strategy=layout)


def _problem(setting: Setting, hardware: Hardware, limit_bytes: int, strategy: str = "osdp") -> PlanningProblem:
    return PlanningProblem(
        description=setting.description, hardware=hardware, job=setting.job, memory_limit_bytes=limit_bytes,
        strategy=Strategy(strategy),
    )  # fmt: skip


def _steps(plan: Plan, setting: Setting, memory: Memory) -> Reading:
    """Build the model under the plan and train; all tensors are freed on return."""
    trial = setting.trial
    model = sharded_copy(plan, trial, setting.meshes)
    optimizer = make_optimizer(model, trial.job.optimizer, plan, trial.units)
    batch = batch_on(trial.inputs, plan.micro_batch_size, trial.device)
    for number in range(STEPS):
        if number == STEPS - 1:
            memory.last_step_begins()
        train_step(model, optimizer, batch, plan, trial.job)
    return memory.reading()


def show(layouts: Sequence[LayoutRow], limits: Sequence[LimitRow]) -> None:
    """Print the rows as text of at most 100 columns."""
    print(f"\n{'model':<13}{'dtype':<6}{'layout':<8}{'estimated':>11}{'allocated':>11}{'reserved':>11}{'error':>9}")
    for row in layouts:
        error = "-" if row.error is None else f"{row.error:+.2%}"
        print(f"{row.model:<13}{row.precision:<6}{row.layout:<8}{_text(row.estimated_bytes):>11}{_text(row.allocated_bytes):>11}"
              f"{_text(row.reserved_bytes):>11}{error:>9}")  # fmt: skip
    if not limits:
        return sys.stdout.flush()
    names = ("limit", "planned", "allocated", "reserved", "retries", "used")
    print(
        f"\n{'model':<13}{'dtype':<6}"
        + "".join(f"{name:>{8 if name in ('retries', 'used') else 11}}" for name in names)
        + "  outcome, in 97 %, fixed"
    )
    for row in limits:
        sizes = (row.limit_bytes, row.planned_bytes, row.allocated_bytes, row.reserved_bytes)
        used = "-" if row.used is None else f"{row.used:.1%}"
        outcome = "fits" if row.fits else "OUT OF MEMORY"
        others = ", ".join("fits" if fits else "out" for fits in (row.fits_97, row.fits_fixed))
        retries = "-" if row.retries is None else row.retries
        texts = "".join(f"{_text(size):>11}" for size in sizes)
        texts += f"{retries:>8}{used:>8}"
        print(f"{row.model:<13}{row.precision:<6}{texts}  {outcome}, {others}")
    sys.stdout.flush()


def _text(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


if __name__ == "__main__":
    sys.exit(main())
