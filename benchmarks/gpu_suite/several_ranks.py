"""Several ranks on one GPU over real NCCL, to test correctness, not speed."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from hf_osdp.distributed.mesh import collective_device
from hf_osdp.sharding.environment import form_process_group
from tests.distributed.cases.layouts import CASES
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import LAYOUTS
from tests.helpers.training import Trained, alone, train

from .step import Bench, step

TOLERANCE = 1e-11
"""Tolerance of losses, norms and weights in float64; sums are in another order than in one process."""


def on_ranks(bench: Bench, fn: Any, world: int, *args: Any, nodes: int = 1) -> list[Any]:
    """Call a function on each rank, with NCCL on the one GPU or gloo in a rehearsal; the function forms the process
    group.
    """
    limit_s = max(10.0, bench.left_s - 5.0)
    return run_ranks(fn, world, *args, init=False, nodes=nodes, timeout_s=limit_s, one_gpu=not bench.on_cpu)


def ranks_train(names: tuple[str, ...]) -> tuple[dict[str, Trained], str]:
    """Return, on a rank, the results of every case, and the backends."""
    from hf_osdp.distributed.mesh import Meshes

    form_process_group(needed=True)
    meshes = Meshes(collective_device().type)
    results = {name: train(CASES[name], meshes=meshes) for name in names}
    return (results if dist.get_rank() == 0 else {}), str(dist.get_backend_config())


def equals_one_process(bench: Bench, world: int, names: tuple[str, ...]) -> None:
    began = time.monotonic()
    if any("compiled" in name for name in names) and not bench.compiles:
        names = tuple(name for name in names if "compiled" not in name)
    results, backend = on_ranks(bench, ranks_train, world, names, nodes=world // 2)[0]
    bench.note(f"{world} ranks on {backend}, {time.monotonic() - began:.0f} s")
    for name, trained in results.items():
        errors = trained.worst_error(alone(CASES[name].alone, bench.device.type))
        bench.row(ranks=world, case=name, **{kind: f"{error:.1e}" for kind, error in errors.items()})
        bench.aim(max(errors.values()) < TOLERANCE, f"{name} on {world} ranks differs from one process: {errors}")


def everyday(world: int, bench: Bench) -> tuple[str, ...]:
    """Return every layout, model and option once; in a rehearsal only the layouts, because tests/distributed covers
    the rest.
    """
    cases = {name: case for name, case in CASES.items() if not (case.slow or name.startswith(("slices", "chunks")))}
    names = tuple(name for name, case in cases.items() if case.world == world)
    return names[:3] if bench.rehearses else names


@step(
    part=2, expected_s=40, limit_s=150, rehearsal_s=15,
    proves="2 NCCL ranks on one GPU: layouts train as one process does, in float64: loss, gradient norm, each parameter",  # noqa: E501
)  # fmt: skip
def two_ranks(bench: Bench) -> None:
    equals_one_process(bench, 2, everyday(2, bench))


@step(
    part=2, expected_s=75, limit_s=300, rehearsal_s=20,
    proves="4 NCCL ranks on one GPU, as 2 nodes: replicas, HSDP, full shards kept and freed, two stages, all in turn: as one process",  # noqa: E501
)  # fmt: skip
def four_ranks(bench: Bench) -> None:
    layouts = tuple(f"gpt2, {layout}" for layout in LAYOUTS)
    equals_one_process(bench, 4, layouts)  # writes these rows before the others begin
    if not bench.rehearses:
        equals_one_process(bench, 4, tuple(name for name in everyday(4, bench) if name not in layouts))


def rank_of_trainer(folder: str, use_cpu: bool) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Run the Trainer on a rank under a mixed plan in float64."""
    from hf_osdp import OSDPConfig
    from hf_osdp.distributed.launcher import launched_rank, launched_world_size
    from tests.distributed import test_integration_trainer as there
    from tests.helpers.layouts import mixed_plan

    world, model = launched_world_size(), there.tiny_model(seed=launched_rank())
    accumulation = there.GLOBAL_BATCH // 2 // world
    plan = mixed_plan(
        model, world, sequence_length=there.LENGTH, micro_batch_size=2, accumulation_steps=accumulation, reduce=False
    )
    args = there.arguments(folder, per_device_train_batch_size=there.GLOBAL_BATCH // world, use_cpu=use_cpu)
    trainer = there.PlannedTrainer(model=model, args=args, train_dataset=there.tokens(), osdp=OSDPConfig(plan=plan))
    trainer.train()
    return there.history(trainer), trainer.accelerator.get_state_dict(trainer.model)


@step(
    part=2,
    expected_s=45,
    limit_s=150,
    rehearsal_s=20,
    proves="the Trainer on 2 ranks under a mixed plan, clipping and accumulating, as one process in float64",
)
def ranks_trainer(bench: Bench) -> None:
    from tests.distributed import test_integration_trainer as there

    ours, weights = on_ranks(bench, rank_of_trainer, 2, str(bench.folder / "planned"), bench.on_cpu)[0]
    args = there.arguments(
        str(bench.folder / "one"), per_device_train_batch_size=there.GLOBAL_BATCH, use_cpu=bench.on_cpu
    )
    stock = there.StockTrainer(model=there.tiny_model(), args=args, train_dataset=there.tokens())
    stock.train()
    wanted = there.history(stock)
    state = {name: value.detach().cpu() for name, value in stock.model.state_dict().items()}
    errors = {kind: max(abs(a - b) for a, b in zip(ours[kind], wanted[kind], strict=True)) for kind in wanted}
    errors["parameter"] = max((weights[name].cpu() - value).abs().max().item() for name, value in state.items())
    bench.row(ranks=2, **{kind: f"{error:.1e}" for kind, error in errors.items()})
    bench.aim(max(errors.values()) < TOLERANCE, f"the Trainer on 2 ranks differs from one process: {errors}")
