"""Optimizers under a plan: which are refused, how they are bound to shards, what they hold and what plans count. That
they train as one process does is in `cases/optimizers.py`.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import GPT2Config
from transformers.optimization import Adafactor

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, PlanError, PreflightError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.cost.collectives import collective_seconds, shard_ring
from hf_osdp.planner.cost.timing import estimate_time
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import DType, ParameterSpec
from hf_osdp.planner.hardware import Collective
from hf_osdp.planner.optimizers import spec_of_trainer_name, upper_bound
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, TrainingJob
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.plan_run import check_whole
from hf_osdp.preparation.preflight import Finding, merged_findings
from hf_osdp.quantities import format_seconds
from hf_osdp.report.content import report_content
from hf_osdp.report.plan_file import PlanInputs
from hf_osdp.report.tables import plan_lines
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer import check_optimizer, spec_of_optimizer
from hf_osdp.sharding.optimizer_steps import (
    bind_optimizer,
    parameter_names,
    prepare_new_optimizers,
    rebind_parameters,
    release_parameters,
    step_by_device,
    step_on_shards,
)
from hf_osdp.sharding.optimizers import kind_of
from hf_osdp.sharding.optimizers.trial import after_step, difference_on_shards
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.tracing.describe import describe
from tests.helpers.checkpointed import whole, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import SEQUENCE_LENGTH, tiny_model
from tests.helpers.problems import problem, run_job
from tests.helpers.sampling import slow_but
from tests.helpers.training import loop_of

from .cases.optimizers import GlobalNorm, SignOfMomentum, TrustRatio, in_float64, matrices_alone, muon, quantized

NO_SHARDS = (
    r"^Adafactor is not element-wise: it needs whole parameters, and \d+ of \d+ are sharded, in parts or on the"
)


class Lamb(torch.optim.AdamW):
    """As other packages call it."""


class MyLamb(Lamb):
    """A subclass by a user."""


class MyMuon(torch.optim.Muon):
    """By its base as torch's, but a user may have changed it."""


class Counts(torch.optim.SGD):
    """May count for all its parameters."""


class StepsOthers(torch.optim.Optimizer):
    """Keeps states where neither a plan nor a checkpoint finds them."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.Muon(parameters)

    def step(self, closure=None) -> None:
        self.inner.step()


class ScalesRows(SignOfMomentum):
    """Is the same on shards of rows, and not on others."""

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(nn.functional.normalize(parameter.grad, dim=-1), alpha=-self.param_groups[0]["lr"])


class RoundsAtRandom(GlobalNorm):
    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            noise = torch.rand_like(parameter) / 100 if parameter.dtype is torch.bfloat16 else 0
            parameter.add_(parameter.grad + noise, alpha=-0.1)


class NeedsClosure(SignOfMomentum):
    def step(self, closure: Any) -> None:
        closure()


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape or (2, 2), dtype=dtype))]


# ---- what is refused


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (torch.optim.SparseAdam, "^SparseAdam .*use an element-wise optimizer"),
        (NeedsClosure, r"^NeedsClosure cannot be tried on a matrix \(TypeError: .*closure.*\)"),
        (StepsOthers, "^StepsOthers cannot be tried on a matrix"),
    ],
)
def test_optimizers_that_cannot_run_under_a_plan_are_refused(cls, said):
    with pytest.raises(OSDPError, match=said):
        check_optimizer(cls(matrix()))


def test_check_finds_by_base_class_and_trial_who_needs_whole():
    weights = matrix()
    schedule_at_0, state = SignOfMomentum(weights, lr=0.0), copy.deepcopy(weights)
    assert difference_on_shards(schedule_at_0) < 1e-6
    assert not schedule_at_0.state and schedule_at_0.param_groups[0]["lr"] == 0.0 and torch.equal(weights[0], state[0])
    assert difference_on_shards(MyLamb(weights)) < 1e-6, "it is known by the name of its base"
    for cls in (TrustRatio, ScalesRows, torch.optim.Adafactor, MyMuon, MyLamb):
        assert kind_of(cls(weights)).needs_whole()
        check_optimizer(cls(weights))
    for optimizer in (torch.optim.Rprop(weights), torch.optim.Muon(weights), schedule_at_0, RoundsAtRandom(weights)):
        assert not kind_of(optimizer).needs_whole()
    with pytest.raises(OSDPError, match="updates at random"):  # which is tried in the parameters' own dtype
        kind_of(RoundsAtRandom(matrix(dtype=torch.bfloat16))).needs_whole()


@pytest.mark.parametrize(
    ("dtype", "nesterov", "whole"), [("bfloat16", False, True), ("bfloat16", True, False), ("float32", False, False)]
)
def test_muon_that_overwrites_its_momentum_is_kept_whole(dtype, nesterov, whole):
    spec = spec_of_optimizer(
        torch.optim.Muon(matrix(24, 8, dtype=getattr(torch, dtype)), nesterov=nesterov), device_type="cpu"
    )
    assert (spec.needs_whole, bool(spec.matrices)) == (whole, not whole)


def test_rebind_takes_new_adagrad_with_state_and_refuses_strange_ones():
    """What else is refused is in docs/data/bad_inputs.csv."""
    model, strange = nn.Linear(2, 2), nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    rebind_parameters(optimizer, parameter_names(model), model)
    assert all(optimizer.state[parameter]["sum"].eq(0.5).all() for parameter in model.parameters())
    optimizer = torch.optim.SGD([*model.parameters(), strange], lr=0.1)
    with pytest.raises(OSDPError, match=r"shape \(5,\) that the model does not have"):
        release_parameters(optimizer, parameter_names(model))
    assert optimizer.param_groups[0]["params"][-1] is strange, "it is unchanged"
    with pytest.raises(OSDPError, match="no parameter 'weight'"):
        rebind_parameters(torch.optim.SGD(model.parameters(), lr=0.1), parameter_names(model), nn.Module())


def sharded(layout: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[nn.Module, Plan, Any]:
    model = tiny_model("gpt2", layers=2, dtype=dtype)
    units = find_units(model)
    plan = plan_of(units, dist.get_world_size() if dist.is_initialized() else 1, layout)
    plan = replace(plan, units=tuple(replace(unit, **changes) for unit in plan.units))
    apply_plan(model, plan, units)
    return model, plan, units


def test_states_on_host_refuse_several_optimizers_and_shared_counters():
    model, plan, units = sharded("replicate", states_on_host=True)
    with pytest.raises(OSDPError, match="Counts may keep state that all its parameters share"):
        bind_optimizer(model, plan, units, [Counts(model.parameters())])
    with pytest.raises(OSDPError, match=r"there are several optimizers"):
        bind_optimizer(model, plan, units, [torch.optim.SGD([p]) for p in model.parameters()])


def backward(model: nn.Module) -> None:
    model(input_ids=torch.arange(SEQUENCE_LENGTH)[None]).logits.square().mean().backward()


@pytest.mark.on_ranks(2, shared=True)
def test_whole_parameters_are_asked_for_before_the_first_step():
    model, *_ = sharded("zero3")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    with pytest.raises(OSDPError, match=NO_SHARDS):
        check_optimizer(Adafactor(model.parameters()))
    for trains in (False, True):  # a frozen one may be sharded
        model.transformer.wpe.weight.requires_grad_(trains)
        if not trains:
            check_optimizer(Adafactor(model.transformer.wpe.parameters()))
    prepare_new_optimizers(model, lambda module, optimizer: None)
    before = full_state_dict(model)
    backward(model)
    for optimizer in (TrustRatio(matrices), MyMuon(matrices), Adafactor(model.parameters())):
        with pytest.raises(OSDPError, match=f"^{type(optimizer).__name__} is not element-wise: it needs whole param"):
            optimizer.step()
    after = full_state_dict(model)
    assert dist.get_rank() or worst(after, before) == 0.0
    SignOfMomentum(matrices, lr=0.1).step()


@pytest.mark.on_ranks(2, shared=True)
def test_closures_and_rounding_at_random_are_refused():
    for layout, of, changes in (
        ("zero3", muon, {}),
        ("mixed", lambda model: torch.optim.SGD(model.parameters(), lr=0.1), {"states_on_host": True}),
    ):  # fmt: skip
        model = matrices_alone()
        units = find_units(model)
        plan = plan_of(units, 2, layout)
        turned = {unit.fqn for unit in units if unit.trainable_numel}
        plan = replace(plan, units=tuple(replace(u, **(changes if u.fqn in turned else {})) for u in plan.units))
        apply_plan(model, plan, units)
        optimizer = of(model)
        step_on_shards(optimizer, model)
        bind_optimizer(model, plan, units, [optimizer])
        with pytest.raises(OSDPError, match=r"^(Muon|SGD)\.step\(closure\) would step shards by gradients"):
            optimizer.step(lambda: 0.0)
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed; pip install 'hf_osdp[low-bit]'")
    for layout, dtype in (("replicate", torch.bfloat16), ("zero3", torch.bfloat16), ("replicate", torch.float32)):
        model, *_ = sharded(layout, dtype)
        optimizer = torchao.AdamW8bit(model.parameters(), bf16_stochastic_round=True)
        refused = pytest.raises(OSDPError, match=r"^AdamW8bit rounds parameters in bf16 at random")
        with refused if (layout, dtype) == ("replicate", torch.bfloat16) else nullcontext():
            step_on_shards(optimizer, model)


@pytest.mark.on_ranks(2, shared=True)
def test_findings_of_one_rank_stop_all_and_warnings_stand_once():
    rank = dist.get_rank()
    with pytest.raises(PreflightError, match=r"^On rank 1: Bad here\.$"):
        merged_findings([Finding("model", "Bad here.", stops=bool(rank))])
    few = [Finding("model", f"Few on {rank}.")]
    assert [finding.message for finding in merged_findings(few)] == ["Few on 0."]


# ---- bitsandbytes


def of_bitsandbytes(name: str = "AdamW", *, block_wise: bool = True, overridden: bool = False, **options: Any) -> Any:
    bnb = pytest.importorskip("bitsandbytes.optim", reason="pip install 'hf_osdp[bnb]'")
    manager = bnb.GlobalOptimManager.get_instance()
    manager.initialize()
    optimizer = getattr(bnb, name)(matrix(), **options)
    if not block_wise:
        optimizer.args.block_wise = False
    if overridden:
        manager.pid2config[id(optimizer.param_groups[0]["params"][0])] = {"betas": (0.0, 0.9)}
    return optimizer


OWN_OPTIONS = "^AdamW has parameters with options of their own in GlobalOptimManager"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "PagedLion8bit"}, "^PagedLion8bit keeps states in CUDA's unified memory"),
        ({"name": "LAMB8bit"}, "^LAMB8bit holds its states in blocks that are quantized together"),
        ({"overridden": True, "optim_bits": 8}, OWN_OPTIONS),
        ({"block_wise": False, "optim_bits": 8}, "^AdamW comes from bitsandbytes before 0.50"),
    ],
)
def test_what_shards_cannot_hold_is_refused_in_one_line(options, said):
    with pytest.raises(OSDPError, match=said):
        kind_of(of_bitsandbytes(**options)).needs_whole()
    with pytest.raises(ValueError, match=said):
        spec_of_optimizer(of_bitsandbytes(**options), device_type="cuda")


def test_plain_loop_of_one_process_refuses_options_of_parameters_and_slices_blocks():
    for bits, allowed in ((8, False), (32, True)):
        optimizer = of_bitsandbytes(optim_bits=bits)
        assert spec_of_optimizer(optimizer, device_type="cuda").steps_parts is allowed
        said = "quantizes blocks of whole parameters, and 1 of 1 are in parts"
        with nullcontext() if allowed else pytest.raises(OSDPError, match=said):
            check_optimizer(optimizer, optimizer.param_groups[0]["params"])
    optimizer = of_bitsandbytes(overridden=True, optim_bits=8)
    model = nn.ParameterList(optimizer.param_groups[0]["params"])
    prepare_new_optimizers(model, lambda *_: None)
    model[0].grad = torch.ones(2, 2)
    with pytest.raises(OSDPError, match=OWN_OPTIONS):
        optimizer.step()


@pytest.mark.on_ranks(2, shared=True)
def test_muon_steps_uneven_and_missing_rows_by_one_gather():
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((5, 7), (7, 1), (1, 6)))).double()
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=Meshes("cpu").mesh(2))
    optimizers = [muon(each, weight_decay=0.5) for each in (model, plain)]
    step_by_device(optimizers[0])
    for _ in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
            with CommDebugMode() as sent, in_float64():
                optimizer.step()
            assert sent.get_total_counts() == (3 if each is model else 0)
            optimizer.zero_grad()
    gathered = {name: whole(parameter) for name, parameter in model.named_parameters()}
    assert worst(gathered, dict(plain.named_parameters())) < 1e-12


# ---- what is held and counted

TABLES = 2048
"""Bytes of bitsandbytes' tables of what codes mean, which all parameters share."""


def state_bytes(tensor: torch.Tensor) -> int:
    tensor = local(tensor)
    names = getattr(tensor, "tensor_attrs", None)
    return tensor.nbytes if names is None else sum(getattr(tensor, name).nbytes for name in names)


def held(package: str, kind: str, width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of each parameter's states on this rank, and as planned."""
    with torch.compiler.set_stance("force_eager"):
        loop, units = loop_of(replace(quantized(package, kind, width=width), layout="mixed"))
        spec = spec_of_optimizer(loop.optimizer, device_type="cpu")
        loop.step(0)
    sizes = {unit.fqn: unit.shard_size for unit in loop.plan.units}
    states = {name: loop.optimizer.state[parameter] for name, parameter in loop.model.named_parameters()}
    found = {name: sum(state_bytes(v) for key, v in of.items() if key != "step") for name, of in states.items()}
    return found, {p.name: spec.state_bytes(p, sizes[unit.fqn]) for unit in units for p in unit.trainable}


CASES_OF_BYTES = [
    ("torchao", "AdamW8bit", 128), ("torchao", "AdamWFp8", 72), ("torchao", "AdamW4bit", 72),
    ("bitsandbytes", "AdamW8bit", 72), ("bitsandbytes", "AdEMAMix8bit", 256), ("bitsandbytes", "Lion", 256),
]  # fmt: skip


@pytest.mark.parametrize(
    ("package", "kind", "width"), slow_but(CASES_OF_BYTES, daily=[CASES_OF_BYTES[0], CASES_OF_BYTES[3]])
)
def test_states_take_planned_bytes_on_the_rank_with_most(package, kind, width):
    """Of 72, shards have no whole blocks, and those of an embedding fewer elements than a whole one must have."""
    pytest.importorskip(package)
    (first, planned), (second, _) = run_ranks(held, 2, package, kind, width, timeout_s=300, shared=True)
    whole = {name: p.numel() for name, p in tiny_model("gpt2", layers=2, width=width).named_parameters()}
    with_tables = {name for name in whole if package == "bitsandbytes" and "8bit" in kind and whole[name] >= 4096}
    expected = {name: planned[name] + TABLES * (name in with_tables) for name in first}
    assert {name: max(first[name], second[name]) for name in first} == expected
    assert package != "torchao" or sum(planned.values()) / sum(16 * n for n in whole.values()) < 0.5, "quantized"


@pytest.mark.parametrize("shape", [(96, 64), (32, 128)])
def test_temporaries_of_a_replica_are_those_of_torch(shape):
    optimizer = torch.optim.Muon(matrix(*shape))
    parameter = ParameterSpec(name="weight", shape=shape, dtype=DType.FLOAT32)
    counted = spec_of_optimizer(optimizer, device_type="cpu").matrix_scratch(parameter, 1)
    assert after_step(optimizer, *shape)[1] * 4 * parameter.numel == pytest.approx(counted, rel=0.01)


def test_optimizers_beside_muon_are_counted_and_matrices_by_shape():
    muons = torch.optim.Muon([*matrix(4, 8), *matrix(8, 4), *matrix(4, 8)])

    def beside(other: torch.optim.Optimizer) -> object:
        return upper_bound([spec_of_optimizer(one, device_type="cpu") for one in (muons, other)])

    both = beside(torch.optim.AdamW(matrix(8, 8), foreach=True))
    assert (both.states, both.step, both.matrices) == (2, OptimizerStep.FOREACH, ((4, 8), (8, 4)))
    assert not both.needs_whole
    wide, other = (ParameterSpec(name="weight", shape=shape, dtype=DType.FLOAT32) for shape in ((4, 8), (8, 8)))
    assert both.gathered_bytes(wide, 3) == 2 * 6 * 8
    assert both.gathered_bytes(wide, 1) == both.gathered_bytes(other, 2) == 0
    whole = beside(torch.optim.Adafactor(matrix(8, 8)))
    assert whole.needs_whole and whole.matrices == both.matrices
    sgd = beside(torch.optim.SGD(matrix(8, 8), lr=0.1))
    assert (sgd.states, sgd.loop_scratch) == (1, 2.0)


BNB_NAMES = {"adamw_bnb_8bit": ("AdamW", 8), "lion_32bit": ("Lion", 32), "rmsprop_bnb": ("RMSprop", 32),
             "ademamix": ("AdEMAMix", 32)}  # fmt: skip


@pytest.mark.parametrize("name", BNB_NAMES)
def test_trainer_names_of_bitsandbytes_stand_for_what_the_optimizers_hold(name):
    bnb = pytest.importorskip("bitsandbytes.optim", reason="pip install 'hf_osdp[bnb]'")
    bnb.GlobalOptimManager.get_instance().initialize()
    cls, bits = BNB_NAMES[name]
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 128), "other": nn.Linear(128, 64)})
    optimizer = getattr(bnb, cls)(model.parameters(), optim_bits=bits)
    if bits == 8:  # as a Trainer does
        manager = bnb.GlobalOptimManager.get_instance()
        manager.register_module_override(model["embedding"], "weight", {"optim_bits": 32})
    for device in ("cpu", "cuda"):
        assert spec_of_trainer_name(name, device_type=device) == spec_of_optimizer(optimizer, device_type=device)


def test_trainer_names_states_and_host_are_known_before_a_run():
    adafactor = Adafactor(matrix(), scale_parameter=False, relative_step=False, lr=1e-3)
    counted = spec_of_optimizer(adafactor, device_type="cuda")
    named = spec_of_trainer_name("adafactor", device_type="cuda")
    assert replace(counted, loop_scratch=2.0) == named and abs(counted.loop_scratch - 2) < 0.05
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed; pip install 'hf_osdp[low-bit]'")
    eight, four = (spec_of_trainer_name(f"adamw_torch_{bits}bit", device_type="cuda") for bits in (8, 4))
    assert eight == spec_of_optimizer(torchao.AdamW8bit(matrix(2)), device_type="cuda")
    made = torchao.AdamW4bit(matrix(2), block_size=256)  # transformers' size, where torchao has 128
    assert four == spec_of_optimizer(made, device_type="cuda") and four.formats[0].bytes_per_element == 0.5 + 4 / 256
    check_optimizer(made)
    job = run_job(OSDPConfig(global_batch_size=2), world_size=2, device_type="cuda", optimizer=eight)
    with pytest.raises(ValueError, match="plain tensors, and adamw8bit's are quantized; leave the offload out"):
        job.asking(host_offload=True).training()


# ---- plans


def muon_problem() -> PlanningProblem:
    """GPT-2's shape on two devices, with all matrices of blocks trained by Muon."""
    config = GPT2Config(n_layer=2, n_embd=256, n_head=4, n_positions=64, vocab_size=500)
    description = describe(config, sequence_length=16, recomputation=False)
    trained = [p for unit in description.units for p in unit.trainable if len(p.shape) == 2 and ".h." in p.name]
    shapes = tuple(sorted({p.shape for p in trained}))
    optimizer = OptimizerSpec(name="muon", states=1, step=OptimizerStep.FOR_LOOP, loop_scratch=0.0, matrices=shapes)
    job = TrainingJob(global_batch_size=2, optimizer=optimizer)
    return problem(description, preset("titan-rtx", devices_per_node=2), job, 2**34)


def test_gathers_of_the_step_are_in_its_seconds():
    exact, batch = muon_problem(), Batch(micro_batch_size=1, accumulation_steps=1)
    layouts = [UnitLayout(shard_size=2, reshard_after_forward=False)] * len(exact.description.units)
    plain = replace(exact.job, optimizer=replace(exact.job.optimizer, matrices=()))
    seconds = [
        estimate_time(exact.description, layouts, exact.hardware, job, batch).total("optimizer_s")
        for job in (exact.job, plain)
    ]
    trained = [p for unit in exact.description.units for p in unit.trainable]
    sizes = [2 * p.numel for p in trained if p.shape in exact.job.optimizer.matrices]
    ring = shard_ring(exact.hardware, 2)
    sent = sum(collective_seconds(exact.hardware, Collective.ALL_GATHER, ring, nbytes) for nbytes in sizes)
    assert len(sizes) == 8 and seconds[0] - seconds[1] == pytest.approx(sent)
    found = search(replace(exact, strategy="fsdp"))
    said = f", of which gathers of whole updates {format_seconds(sent)}."
    assert any(said in line for line in plan_lines(report_content(found.plan, PlanInputs.of(exact))))


def test_what_muon_cannot_have_is_refused_in_one_line():
    exact = muon_problem()
    units, optimizer = exact.description.units, exact.job.optimizer
    layouts = [UnitLayout(shard_size=2, reshard_after_forward=False) for _ in units]
    plan = Plan.of(exact.description, layouts, Batch(micro_batch_size=1, accumulation_steps=1), world_size=2)
    check_whole(plan, exact.description, optimizer)
    on_host = replace(plan, units=tuple(replace(unit, on_host=True) for unit in plan.units))
    with pytest.raises(PlanError, match=r"^muon needs whole parameters, and the plan has"):
        check_whole(on_host, exact.description, optimizer)
    job = run_job(OSDPConfig(global_batch_size=2), world_size=2, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"^muon needs whole parameters at once, which host and device do not have"):
        job.asking(host_offload=True).training()
    assert job.training().host_offload is False and not optimizer.steps_parts


def small_devices(**options: Any) -> OSDPConfig:
    hardware = preset("cpu", devices_per_node=2)
    return OSDPConfig(hardware=hardware, sequence_length=12, operator_splitting=False, **options)


@pytest.mark.on_ranks(2, shared=True)
def test_accelerate_and_plain_loop_plan_for_the_optimizers_given():
    """Muon beside AdamW is sharded, Adafactor has replicas; made after the model was prepared, it is refused."""
    for cls, strategy, size in ((torch.optim.Muon, "fsdp", 2), (torch.optim.Adafactor, "osdp", 1)):
        AcceleratorState._reset_state()
        model = tiny_model("gpt2", layers=2)
        chosen: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, parameter in model.named_parameters():
            chosen[".h." in name and parameter.dim() == 2].append(parameter)
        accelerator = OSDPAccelerator(cpu=True, osdp=small_devices(global_batch_size=8, strategy=strategy))
        model, *optimizers = accelerator.prepare(model, cls(chosen[1], lr=1e-2), torch.optim.AdamW(chosen[0]))
        assert {unit.shard_size for unit in accelerator.planned_run.plan.units} == {size}
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
    AcceleratorState._reset_state()
    accelerator = OSDPAccelerator(cpu=True, osdp=small_devices(global_batch_size=8, strategy="fsdp"))
    accelerator.plan(given := tiny_model("gpt2", layers=2))
    model = accelerator.prepare(given)
    with pytest.raises(OSDPError, match="Adafactor is not element-wise: it needs whole parameters"):
        accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
    config = small_devices(global_batch_size=8)
    plain = OptimalShardedDataParallel(tiny_model("gpt2", layers=2), config, optimizer="adafactor")
    assert {unit.shard_size for unit in plain.plan.units} == {1}
    backward(plain.module)
    Adafactor(plain.parameters()).step()
