"""A step of ours, of stock FSDP2 and of plain autocast side by side on one rank; the rates that this device
reaches, by shape.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu_memory import MODELS, Model
from benchmarks.trial import Trial, sharded_copy
from hf_osdp.distributed.device import prefer_expandable_segments
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.timing import median_seconds
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.sharding.environment import form_process_group
from hf_osdp.tracing.describe import describe
from tests.helpers.steps import batch_on, make_optimizer, train_step

from .step import Bench, step
from .times import REHEARSED, wait

UNTIMED, TIMED = 4, 10
_Step = Callable[[], None]


@step(
    part=5,
    expected_s=50,
    limit_s=150,
    rehearsal_s=20,
    proves="one rank in bf16: our step beside stock FSDP2's of the same units and plain autocast's; CPU time and the GPU's busy time",  # noqa: E501
)
def beside(bench: Bench) -> None:
    prefer_expandable_segments()
    form_process_group(needed=True)
    chosen = (
        {"GPT-2": REHEARSED["GPT-2"]}
        if bench.rehearses
        else {name: MODELS[name] for name in ("GPT-2 medium", "Llama 1B", "BERT large")}
    )
    for name, model in chosen.items():
        for kind, make in (("plain autocast", plain), ("stock FSDP2", stock), ("ours", ours)):
            run = make(bench, model)
            step_s, issued_s = timed(run, bench)
            kernels, busy_s = busy(run, bench)
            bench.row(
                model=name, step_of=kind, step=f"{1e3 * step_s:.0f} ms", issued_in=f"{1e3 * issued_s:.0f} ms",
                GPU_busy="-" if busy_s is None else f"{1e3 * busy_s:.0f} ms", kernels=kernels,
            )  # fmt: skip
            del run
            gc.collect()
    bench.note(
        "`issued in` is the time after which the CPU has queued the step; near the step's own, the GPU waits for the"
        " CPU."
    )


def config_of(model: Model) -> Any:
    sizes = dict(model.sizes)
    if model.config == "GPT2Config":
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return getattr(transformers, model.config)(**sizes, architectures=[model.architecture])


def plain(bench: Bench, model: Model) -> _Step:
    """Return a step under autocast, without FSDP2."""
    made, optimizer, batch = _parts(bench, model)

    def run() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = made(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def stock(bench: Bench, model: Model) -> _Step:
    """Return a step under `fully_shard` of each block and the root, in bf16, as Accelerate wraps a model."""
    mesh = init_device_mesh(bench.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def wrapped(made: torch.nn.Module) -> None:
        for module in [module for module in made.modules() if type(module).__name__ in (made._no_split_modules or ())]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(made, mesh=mesh, mp_policy=policy)

    made, optimizer, batch = _parts(bench, model, wrapped)

    def run() -> None:
        made(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def ours(bench: Bench, model: Model) -> _Step:
    """Return a step under a plan of one process, which computes under autocast."""
    config, precision = config_of(model), Precision.named("bf16", autocast=True)
    job = TrainingJob(global_batch_size=model.samples, precision=precision)
    description = describe(
        config, sequence_length=model.sequence_length, compute_dtype=precision.compute, autocast=True,
        device_type=bench.device.type
    )  # fmt: skip
    empty = build_on_meta(config)
    inputs = training_batch(empty, model.sequence_length)
    choices = [UnitLayout(shard_size=1, reshard_after_forward=False) for _ in description.units]
    plan = Plan.of(description, choices, Batch(micro_batch_size=model.samples, accumulation_steps=1), world_size=1)
    trial = Trial(model=empty, units=description.units, job=job, inputs=inputs, device=bench.device)
    made = sharded_copy(plan, trial, Meshes(bench.device.type))
    optimizer = make_optimizer(made, job.optimizer, plan, description.units)
    return partial(train_step, made, optimizer, batch_on(inputs, model.samples, bench.device), plan, job)


def _parts(
    bench: Bench, model: Model, wrap: Callable[[Any], None] = lambda made: None
) -> tuple[Any, torch.optim.Optimizer, dict[str, Any]]:
    with bench.device:
        made = getattr(transformers, model.architecture)(config_of(model))
        ids = torch.randint(0, 300, (model.samples, model.sequence_length))
    wrap(made)
    return made, torch.optim.AdamW(made.parameters(), fused=True), {"input_ids": ids, "labels": ids}


def timed(run: _Step, bench: Bench) -> tuple[float, float]:
    """Return the median seconds of a step, and those after which the CPU has queued it."""
    whole, issued = [], []
    for number in range(UNTIMED + (3 if bench.rehearses else TIMED)):
        wait(bench.device)
        began = time.perf_counter()
        run()
        queued = time.perf_counter()
        wait(bench.device)
        if number >= UNTIMED:
            whole.append(time.perf_counter() - began)
            issued.append(queued - began)
    return statistics.median(whole), statistics.median(issued)


def busy(run: _Step, bench: Bench) -> tuple[int | str, float | None]:
    """Return a step's number of kernels and copies, and the seconds in which at least one of them runs."""
    if bench.device.type != "cuda":
        return "-", None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    ranges = sorted(
        (e.time_range.start, e.time_range.end)
        for e in seen.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    total, end = 0.0, 0.0
    for start, stop in ranges:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return len(ranges), total / 1e6


@step(
    part=5,
    expected_s=25,
    limit_s=90,
    rehearsal_s=15,
    proves="rates that the device reaches in bf16: products by shape, causal attention by length, copies by size",
)
def rates(bench: Bench) -> None:
    device, dtype = bench.device, torch.bfloat16
    limit_s = 0.02 if bench.rehearses else 0.05

    def rate(run: Callable[[], object], amount: float, unit: float = 1e12) -> str:
        return f"{amount / median_seconds(run, device, limit_s) / unit:.0f}"

    for rows in (256,) if bench.rehearses else (1024, 4096, 16384):
        for inner in (64,) if bench.rehearses else (768, 1024, 1600, 2048, 4096, 8192):
            for outer in (inner, 4 * inner):
                x, w, g = (
                    torch.randn(*shape, device=device, dtype=dtype)
                    for shape in ((rows, inner), (outer, inner), (rows, outer))
                )
                flops = 2 * rows * inner * outer
                forward, to_input, to_weight = (
                    rate(run, flops)
                    for run in (lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x)  # noqa: B023
                )
                bench.row(
                    what="product, TFLOP/s",
                    shape=f"{rows} x {inner} -> {outer}",
                    forward=forward,
                    backward=f"{to_input}, {to_weight}",
                )
    for length in (64,) if bench.rehearses else (512, 1024, 2048, 4096, 8192):
        for heads, size in ((2, 16),) if bench.rehearses else ((16, 64), (32, 128)):
            samples = max(1, (64 if bench.rehearses else 8192) // length)
            q, k, v = (
                torch.randn(samples, heads, length, size, device=device, dtype=dtype, requires_grad=True)
                for _ in range(3)
            )
            flops = 2 * samples * heads * length**2 * size  # the causal half
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            gradient = torch.randn_like(output)
            forward = rate(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), flops)  # noqa: B023
            back = rate(lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True), 2.5 * flops)  # noqa: B023
            bench.row(
                what="causal attention, TFLOP/s",
                shape=f"{length} tokens, {heads} x {size}",
                forward=forward,
                backward=back,
            )
    for mib in (1,) if bench.rehearses else (1, 8, 64, 512):
        source = torch.ones(mib * 2**19, device=device, dtype=dtype)
        target = torch.empty_like(source)
        copied, gelu = (
            rate(run, 2 * source.nbytes, 1e9)
            for run in (lambda: target.copy_(source), lambda: F.gelu(source))  # noqa: B023
        )
        bench.row(what="copy and GELU, GB/s", shape=f"{mib} MiB", forward=copied, backward=gelu)
