"""OptimalShardedDataParallel in a plain loop, on 1 and 2 processes; slow: on 4."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_osdp.errors import InfeasibleError, OSDPError, PlanError
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import OSDPConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import SAMPLES, SEQUENCE_LENGTH, tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import MAX_NORM, STEPS, train_alone

MODEL = "gpt2"


@functools.cache
def outcome(world_size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(run_cases, world_size, folder, timeout_s=200, init=False)[0]


def run_cases(folder: str) -> dict[str, Any]:
    results = {"given": train(folder)}
    results["planned"] = planned()
    results["errors"] = errors(folder)
    results["bf16"] = low_precision()
    results["evaluated"] = evaluated()
    return results


def train(folder: str) -> dict[str, Any]:
    """The reference's training, in the loop of the docstring, two micro-steps each; then everything about state."""
    import os

    world = int(os.environ["WORLD_SIZE"])
    model = tiny_model(MODEL)
    plan = plan_of(find_units(model), world, "mixed", accumulation_steps=2, reduce_every_micro_step=False)
    file = Path(folder) / f"plan{os.environ['RANK']}.json"
    plan.save(file)
    parallel = OptimalShardedDataParallel(model, OSDPConfig(plan=file))
    assert dist.get_world_size() == world, "formed from torchrun's variables"
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(2):
            batch = tiny_batch(step, part=number * world + dist.get_rank(), parts=2 * world)
            if step % 2:
                with parallel.micro_step(is_last=number == 1):
                    loss = tiny_loss(parallel, batch) / 2
                    loss.backward()
            else:
                loss = tiny_loss(parallel, batch) / 2
                parallel.backward(loss, is_last=number == 1)
            total += loss.detach()
        norms.append(parallel.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return {"losses": losses, "norms": norms, "plan": parallel.plan == plan, "report": parallel.report, **state(parallel, folder)}


def state(parallel: OptimalShardedDataParallel, folder: str) -> dict[str, Any]:
    path = Path(folder) / "saved"
    parallel.save_pretrained(path)
    full = parallel.full_state_dict()
    shards = {name: value.clone() for name, value in parallel.state_dict().items()}
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    parallel.load_state_dict(shards)
    after_shards = parallel.full_state_dict()
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    parallel.load_state_dict(full)
    after_full = parallel.full_state_dict()
    results = {
        "full": full,
        "reloaded": [all(torch.equal(full[name], other[name]) for name in full) for other in (after_shards, after_full)],
        "names": [name for name, _ in parallel.named_parameters()],
        "state names": list(parallel.state_dict()),
        "vocabulary": parallel.config.vocab_size,
        "unknown": hasattr(parallel, "no_such_attribute"),
        "training": (parallel.eval().module.training, parallel.train().module.training),
    }
    if dist.get_rank() == 0:
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        results["from_pretrained"] = plain.state_dict()
        results["class"] = type(plain).__name__, plain.config.architectures
    dist.barrier()
    return results


def planned() -> dict[str, Any]:
    """Plan inside; two processes measure this machine, one and four take a preset."""
    world = dist.get_world_size()
    hardware = None if world == 2 else preset("cpu").scaled(nodes=1, devices_per_node=world)
    parallel = OptimalShardedDataParallel(
        tiny_model(MODEL),
        OSDPConfig(memory_limit="1GiB", sequence_length=SEQUENCE_LENGTH, global_batch_size=SAMPLES, hardware=hardware),
    )
    batch = tiny_batch(0, part=dist.get_rank(), parts=world)
    loss = tiny_loss(parallel, batch)
    parallel.backward(loss)
    norm = parallel.clip_grad_norm_(1.0)
    return {"plan": parallel.plan, "norm": norm.item(), "report": parallel.report is not None and parallel.report.plan == parallel.plan}


def low_precision() -> dict[str, Any]:
    """bf16: parameters and gradients are held in float32 and computed with in bfloat16."""
    model = tiny_model(MODEL, dtype=torch.bfloat16)
    plan = plan_of(find_units(model.float()), dist.get_world_size(), "mixed")
    parallel = OptimalShardedDataParallel(model.bfloat16(), {"plan": plan}, mixed_precision="bf16")
    batch = tiny_batch(0, part=dist.get_rank(), parts=dist.get_world_size())
    logits = parallel(input_ids=batch["input_ids"]).logits
    parallel.backward(logits.float().logsumexp(-1).mean())
    return {
        "logits": logits.dtype,
        "parameters": {p.dtype for p in parallel.parameters()},
        "gradients": {p.grad.dtype for p in parallel.parameters()},
    }


def evaluated() -> dict[str, Any]:
    """After an evaluation kept units show gathered parameters; what the wrapper gives out are shards all the same."""
    model = tiny_model(MODEL)
    parallel = OptimalShardedDataParallel(model, OSDPConfig(plan=plan_of(find_units(model), dist.get_world_size(), "zero2")))
    with torch.no_grad():
        tiny_loss(parallel, tiny_batch(0))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    before = parallel.full_state_dict()
    parallel.backward(tiny_loss(parallel, tiny_batch(0)))
    optimizer.step()
    after = parallel.full_state_dict()
    return {"equal": sum(torch.equal(before[name], after[name]) for name in before)}


def errors(folder: str) -> dict[str, Any]:
    def caught(*, mixed_precision: str = "no", **options: Any) -> tuple[type[Exception], str]:
        try:
            OptimalShardedDataParallel(tiny_model(MODEL), options, mixed_precision=mixed_precision)
        except Exception as error:
            return type(error), str(error)
        return type(None), ""

    world = dist.get_world_size()
    run = {
        "sequence_length": SEQUENCE_LENGTH,
        "global_batch_size": SAMPLES,
        "hardware": preset("cpu").scaled(nodes=1, devices_per_node=world),
    }
    return {
        "nothing": caught(),
        "limit": caught(memory_limit="100KB", **run),
        "hardware": caught(memory_limit="1GiB", **{**run, "hardware": preset("cpu").scaled(nodes=1, devices_per_node=world + 1)}),
        "file": caught(plan=Path(folder) / "absent.json"),
        "precision": caught(**run, mixed_precision="fp8"),
        "batch": caught(memory_limit="1GiB", **{**run, "global_batch_size": 3 * world + 1}) if world > 1 else (ValueError, ""),
    }


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
class TestOnProcesses:
    def test_a_plain_loop_equals_one_process(self, world_size):
        found, alone = outcome(world_size)["given"], train_alone(MODEL, accumulation_steps=2)
        assert found["plan"] and found["report"] is None
        assert max(abs(a - b) for a, b in zip(found["losses"], alone.losses, strict=True)) < 1e-12
        assert max(abs(a - b) for a, b in zip(found["norms"], alone.norms, strict=True)) < 1e-12
        assert found["full"].keys() == alone.parameters.keys()
        assert max((found["full"][name] - alone.parameters[name]).abs().max().item() for name in found["full"]) < 1e-12

    def test_state_goes_out_and_in_under_hugging_face_names(self, world_size):
        found, plain = outcome(world_size)["given"], tiny_model(MODEL)
        assert found["reloaded"] == [True, True]
        assert found["names"] == [name for name, _ in plain.named_parameters()]
        assert found["state names"] == list(plain.state_dict())
        assert all(torch.equal(found["full"][name], value) for name, value in found["from_pretrained"].items())
        assert found["class"] == ("GPT2LMHeadModel", ["GPT2LMHeadModel"])

    def test_it_behaves_like_the_model(self, world_size):
        found = outcome(world_size)["given"]
        assert found["vocabulary"] == tiny_model(MODEL).config.vocab_size
        assert found["unknown"] is False
        assert found["training"] == (False, True)

    def test_it_plans(self, world_size):
        found = outcome(world_size)["planned"]
        plan: Plan = found["plan"]
        assert found["report"]
        assert (plan.world_size, plan.global_batch_size) == (world_size, SAMPLES)
        model = tiny_model(MODEL)
        tiny_loss(model, tiny_batch(0)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        assert abs(found["norm"] - norm) < 1e-12

    def test_mixed_precision(self, world_size):
        found = outcome(world_size)["bf16"]
        assert found == {"logits": torch.bfloat16, "parameters": {torch.float32}, "gradients": {torch.float32}}

    def test_an_optimizer_made_after_an_evaluation_trains_the_model(self, world_size):
        assert outcome(world_size)["evaluated"] == {"equal": 0}

    def test_errors(self, world_size):
        found = outcome(world_size)["errors"]
        assert found["nothing"][0] is ValueError and "sequence_length and global_batch_size" in found["nothing"][1]
        assert found["limit"][0] is InfeasibleError
        assert found["hardware"][0] is ValueError and f"{world_size} processes" in found["hardware"][1]
        assert found["file"][0] is PlanError and "absent.json" in found["file"][1]
        assert found["precision"][0] is ValueError
        assert found["batch"][0] is ValueError


def test_without_torchrun_it_runs_alone_and_forms_no_group(tmp_path):
    model = tiny_model(MODEL)
    parallel = OptimalShardedDataParallel(model, OSDPConfig(plan=plan_of(find_units(model), 1, "replicate")))
    parallel.backward(tiny_loss(parallel, tiny_batch(0)))
    assert not dist.is_initialized()
    parallel.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_a_model_that_cannot_be_saved_says_what_to_do():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2)))
    parallel = OptimalShardedDataParallel(model, OSDPConfig(plan=plan_of(find_units(model), 1, "replicate")))
    with pytest.raises(ValueError, match="full_state_dict"):
        parallel.save_pretrained("nowhere")
    with pytest.raises(OSDPError):
        OptimalShardedDataParallel(model, OSDPConfig(plan=plan_of(find_units(model), 2, "zero3")))
