"""Models beside the trained one are sharded where the plan needs their memory, and results stay those of stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from hf_osdp import OptimalShardedDataParallel, OSDPAccelerator, OSDPConfig, with_osdp
from hf_osdp.preparation.beside import ModelsBeside
from hf_osdp.sharding.replicas import is_under_plan
from tests.distributed.test_trainers_of_others import _texts, _tokenizer
from tests.helpers.distributed import run_ranks

trl = pytest.importorskip("trl", reason="needs the extra `trainers`")


def llama(width: int = 32, seed: int = 0, layers: int = 12, vocabulary: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=2,
        vocab_size=vocabulary,
        pad_token_id=1,
    ))  # fmt: skip


SETTINGS = {
    "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "report_to": [], "save_strategy": "no",
    "max_length": 32, "disable_tqdm": True, "bf16": False,
}  # fmt: skip


def chat_tokenizer() -> Any:
    tokenizer = _tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return tokenizer


def preferences() -> Dataset:
    return Dataset.from_dict({"prompt": _texts(12, 3), "chosen": _texts(12, 5), "rejected": _texts(12, 4)})


def conversations() -> Dataset:
    texts = [{"role": "user", "content": text} for text in _texts(12, 5)]
    answers = [{"role": "assistant", "content": text} for text in _texts(12, 4)]
    return Dataset.from_dict({"messages": [list(pair) for pair in zip(texts, answers, strict=True)]})


def dpo(folder: str, osdp: Any, width: int = 64, **more: Any) -> Any:
    args = trl.DPOConfig(folder, use_cpu=True, **SETTINGS, **more)
    kind = trl.DPOTrainer if osdp is None else with_osdp(trl.DPOTrainer)
    extra = {} if osdp is None else {"osdp": osdp}
    return kind(
        model=llama(), ref_model=llama(width, seed=1), args=args, train_dataset=preferences(),
        processing_class=_tokenizer(), **extra,
    )  # fmt: skip


def gkd(folder: str, osdp: Any) -> Any:
    experimental = pytest.importorskip("trl.experimental.gkd")
    args = experimental.GKDConfig(folder, use_cpu=True, lmbda=0.0, **SETTINGS)
    kind = experimental.GKDTrainer if osdp is None else with_osdp(experimental.GKDTrainer)
    extra = {} if osdp is None else {"osdp": osdp}
    return kind(
        model=llama(layers=2), teacher_model=llama(64, seed=1), args=args, processing_class=chat_tokenizer(),
        train_dataset=conversations(), **extra,
    )  # fmt: skip


def grpo(folder: str, osdp: Any) -> Any:
    settings = {name: value for name, value in SETTINGS.items() if name != "max_length"}
    args = trl.GRPOConfig(folder, use_cpu=True, num_generations=2, max_completion_length=6, **settings)
    config = llama(64).config
    config.num_labels = 1
    torch.manual_seed(2)
    reward = LlamaForSequenceClassification(config)
    kind = trl.GRPOTrainer if osdp is None else with_osdp(trl.GRPOTrainer)
    extra = {} if osdp is None else {"osdp": osdp}
    return kind(
        model=llama(layers=2), reward_funcs=[reward], args=args, processing_class=_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": _texts(12, 3)}), reward_processing_classes=[_tokenizer()], **extra,
    )  # fmt: skip


MAKERS = {
    "DPO": (dpo, "ref_model"),
    "DPO, sync_ref_model": (
        lambda folder, osdp: dpo(folder, osdp, width=32, sync_ref_model=True, ref_model_sync_steps=1), "ref_model",
    ),
    "GKD": (gkd, "teacher_model"),
    "GRPO with a reward model": (grpo, "reward_funcs"),
}  # fmt: skip


def history(name: str, folder: str, osdp: Any) -> tuple[list[tuple[float, float]], bool, int, int]:
    make, attribute = MAKERS[name]
    trainer = make(folder, osdp)
    trainer.train()
    other = getattr(trainer, attribute)
    other = other[0] if isinstance(other, list) else other
    rows = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    peak = 0 if osdp is None else trainer.plan.peak_bytes
    return rows, any(map(is_under_plan, other.modules())), peak, sum(p.nbytes for p in other.parameters())


@pytest.mark.parametrize("name", MAKERS)
def test_trainers_whose_model_beside_is_sharded_equal_stock(tmp_path, name):
    stock, whole = (
        run_ranks(history, 2, name, str(tmp_path), osdp, timeout_s=200, init=False)[0]
        for osdp in (None, {"strategy": "fsdp", "hardware": "cpu"})
    )
    less = whole[3] // 4
    limited = {"strategy": "fsdp", "hardware": "cpu", "memory_limit": whole[2] - less}
    sharded = run_ranks(history, 2, name, str(tmp_path), limited, timeout_s=200, init=False)[0]
    assert (whole[1], sharded[1]) == (False, True)
    assert sharded[2] <= whole[2] - less
    for got in (whole[0], sharded[0]):
        assert got == [pytest.approx(row, rel=2e-4) for row in stock[0]]


def distilled(kind: str, limit: int | None) -> tuple[list[float], int, bool]:
    """Losses of a student and a teacher that is given as `also`, in an Accelerate loop or a plain one."""
    student, teacher = llama(32, 0, 4).double(), llama(64, 1, 24).double().eval()
    ids = torch.randint(2, 32, (8, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    sizes = {"sequence_length": 16, "global_batch_size": 16, "micro_batch_size": 8, "recompute": False}
    config = OSDPConfig(strategy="fsdp", hardware="cpu", also=(teacher,), memory_limit=limit, report=False, **sizes)
    optimizer: torch.optim.Optimizer
    if kind == "plain":
        model = OptimalShardedDataParallel(student, config)
        optimizer, plan = torch.optim.AdamW(model.parameters(), lr=1e-3), model.plan
    else:
        accelerator = OSDPAccelerator(cpu=True, osdp=config)
        model, optimizer = accelerator.prepare(student, torch.optim.AdamW(student.parameters(), lr=1e-3))
        plan = accelerator.planned_run.plan
    losses = []
    for _ in range(3):
        with torch.no_grad():
            wanted = teacher(input_ids=ids, use_cache=False).logits
        loss = (model(input_ids=ids, use_cache=False).logits - wanted).pow(2).mean()
        accelerator.backward(loss) if kind != "plain" else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, plan.peak_bytes, any(map(is_under_plan, teacher.modules()))


@pytest.mark.parametrize("kind", ["plain", "accelerate"])
def test_a_teacher_of_a_loop_is_sharded_and_gives_the_same_losses(kind):
    whole = run_ranks(distilled, 2, kind, None)[0]
    sharded = run_ranks(distilled, 2, kind, whole[1] - 2**20)[0]
    assert (whole[2], sharded[2]) == (False, True)
    assert sharded[0] == pytest.approx(whole[0], rel=1e-12)
    assert sharded[1] <= whole[1] - 2**20


def planned(folder: str, limit: int | None) -> tuple[bool, int]:
    """Plan DPO with an evaluation larger than its step; return whether the reference is sharded, and what the
    evaluation needs."""
    args = trl.DPOConfig(folder, use_cpu=True, **{**SETTINGS, "per_device_eval_batch_size": 6})
    trainer = with_osdp(trl.DPOTrainer)(
        model=llama(), ref_model=llama(64, seed=1), args=args, train_dataset=preferences(), eval_dataset=preferences(),
        processing_class=_tokenizer(), osdp={"strategy": "fsdp", "hardware": "cpu", "memory_limit": limit},
    )  # fmt: skip
    assert trainer.plan is not None
    (evaluation,) = trainer._run.inputs.others
    return trainer._run.shards_beside, evaluation.peak_bytes


def test_a_reference_is_sharded_also_where_the_evaluation_alone_needs_it(tmp_path):
    whole = run_ranks(planned, 2, str(tmp_path), None, timeout_s=200, init=False)[0]
    sharded = run_ranks(planned, 2, str(tmp_path), whole[1] - 2**18, timeout_s=200, init=False)[0]
    assert (whole[0], sharded[0]) == (False, True)
    assert sharded[1] <= whole[1] - 2**18


@pytest.mark.on_ranks(2)
def test_a_model_beside_of_a_dtype_that_no_plan_knows_stays_whole():
    model = torch.nn.Linear(4, 4).to(torch.float8_e4m3fn)
    beside = ModelsBeside(torch.device("cpu"), [model])
    assert beside.facts(torch.nn.Linear(2, 2)) == {"other_models": {"models beside": 20}, "models_beside": None}
    beside.place(sharded=True)
    assert not any(map(is_under_plan, model.modules()))
