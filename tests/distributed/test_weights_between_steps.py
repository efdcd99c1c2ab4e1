"""Work on weights between steps is as in one process, or refused in a line."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.clip_grad import clip_grad_norm_ as clip_of_an_early_import
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback

import hf_osdp
from hf_osdp.distributed import process_group
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError
from hf_osdp.modeling.units import find_units
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.between_steps import AcrossLayouts
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer_steps import step_on_shards
from hf_osdp.sharding.state import full_state_dict
from tests.helpers.checkpointed import worst
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model

from .test_integration_trainer import LENGTH, PlannedTrainer, StockTrainer, arguments, assert_close, history, tokens

LAYOUTS = ("mixed", "zero3", "zero2", "replicate")
TOLERANCE = 1e-12


def whole_model() -> nn.Module:
    """With a parameter without dimensions, which FSDP2 does not shard."""
    model = tiny_model("llama", layers=2, scale=10.0)
    model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
    return model


def sharded(layout: str = "mixed") -> nn.Module:
    model = whole_model()
    units = find_units(model)
    return apply_plan(model, plan_of(units, dist.get_world_size(), layout), units, meshes=Meshes("cpu"))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, max_norm: float | None = None) -> float:
    """Take a step, this rank with its part of the batch under a plan; return the norm."""
    is_whole = not any(isinstance(p, DTensor) for p in model.parameters())
    part, parts = (0, 1) if is_whole else (dist.get_rank(), dist.get_world_size())
    (tiny_loss(model, tiny_batch(number, part=part, parts=parts)) * model.scale).backward()
    norm = (
        torch.zeros(())
        if max_norm is None
        else clip_of_an_early_import(model.parameters(), max_norm, error_if_nonfinite=True)
    )
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def assert_equal(model: nn.Module, alone: nn.Module) -> None:
    found = full_state_dict(model)
    if dist.get_rank() == 0:
        assert worst(found, alone.state_dict()) < TOLERANCE


def pair(layout: str) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """A model under a plan and one on each rank alone, with optimizers."""
    model, alone = sharded(layout), whole_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_on_shards(optimizer, model)
    return model, optimizer, alone, torch.optim.SGD(alone.parameters(), lr=0.1)


@pytest.mark.on_ranks(2, shared=True)
def test_torchs_clipping_equals_one_process_under_every_layout():
    for layout in LAYOUTS:
        model, optimizer, alone, other = pair(layout)
        for number in range(2):
            norms = [stepped(*one, number, max_norm=0.1) for one in ((model, optimizer), (alone, other))]
            assert norms[0] == pytest.approx(norms[1], rel=TOLERANCE)
        assert_equal(model, alone)


@pytest.mark.on_ranks(2)
def test_torch_cannot_clip_on_several_meshes_by_itself():
    """If it can, `clip_across_meshes` may go."""
    stock = torch.nn.utils.clip_grad._get_total_norm
    model = sharded("mixed")
    assert torch.nn.utils.clip_grad._get_total_norm is not stock
    tiny_loss(model, tiny_batch(0)).backward()
    with pytest.raises((RuntimeError, ValueError), match="mesh"):
        stock([p.grad for p in model.parameters() if p.grad is not None and p.dim()])


@pytest.mark.on_ranks(2, shared=True)
def test_a_reference_of_another_layout_follows_element_by_element():
    for layout in LAYOUTS:
        model, optimizer, alone, other = pair(layout)
        reference = fully_shard(tiny_model("llama", layers=2, scale=7.0))
        expected = tiny_model("llama", layers=2, scale=7.0)
        for number in range(2):
            stepped(model, optimizer, number)
            stepped(alone, other, number)
            with AcrossLayouts("Work on weights in on_step_end"):
                follow(reference, model)
            follow(expected, alone)
        for (name, found), wanted in zip(reference.named_parameters(), expected.parameters(), strict=True):
            assert torch.allclose(found.full_tensor(), wanted, rtol=0, atol=TOLERANCE), (layout, name)


def follow(reference: nn.Module, model: nn.Module) -> None:
    """As TRL's `sync_ref_model`."""
    followed = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        parameter.data.mul_(0.5).add_(followed[name].data, alpha=0.5)


@pytest.mark.on_ranks(2, shared=True)
def test_averages_of_whole_copies_equal_one_process():
    for layout, options in (("mixed", {}), ("zero3", {"multi_avg_fn": get_ema_multi_avg_fn(0.5)})):
        model, optimizer, alone, other = pair(layout)
        averages = [AveragedModel(whole_model(), **options) for _ in range(3)]
        for number in range(3):
            stepped(model, optimizer, number)
            stepped(alone, other, number)
            with AcrossLayouts("Work on weights in on_step_end"):
                averages[0].update_parameters(model)
            with hf_osdp.full_parameters(model, write_back=False):
                averages[1].update_parameters(model)
            averages[2].update_parameters(alone)
        for average in averages[:2]:
            assert worst(average.module.state_dict(), averages[2].module.state_dict()) < TOLERANCE
        with AcrossLayouts("Work on weights in on_step_end"), torch.no_grad():  # the average takes the weights' place
            for parameter, mean in zip(model.parameters(), averages[0].module.parameters(), strict=True):
                parameter.copy_(mean)
        stepped(model, optimizer, 3)
        alone.load_state_dict(averages[2].module.state_dict())
        stepped(alone, other, 3)
        assert_equal(model, alone)


@pytest.mark.on_ranks(2, shared=True)
def test_sums_over_layouts_and_work_with_gradients():
    model, alone = sharded("mixed"), whole_model()
    with AcrossLayouts("Work on weights in on_step_end"):
        norm = sum(parameter.detach().norm() ** 2 for parameter in model.parameters())
        distance = sum(
            ((p.detach() - q.detach()) ** 2).sum() for p, q in zip(alone.parameters(), model.parameters(), strict=True)
        )
        with pytest.raises((RuntimeError, ValueError), match="got mixed"):
            (model.lm_head.weight * alone.lm_head.weight.detach()).sum()  # a gradient would flow past FSDP2
    assert float(norm) == pytest.approx(float(sum(p.detach().norm() ** 2 for p in alone.parameters())), rel=TOLERANCE)
    assert float(distance) == 0.0


@pytest.mark.on_ranks(2, shared=True)
def test_a_rank_that_gathers_alone_is_refused():
    model, alone = sharded("zero3"), whole_model()
    weight, process_group.ALL_CALL_S = model.lm_head.weight.detach(), 1.0
    if dist.get_rank() == 0:
        said = r"Work on weights in on_log gathers a sharded model and must be called on every rank, but ranks \[0\]"
        with AcrossLayouts("Work on weights in on_log"), pytest.raises(OSDPError, match=said):
            alone.lm_head.weight.data.add_(weight)
    dist.barrier()
    process_group.ALL_CALL_S = 300.0


@pytest.mark.on_ranks(2, shared=True)
def test_full_parameters_are_whole_inside_and_shards_after():
    for layout in LAYOUTS:
        model, optimizer, alone, other = pair(layout)
        stepped(model, optimizer, 0)
        stepped(alone, other, 0)
        with torch.no_grad():
            tiny_loss(model, tiny_batch(1))  # leaves weights gathered
        shards = dict(model.named_parameters())
        with hf_osdp.full_parameters(model) as whole, torch.no_grad():
            assert worst(dict(whole.named_parameters()), dict(alone.named_parameters())) < TOLERANCE
            if dist.get_rank() == 0:
                whole.lm_head.weight.data.mul_(0.5)
                whole.model.load_state_dict({name: 0.9 * value for name, value in alone.model.state_dict().items()})
        with torch.no_grad():
            alone.lm_head.weight.mul_(0.5)
            alone.model.load_state_dict({name: 0.9 * value for name, value in alone.model.state_dict().items()})
        with hf_osdp.full_parameters(model.lm_head, write_back=False) as head, torch.no_grad():
            head.weight.zero_()
        assert all(parameter is shards[name] for name, parameter in model.named_parameters())
        stepped(model, optimizer, 2)
        stepped(alone, other, 2)
        assert_equal(model, alone)


@pytest.mark.on_ranks(2, shared=True)
def test_full_parameters_restore_shards_after_an_error_and_refuse_calls():
    model = sharded("mixed")
    before = copy.deepcopy(full_state_dict(model))
    for call in (
        lambda: tiny_loss(model, tiny_batch(0)),
        lambda: model.lm_head(torch.ones(1, 64, dtype=torch.float64)),
    ):
        with pytest.raises(OSDPError, match=r"was called within hf_osdp\.full_parameters"):
            with hf_osdp.full_parameters(model):
                model.lm_head.weight.data.zero_()
                call()
        assert all(isinstance(p, DTensor) for p in model.parameters() if p.dim())
    after = full_state_dict(model)
    assert dist.get_rank() or worst(after, before) == 0.0
    tiny_loss(model, tiny_batch(0)).backward()
    plain = whole_model()
    with hf_osdp.full_parameters(plain):
        tiny_loss(plain, tiny_batch(0))


@pytest.mark.on_ranks(2, shared=True)
def test_whole_weights_are_loaded_and_parts_are_saved(tmp_path):
    for layout in LAYOUTS:
        model, optimizer, alone, other = pair(layout)
        other_weights = {name: 0.7 * value for name, value in alone.state_dict().items()}
        model.load_state_dict(other_weights)
        alone.load_state_dict(other_weights)
        stepped(model, optimizer, 0)
        stepped(alone, other, 0)
        assert_equal(model, alone)
        folder = tmp_path / layout
        model.model.save_pretrained(folder)
        saved = type(alone.model).from_pretrained(folder, dtype=torch.float64)
        assert worst(saved.state_dict(), alone.model.state_dict()) < TOLERANCE
        with hf_osdp.full_parameters(model, write_back=False):
            if dist.get_rank() == 0:  # whole weights need no other rank
                model.model.save_pretrained(folder / "alone")
        dist.barrier()
        assert (
            worst(
                type(alone.model).from_pretrained(folder / "alone", dtype=torch.float64).state_dict(),
                saved.state_dict(),
            )
            == 0.0
        )
        with hf_osdp.full_parameters(model.model.layers[1], write_back=False) as block:
            torch.save(block.state_dict(), folder / f"block{dist.get_rank()}.pt")
        block = torch.load(folder / f"block{dist.get_rank()}.pt", weights_only=True)
        assert worst(block, alone.model.layers[1].state_dict()) < TOLERANCE
        with pytest.raises(OSDPError, match=re.escape("load_state_dict(assign=True) would replace shards")):
            model.load_state_dict(other_weights, assign=True)


class Averages(TrainerCallback):
    """Average weights in a whole copy, and continue from the average."""

    def __init__(self, model: nn.Module) -> None:
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        self.average.update_parameters(model)
        with torch.no_grad():
            for parameter, mean in zip(model.parameters(), self.average.module.parameters(), strict=True):
                parameter.copy_(mean)


class Stacks(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        torch.stack([parameter.detach().sum() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """History and average of the stock Trainer in one process."""
    callback = Averages(tiny_model("gpt2"))
    args = arguments(str(tmp_path_factory.mktemp("one")), per_device_train_batch_size=8)
    trainer = StockTrainer(model=tiny_model("gpt2"), args=args, train_dataset=tokens(), callbacks=[callback])
    trainer.train()
    return history(trainer), dict(callback.average.module.state_dict())


@pytest.mark.slow
@pytest.mark.on_ranks(2, init=False)
def test_callbacks_average_weights_as_under_the_stock_trainer(tmp_path, averaged):
    given = plan_of(find_units(tiny_model("gpt2")), 2, "mixed")
    config = OSDPConfig(plan=replace(given, sequence_length=LENGTH, micro_batch_size=4))
    args = arguments(str(tmp_path), per_device_train_batch_size=4)
    callback = Averages(tiny_model("gpt2"))
    options = {"args": args, "train_dataset": tokens(), "osdp": config}
    trainer = PlannedTrainer(model=tiny_model("gpt2"), callbacks=[callback], **options)
    trainer.train()
    assert_close(history(trainer), averaged[0], 1e-9)
    assert worst(callback.average.module.state_dict(), averaged[1]) < 1e-9
    trainer = PlannedTrainer(model=tiny_model("gpt2"), callbacks=[Stacks()], **options)
    said = (
        "^Code between steps mixes whole tensors with shards of weights; do this within `with hf_osdp.full_parameters"
    )
    with pytest.raises(OSDPError, match=said):
        trainer.train()


@pytest.mark.on_ranks(2, shared=True)
def test_merged_adapters_are_saved_as_in_one_process(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra `trainers`")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    for inside in (False, True):
        merged = []
        for layout in ("mixed", None):
            torch.manual_seed(0)
            model = peft.get_peft_model(tiny_model("llama", layers=2), config).double()
            if layout is not None:
                units = find_units(model)
                apply_plan(model, plan_of(units, 2, layout), units, meshes=Meshes("cpu"))
            if inside:
                with hf_osdp.full_parameters(model):
                    merged.append(model.merge_and_unload())
            else:
                merged.append(model.merge_and_unload())
        folder = tmp_path / str(inside)
        merged[0].save_pretrained(folder)
        saved = type(merged[1]).from_pretrained(folder, dtype=torch.float64)
        assert worst(saved.state_dict(), merged[1].state_dict()) < TOLERANCE
        assert all(isinstance(local(p), torch.Tensor) for p in merged[0].parameters())
