"""Ranks that run different modules: what is refused, agreed on and generated; `cases/modules.py` has what trains."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers.distributed.fsdp import is_fsdp_managed_module

from benchmarks import trial as trials
from hf_osdp.distributed import fsdp_internals
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.step_meter import StepMeter
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.steps import micro_step
from tests.helpers.checkpointed import whole
from tests.helpers.distributed import RankFailure, run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.simulation import Trial, built
from tests.helpers.steps import batch_on, make_optimizer, train_step

from .cases.modules import inputs, parts, units_of_parts

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(layout: str, *, policy: MixedPrecisionPolicy | None = None, **options: object) -> nn.Module:
    model = parts()
    units = units_of_parts(model)
    plan = plan_of(units, dist.get_world_size(), layout, **options)
    return apply_plan(model, plan, units, meshes=Meshes("cpu"), mp_policy=policy)


@pytest.mark.on_ranks(2, shared=True)
def test_unused_units_may_hold_gradients_in_another_dtype():
    for layout in ("zero3", "replicate"):
        model = sharded(layout, accumulation_steps=2, reduce_every_micro_step=False, policy=HALF)
        for is_last in (False, True):
            with micro_step(model, is_last=is_last):
                model(inputs(0, 0), picture=is_last and dist.get_rank() == 0).backward()
        assert model.get_parameter("picture.weight").grad is not None


@pytest.mark.on_ranks(2, shared=True)
def test_held_gradients_are_summed_in_the_reduced_dtype_as_by_fsdp2():
    """Sums of several micro-steps in bf16 would differ in the third digit."""
    stock = tiny_model("gpt2", dtype=torch.float32, layers=2)
    model = copy.deepcopy(stock)
    for module in (*stock.transformer.h, stock):
        fully_shard(module, mp_policy=HALF)
    units = find_units(model)
    plan = plan_of(units, 2, "zero3", accumulation_steps=8, reduce_every_micro_step=False)
    apply_plan(model, plan, units, meshes=Meshes("cpu"), mp_policy=HALF)
    for number in range(8):
        batch = tiny_batch(number, part=dist.get_rank(), parts=2)
        stock.set_requires_gradient_sync(number == 7)
        with micro_step(model, is_last=number == 7):
            for one in (stock, model):
                tiny_loss(one, batch).backward()
    wanted = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), whole(wanted[name].grad), rtol=1e-5, atol=1e-7)


@pytest.mark.on_ranks(2, shared=True)
@pytest.mark.parametrize("policy", [None, HALF])
def test_ordinary_shards_are_gathered_with_fewer_operators(policy):
    """Values are those that `test_exactness.py` trains with; FSDP2 gathers other shards itself, and other models'."""
    gathers = {"foreach_all_gather": 0, "foreach_all_gather_copy_out": 0}

    def counted(name):
        def call(*args):
            gathers[name] += 1
            return own(*args)

        own = getattr(fsdp_internals, name)
        return patch.object(fsdp_internals, name, call)

    model, stock = sharded("zero3", policy=policy), fully_shard(nn.Linear(4, 4))
    with counted("foreach_all_gather"), counted("foreach_all_gather_copy_out"):
        with torch.no_grad():
            model(inputs(0, 0), picture=True)
        assert gathers["foreach_all_gather_copy_out"] > 0, "FSDP2 allocates whole parameters at first"
        gathers["foreach_all_gather_copy_out"] = 0
        model(inputs(0, 1), picture=True).backward()
        assert gathers == {"foreach_all_gather": 0, "foreach_all_gather_copy_out": 0}
        stock(torch.ones(2, 4)).sum().backward()
        assert gathers == {"foreach_all_gather": 1, "foreach_all_gather_copy_out": 1}


@pytest.mark.on_ranks(2, shared=True)
def test_profilers_see_the_parts_of_a_step():
    model = sharded("zero3")
    with torch.profiler.profile() as profile:
        model(inputs(0, 0), picture=True).backward()
    names = {event.key.partition(" ")[0] for event in profile.key_averages()}
    assert {"FSDP::pre_forward", "FSDP::all_gather", "FSDP::post_backward_reduce"} <= names


@pytest.mark.on_ranks(2, shared=True)
def test_usual_training_needs_no_further_agreement():
    """Once the order is learned, ranks wait for one another only at the end of forward and of backward."""
    for layout in ("zero3", "mixed"):
        model = tiny_model("gpt2", layers=3)
        units = find_units(model)
        apply_plan(model, plan_of(units, 2, layout), units, meshes=Meshes("cpu"))
        counted = []
        for step in range(3):
            with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as called:
                tiny_loss(model, tiny_batch(step)).backward()
            counted.append(sum(call.args[0].dtype == torch.int64 for call in called.call_args_list))
        assert counted[0] > 2 and counted[1:] == [4, 4], counted  # at the beginning and at the end of each


@pytest.mark.parametrize("case", ["no gradients", "a read", "no backward"])
def test_different_parts_of_a_step_are_refused_within_seconds(case):
    with pytest.raises(RankFailure, match=r"OSDPError: Ranks run different parts of a step: rank ."):
        run_ranks(runs_different_parts, 2, case, timeout_s=30)


def runs_different_parts(case: str) -> None:
    model, is_first = sharded("zero3"), dist.get_rank() == 0
    for _ in range(2):
        model(inputs(0, 0)).backward()
    loss = model(inputs(0, 0))
    if is_first and case == "a read":
        loss = loss + model.tasks[0].up.weight.sum()
    if is_first or case != "no backward":
        loss.backward()
    with torch.set_grad_enabled(is_first or case != "no gradients"):
        model(inputs(0, 0))


@pytest.mark.on_ranks(2, shared=True)
def test_ranks_generate_with_and_without_a_picture():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50, initializer_range=0.5,
                                             eos_token_id=None),
        image_token_id=49, vision_feature_layer=-1, image_seq_length=4,
    )  # fmt: skip
    torch.manual_seed(0)
    expected = transformers.LlavaForConditionalGeneration(config).double().eval()
    model = copy.deepcopy(expected)
    units = find_units(model)
    apply_plan(model, plan_of(units, 2, "zero3"), units, meshes=Meshes("cpu"))
    managed = {module for module in model.modules() if is_fsdp_managed_module(module)}
    # encoders with LayerDrop run all layers where they find FSDP2's mark
    assert model in managed and all(hasattr(one, "generate") for one in managed)
    register_fsdp_forward_method(model, "generate")  # as the Trainer does, which encodes pictures before the call
    text = torch.arange(3, 12)[None]
    with_picture = torch.cat([torch.full((1, 4), 49), text], dim=1)
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = {"input_ids": text} if dist.get_rank() else {"input_ids": with_picture, "pixel_values": pixels}
    for count in (3 + dist.get_rank(), 5 - dist.get_rank()):  # ranks end after different numbers of tokens
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        assert model.generate(**given, **options).tolist() == expected.generate(**given, **options).tolist()


@pytest.mark.on_ranks(2, shared=True)
def test_peak_where_gradients_are_held_on_real_ranks_is_estimated():
    """Simulated steps have no other rank, and so no order of units."""
    trial = Trial(
        model="small llama", world=2, length=64, samples=2, steps=2, hold=(True,), precision="bf16", device_type="cpu"
    )  # fmt: skip
    description, job, told = trial.description, trial.job, []
    plan = Plan.of(description, trial.layouts, trial.batch, world_size=2)
    inputs, device = training_batch(built(trial.model), trial.length), torch.device("cpu")
    whole_model = trials.Trial(
        model=built(trial.model), units=description.units, job=job, inputs=inputs, device=device
    )  # fmt: skip
    model = trials.sharded_copy(plan, whole_model, Meshes("cpu"))
    optimizer = make_optimizer(model, job.optimizer, plan, description.units)
    meter = StepMeter(model, device, told.append, plan, may_skip=False, steps=3)
    batch = batch_on(inputs, 2, device)
    for _ in range(3):
        train_step(model, optimizer, batch, plan, job)
    assert meter.model is None
    estimate = estimate_memory(description, trial.layouts, 2, job, trial.batch)
    assert told[0].peak_bytes == pytest.approx(estimate.peak_bytes, rel=2e-3)
