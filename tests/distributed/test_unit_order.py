"""Ranks that run different modules train and evaluate as DDP with `find_unused_parameters`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step
from tests.helpers.distributed import RankFailure, run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.sampling import slow_but

WIDTH = 8
STEPS = 6
LAYOUTS = ("zero3", "zero2", "replicate", "mixed", "everything")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Batch = tuple[torch.Tensor, dict[str, object]]
"""Inputs, and what a rank's model does with them."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Parts(nn.Module):
    """A tower for pictures, layers that may be dropped, one for each task, parameters that some losses use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.picture = nn.Linear(4, WIDTH)
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.tasks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x, *, picture=False, layers=(0, 1, 2), task=0, own=None):
        hidden = self.embed(x)
        if picture:
            seen = self.picture(x)
            for block in self.tower:
                seen = block(seen)
            hidden = hidden + seen
        for number in layers:
            hidden = self.layers[number](hidden)
        scale = 1 if own is None else getattr(self, own)
        return (self.head(self.tasks[task](hidden)) * scale).square().mean()


def pictures(step: int, rank: int) -> dict[str, object]:
    return {"picture": step > 1 and (step + rank) % 2 == 0}


def dropped_layers(step: int, rank: int) -> dict[str, object]:
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(10 * step + rank)) > 0.4
    return {"layers": tuple(drawn.nonzero().flatten().tolist())}


def tasks(step: int, rank: int) -> dict[str, object]:
    return {"task": rank if step % 3 else 0}


def parameters(step: int, rank: int) -> dict[str, object]:
    return {"own": ("first", "second")[rank] if step % 2 else None}


def orders(step: int, rank: int) -> dict[str, object]:
    return {"layers": ((0, 1, 2), (2, 0, 1), (1, 1, 0))[(step + rank) % 3], "picture": rank == step % 2}


CASES = (pictures, dropped_layers, tasks, parameters, orders)


def whole_model() -> nn.Module:
    torch.manual_seed(0)
    return Parts().double()


def sharded(layout: str, *, policy: MixedPrecisionPolicy | None = None, **options: object) -> tuple[nn.Module, Plan]:
    model = whole_model()
    units = find_units(model, ["Block"])
    plan = plan_of(units, dist.get_world_size(), layout, **options)
    apply_plan(model, plan, units, meshes=Meshes("cpu"), mp_policy=policy, pin_memory=False)
    return model, plan


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-4, foreach=False)


def averaged(model: nn.Module, losses: list[torch.Tensor], ranks: int) -> None:
    """Leave the sum of the losses' gradients divided by the ranks, and None where no rank has one, as DDP does."""
    sum(losses).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= ranks


def assert_equal_weights(model: nn.Module, expected: nn.Module) -> None:
    found = full_state_dict(model)
    if dist.get_rank() == 0:
        for name, weight in expected.state_dict().items():
            torch.testing.assert_close(
                found[name], weight, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, daily=("everything",)))
def test_ranks_with_different_modules_train_and_evaluate_as_ddp(layout):
    run_ranks(trains_as_ddp, 2, layout, *CASES, timeout_s=150, shared=True)


def trains_as_ddp(layout: str, *cases: Callable[[int, int], dict[str, object]]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for case in cases:
        model, _ = sharded(layout)
        expected = whole_model()
        optimizer, reference = optimizer_of(model), optimizer_of(expected)
        for step in range(STEPS):
            wanted = [expected(inputs(step, other), **case(step, other)) for other in range(ranks)]
            averaged(expected, wanted, ranks)
            loss = model(inputs(step, rank), **case(step, rank))
            assert torch.allclose(loss, wanted[rank], rtol=0, atol=1e-12), (case, step)
            loss.backward()
            for name, parameter in expected.named_parameters():
                assert (parameter.grad is None) == (model.get_parameter(name).grad is None), (case, step, name)
            for one in (reference, optimizer):
                one.step()
                one.zero_grad()
            with torch.no_grad():  # as an evaluation within training
                own = case(step + 1, rank)
                assert torch.allclose(
                    model(inputs(50, rank), **own), expected(inputs(50, rank), **own), rtol=0, atol=1e-12
                )
        assert_equal_weights(model, expected)


@pytest.mark.parametrize("layout", slow_but(("hsdp", "mixed", "two_stage"), daily=()))
@pytest.mark.on_ranks(4, timeout_s=150, shared=True)
def test_different_modules_on_four_ranks_train_as_ddp(layout):
    trains_as_ddp(
        layout, lambda step, rank: {**pictures(step, rank), **dropped_layers(step, rank), **tasks(step, rank % 2)}
    )


@pytest.mark.parametrize("layout", slow_but(("zero3", "replicate", "mixed"), daily=("mixed",)))
@pytest.mark.on_ranks(2, timeout_s=150, shared=True)
def test_micro_steps_with_different_modules_train_as_ddp(layout):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for reduces in (False, True, None):
        model, plan = sharded(layout, accumulation_steps=2, reduce_every_micro_step=reduces)
        expected = whole_model()
        optimizer, reference = optimizer_of(model), optimizer_of(expected)
        for step in range(4):
            for micro in range(2):
                number = 2 * step + micro
                averaged_sum = [
                    expected(inputs(number, other), **pictures(number, other), **parameters(number, other))
                    for other in range(ranks)
                ]
                (sum(averaged_sum) / ranks).backward()
                with micro_step(model, is_last=micro == 1, plan=plan):
                    model(inputs(number, rank), **pictures(number, rank), **parameters(number, rank)).backward()
            for one in (reference, optimizer):
                one.step()
                one.zero_grad()
        assert_equal_weights(model, expected)


@pytest.mark.on_ranks(2, timeout_s=150, shared=True)
def test_units_that_only_earlier_micro_steps_use_are_reduced():
    """Replicas wait for the last micro-step with their all-reduce, for which FSDP2 needs a gradient there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for layout in ("replicate", "mixed"):
        model, plan = sharded(layout, accumulation_steps=2, reduce_every_micro_step=True)
        expected = whole_model()
        optimizer, reference = optimizer_of(model), optimizer_of(expected)
        for step, seen in enumerate([(True, True), (False, False), (False, True)]):  # by rank, in the first micro-step
            for micro in range(2):
                number = 2 * step + micro
                losses = [
                    expected(inputs(number, other), picture=micro == 0 and seen[other]) for other in range(ranks)
                ]
                (sum(losses) / ranks).backward()
                with micro_step(model, is_last=micro == 1, plan=plan):
                    model(inputs(number, rank), picture=micro == 0 and seen[rank]).backward()
            for name, parameter in expected.named_parameters():
                assert (parameter.grad is None) == (model.get_parameter(name).grad is None), (layout, step, name)
            for one in (reference, optimizer):
                one.step()
                one.zero_grad()
        assert_equal_weights(model, expected)


@pytest.mark.on_ranks(2, shared=True)
def test_unused_units_may_hold_gradients_in_another_dtype():
    for layout in ("zero3", "replicate"):
        model, plan = sharded(layout, accumulation_steps=2, reduce_every_micro_step=False, policy=HALF)
        for is_last in (False, True):
            with micro_step(model, is_last=is_last, plan=plan):
                model(inputs(0, 0), picture=is_last and dist.get_rank() == 0).backward()
        assert model.get_parameter("picture.weight").grad is not None


def counted_all_reduce(
    calls: list[int], all_reduce: Callable[..., object], tensor: torch.Tensor, *args: object, **options: object
) -> object:
    if tensor.dtype == torch.int64:
        calls.append(tensor.numel())
    return all_reduce(tensor, *args, **options)


@pytest.mark.on_ranks(2, shared=True)
def test_usual_training_needs_no_further_agreement():
    monkeypatch, all_reduce = pytest.MonkeyPatch(), dist.all_reduce
    """Once the order is learned, ranks wait for one another only at the end of forward and of backward."""
    for layout in ("zero3", "mixed"):
        model = tiny_model("gpt2", layers=3)
        units = find_units(model)
        apply_plan(model, plan_of(units, 2, layout), units, meshes=Meshes("cpu"))
        counted = []
        for step in range(3):
            calls: list[int] = []
            monkeypatch.setattr(dist, "all_reduce", partial(counted_all_reduce, calls, all_reduce))
            tiny_loss(model, tiny_batch(step)).backward()
            monkeypatch.undo()
            counted.append(len(calls))
        assert counted[0] > 2 and counted[1:] == [4, 4], counted  # at the beginning and at the end of each


@pytest.mark.parametrize("case", ["no gradients", "a read", "no backward"])
def test_different_parts_of_a_step_are_refused_within_seconds(case):
    with pytest.raises(RankFailure, match=r"OSDPError: Ranks run different parts of a step: rank ."):
        run_ranks(runs_different_parts, 2, case, timeout_s=30)


def runs_different_parts(case: str) -> None:
    model, _ = sharded("zero3")
    for _ in range(2):
        model(inputs(0, 0)).backward()
    loss, is_first = model(inputs(0, 0)), dist.get_rank() == 0
    match case:
        case "no gradients":
            loss.backward()
            with torch.set_grad_enabled(is_first):
                model(inputs(0, 0))
        case "a read":
            if is_first:
                loss = loss + model.tasks[0].up.weight.sum()
            loss.backward()
        case _:
            if is_first:
                loss.backward()
            model(inputs(0, 0)).backward()


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
    register_fsdp_forward_method(
        model, "generate"
    )  # as the Trainer does: pictures are encoded before the model is called
    text = torch.arange(3, 12)[None]
    with_picture = torch.cat([torch.full((1, 4), 49), text], dim=1)
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = {"input_ids": text} if dist.get_rank() else {"input_ids": with_picture, "pixel_values": pixels}
    for count in (3 + dist.get_rank(), 5 - dist.get_rank()):  # ranks end after different numbers of tokens
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        assert model.generate(**given, **options).tolist() == expected.generate(**given, **options).tolist()


@pytest.mark.on_ranks(2, shared=True)
def test_layer_drop_is_not_switched_off():
    """Encoders run all layers if FSDP2's mark is on them."""
    from transformers.distributed.fsdp import is_fsdp_managed_module

    model = tiny_model("gpt2", layers=2)
    units = find_units(model)
    apply_plan(model, plan_of(units, 2, "zero3"), units, meshes=Meshes("cpu"))
    assert is_fsdp_managed_module(model)  # for `generate`
    assert not any(is_fsdp_managed_module(module) for module in model.modules() if not hasattr(module, "generate"))
