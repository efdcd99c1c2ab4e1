"""The Trainer on two ranks under a mixed plan trains as one process does, and its checkpoints go on exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_osdp.distributed.launcher import launched_rank
from hf_osdp.errors import PlanError
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
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
    losses = losses.view(-1, trainer.args.gradient_accumulation_steps).sum(1)
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"loss": losses.tolist(), "grad_norm": norms}


def assert_close(got: dict[str, list[float]], want: dict[str, list[float]], tolerance: float = 1e-12) -> None:
    for name in want:
        assert len(got[name]) == len(want[name]), name
        worst = max(abs(a - b) for a, b in zip(got[name], want[name], strict=True))
        assert worst <= tolerance, (name, worst, got[name], want[name])


def trained_and_resumed_as_stock(
    build: Callable[..., torch.nn.Module], args: TrainingArguments, stock: dict[str, list[float]]
) -> PlannedTrainer:
    """Train by a mixed plan, and again from the checkpoint of step 2, whose states are rounded once more."""
    plan = mixed_plan(build(), 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=True)
    trainer = PlannedTrainer(model=build(seed=0), args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    trainer.train()
    assert_close(history(trainer), stock, 1e-9)
    again = PlannedTrainer(model=build(seed=1), args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    again.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-2")
    assert_close(history(again), {"loss": stock["loss"][2:]}, 1e-3)
    return trainer


def train_one_process(folder: str):
    trainer = StockTrainer(
        model=tiny_model(), args=arguments(folder, per_device_train_batch_size=GLOBAL_BATCH), train_dataset=tokens()
    )
    trainer.train()
    return history(trainer), {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """What the stock Trainer logs and gets in one process."""
    return train_one_process(str(tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize("reduce", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.on_ranks(2, init=False)
def test_planned_trainer_equals_one_process(tmp_path, alone, reduce):
    model = tiny_model(seed=launched_rank())
    plan = mixed_plan(
        model, 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=GLOBAL_BATCH // 4, reduce=reduce
    )
    args = arguments(str(tmp_path), per_device_train_batch_size=GLOBAL_BATCH // 2)
    trainer = PlannedTrainer(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    assert args.per_device_train_batch_size == GLOBAL_BATCH // 2, "the caller's arguments were changed"
    assert trainer.args.per_device_train_batch_size == 2
    trainer.train()
    assert_close(history(trainer), alone[0])
    state = trainer.accelerator.get_state_dict(trainer.model)
    if dist.get_rank() == 0:
        assert worst(state, alone[1]) <= 1e-12 and json.loads((tmp_path / "osdp_report.json").read_text())


def in_float32(
    folder: Path, kind: type[transformers.Trainer] = PlannedTrainer, seed: int = 0, **options: object
) -> transformers.Trainer:
    """A Trainer under a mixed plan."""
    model = tiny_model(dtype=torch.float32, seed=seed)
    plan = mixed_plan(model, 2, sequence_length=LENGTH, micro_batch_size=4, accumulation_steps=1, reduce=True)
    args = arguments(str(folder), per_device_train_batch_size=4, **options)
    return kind(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))


@pytest.mark.parametrize(
    ("layout", "precision"),
    slow_but(
        [("FULL_STATE_DICT", ""), ("SHARDED_STATE_DICT", "bf16"), ("FULL_STATE_DICT", "fp16")],
        daily=[("SHARDED_STATE_DICT", "bf16")],
    ),
)
@pytest.mark.on_ranks(2, shared=True)
def test_trainer_resumes_exactly_and_saves_float32_under_hugging_face_names(tmp_path, layout, precision):
    options = {
        "save_strategy": "steps",
        "save_steps": 3,
        "fsdp_config": {"state_dict_type": layout},
        **({precision: True} if precision else {}),
    }
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
        assert {value.dtype for value in saved.values()} == {torch.float32} and all(
            name.startswith("transformer.") for name in saved
        )
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and worst(model.state_dict(), state) == 0


class Overflowing(PlannedTrainer):
    """One rank's third loss is infinite; notes which steps were skipped."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("inf") if self.state.global_step == 2 and dist.get_rank() == 1 else loss

    def training_step(self, *args, **kwargs):
        self.__dict__.setdefault("skipped", []).append(
            self.accelerator.optimizer_step_was_skipped
        )  # of the step before
        return super().training_step(*args, **kwargs)


@pytest.mark.on_ranks(2, shared=True)
def test_fp16_overflow_on_one_rank_skips_the_step_on_both(tmp_path):
    trainer = in_float32(tmp_path, Overflowing, fp16=True)
    trainer.train()
    found = [None, None]
    dist.all_gather_object(found, (trainer.skipped, trainer.accelerator.scaler.get_scale()))
    assert trainer.skipped[3] and found[0] == found[1]


@pytest.mark.on_ranks(2, shared=True)
def test_trainer_plans_from_its_arguments_and_leaves_them_alone(tmp_path):
    args = arguments(str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2)
    options = {"hardware": preset("cpu", devices_per_node=2), "memory_limit": "1GiB"}
    trainer = Trainer(model=tiny_model(), args=args, train_dataset=tokens(), osdp=options)
    trainer.train()
    assert trainer.plan.global_batch_size == 8 and trainer.plan.sequence_length == LENGTH
    assert trainer.args.per_device_train_batch_size == trainer.plan.micro_batch_size
    found = [None, None]
    dist.all_gather_object(found, (trainer.plan.fingerprint, trainer.evaluate(tokens(8))["eval_loss"]))
    assert found[0] == found[1] and (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 2)


@pytest.mark.on_ranks(2, init=False)
def test_wrong_world_and_forgotten_cpu_are_refused_before_writing(tmp_path):
    plan = mixed_plan(tiny_model(), 4, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=1, reduce=True)
    if not torch.cuda.is_available():  # processes would not see each other
        with pytest.raises(ValueError, match="use_cpu=True"):
            Trainer(
                model=tiny_model(),
                args=arguments(str(tmp_path / "out"), use_cpu=False),
                train_dataset=tokens(),
                osdp=True,
            )
    args = arguments(str(tmp_path / "out"), per_device_train_batch_size=4)
    with pytest.raises(PlanError, match="The plan is for 4 processes, but 2 are running"):
        Trainer(model=tiny_model(), args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def stock_loss(tmp_path) -> float:
    """Of an evaluation by the stock Trainer in one process, before training."""
    args = arguments(str(tmp_path), per_device_eval_batch_size=8)
    return StockTrainer(model=tiny_model(), args=args, eval_dataset=tokens(16)).evaluate()["eval_loss"]


@pytest.mark.slow
@pytest.mark.on_ranks(2, init=False)
def test_evaluation_before_training_changes_nothing(tmp_path, alone, stock_loss):
    args = arguments(str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4)
    osdp = OSDPConfig(hardware=preset("cpu", devices_per_node=2), strategy="fsdp")
    trainer = PlannedTrainer(model=tiny_model(), args=args, train_dataset=tokens(), eval_dataset=tokens(16), osdp=osdp)
    assert abs(stock_loss - trainer.evaluate()["eval_loss"]) < 1e-6
    trainer.train()
    assert_close(history(trainer), alone[0])
    assert trainer.evaluate()["eval_loss"] < stock_loss


def train_without_osdp(
    kind: type[transformers.Trainer], folder: str, **options: object
) -> tuple[str, dict[str, list[float]]]:
    trainer = kind(
        model=tiny_model(), args=arguments(folder, per_device_train_batch_size=4), train_dataset=tokens(), **options
    )
    trainer.train()
    assert not (Path(folder) / "osdp_report.json").exists() and getattr(trainer, "plan", None) is None
    return type(trainer.accelerator).__name__, history(trainer)


def train_switched_off(folder: str) -> tuple[str, dict[str, list[float]]]:
    return train_without_osdp(PlannedTrainer, folder, osdp=False)


@pytest.mark.slow
def test_trainer_switched_off_is_the_stock_one(tmp_path):
    want = run_ranks(train_without_osdp, 2, StockTrainer, str(tmp_path / "stock"), init=False)
    got = run_ranks(train_switched_off, 2, str(tmp_path / "off"), init=False)
    assert got == want and got[0][0] == "Accelerator"


class CallsModelToSave(PlannedTrainer):
    """Like sentence-transformers' trainer, whose model card has the output of an example, on the rank that writes."""

    def _save(self, output_dir=None, state_dict=None):
        with torch.no_grad():
            self.output = self.model(torch.arange(LENGTH)[None]).logits
        super()._save(output_dir, state_dict=state_dict)


@pytest.mark.on_ranks(2, shared=True)
def test_rank_that_saves_may_call_the_model_alone(tmp_path):
    first = in_float32(tmp_path / "first", kind=CallsModelToSave, save_strategy="steps", save_steps=2, max_steps=3)
    plain = in_float32(tmp_path / "plain", max_steps=3)
    for trainer in (first, plain):
        trainer.train()
    assert history(first) == history(plain)
    first.save_model()
    assert hasattr(first, "output") == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
        assert torch.equal(saved(torch.arange(LENGTH)[None]).logits, first.output)
