"""Models beside the trained one are sharded where the plan needs their memory, and results stay those of stock; TRL's
trainers take what the plan estimates.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from hf_osdp import OptimalShardedDataParallel, OSDPAccelerator, OSDPConfig, with_osdp
from hf_osdp.preparation.beside import ModelsBeside
from hf_osdp.sharding.replicas import is_under_plan
from tests.compatibility.data import (
    judged_dataset,
    preference_dataset,
    prompts,
    sentences,
    text_dataset,
    tokenizer,
)

trl = pytest.importorskip("trl", reason="needs the extra `trainers`")
gkd = pytest.importorskip("trl.experimental.gkd")

SETTINGS = {
    "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "report_to": [], "save_strategy": "no",
    "disable_tqdm": True, "bf16": False,
}  # fmt: skip
on_two_ranks = pytest.mark.on_ranks(2, shared=True)


def llama(
    width: int = 32, seed: int = 0, layers: int = 12, vocabulary: int = 32, kind: type = LlamaForCausalLM
) -> Any:
    torch.manual_seed(seed)
    return kind(LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=2,
        vocab_size=vocabulary, pad_token_id=0, num_labels=1,
    ))  # fmt: skip


def chat_tokenizer() -> Any:
    made = tokenizer()
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def conversations() -> Dataset:
    pairs = zip(sentences(12), sentences(12, seed=8), strict=True)
    roles = ("user", "assistant")
    return Dataset.from_dict({"messages": [
        [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)] for pair in pairs
    ]})  # fmt: skip


def of_trl(name: str, folder: object, osdp: Any, options: dict[str, Any], **given: Any) -> Any:
    """Return a trainer of TRL, stock where `osdp` is None."""
    AcceleratorState._reset_state(True)
    place = gkd if name == "GKD" else trl
    kind, arguments = (getattr(place, f"{name}{part}") for part in ("Trainer", "Config"))
    args = arguments(str(folder), use_cpu=True, **{**SETTINGS, **options})
    if osdp is not None:
        kind, given = with_osdp(kind), {**given, "osdp": {"strategy": "fsdp", "hardware": "cpu", **osdp}}
    return kind(args=args, **{"processing_class": tokenizer(), **given})


def dpo(folder: object, osdp: Any, width: int = 64, **options: Any) -> Any:
    given = {"model": llama(), "ref_model": llama(width, seed=1), "train_dataset": preference_dataset()}
    return of_trl("DPO", folder, osdp, {"max_length": 32, **options}, **given)


MAKERS: dict[str, Any] = {
    "DPO": (dpo, "ref_model"),
    "DPO, sync_ref_model": (
        lambda folder, osdp: dpo(folder, osdp, width=32, sync_ref_model=True, ref_model_sync_steps=1), "ref_model",
    ),
    "GKD": (
        lambda folder, osdp: of_trl(
            "GKD", folder, osdp, {"max_length": 32, "lmbda": 0.0}, model=llama(layers=2),
            teacher_model=llama(64, seed=1), processing_class=chat_tokenizer(), train_dataset=conversations(),
        ), "teacher_model",
    ),
    "GRPO with a reward model": (
        lambda folder, osdp: of_trl(
            "GRPO", folder, osdp, {"num_generations": 2, "max_completion_length": 6}, model=llama(layers=2),
            reward_funcs=[llama(64, seed=2, kind=LlamaForSequenceClassification)], train_dataset=prompts(),
            reward_processing_classes=[tokenizer()],
        ), "reward_funcs",
    ),
}  # fmt: skip


def history(name: str, folder: object, osdp: Any) -> tuple[list[Any], bool, int, int]:
    """What is logged, whether the model beside is sharded, the plan's peak, and the bytes of that model."""
    make, attribute = MAKERS[name]
    trainer = make(folder, osdp)
    trainer.train()
    other = getattr(trainer, attribute)
    other = other[0] if isinstance(other, list) else other
    rows = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    peak = 0 if osdp is None else trainer.plan.peak_bytes
    return rows, any(map(is_under_plan, other.modules())), peak, sum(p.nbytes for p in other.parameters())


@pytest.mark.parametrize("name", MAKERS)
@on_two_ranks
def test_trainers_whose_model_beside_is_sharded_equal_stock(tmp_path, name):
    stock, whole = (history(name, tmp_path, osdp) for osdp in (None, {}))
    less = whole[3] // 4
    sharded = history(name, tmp_path, {"memory_limit": whole[2] - less})
    assert (whole[1], sharded[1]) == (False, True)
    assert sharded[2] <= whole[2] - less
    for got in (whole[0], sharded[0]):
        assert got == [pytest.approx(row, rel=2e-4) for row in stock[0]]


PEAKS = {
    "SFT": text_dataset, "DPO": preference_dataset, "KTO": judged_dataset, "Reward": preference_dataset,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", PEAKS)
@on_two_ranks
def test_estimated_peak_is_near_the_measured_one(kind, tmp_path):
    model = LlamaForSequenceClassification if kind == "Reward" else LlamaForCausalLM
    given = {"model": llama(128, layers=4, vocabulary=4096, kind=model), "train_dataset": PEAKS[kind]()}
    given |= {"ref_model": llama(128, layers=4, vocabulary=4096)} if kind in ("DPO", "KTO") else {}
    options = {"max_length": 64, "per_device_train_batch_size": 4, "max_steps": 4}
    trainer = of_trl(kind, tmp_path, {"strategy": "osdp", "hardware": None}, options, **given)
    trainer.train()
    if trainer.is_world_process_zero():
        report = json.loads((tmp_path / "osdp_report.json").read_text())
        peaks = [report[of]["peak_bytes"] for of in ("estimated", "measured")]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.06), peaks


def distilled(kind: str, limit: int | None) -> tuple[list[float], int, bool]:
    """Losses of a student and a teacher that is given as `also`, in an Accelerate loop or a plain one."""
    AcceleratorState._reset_state(True)
    student, teacher = llama(32, 0, 4).double(), llama(64, 1, 24).double().eval()
    ids = torch.randint(2, 32, (8, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    sizes = {"sequence_length": 16, "global_batch_size": 16, "micro_batch_size": 8, "recompute": False}
    config = OSDPConfig(strategy="fsdp", hardware="cpu", also=(teacher,), memory_limit=limit, report=False, **sizes)
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
@on_two_ranks
def test_a_teacher_of_a_loop_is_sharded_and_gives_the_same_losses(kind):
    whole = distilled(kind, None)
    sharded = distilled(kind, whole[1] - 2**20)
    assert (whole[2], sharded[2]) == (False, True)
    assert sharded[0] == pytest.approx(whole[0], rel=1e-12)
    assert sharded[1] <= whole[1] - 2**20


@on_two_ranks
def test_a_reference_is_sharded_also_where_the_evaluation_alone_needs_it(tmp_path):
    found, limit = [], None
    for _ in range(2):
        given = {"model": llama(), "ref_model": llama(64, seed=1), "train_dataset": preference_dataset()}
        options = {"max_length": 32, "per_device_eval_batch_size": 6}
        trainer = of_trl("DPO", tmp_path, {"memory_limit": limit}, options, eval_dataset=preference_dataset(), **given)
        assert trainer.plan is not None
        (evaluation,) = trainer._run.inputs.others
        found.append((trainer._run.shards_beside, evaluation.peak_bytes))
        limit = evaluation.peak_bytes - 2**18
    assert [shards for shards, _ in found] == [False, True] and found[1][1] <= found[0][1] - 2**18


@on_two_ranks
def test_a_model_beside_of_a_dtype_that_no_plan_knows_stays_whole():
    model = torch.nn.Linear(4, 4).to(torch.float8_e4m3fn)
    beside = ModelsBeside(torch.device("cpu"), [model])
    assert beside.facts(torch.nn.Linear(2, 2)) == {"other_models": {"models beside": 20}, "models_beside": None}
    beside.place(sharded=True)
    assert not any(map(is_under_plan, model.modules()))
