"""The Trainer on two ranks under a mixed plan trains as one process does, and its checkpoints go on exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from hf_osdp.integrations.launch import launched_rank, launched_world_size
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import OSDPConfig
from tests.helpers.distributed import RankFailure, run_ranks
from tests.helpers.mixed import mixed_plan
from tests.helpers.sampling import slow_but

STEPS, LENGTH, GLOBAL_BATCH = 5, 12, 8


def tiny_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> GPT2LMHeadModel:
    set_seed(seed)
    config = GPT2Config(
        n_layer=4, n_head=2, n_embd=16, vocab_size=61, n_positions=16, initializer_range=0.2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype)


def tokens(count: int = 64) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 61, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: str, **changes: object) -> TrainingArguments:
    options = dict(
        output_dir=folder, max_steps=STEPS, logging_steps=1, learning_rate=1e-2, max_grad_norm=1.0, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", seed=5, optim="adamw_torch", lr_scheduler_type="linear", weight_decay=0.1, adam_epsilon=1e-5,
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


def train_one_process(folder: str):
    trainer = StockTrainer(model=tiny_model(), args=arguments(folder, per_device_train_batch_size=GLOBAL_BATCH), train_dataset=tokens())
    trainer.train()
    return history(trainer), {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def train_planned(folder: str, reduce: bool):
    world = launched_world_size()
    model = tiny_model(seed=launched_rank())
    plan = mixed_plan(
        model, world, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=GLOBAL_BATCH // 2 // world, reduce=reduce
    )
    args = arguments(folder, per_device_train_batch_size=GLOBAL_BATCH // world)
    trainer = PlannedTrainer(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    assert args.per_device_train_batch_size == GLOBAL_BATCH // world, "the caller's arguments were changed"
    assert trainer.args.per_device_train_batch_size == 2
    trainer.train()
    return history(trainer), trainer.accelerator.get_state_dict(trainer.model)


@pytest.mark.parametrize(("world", "reduce"), [pytest.param(2, True, marks=pytest.mark.slow), (2, False)])
def test_equals_one_process(tmp_path, world, reduce):
    want, weights = train_one_process(str(tmp_path / "one"))
    results = run_ranks(train_planned, world, str(tmp_path / "planned"), reduce, init=False)
    for got, _ in results:
        assert_close(got, want)
    state = results[0][1]
    assert set(state) == set(weights)
    assert max((state[name] - value).abs().max().item() for name, value in weights.items()) <= 1e-12
    report = json.loads((tmp_path / "planned" / "osdp_report.json").read_text())
    assert report


def train_and_resume(folder: str, layout: str, precision: str):
    osdp = OSDPConfig(
        plan=mixed_plan(
            tiny_model(torch.float32), 2, sequence_length=LENGTH, micro_batch_size=4, accumulation_steps=1, reduce=True
        )
    )  # fmt: skip
    options = dict(
        per_device_train_batch_size=4, save_strategy="steps", save_steps=3, fsdp_config={"state_dict_type": layout},
        fp16=precision == "fp16", bf16=precision == "bf16",
    )  # fmt: skip
    first = PlannedTrainer(model=tiny_model(torch.float32), args=arguments(folder, **options), train_dataset=tokens(), osdp=osdp)
    first.train()
    first.save_model(f"{folder}/final")
    whole = history(first)
    again = PlannedTrainer(model=tiny_model(torch.float32, seed=9), args=arguments(folder, **options), train_dataset=tokens(), osdp=osdp)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    rest = history(again)
    return whole, rest, again.accelerator.get_state_dict(again.model), str(again.accelerator.plugin.state_dict_type)


@pytest.mark.parametrize(
    ("layout", "precision"),
    slow_but(
        [("FULL_STATE_DICT", "no"), ("SHARDED_STATE_DICT", "bf16"), ("FULL_STATE_DICT", "fp16")], daily=[("SHARDED_STATE_DICT", "bf16")]
    ),
)
def test_resumes_exactly_and_saves_float32_under_hugging_face_names(tmp_path, layout, precision):
    folder = tmp_path / "run"
    whole, rest, state, used = run_ranks(train_and_resume, 2, str(folder), layout, precision, init=False)[0]
    assert layout in used
    assert rest["loss"] == whole["loss"][3:]
    assert rest["grad_norm"][-2:] == whole["grad_norm"][3:]
    saved = load_file(folder / "final" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert all(name.startswith("transformer.") for name in saved)
    model, report = AutoModelForCausalLM.from_pretrained(folder / "final", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def overflow_on_one_rank(folder: str):
    plan = mixed_plan(tiny_model(torch.float32), 2, sequence_length=LENGTH, micro_batch_size=4, accumulation_steps=1, reduce=True)

    class Overflowing(PlannedTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            hit = self.state.global_step == 2 and dist.get_rank() == 1
            return loss * float("inf") if hit else loss

    trainer = Overflowing(
        model=tiny_model(torch.float32),
        args=arguments(folder, per_device_train_batch_size=4, fp16=True),
        train_dataset=tokens(),
        osdp=OSDPConfig(plan=plan),
    )
    skipped = []
    trainer.add_callback(_SkipRecorder(trainer, skipped))
    trainer.train()
    return skipped, trainer.accelerator.scaler.get_scale()


class _SkipRecorder(transformers.TrainerCallback):
    def __init__(self, trainer, skipped):
        self.trainer, self.skipped = trainer, skipped

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.skipped.append(self.trainer.accelerator.optimizer_step_was_skipped)


def test_fp16_overflow_on_one_rank_skips_the_step_on_both(tmp_path):
    (skipped, scale), other = run_ranks(overflow_on_one_rank, 2, str(tmp_path), init=False)
    assert skipped[2] and (skipped, scale) == other


def planner_chooses(folder: str):
    hardware = preset("cpu", devices_per_node=2)
    args = arguments(folder, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    trainer = Trainer(model=tiny_model(), args=args, train_dataset=tokens(), osdp={"hardware": hardware, "memory_limit": "1GiB"})
    trainer.train()
    assert trainer.plan.global_batch_size == 8
    assert trainer.args.per_device_train_batch_size == trainer.plan.micro_batch_size
    assert trainer.plan.sequence_length == LENGTH
    evaluation = trainer.evaluate(tokens(8))
    return trainer.plan.fingerprint, evaluation["eval_loss"], (args.per_device_train_batch_size, args.gradient_accumulation_steps)


def test_plans_from_the_arguments_and_leaves_them_alone(tmp_path):
    first, second = run_ranks(planner_chooses, 2, str(tmp_path), init=False)
    assert first == second
    assert first[2] == (2, 2)


def evaluate_then_train(folder: str):
    hardware: Hardware = preset("cpu", devices_per_node=2)
    args = arguments(folder, per_device_train_batch_size=4, per_device_eval_batch_size=4)
    trainer = PlannedTrainer(
        model=tiny_model(), args=args, train_dataset=tokens(), eval_dataset=tokens(16), osdp=OSDPConfig(hardware=hardware, strategy="fsdp")
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"], history(trainer)


@pytest.mark.slow
def test_evaluation_before_training_changes_nothing(tmp_path):
    want, _ = train_one_process(str(tmp_path / "one"))
    before, after, got = run_ranks(evaluate_then_train, 2, str(tmp_path / "two"), init=False)[0]
    assert_close(got, want)
    stock = StockTrainer(model=tiny_model(), args=arguments(str(tmp_path), per_device_eval_batch_size=8), eval_dataset=tokens(16))
    assert abs(stock.evaluate()["eval_loss"] - before) < 1e-6
    assert after < before


def wrong_world(folder: str):
    plan = mixed_plan(tiny_model(), 4, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=1, reduce=True)
    Trainer(model=tiny_model(), args=arguments(folder, per_device_train_batch_size=4), train_dataset=tokens(), osdp=OSDPConfig(plan=plan))


def test_a_plan_for_another_world_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(RankFailure, match="The plan is for 4 processes, but 2 are running"):
        run_ranks(wrong_world, 2, str(tmp_path / "out"), init=False)
    assert not (tmp_path / "out").exists()


def forgot_the_cpu(folder: str):
    Trainer(model=tiny_model(), args=arguments(folder, use_cpu=False), train_dataset=tokens(), osdp=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_processes_that_would_not_see_each_other_are_refused(tmp_path):
    with pytest.raises(RankFailure, match="use_cpu=True"):
        run_ranks(forgot_the_cpu, 2, str(tmp_path / "out"), init=False)


def stock(folder: str):
    trainer = StockTrainer(model=tiny_model(), args=arguments(folder, per_device_train_batch_size=4), train_dataset=tokens())
    trainer.train()
    return type(trainer.accelerator).__name__, history(trainer)


def switched_off(folder: str):
    args = arguments(folder, per_device_train_batch_size=4)
    trainer = PlannedTrainer(model=tiny_model(), args=args, train_dataset=tokens(), osdp=False)
    trainer.train()
    assert trainer.plan is None
    assert not (Path(folder) / "osdp_report.json").exists()
    return type(trainer.accelerator).__name__, history(trainer)


@pytest.mark.slow
def test_switched_off_is_the_stock_trainer(tmp_path):
    want = run_ranks(stock, 2, str(tmp_path / "stock"), init=False)
    got = run_ranks(switched_off, 2, str(tmp_path / "off"), init=False)
    assert got == want
    assert got[0][0] == "Accelerator"
