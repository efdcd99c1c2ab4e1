"""A process group of one rank: timed collectives, the machine, and a profile."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
import torch.distributed as dist

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.machine import measure_hardware
from hf_osdp.measurement.timing import CollectiveClock
from hf_osdp.quantities import format_bytes, format_seconds
from hf_osdp.sharding.environment import form_process_group

from .runner import ROOT
from .step import Bench, step

_NUMEL = 2**18
GPT2_SMALL = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2_TINY = GPT2_SMALL | {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512, "n_positions": 64}


@step(
    part=1, expected_s=25, limit_s=90, rehearsal_s=8,
    proves="collectives of one NCCL rank run under the clock, whose works may be null; FSDP2 steps, which send nothing there",  # noqa: E501
)  # fmt: skip
def clock(bench: Bench) -> None:
    form_process_group(needed=True)
    bench.note(f"process group: {dist.get_backend_config()}")
    for name, call in _CALLS.items():
        for is_async in (False, True):
            given = torch.arange(_NUMEL, device=bench.device, dtype=torch.float32)
            output = torch.full_like(given, -1.0)
            with CollectiveClock(bench.device) as watch:
                work = call(output, given, is_async)
                if is_async:
                    work.wait()
            seen, right = len(watch._seen), torch.equal(output, given)
            bench.row(
                collective=name,
                async_op=is_async,
                seen=seen,
                result="right" if right else "WRONG",
                work=type(work).__name__,
            )
            bench.aim(
                seen == 1 and right,
                f"{name}, async_op={is_async}: {seen} calls seen, result {'right' if right else 'wrong'}",
            )
    _two_steps(bench)


def _all_reduce(output: torch.Tensor, given: torch.Tensor, is_async: bool) -> dist.Work | None:
    output.copy_(given)
    return dist.all_reduce(output, async_op=is_async)


_CALLS = {
    "all-reduce": _all_reduce,
    "all-gather": lambda output, given, is_async: dist.all_gather_into_tensor(output, given, async_op=is_async),
    "reduce-scatter": lambda output, given, is_async: dist.reduce_scatter_tensor(output, given, async_op=is_async),
}


def _two_steps(bench: Bench) -> None:
    """Check FSDP2's own calls."""
    from hf_osdp.measurement.step_meter import StepMeter
    from hf_osdp.modeling.units import find_units
    from hf_osdp.sharding.apply import apply_plan
    from tests.helpers.layouts import plan_of
    from tests.helpers.models import tiny_batch, tiny_loss, tiny_model

    model = tiny_model("gpt2").to(bench.device)
    units = find_units(model)
    apply_plan(model, plan_of(units, 1, "zero3"), units, meshes=Meshes(bench.device.type))
    optimizer, meter = torch.optim.AdamW(model.parameters()), StepMeter(bench.device, list)
    for number in range(4):
        with CollectiveClock(bench.device) as watch:
            meter.step_begins()
            tiny_loss(model, {name: value.to(bench.device) for name, value in tiny_batch(number).items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.step_ends()
    seen = meter.summary()
    bench.note(
        f"4 FSDP2 steps of a tiny GPT-2 in one shard: {len(watch._seen)} collectives seen in the last one;"
        f" {seen.steps} measured."
    )
    bench.aim(seen.steps == 4, f"{seen.steps} of 4 steps were measured")


@step(
    part=1,
    expected_s=20,
    limit_s=90,
    rehearsal_s=8,
    proves="measure_hardware in a process group of one rank: rates, launch cost, host, handling",
)
def hardware(bench: Bench) -> None:
    form_process_group(needed=True)
    found = measure_hardware(device_type=bench.device.type, seconds=0.7 if bench.rehearses else 3.0)
    device, host = found.device, found.host
    figures = {
        "device": device.name, "memory": format_bytes(device.memory_bytes),
        "reserved outside tensors": format_bytes(device.reserved_bytes),
        "memory bandwidth": f"{device.memory_bytes_per_s / 1e9:.0f} GB/s",
        "dispatch of an operator": format_seconds(device.operator_s),
        **{f"{dtype.value} products": f"{rate / 1e12:.1f} TFLOP/s" for dtype, rate in device.flops_per_s.items()},
    }  # fmt: skip
    if host is not None:
        figures |= {
            "host memory": format_bytes(host.memory_bytes),
            "host to device": f"{host.to_device_bytes_per_s / 1e9:.1f} GB/s",
            "device to host": f"{host.to_host_bytes_per_s / 1e9:.1f} GB/s",
            "steps on the host": f"{host.update_bytes_per_s / 1e9:.1f} GB/s",
        }  # fmt: skip
    for name, text in figures.items():
        bench.row(figure=name, measured=text)
    bench.note(f"handling: {found.fsdp_overhead}")
    bench.aim((host is None) == bench.on_cpu, "no host was measured beside the device")


@step(part=1, expected_s=40, limit_s=120, rehearsal_s=15, proves="`hf-osdp profile` with a model, by command")
def profile(bench: Bench) -> None:
    config, output = bench.folder / "config.json", bench.folder / "profile.json"
    config.write_text(json.dumps(GPT2_TINY if bench.rehearses else GPT2_SMALL), encoding="utf-8")
    length, seconds = ("32", "2") if bench.rehearses else ("1024", "10")
    command = [
        sys.executable,
        "-m",
        "hf_osdp",
        "profile",
        str(config),
        "--sequence-length",
        length,
        "--seconds",
        seconds,
        "--output",
        str(output),
    ]
    if not bench.on_cpu:
        command += ["--precision", "bf16", "--device", "cuda"]
    subprocess.run(command, cwd=ROOT, check=True)
    found = json.loads(output.read_text(encoding="utf-8"))
    for segment in found["segments"]:
        points = {point["samples"]: point for point in segment["points"]}
        bench.row(segment=segment["class_name"], **{f"samples_{n}": _both(point) for n, point in points.items()})


def _both(point: dict) -> str:
    return f"{format_seconds(point['forward_s'])} + {format_seconds(point['backward_s'])}"
