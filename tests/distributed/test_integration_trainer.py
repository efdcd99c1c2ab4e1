"""The Trainer on two ranks under a mixed plan trains as one process does, goes on exactly, saves and generates."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers.optimization import Adafactor

from hf_osdp.distributed import process_group
from hf_osdp.distributed.launcher import launched_rank
from hf_osdp.errors import OSDPError, PlanError
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.gradients import local
from tests.helpers import models
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import mixed_plan, plan_of
from tests.helpers.sampling import slow_but

from .cases.optimizers import frozen

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


def assert_close(got: dict[str, list[float]], want: dict[str, list[float]], tolerance: float = 1e-12) -> None:
    for name in want:
        assert len(got[name]) == len(want[name]), name
        worst = max(abs(a - b) for a, b in zip(got[name], want[name], strict=True))
        assert worst <= tolerance, (name, worst, got[name], want[name])


def planned_osdp(build: Callable[..., torch.nn.Module], **options: Any) -> OSDPConfig:
    """Return a mixed plan with micro-steps, or with options what a planner gets."""
    if options:
        return OSDPConfig(hardware=preset("cpu", devices_per_node=2), operator_splitting=False, **options)
    plan = mixed_plan(build(), 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=False)
    return OSDPConfig(plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training of the Trainer that logs and gets what the stock one does in one process."""

    build: Callable[..., torch.nn.Module] = tiny_model
    arguments: Mapping[str, Any] = field(default_factory=dict)
    osdp: Mapping[str, Any] = field(default_factory=dict)
    """What is planned for; a mixed plan otherwise."""
    tolerance: float = 1e-12
    resumes: float = 0.0
    """The tolerance of the rest after a checkpoint, whose states may be rounded once more; 0: not tried."""
    evaluates: bool = False
    """Before training."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    check: Callable[[PlannedTrainer], object] | None = None
    needs: str = "torch"
    slow: bool = True


def eagerly() -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager")


def gpt2(width: int, seed: int = 0) -> torch.nn.Module:
    return models.tiny_model("gpt2", layers=2, width=width, seed=seed)


def partly_frozen(seed: int = 0) -> torch.nn.Module:
    return frozen(("transformer.h.1.", "transformer.h.2."), seed=seed)()


def units_are_whole(trainer: PlannedTrainer) -> None:
    trained = {unit.fqn for unit in find_units(trainer.model) if unit.trainable_numel}
    assert all(unit.shard_size == 1 for unit in trainer.plan.units if unit.fqn in trained)
    assert isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), Adafactor)


def states_are_quantized(trainer: PlannedTrainer) -> None:
    values = [value for states in trainer.optimizer.state.values() for value in states.values()]
    assert not any(isinstance(value, DTensor) for value in values)
    assert any(type(v).__name__.startswith("OptimState") or getattr(v, "dtype", None) is torch.uint8 for v in values)


BITS = {"tolerance": 1e-9, "check": states_are_quantized}
SMALL = {"strategy": "osdp", "sequence_length": LENGTH}
EIGHT = {**BITS, "build": partial(gpt2, 128), "arguments": {"optim": "adamw_torch_8bit"}, "needs": "torchao"}
FOUR = {**EIGHT, "arguments": {"optim": "adamw_torch_4bit"}}
TRAININGS = {
    "a mixed plan": Training(slow=False),
    "fsdp, evaluates first": Training(osdp={"strategy": "fsdp"}, evaluates=True),
    "adafactor": Training(
        build=partly_frozen, arguments={"optim": "adafactor"}, osdp=SMALL, tolerance=1e-6, resumes=1e-6,
        check=units_are_whole,
    ),
    "adamw_torch_8bit, compiled": Training(**EIGHT, resumes=1e-3),
    "adamw_torch_4bit, evaluates first": Training(**FOUR, within=eagerly, evaluates=True),
    "adamw_bnb_8bit": Training(
        **BITS, build=partial(gpt2, 256), arguments={"optim": "adamw_bnb_8bit"}, resumes=1e-3, needs="bitsandbytes"
    ),
}  # fmt: skip


def made(kind: type, training: Training, folder: str, samples: int, seed: int, **more: Any) -> Any:
    """Return a Trainer that is to train."""
    saves = {"save_strategy": "steps", "save_steps": 2} if training.resumes and kind is PlannedTrainer else {}
    options = {"per_device_train_batch_size": samples, "per_device_eval_batch_size": samples, **saves}
    args = arguments(folder, **{**options, **training.arguments})
    model = training.build(seed=seed)
    return kind(model=model, args=args, train_dataset=tokens(), eval_dataset=tokens(16), **more)


def run_stock(training: Training, folder: str) -> tuple[dict[str, list[float]], dict[str, torch.Tensor], list[float]]:
    """Train in one process."""
    with training.within():
        trainer = made(StockTrainer, training, folder, GLOBAL_BATCH, 0)
        evaluated = [trainer.evaluate()["eval_loss"]] if training.evaluates else []
        trainer.train()
        evaluated += [trainer.evaluate()["eval_loss"]] if training.evaluates else []
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return history(trainer), weights, evaluated


def run_planned(name: str, folder: str) -> tuple[dict, dict, list[float], list[float]]:
    """Train on this rank, whose weights are another's until they are broadcast, and once more from step 2."""
    training = TRAININGS[name]
    with training.within():
        osdp = planned_osdp(training.build, **training.osdp)
        seed = launched_rank() if not training.osdp else 0
        trainer = made(PlannedTrainer, training, folder, GLOBAL_BATCH // 2, seed, osdp=osdp)
        evaluated = [trainer.evaluate()["eval_loss"]] if training.evaluates else []
        trainer.train()
        evaluated += [trainer.evaluate()["eval_loss"]] if training.evaluates else []
        if training.check:
            training.check(trainer)
        found, weights = history(trainer), dict(trainer.accelerator.get_state_dict(trainer.model))
        rest = []
        if training.resumes:
            again_osdp = replace(osdp, memory_limit="1GiB") if training.osdp else osdp
            again = made(PlannedTrainer, training, folder, GLOBAL_BATCH // 2, 1, osdp=again_osdp)
            again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
            rest = history(again)["loss"]
    return found, weights, evaluated, rest


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * one.slow) for name, one in TRAININGS.items()]
)
def test_planned_trainer_equals_the_stock_one(tmp_path, name):
    training = TRAININGS[name]
    pytest.importorskip(training.needs)
    want, weights, losses = run_stock(training, str(tmp_path / "stock"))
    found, got, evaluated, rest = run_ranks(
        run_planned, 2, name, str(tmp_path / "planned"), timeout_s=280, shared=True
    )[0]
    assert_close(found, want, training.tolerance)
    assert evaluated == pytest.approx(losses, abs=1e-6)
    assert not rest or rest == pytest.approx(want["loss"][2:], abs=training.resumes)
    assert len(rest) == (3 if training.resumes else 0)
    if training.tolerance <= 1e-9 and "optim" not in training.arguments:
        assert worst({name: got[name] for name in weights}, weights) <= training.tolerance
    assert json.loads((tmp_path / "planned" / "osdp_report.json").read_text())


class Stacks(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        torch.stack([bias.detach() for bias in model.parameters() if bias.shape == (20,)])


@pytest.mark.slow
@pytest.mark.on_ranks(2, init=False)
def test_callback_that_mixes_shards_is_refused(tmp_path):
    args = arguments(str(tmp_path), per_device_train_batch_size=4)
    options = {"args": args, "train_dataset": tokens(), "osdp": planned_osdp(tiny_model)}
    trainer = PlannedTrainer(model=tiny_model(), callbacks=[Stacks()], **options)
    said = "^Code between steps mixes whole tensors with shards of weights; do this within `with hf_osdp.full_paramet"
    with pytest.raises(OSDPError, match=said):
        trainer.train()


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


@pytest.mark.on_ranks(2, init=False)
def test_wrong_world_optimizer_and_forgotten_cpu_are_refused(tmp_path):
    plan = mixed_plan(tiny_model(), 4, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=1, reduce=True)
    data = {"train_dataset": tokens()}
    if not torch.cuda.is_available():  # processes would not see each other
        with pytest.raises(ValueError, match="use_cpu=True"):
            Trainer(model=tiny_model(), args=arguments(str(tmp_path / "out"), use_cpu=False), osdp=True, **data)
    whole = replace(plan_of(find_units(tiny_model()), 2, "zero3"), sequence_length=LENGTH, micro_batch_size=4)
    for said, given, optim in (
        ("^The plan is for 4 processes, but 2 are running", plan, "adamw_torch"),
        ("^adafactor needs whole parameters, and the plan has", whole, "adafactor"),
    ):
        args = arguments(str(tmp_path / "out"), per_device_train_batch_size=4, optim=optim)
        with pytest.raises(PlanError, match=said):
            Trainer(model=tiny_model(), args=args, osdp=OSDPConfig(plan=given), **data).train()


@pytest.mark.on_ranks(2, shared=True)
def test_second_trainer_of_a_model_under_a_plan_is_refused(tmp_path):
    data = {"train_dataset": tokens()}
    first = Trainer(model=tiny_model(), args=arguments(str(tmp_path), max_steps=1), osdp={"hardware": "cpu"}, **data)
    first.train()
    second = Trainer(model=first.model, args=arguments(str(tmp_path), max_steps=1), osdp={"hardware": "cpu"}, **data)
    with pytest.raises(OSDPError, match=r"GPT2LMHeadModel is under a plan, .* load the model anew"):
        second.train()


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


# ---- after training


PROMPT = torch.arange(5)[None]


def assert_saved(folder: str, weights: dict[str, torch.Tensor]) -> GPT2LMHeadModel:
    model = GPT2LMHeadModel.from_pretrained(folder)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    return model


@pytest.mark.on_ranks(2, shared=True)
def test_sharded_model_saves_and_generates_on_all_ranks_only(tmp_path):
    model = tiny_model()
    plan = mixed_plan(model, 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=1, reduce=True)
    args = arguments(str(tmp_path), max_steps=2, per_device_train_batch_size=2)
    trainer = Trainer(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    trainer.train()
    model, rank = trainer.model, dist.get_rank()
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    trainer.train()
    assert (
        hooks == sum(len(module._forward_hooks) for module in model.modules())
        and type(model).__qualname__ == "GPT2LMHeadModel"
    )

    weights = trainer.accelerator.get_state_dict(model)
    model.save_pretrained(tmp_path / "gathered")
    model.save_pretrained(
        tmp_path / "given", state_dict=trainer.accelerator.get_state_dict(model), is_main_process=rank == 0
    )
    dist.barrier()
    for name in ("gathered", "given") if rank == 0 else ():
        assert assert_saved(tmp_path / name, weights).config.architectures == ["GPT2LMHeadModel"]
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "gathered")
    generated = plain.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=6, do_sample=False), generated)
    uneven = torch.arange(5 + rank)[None]  # the shorter prompt takes a step more
    assert torch.equal(
        model.generate(uneven, max_length=12, do_sample=False), plain.generate(uneven, max_length=12, do_sample=False)
    )

    for saved in (model, {"model": model.state_dict()}):
        with pytest.raises(OSDPError, match=r"one rank's shards?.*save_pretrained\(folder\) on every rank"):
            torch.save(saved, tmp_path / f"saved{rank}.pt")
    copied = copy.deepcopy(model.state_dict())
    assert all(torch.equal(local(copied[name]), local(value)) for name, value in model.state_dict().items())
    process_group.ALL_CALL_S = 1.0
    if rank == 0:
        said = r"GPT2LMHeadModel.generate gathers a sharded model.*ranks \[0\] called it and, within 1 s, ranks \[1\] did not"  # noqa: E501
        with pytest.raises(OSDPError, match=said):
            model.generate(PROMPT, max_new_tokens=2)
        with pytest.raises(OSDPError, match=r"GPT2LMHeadModel.save_pretrained gathers"):
            model.save_pretrained(tmp_path / "alone")
    dist.barrier()
    process_group.ALL_CALL_S = 300.0
    assert torch.equal(model.generate(PROMPT, max_new_tokens=6, do_sample=False), generated)


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
def test_batch_is_what_the_arguments_mean_for_all_ranks(tmp_path):
    said = said_by("hf_osdp")
    for batch, osdp, changes in (
        (GLOBAL_BATCH // 4, {}, STEPS_OF_2),
        (GLOBAL_BATCH, {"micro_batch_size": 2}, SPLIT),
        (GLOBAL_BATCH // 2, {}, {"auto_find_batch_size": True}),
    ):
        plan = by_arguments(tmp_path, osdp, per_device_train_batch_size=batch, **changes).plan
        assert plan.global_batch_size == GLOBAL_BATCH, changes
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
