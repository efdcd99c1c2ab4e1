"""Step times on one rank: estimates from a profile of this machine compared with real steps."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_memory import MODELS, Model
from benchmarks.trial import Trial, sharded_copy
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.block_times import TimedModel
from hf_osdp.measurement.machine import measure_profile
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import ModelDescription, Recomputation
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.profile import with_block_times
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.quantities import format_bytes, format_seconds
from hf_osdp.sharding.environment import form_process_group
from hf_osdp.tracing.describe import describe
from tests.helpers.steps import batch_on, make_optimizer, train_step

from .step import Bench, step

TIME_AIM = 0.10
"""Largest allowed mean error of the step estimates."""
MEMORY_AIM = 0.03
"""Largest allowed error of the estimated peak with compiled blocks."""
CHOICE_AIM = 1.05
"""Largest allowed ratio of the chosen plan's measured step to the fastest."""
UNTIMED, TIMED = 3, 8
BLOCKS = {
    "GPT-2": MODELS["GPT-2 medium"],
    "Llama, grouped queries": MODELS["Llama 1B"],
    "BERT": MODELS["BERT large"],
    "OPT": Model(
        config="OPTConfig", architecture="OPTForCausalLM", sequence_length=1024, samples=4,
        sizes={"num_hidden_layers": 12, "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16,
               "word_embed_proj_dim": 1024},
    ),
    "T5": Model(
        config="T5Config", architecture="T5ForConditionalGeneration", sequence_length=512, samples=8,
        sizes={"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12},
    ),
    "ViT": Model(config="ViTConfig", architecture="ViTForImageClassification", sequence_length=1, samples=32,
                 sizes={"num_labels": 1000}),
    "Mixtral, experts": Model(
        config="MixtralConfig", architecture="MixtralForCausalLM", sequence_length=512, samples=2,
        sizes={"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 6, "num_attention_heads": 16,
               "num_key_value_heads": 4},
    ),
}  # fmt: skip
_TINY = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 301,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
REHEARSED = {
    "GPT-2": Model(config="GPT2Config", architecture="GPT2LMHeadModel", sequence_length=64, samples=2, sizes=_TINY),
    "Llama, grouped queries": Model(
        config="LlamaConfig", architecture="LlamaForCausalLM", sequence_length=64, samples=2,
        sizes={"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
               "num_key_value_heads": 2,
               "vocab_size": 301},
    ),
}  # fmt: skip
SMALL = Model(
    config="GPT2Config", architecture="GPT2LMHeadModel", sequence_length=128, samples=1,
    sizes={"n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 8192, "n_positions": 128, "bos_token_id": 0,
           "eos_token_id": 0},
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A model with block times measured on this device, ready to train on one rank."""

    description: ModelDescription
    hardware: Hardware
    trial: Trial
    meshes: Meshes

    @classmethod
    def of(
        cls,
        bench: Bench,
        model: Model,
        job: TrainingJob,
        micro_batch_sizes: tuple[int, ...],
        seconds: float,
        *,
        compiled: bool = False,
    ) -> Timed:
        """Profile and describe a model, with compiled blocks if `compiles`."""
        import transformers

        sizes = dict(model.sizes)
        if model.config in ("GPT2Config",):
            sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = getattr(transformers, model.config)(**sizes, architectures=[model.architecture])
        options = {
            "sequence_length": model.sequence_length,
            "compute_dtype": job.precision.compute,
            "compile": compiled,
        }
        found = measure_profile(
            device_type=bench.device.type, seconds=seconds,
            model=TimedModel(model_or_config=config, micro_batch_sizes=micro_batch_sizes, **options),
        )  # fmt: skip
        description = with_block_times(describe(config, device_type=bench.device.type, **options), found)
        empty = build_on_meta(config)
        inputs = training_batch(empty, model.sequence_length)
        trial = Trial(model=empty, units=description.units, job=job, inputs=inputs, device=bench.device)
        return cls(description=description, hardware=found.hardware, trial=trial, meshes=Meshes(bench.device.type))

    def plan(
        self, micro_batch_size: int, accumulation_steps: int = 1, *, recomputation: Recomputation | None = None
    ) -> Plan:
        """Return a plan for one rank, with no unit sharded; blocks are recomputed as `recomputation` says."""
        batch = Batch(micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps)
        choices = [
            UnitLayout(
                shard_size=1, reshard_after_forward=False,
                activations=Activations(recomputation=recomputation if recomputation in ways else None),
            )
            for ways in self.description.recomputations
        ]  # fmt: skip
        return Plan.of(self.description, choices, batch, world_size=1)

    def estimated_s(self, plan: Plan) -> float:
        time_of = estimate_plan(plan, self.description, self.trial.job, self.hardware).time
        assert time_of is not None
        return time_of.step_s

    def measured_s(self, plan: Plan, *, timed: int = TIMED) -> float:
        """Return the median seconds of a step; all tensors are freed on return."""
        model = sharded_copy(plan, self.trial, self.meshes)
        optimizer = make_optimizer(model, self.trial.job.optimizer, plan, self.trial.units)
        batch, taken = batch_on(self.trial.inputs, plan.micro_batch_size, self.trial.device), []
        for _ in range(UNTIMED + timed):
            wait(self.trial.device)
            began = time.perf_counter()
            train_step(model, optimizer, batch, plan, self.trial.job)
            wait(self.trial.device)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[UNTIMED:])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def job_of(bench: Bench, samples: int) -> TrainingJob:
    return TrainingJob(global_batch_size=samples, precision=Precision.named("no" if bench.rehearses else "bf16"))


@step(
    part=5,
    expected_s=150,
    limit_s=480,
    rehearsal_s=25,
    proves="step time of one kind of block after another, estimated from a profile and measured, on one rank in bf16",
)
def blocks(bench: Bench) -> None:
    form_process_group(needed=True)
    errors: dict[str, float] = {}
    for name, model in (REHEARSED if bench.rehearses else BLOCKS).items():
        if bench.left_s < 25:
            bench.note(f"No time was left for {name} and what follows.")
            break
        try:
            errors[name] = measure_kind(bench, name, model)
        except Exception as error:  # an error of one kind does not affect the others
            bench.row(
                blocks=name,
                samples=model.samples,
                estimated="-",
                measured="-",
                error=f"{type(error).__name__}: {error}",
            )
            bench.miss(f"{name}: {type(error).__name__}: {error}")
    mean = statistics.fmean(map(abs, errors.values())) if errors else float("inf")
    bench.note(f"mean error {mean:.1%} over {len(errors)} kinds (aim {TIME_AIM:.0%})")
    bench.aim(bench.rehearses or mean <= TIME_AIM, f"estimates are {mean:.1%} off on average (aim {TIME_AIM:.0%})")


def measure_kind(bench: Bench, name: str, model: Model) -> float:
    """Write a row and return the relative error."""
    sizes = (max(1, model.samples // 2), model.samples)
    timed = Timed.of(bench, model, job_of(bench, model.samples), sizes, seconds=2.0 if bench.rehearses else 8.0)
    plan = timed.plan(model.samples)
    estimated_s, measured_s = timed.estimated_s(plan), timed.measured_s(plan)
    error = estimated_s / measured_s - 1
    bench.row(
        blocks=name, samples=model.samples, estimated=format_seconds(estimated_s), measured=format_seconds(measured_s),
        error=f"{error:+.1%}",
    )  # fmt: skip
    return error


@step(
    part=5,
    expected_s=170,
    limit_s=480,
    rehearsal_s=60,
    proves="blocks compiled, recomputed or not, beside eager ones: time and peak estimated and measured, and what compilation gains",  # noqa: E501
)
def compiled(bench: Bench) -> None:
    if not bench.compiles:
        return
    form_process_group(needed=True)
    models = {name: BLOCKS[name] for name in ("GPT-2", "Llama, grouped queries")}
    if bench.rehearses:
        models = {"GPT-2": REHEARSED["GPT-2"]}
    for name, model in models.items():
        taken: dict[bool, float] = {}
        for compiles in (False, True):
            if bench.left_s < (5 if bench.rehearses else 60):
                bench.note(f"No time was left for {name}, compiled={compiles}, and what follows.")
                return
            timed = Timed.of(
                bench, model, job_of(bench, model.samples), (max(1, model.samples // 2), model.samples),
                seconds=1.0 if bench.rehearses else 6.0, compiled=compiles,
            )  # fmt: skip
            ways = dict.fromkeys(way for ways in timed.description.recomputations for way in ways)
            taken[compiles] = min(
                measure_recomputation(bench, name, timed, model.samples, way) for way in (None, *ways)
            )
        gain = taken[False] / taken[True]
        bench.note(f"{name}: the fastest compiled step is {gain:.2f} times as fast as the fastest eager one.")
        bench.aim(bench.rehearses or gain > 1, f"{name}: compiled blocks are {gain:.2f} times as fast")


def measure_recomputation(bench: Bench, name: str, timed: Timed, samples: int, way: Recomputation | None) -> float:
    """Write a row for one policy to recompute the blocks, and return the measured seconds of a step."""
    plan, on_cuda = timed.plan(samples, recomputation=way), bench.device.type == "cuda"
    estimate = estimate_plan(plan, timed.description, timed.trial.job, timed.hardware)
    if on_cuda:
        gc.collect()  # the model before has cycles; its bytes must not count as there before this one
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device) if on_cuda else 0
    seconds = timed.measured_s(plan, timed=3 if bench.rehearses else TIMED)
    assert estimate.time is not None
    time_error, peak, memory_error, shown = estimate.time.step_s / seconds - 1, "-", 0.0, "-"
    if on_cuda:
        peak_bytes = torch.cuda.max_memory_allocated(bench.device) - before
        memory_error = estimate.memory.peak_bytes / peak_bytes - 1
        peak, shown = format_bytes(peak_bytes), f"{memory_error:+.1%}"
    label = f"{name}, {'compiled' if timed.description.compiled_classes else 'eager'}, {'save all' if way is None else way.describe()}"  # noqa: E501
    bench.row(
        blocks=label, estimated=format_seconds(estimate.time.step_s), measured=format_seconds(seconds),
        error=f"{time_error:+.1%}",
        estimated_peak=format_bytes(estimate.memory.peak_bytes), measured_peak=peak, memory_error=shown,
    )  # fmt: skip
    bench.aim(
        bench.rehearses or abs(memory_error) <= MEMORY_AIM,
        f"{label}: peak {memory_error:+.1%} off (aim {MEMORY_AIM:.0%})",
    )
    bench.aim(
        bench.rehearses or abs(time_error) <= TIME_AIM, f"{label}: time {time_error:+.1%} off (aim {TIME_AIM:.0%})"
    )
    return seconds


@step(
    part=5,
    expected_s=60,
    limit_s=240,
    rehearsal_s=25,
    proves="launch cost: a small model at micro-batches of 1 and up; the planner's choice beside the fastest",
)
def launch(bench: Bench) -> None:
    form_process_group(needed=True)
    samples = 8 if bench.rehearses else 64
    model = REHEARSED["GPT-2"] if bench.rehearses else SMALL
    sizes = [1 << n for n in range(samples.bit_length())]
    timed = Timed.of(bench, model, job_of(bench, samples), tuple(sizes), seconds=3.0 if bench.rehearses else 12.0)
    chosen = search(
        PlanningProblem(
            description=timed.description,
            hardware=timed.hardware,
            job=timed.trial.job,
            memory_limit_bytes=timed.hardware.device.memory_bytes,
        )
    ).plan
    sizes = sorted({*sizes, chosen.micro_batch_size})
    measure = partial(timed.measured_s, timed=3 if bench.rehearses else 5)
    measured: dict[int, float] = {}
    for size in sizes:
        plan = timed.plan(size, samples // size)
        estimated_s, measured[size] = timed.estimated_s(plan), measure(plan)
        bench.row(
            micro_batch=size, micro_steps=samples // size, estimated=format_seconds(estimated_s),
            measured=format_seconds(measured[size]),
            error=f"{estimated_s / measured[size] - 1:+.1%}", chosen="yes" if size == chosen.micro_batch_size else "",
        )  # fmt: skip
    times = measured[chosen.micro_batch_size] / min(measured.values())
    device = timed.hardware.device
    bench.note(
        f"operator_s {format_seconds(device.operator_s)}; {samples} samples a step; {_handling(timed.hardware)}"
    )
    text = f"the planner's micro-batch of {chosen.micro_batch_size} takes {times:.2f} times the fastest (aim {CHOICE_AIM})"  # noqa: E501
    bench.note(text)
    bench.aim(bench.rehearses or times <= CHOICE_AIM, text)


def _handling(hardware: Any) -> str:
    return f"handling {hardware.fsdp_overhead}"
