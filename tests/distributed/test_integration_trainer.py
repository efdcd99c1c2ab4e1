"""The Trainer on two ranks under a mixed plan trains as one process does, goes on exactly, saves and generates."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from hf_osdp.distributed import process_group
from hf_osdp.distributed.launcher import launched_rank
from hf_osdp.errors import OSDPError
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.gradients import local
from tests.helpers import models
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import mixed_plan
from tests.helpers.sampling import slow_but

STEPS, LENGTH, GLOBAL_BATCH = 5, 12, 8


def tiny_model(**options) -> torch.nn.Module:
    return models.tiny_model("gpt2", scale=10.0, layers=2, **options)


def tokens(count: int = 64) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 61, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: str, **changes: object) -> TrainingArguments:
    options = dict(
        output_dir=folder, max_steps=STEPS, logging_steps=1, learning_rate=1e-2, max_grad_norm=1.0, use_cpu=True,
        report_to="none",
        disable_tqdm=True, save_strategy="no", seed=5, optim="adamw_torch", lr_scheduler_type="linear",
        weight_decay=0.1, adam_epsilon=1e-5,
    )  # fmt: skip
    return TrainingArguments(**{**options, **changes})


def exact_loss(outputs, labels, num_items_in_batch=None):
    """Next-token loss in the logits' own dtype: the models' own is taken in float32."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


class ExactLosses:
    """Keeps each micro-step's loss as it is: the Trainer's own log holds it in float32."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, compute_loss_func=exact_loss, **kwargs)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("micro_losses", []).append(loss.double())
        return loss


class PlannedTrainer(ExactLosses, Trainer):
    pass


class StockTrainer(ExactLosses, transformers.Trainer):
    pass


def history(trainer) -> dict[str, list[float]]:
    """Loss and gradient norm of each step, over all ranks."""
    losses = torch.stack(trainer.micro_losses)
    parts = trainer.plan.accumulation_steps if hasattr(trainer, "plan") else trainer.args.gradient_accumulation_steps
    losses = losses.view(-1, parts).sum(1)
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"loss": losses.tolist(), "grad_norm": norms}


def assert_close(got: dict[str, list[float]], want: dict[str, list[float]], tolerance: float) -> None:
    for name, values in want.items():
        assert got[name] == pytest.approx(values, rel=0, abs=tolerance), name


def trained_by_stock(folder: Path, model: torch.nn.Module) -> StockTrainer:
    args = arguments(str(folder), per_device_train_batch_size=GLOBAL_BATCH)
    trainer = StockTrainer(model=model, args=args, train_dataset=tokens())
    trainer.train()
    return trainer


def run_planned(folder: str) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Train on this rank, whose weights are another's until they are broadcast."""
    plan = mixed_plan(tiny_model(), 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=False)
    args = arguments(folder, per_device_train_batch_size=GLOBAL_BATCH // 2)
    model = tiny_model(seed=launched_rank())
    trainer = PlannedTrainer(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    trainer.train()
    return history(trainer), dict(trainer.accelerator.get_state_dict(trainer.model))


def test_planned_trainer_equals_the_stock_one(tmp_path):
    """In float64; what else it trains is in tests/compatibility."""
    stock = trained_by_stock(tmp_path / "stock", tiny_model())
    found, weights = run_ranks(run_planned, 2, str(tmp_path / "planned"), shared=True)[0]
    assert_close(found, history(stock), 1e-12)
    assert worst({name: weights[name] for name in stock.model.state_dict()}, stock.model.state_dict()) <= 1e-12
    assert json.loads((tmp_path / "planned" / "osdp_report.json").read_text())


def in_float32(
    folder: Path, kind: type[transformers.Trainer] = PlannedTrainer, seed: int = 0, callbacks: Any = (),
    **options: object,
) -> transformers.Trainer:  # fmt: skip
    """A Trainer under a mixed plan."""
    model = tiny_model(dtype=torch.float32, seed=seed)
    plan = mixed_plan(model, 2, sequence_length=LENGTH, micro_batch_size=4, accumulation_steps=1, reduce=True)
    args = arguments(str(folder), per_device_train_batch_size=4, **options)
    given = {"train_dataset": tokens(), "callbacks": list(callbacks)}
    return kind(model=model, args=args, osdp=OSDPConfig(plan=plan), **given)


@pytest.mark.parametrize(
    ("layout", "precision"),
    slow_but(
        [("FULL_STATE_DICT", ""), ("SHARDED_STATE_DICT", "bf16"), ("FULL_STATE_DICT", "fp16")],
        daily=[("SHARDED_STATE_DICT", "bf16")],
    ),
)
@pytest.mark.on_ranks(2, shared=True)
def test_trainer_resumes_exactly_and_saves_float32_under_hugging_face_names(tmp_path, layout, precision):
    options = {"save_strategy": "steps", "save_steps": 3, "fsdp_config": {"state_dict_type": layout}}
    options |= {precision: True} if precision else {}
    first = in_float32(tmp_path, **options)
    first.train()
    first.save_model(str(tmp_path / "final"))
    whole = history(first)
    again = in_float32(tmp_path, seed=9, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    rest, state = history(again), again.accelerator.get_state_dict(again.model)
    assert layout in str(again.accelerator.plugin.state_dict_type)
    assert rest["loss"] == whole["loss"][3:] and rest["grad_norm"][-2:] == whole["grad_norm"][3:]
    if dist.get_rank() == 0:
        saved = load_file(tmp_path / "final" / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
        assert all(name.startswith("transformer.") for name in saved)
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and worst(model.state_dict(), state) == 0


class Overflowing(PlannedTrainer):
    """One rank's third loss is infinite; notes which steps were skipped."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("inf") if self.state.global_step == 2 and dist.get_rank() == 1 else loss

    def training_step(self, *args, **kwargs):
        skipped = self.accelerator.optimizer_step_was_skipped  # the step before
        self.__dict__.setdefault("skipped", []).append(skipped)
        return super().training_step(*args, **kwargs)


@pytest.mark.on_ranks(2, shared=True)
def test_fp16_overflow_on_one_rank_skips_the_step_on_both(tmp_path):
    trainer = in_float32(tmp_path, Overflowing, fp16=True)
    trainer.train()
    found = [None, None]
    dist.all_gather_object(found, (trainer.skipped, trainer.accelerator.scaler.get_scale()))
    assert trainer.skipped[3] and found[0] == found[1]


class Stacks(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        torch.stack([bias.detach() for bias in model.parameters() if bias.shape == (20,)])


@pytest.mark.on_ranks(2, shared=True)
def test_second_trainer_of_a_model_mixed_shards_and_forgotten_cpu_are_refused(tmp_path):
    given = {"args": arguments(str(tmp_path), max_steps=1), "train_dataset": tokens(), "osdp": {"hardware": "cpu"}}
    first = Trainer(model=tiny_model(), **given)
    first.train()
    with pytest.raises(OSDPError, match=r"GPT2LMHeadModel is under a plan, .* load the model anew"):
        Trainer(model=first.model, **given).train()
    said = "^Code between steps mixes whole tensors with shards of weights; do this within `with hf_osdp.full_paramet"
    with pytest.raises(OSDPError, match=said):
        in_float32(tmp_path, callbacks=[Stacks()]).train()
    if not torch.cuda.is_available():  # processes would not see each other
        with pytest.raises(ValueError, match="use_cpu=True"):
            Trainer(model=tiny_model(), **{**given, "args": arguments(str(tmp_path / "out"), use_cpu=False)})


# ---- after training


@pytest.mark.on_ranks(2, shared=True)
def test_sharded_model_generates_on_all_ranks_only(tmp_path):
    """Rows of tests/compatibility save it, and generate equal lengths."""
    trainer, rank = in_float32(tmp_path, max_steps=2), dist.get_rank()
    trainer.train()
    model = trainer.model
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    trainer.train()
    assert hooks == sum(len(module._forward_hooks) for module in model.modules())
    assert type(model).__qualname__ == "GPT2LMHeadModel"
    model.save_pretrained(tmp_path / "gathered")
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "gathered")
    uneven = torch.arange(5 + rank)[None]  # the shorter prompt takes a step more
    wanted = plain.generate(uneven, max_length=12, do_sample=False)
    assert torch.equal(model.generate(uneven, max_length=12, do_sample=False), wanted)
    copied = copy.deepcopy(model.state_dict())
    assert all(torch.equal(local(copied[name]), local(value)) for name, value in model.state_dict().items())
    with mock.patch.object(process_group, "ALL_CALL_S", 1.0):
        if rank == 0:
            said = r"generate gathers a sharded model.*ranks \[0\] called it and, within 1 s, ranks \[1\] did not"
            with pytest.raises(OSDPError, match=said):
                model.generate(uneven, max_new_tokens=2)
        dist.barrier()
    assert torch.equal(model.generate(uneven, max_length=12, do_sample=False), wanted)


# ---- arguments that mean something else to FSDP2 or the planner


SPLIT = {"accelerator_config": {"split_batches": True}}
STEPS_OF_2 = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}


def by_arguments(folder: object, osdp: dict[str, Any], **changes: Any) -> Trainer:
    config = OSDPConfig(hardware=preset("cpu", devices_per_node=2), operator_splitting=False, **osdp)
    return Trainer(model=tiny_model(), args=arguments(str(folder), **changes), train_dataset=tokens(), osdp=config)


def said_by(name: str) -> list[str]:
    """What a logger says from here on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    return said


@pytest.mark.on_ranks(2, shared=True)
def test_search_for_a_batch_size_is_switched_off_and_batches_that_do_not_divide_are_refused(tmp_path):
    said = said_by("hf_osdp")
    args = {"per_device_train_batch_size": GLOBAL_BATCH // 2, "auto_find_batch_size": True}
    assert by_arguments(tmp_path, {}, **args).plan.global_batch_size == GLOBAL_BATCH
    switched_off = [line for line in said if line.startswith("auto_find_batch_size=True was switched off")]
    assert bool(switched_off) == (dist.get_rank() == 0)
    with pytest.raises(ValueError, match=r"^split_batches=True cannot split batches of 3 over 2 processes"):
        by_arguments(tmp_path, {}, per_device_train_batch_size=3, **SPLIT).train()
    with pytest.raises(ValueError, match=r"`num_steps` is set but `gradient_accumulation_steps` is greater than 1"):
        by_arguments(tmp_path, {}, gradient_accumulation_steps=4, **STEPS_OF_2)


@pytest.mark.parametrize("batch", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.on_ranks(2, shared=True)
def test_warning_at_resume_compares_what_the_user_set(tmp_path, batch):
    """The second plan has another micro-batch than the first."""
    said = said_by("transformers.trainer_utils")
    for steps, micro, given in ((2, 2, 4), (4, 1, batch)):
        options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": given}
        one = by_arguments(tmp_path, {"micro_batch_size": micro}, **options)
        one.train(resume_from_checkpoint=True if steps > 2 else None)
        assert one.state.train_batch_size == given or steps > 2
    lines = [line for line in said if "per_device_train_batch_size" in line]
    assert bool(lines) == (batch != 4)
    assert not lines or "per_device_train_batch_size: 2 (from args) != 4 (from trainer_state.json)" in lines[0]


class Seen(TrainerCallback):
    """Notes the batch sizes that callbacks see."""

    def __init__(self):
        self.batches = []

    def on_step_end(self, args, state, control, **kwargs):
        self.batches.append((args.per_device_train_batch_size, args.gradient_accumulation_steps))


@pytest.mark.on_ranks(2, shared=True)
def test_later_changes_of_arguments_count_or_are_refused(tmp_path):
    config = OSDPConfig(strategy="fsdp", micro_batch_size=1, hardware=preset("cpu", devices_per_node=2))
    options = {"per_device_train_batch_size": 2, "max_grad_norm": 0.0, "max_steps": 2, "lr_scheduler_type": "constant"}

    def made(**more: Any) -> tuple[Any, Trainer]:
        args = arguments(str(tmp_path), **options)
        return args, Trainer(model=tiny_model(), args=args, train_dataset=tokens(), osdp=config, **more)

    seen = Seen()
    args, changed = made(callbacks=[seen])
    args.learning_rate, args.gradient_accumulation_steps = 0.25, 2
    changed.train()
    assert changed.state.log_history[0]["learning_rate"] == 0.25
    assert (changed.plan.global_batch_size, changed.plan.accumulation_steps) == (8, 4)
    assert seen.batches == [(2, 2)] * 2
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 2)
    args.per_device_train_batch_size = 4
    with pytest.raises(
        ValueError, match=r"^The Trainer's arguments now make 16 samples per step, but the plan was made for 8; set"
    ):
        changed.train()
