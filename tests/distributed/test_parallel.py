"""OptimalShardedDataParallel in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import hf_osdp
from hf_osdp.distributed import process_group
from hf_osdp.errors import CheckpointError, DescriptionError, OSDPError, PlanError
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.presets import preset
from hf_osdp.planner.split import WHOLE_BLOCKS
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.plan_run import check_given_plan
from hf_osdp.sharding.gradients import OSDPGradScaler
from tests.helpers.layouts import plan_of
from tests.helpers.models import SAMPLES, SEQUENCE_LENGTH, tiny_batch, tiny_loss, tiny_model
from tests.helpers.sampling import slow_but
from tests.helpers.training import MAX_NORM, STEPS, Case, Trained, alone, assert_trained_alike

MODEL = "gpt2"
on_two_ranks = pytest.mark.on_ranks(2, shared=True)


def sharded(
    world_size: int, layout: str, *, precision: str = "no", dtype: torch.dtype = torch.float64
) -> OptimalShardedDataParallel:
    plan = plan_of(find_units(tiny_model(MODEL, dtype=torch.promote_types(dtype, torch.float32))), world_size, layout)
    return OptimalShardedDataParallel(tiny_model(MODEL, dtype=dtype), OSDPConfig(plan=plan), mixed_precision=precision)


@pytest.mark.parametrize("world_size", slow_but((1, 2, 4), daily=(2,)))
@pytest.mark.on_ranks(init=False)
def test_plain_loop_trains_as_one_process_from_a_plan_file(world_size, tmp_path):
    """The loop of the docstring, two micro-steps each, by `micro_step` and by `backward`."""
    model = tiny_model(MODEL)
    plan = plan_of(find_units(model), world_size, "mixed", accumulation_steps=2, reduce_every_micro_step=False)
    plan.save(tmp_path / "plan.json")
    parallel = OptimalShardedDataParallel(model, OSDPConfig(plan=tmp_path / "plan.json"))
    assert dist.get_world_size() == world_size, "formed from torchrun's variables"
    assert parallel.plan == plan and parallel.report is None
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(2):
            batch = tiny_batch(step, part=number * world_size + dist.get_rank(), parts=2 * world_size)
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
        losses.append(total.item() / world_size)
    trained = Trained(losses=tuple(losses), norms=tuple(norms), parameters=parallel.full_state_dict())
    assert_trained_alike(trained, lambda: alone(Case(with_states=False).alone))


@on_two_ranks
def test_state_goes_out_and_in_under_hugging_face_names(tmp_path):
    """Rows of tests/compatibility save it whole."""
    parallel, plain = sharded(2, "mixed"), tiny_model(MODEL)
    parallel.save_pretrained(tmp_path)
    full, shards = parallel.full_state_dict(), {name: value.clone() for name, value in parallel.state_dict().items()}
    for state in (shards, full):
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        parallel.load_state_dict(state)
        again = parallel.full_state_dict()
        assert all(torch.equal(value, again[name]) for name, value in full.items())
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(parallel.state_dict()) == list(plain.state_dict())
    assert parallel.config.vocab_size == plain.config.vocab_size and not hasattr(parallel, "no_such_attribute")
    assert (parallel.eval().module.training, parallel.train().module.training) == (False, True)
    if dist.get_rank() == 0:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        assert (type(saved).__name__, saved.config.architectures) == ("GPT2LMHeadModel", ["GPT2LMHeadModel"])


@pytest.mark.parametrize("hardware", ["cpu", pytest.param(None, marks=pytest.mark.slow)])
@on_two_ranks
def test_parallel_plans_by_itself(hardware):
    """For a preset, or for this machine as measured."""
    run = {"sequence_length": SEQUENCE_LENGTH, "global_batch_size": SAMPLES, "hardware": hardware}
    parallel = OptimalShardedDataParallel(tiny_model(MODEL), OSDPConfig(memory_limit="1GiB", compare=True, **run))
    assert (parallel.plan.world_size, parallel.plan.global_batch_size) == (2, SAMPLES)
    assert dist.get_rank() or parallel.report.time.step_s == parallel.plan.step_s
    assert dist.get_rank() or {row.label for row in parallel._run.comparison} >= {"osdp", "ddp"}


@on_two_ranks
def test_bf16_holds_parameters_and_gradients_in_float32():
    parallel = sharded(2, "mixed", precision="bf16", dtype=torch.bfloat16)
    logits = parallel(input_ids=tiny_batch(0)["input_ids"]).logits
    parallel.backward(logits.float().logsumexp(-1).mean())
    assert logits.dtype is torch.bfloat16
    assert {p.dtype for p in parallel.parameters()} == {p.grad.dtype for p in parallel.parameters()} == {torch.float32}


@on_two_ranks
def test_optimizer_made_after_an_evaluation_trains_the_model():
    """Kept units then show gathered parameters; what the wrapper gives out are shards all the same."""
    parallel = sharded(2, "zero2")
    with torch.no_grad():
        tiny_loss(parallel, tiny_batch(0))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    before = parallel.full_state_dict()
    parallel.backward(tiny_loss(parallel, tiny_batch(0)))
    optimizer.step()
    after = parallel.full_state_dict()
    assert not [name for name in before if torch.equal(before[name], after[name])]


@on_two_ranks
def test_hardware_of_another_world_and_absent_plan_are_refused(tmp_path):
    """What else is refused is in docs/data/bad_inputs.csv."""
    run = {"sequence_length": SEQUENCE_LENGTH, "global_batch_size": SAMPLES, "memory_limit": "1GiB"}
    for error, said, options in (
        (ValueError, "2 process", {**run, "hardware": preset("cpu", devices_per_node=3)}),
        (PlanError, "absent.json", {"plan": tmp_path / "absent.json"}),
    ):
        with pytest.raises(error, match=said):
            OptimalShardedDataParallel(tiny_model(MODEL), options)


def test_parallel_without_torchrun_runs_alone_and_forms_no_group(tmp_path):
    model = tiny_model(MODEL)
    parallel = OptimalShardedDataParallel(model, OSDPConfig(plan=plan_of(find_units(model), 1, "replicate")))
    parallel.backward(tiny_loss(parallel, tiny_batch(0)))
    assert not dist.is_initialized()
    parallel.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


class Summed(torch.nn.Sequential):
    """Not from transformers."""

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(features).sum()}


def test_model_that_cannot_be_saved_says_what_to_do():
    model = Summed(*(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2)))
    plan = plan_of(find_units(model), 1, "replicate")
    with pytest.raises(DescriptionError, match="pass inputs"):
        OptimalShardedDataParallel(model, OSDPConfig(plan=plan))
    run = {"inputs": lambda samples: {"features": torch.zeros(samples, 2)}}
    parallel = OptimalShardedDataParallel(model, OSDPConfig(plan=plan, **run))
    with pytest.raises(ValueError, match="full_state_dict"):
        parallel.save_pretrained("nowhere")
    with pytest.raises(OSDPError):
        OptimalShardedDataParallel(model, OSDPConfig(plan=plan_of(find_units(model), 2, "zero3"), **run))


class OddState:
    def state_dict(self) -> dict[str, object]:
        return {"folder": Path()}


@pytest.mark.on_ranks(2)
def test_saving_is_refused_of_one_rank_and_of_what_could_not_be_read(tmp_path):
    parallel, process_group.ALL_CALL_S = sharded(2, "zero3"), 1.0
    if dist.get_rank() == 0:
        with pytest.raises(OSDPError, match="save_pretrained gathers a sharded model"):
            parallel.save_pretrained(tmp_path / "alone")
    dist.barrier()
    optimizer = torch.optim.SGD(parallel.parameters())
    for more in ({"scheduler": OddState()}, {"progress": {"folder": Path()}}):
        with pytest.raises(CheckpointError, match=r"The state of .* could not be read again"):
            parallel.save_checkpoint(tmp_path / "checkpoint", optimizer, **more)
    assert not (tmp_path / "checkpoint").exists()


def test_reducing_otherwise_than_the_plan_is_refused():
    units = find_units(tiny_model(MODEL))
    one, mixed = (
        plan_of(units, 2, "zero3", accumulation_steps=steps, reduce_every_micro_step=reduce)
        for steps, reduce in ((1, True), (2, None))
    )
    check_given_plan(one, OSDPConfig(reduce_every_micro_step=True), 0)
    check_given_plan(mixed, OSDPConfig(), 0)
    for plan, every in ((one, False), (mixed, True), (mixed, False)):
        with pytest.raises(PlanError, match=f"units with reduce_every_micro_step={not every}"):
            check_given_plan(plan, OSDPConfig(reduce_every_micro_step=every), 0)


def planned(optimizer: Any = None, **options: Any) -> OptimalShardedDataParallel:
    run = {"sequence_length": SEQUENCE_LENGTH, "global_batch_size": SAMPLES, "hardware": "cpu"}
    return OptimalShardedDataParallel(
        tiny_model(MODEL), {**run, "operator_splitting": False, **options}, optimizer=optimizer
    )


def test_plan_counts_plain_adamw_or_the_given_optimizer_and_has_fixed_decisions():
    parallel = planned(recompute=True, reduce_every_micro_step=True, micro_batch_size=1)
    blocks = [unit for unit in parallel.plan.units if ".h." in unit.fqn]
    assert blocks and all(unit.activations == Activations.RECOMPUTE for unit in blocks)
    assert all(unit.reduce_every_micro_step for unit in parallel.plan.units) and parallel.plan.split == WHOLE_BLOCKS
    adamw, sgd = (
        OptimizerSpec(name="adamw", states=2, step=OptimizerStep.FOR_LOOP),
        OptimizerSpec(name="sgd", states=0),
    )
    assert [one._run.inputs.job.optimizer for one in (parallel, planned(sgd))] == [adamw, sgd]


def test_the_scaler_is_public_and_off_without_fp16():
    assert hf_osdp.OSDPGradScaler is OSDPGradScaler
    parallel = sharded(1, "replicate")
    scaler = parallel.grad_scaler(init_scale=8.0)
    assert type(scaler) is OSDPGradScaler and not scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == 1
    assert parallel.grad_scaler(enabled=True, init_scale=8.0).get_scale() == 8
