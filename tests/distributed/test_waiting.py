"""Ranks wait for one that works, as long as the group's collectives may take, and no longer for one that has died."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from hf_osdp.checkpoint import writer as writer_module
from hf_osdp.checkpoint.resume import check_checkpoint
from hf_osdp.checkpoint.safe import SafeReader
from hf_osdp.checkpoint.states import load_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.consensus import on_rank_zero
from hf_osdp.distributed.mesh import find_topology
from hf_osdp.distributed.process_group import all_gather_objects, gloo_group
from hf_osdp.errors import LaunchError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.preflight import merged_findings
from tests.distributed.test_integration_trainer import arguments, tiny_model, tokens
from tests.helpers.checkpointed import save_loop
from tests.helpers.distributed import RankFailure, run_ranks
from tests.helpers.training import Case, loop_of

TIMEOUT_S, WORK_S = 20.0, 3.0
"""Of the group's collectives, and what one rank does meanwhile."""


def work(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(WORK_S)


@contextmanager
def slow(owner: object, name: str, rank: int) -> Iterator[None]:
    """The first call of a function takes long on one rank; it must be called."""
    stock, calls = getattr(owner, name), []

    @wraps(stock)
    def working(*args, **kwargs):
        if not calls:
            work(rank)
        calls.append(1)
        return stock(*args, **kwargs)

    with mock.patch.object(owner, name, working):
        yield
    assert calls or dist.get_rank() != rank, name


def late(act: Callable[[], object], rank: int) -> object:
    work(rank)
    return act()


def form_another() -> None:
    """Form a group that is not gloo's by its name, as NCCL's is not."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("another", create, devices=["cpu"])
    dist.init_process_group("another", timeout=timedelta(seconds=TIMEOUT_S))


@pytest.mark.slow
@pytest.mark.on_ranks(2, init=False)
def test_ranks_wait_for_searches_and_what_they_tell_each_other():
    form_another()
    assert on_rank_zero(lambda: late(lambda: 7, 0)) == 7
    assert late(lambda: max(all_gather_objects(dist.get_rank())), 1) == 1
    assert late(lambda: merged_findings(()), 0) == () and late(find_topology, 0).nodes == 1
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize(("sharded", "in_background"), [(True, False), (True, True), (False, False)])
@pytest.mark.on_ranks(2, init=False)
def test_ranks_wait_for_checkpoints(tmp_path, sharded, in_background):
    """One rank writes, hashes or reads long."""
    form_another()
    folder = tmp_path / "checkpoint-1"
    loop, _ = loop_of(Case())
    model, optimizer = loop.model, loop.optimizer
    writer = CheckpointWriter(in_background=in_background)
    save = partial(save_loop, writer, str(folder), model, optimizer, others={}, progress={"step": 1}, sharded=sharded)
    held = writer_module.HeldFileSystem if in_background else FileSystem
    with slow(held, "create_stream", 1) if sharded else slow(torch, "save", 0), slow(writer_module, "complete", 0):
        save()
        writer.wait()
    with slow(SafeReader, "read_data", 1) if sharded else slow(torch, "load", 0):
        late(lambda: check_checkpoint(folder), 1)
        assert load_loop(str(folder), model, optimizer, others={}) == {"step": 1}
    dist.all_reduce(torch.ones(1))


def compared(*args: object, **options: object) -> object:
    """Rank 0 compares with other strategies before all ranks tell what they found."""
    time.sleep(WORK_S)
    return compare_strategies(*args, **options)


@pytest.mark.slow
@pytest.mark.on_ranks(2, init=False)
def test_ranks_wait_for_a_trainers_plan_and_model(tmp_path):
    form_another()
    hardware = preset("cpu", devices_per_node=2)
    osdp = OSDPConfig(hardware=hardware, memory_limit="4MiB", operator_splitting=False, compare=True)
    with slow(Trainer, "_save", 0), mock.patch("hf_osdp.preparation.find_plan.compare_strategies", compared):
        args = arguments(str(tmp_path), per_device_train_batch_size=4, max_steps=2)
        trainer = Trainer(model=tiny_model(), args=args, train_dataset=tokens(), osdp=osdp)
        trainer.train()
        trainer.save_model(str(tmp_path))
        dist.all_reduce(torch.ones(1))
    assert isinstance(trainer.accelerator, OSDPAccelerator) and (tmp_path / "model.safetensors").is_file()
    late(trainer.accelerator.wait_for_everyone, 1)
    dist.all_reduce(torch.ones(1))


@pytest.mark.on_ranks(2, init=False)
def test_gloo_without_connection_is_refused_at_the_start():
    form_another()
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    with pytest.raises(LaunchError, match=r"cannot connect to other ranks over gloo.*nowhere0"):
        gloo_group()


def dying(noted: str) -> None:
    """Rank 0 dies while the others wait for it."""
    form_another()

    def die() -> None:
        time.sleep(1.0)
        Path(noted, "died").touch()
        os._exit(9)

    try:
        on_rank_zero(die)
    finally:
        Path(noted, f"rank {dist.get_rank()}").touch()


def test_waiting_ends_with_the_rank_that_is_waited_for(tmp_path):
    with pytest.raises(RankFailure):
        run_ranks(dying, 3, str(tmp_path), init=False, timeout_s=60)
    died, *ended = (path.stat().st_mtime for path in [tmp_path / "died", tmp_path / "rank 1", tmp_path / "rank 2"])
    assert max(ended) - died < 2
