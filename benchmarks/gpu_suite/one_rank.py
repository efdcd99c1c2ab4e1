"""A process group of one rank: the machine, and a profile."""

from __future__ import annotations

import json
import subprocess
import sys

from hf_osdp.measurement.machine import measure_hardware
from hf_osdp.quantities import format_bytes, format_seconds
from hf_osdp.sharding.environment import form_process_group

from .runner import ROOT
from .step import Bench, step

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
