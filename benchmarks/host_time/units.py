"""Measure the host's time of a unit, of AdamW and of autocast's casts as multiples of an operator's.

    DIR/bin/python -m benchmarks.host_time.units [--device cpu]

DIR as for `python -m benchmarks.host_time`, or any environment for `--device cpu`. Modules have parameters of 8
elements and compute nothing, ranks are fake and send nothing: what is left is the host's. Each figure is the
difference between 20 and 4 units, or between many and few tensors, of the least CPU time of 60 steps.
`hf_osdp/planner/hardware.py` has the rounded figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_osdp.distributed.fsdp_internals import parameter_groups
from hf_osdp.measurement.rates import _Counter, _tiny_step
from hf_osdp.planner.training_job import OptimizerStep
from hf_osdp.sharding.replica_buckets import Parameters
from hf_osdp.sharding.replicas import Replicas

TENSORS, FEW, MANY = (3, 12, 24), 4, 20
_Prepare = Callable[[nn.Sequential, torch.dtype], object]


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.weights = weights
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient, *map(torch.empty_like, ctx.weights))


class _Unit(nn.Module):
    def __init__(self, tensors: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.names = [f"weight{index}" for index in range(tensors)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.zeros(8, device=device, dtype=dtype)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _Nothing.apply(rows, *(getattr(self, name) for name in self.names))


def quickest(run: Callable[[], object], times: int = 60) -> float:
    """Return the least CPU seconds of a run, of all threads: backward has its own on CUDA."""
    seconds = []
    for _ in range(times):
        begun = time.process_time()
        run()
        seconds.append(time.process_time() - begun)
    return min(seconds)


def phases(
    units: int, tensors: int, device: torch.device, computed: torch.dtype, prepare: _Prepare | None
) -> tuple[float, float]:
    """Return the seconds of forward and of backward; unprepared modules have the computed dtype themselves."""
    stored = torch.float32 if prepare is not None else computed
    model = nn.Sequential(*(_Unit(tensors, device, stored) for _ in range(units)))
    begin = prepare(model, computed) if prepare is not None else None
    rows = torch.zeros(4, device=device, dtype=computed, requires_grad=True)

    def forward() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        if callable(begin):
            begin()
        return model(rows).sum()

    forward_s, both_s = quickest(forward), quickest(lambda: forward().backward())
    return forward_s, both_s - forward_s


def replicate(model: nn.Sequential, computed: torch.dtype) -> Callable[[], None]:
    casts = computed is not torch.float32
    found = [
        Parameters(label="", places=[[(unit, name)] for name in unit.names], dtype=computed if casts else None)
        for unit in reversed(list(model))
    ]
    replicas = Replicas(model, found, dist.distributed_c10d._get_default_group(), averages=True)
    for unit in model:
        replicas.watch(unit, computed)
    return replicas.rest


def shard(model: nn.Sequential, computed: torch.dtype) -> None:
    """Shard as FSDP2 does: each unit is gathered in forward and in backward."""
    for module in (*model, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(computed, torch.float32), reshard_after_forward=True)


def shard_as_planned(model: nn.Sequential, computed: torch.dtype) -> None:
    """The same with a plan's gathers; must be measured last, since FSDP2 names parts for profilers alone from here."""
    shard(model, computed)
    for unit in model:
        parameter_groups(unit)


def line(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Return the fit of a line through operators by tensors."""
    fit = statistics.linear_regression(*zip(*points, strict=True))
    return f"{name}: {fit.intercept:.1f} a call, {fit.slope:.2f} a tensor, in operators"


def autocast_seconds(device: torch.device) -> tuple[float, float]:
    """Return the seconds that autocast takes for a tensor, in forward and in backward."""
    rows = torch.zeros(2, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    found_s: dict[bool, tuple[float, float]] = {}
    for autocasts in (True, False):
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(24)))
        layers.to(device, torch.float32 if autocasts else torch.bfloat16)

        def forward(layers: nn.Module = layers, autocasts: bool = autocasts) -> torch.Tensor:
            layers.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocasts):
                return layers(rows).sum()

        found_s[autocasts] = quickest(forward), quickest(lambda: forward().backward())
    forward_s, both_s = (a - b for a, b in zip(found_s[True], found_s[False], strict=True))
    return forward_s / 48, (both_s - forward_s) / 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = torch.device(parser.parse_args().device)
    os.environ |= {"FAKE_CUDA_MEM": "8G", "FAKE_CUDA_COMPUTE_MAX": "0", "FAKE_CUDA_COPY": "0"}
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    step, casts = _tiny_step(device), device.type == "cuda"
    with _Counter() as counter:
        step()
    operator_s = quickest(step) / counter.operators
    print(f"an operator: {1e6 * operator_s:.1f} us")
    computed = torch.bfloat16 if casts else torch.float32
    for title, prepare in (("a replica", replicate), ("FSDP2", shard), ("a sharded unit", shard_as_planned)):
        points: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
        for tensors in TENSORS:
            (few, many), (few_plain, many_plain) = (
                [phases(units, tensors, device, computed, one) for units in (FEW, MANY)] for one in (prepare, None)
            )
            for index, name in enumerate(points):
                own_s = many[index] - few[index] - many_plain[index] + few_plain[index]
                points[name].append((tensors, own_s / (MANY - FEW) / operator_s))
        for name, found in points.items():
            print(line(f"{title}, {name}", found))
    for kind in OptimizerStep:
        found = []
        for tensors in (48, 192):
            parameters = [nn.Parameter(torch.zeros(8, device=device)) for _ in range(tensors)]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            found.append((tensors, quickest(torch.optim.AdamW(parameters, **kind.options).step) / operator_s))
        print(line(f"AdamW {kind.value}", found))
    if casts:
        parts = (one / operator_s for one in autocast_seconds(device))
        print("autocast: {:.1f} operators a tensor in forward, {:.1f} in backward".format(*parts))


if __name__ == "__main__":
    main()
