"""recalibrate on two ranks: what runs was tried, the training is the one that the plan alone would give, and it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import OSDPConfig
from tests.helpers.distributed import run_ranks

LENGTH, VOCABULARY, LIMIT = 24, 173, "4MiB"
"""Under this limit some units are sharded; replicas of all would need more."""
BLOCK_BYTES = 4 * (12 * 64**2 + 13 * 64)
"""Of one gathered block in fp32. Gloo's thread lets go of a collective's buffer a moment after the collective has ended, so that one
more may be alive at the peak: a peak varies by this from step to step."""


def tiny_model(seed: int = 0) -> GPT2LMHeadModel:
    set_seed(seed)
    config = GPT2Config(
        n_layer=4, n_head=2, n_embd=64, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def tokens(count: int = 64) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(folder: str, osdp: OSDPConfig) -> tuple[Plan, list[float], list[torch.Tensor], Trainer]:
    """With dropout and a shuffled data set, so that a generator that was moved shows."""
    args = TrainingArguments(
        output_dir=folder, max_steps=4, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", seed=5,
        per_device_train_batch_size=4, optim="adamw_torch",
    )  # fmt: skip
    losses: list[float] = []

    class Recording(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    trainer = Recording(model=tiny_model(), args=args, train_dataset=tokens(), osdp=osdp)
    trainer.train()
    return trainer.plan, losses, [p.detach().to_local().clone() for p in trainer.model.parameters()], trainer


def with_and_without(folder: str) -> dict:
    hardware = preset("cpu", devices_per_node=2)
    osdp = OSDPConfig(
        recalibrate=True, hardware=hardware, memory_limit=LIMIT, micro_batch_size=2, operator_splitting=False, compare=False
    )  # fmt: skip
    plan, losses, weights, trainer = trained(f"{folder}/with", osdp)
    given, plain_losses, plain_weights, _ = trained(f"{folder}/without", OSDPConfig(plan=plan))
    return {
        "fingerprints": (plan.fingerprint, given.fingerprint),
        "losses": (losses, plain_losses),
        "weights": all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True)),
        "rounds": [(r.plan.fingerprint, r.fits, r.observed.peak_bytes) for r in trainer._run.rounds],
        "plain": plain_loop(),
        "loop": loop(folder),  # last: end_training gives the process group up
    }


def loop(folder: str) -> dict:
    """An Accelerate loop that evaluates between steps."""
    hardware = preset("cpu", devices_per_node=2)
    osdp = OSDPConfig(hardware=hardware, memory_limit=LIMIT, operator_splitting=False, compare=False)
    accelerator = OSDPAccelerator(osdp=osdp, project_dir=f"{folder}/loop", gradient_accumulation_steps=2)
    model = tiny_model()
    batches = DataLoader([row["input_ids"] for row in tokens()], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), batches)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            with torch.no_grad():
                model.eval()(input_ids=batch)
                model.train()
    accelerator.end_training()
    estimated = accelerator.planned_run.search
    return {"measured": accelerator.measured, "estimated": None if estimated is None else estimated.memory.peak_bytes}


def plain_loop() -> dict:
    """Here operators may be split, too."""
    model = OptimalShardedDataParallel(
        tiny_model(),
        OSDPConfig(
            memory_limit=LIMIT, sequence_length=LENGTH, global_batch_size=8, recalibrate=True, hardware=preset("cpu", devices_per_node=2)
        ),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.stack([row["input_ids"] for row in tokens(model.plan.micro_batch_size)])
    for _ in range(8):
        for number in range(1, model.plan.accumulation_steps + 1):
            model.backward(model(input_ids=batch, labels=batch).loss, is_last=number == model.plan.accumulation_steps)
        optimizer.step()
        optimizer.zero_grad()
    return {"measured": model.measured, "rounds": model.rounds, "plan": model.plan.fingerprint}


pytestmark = pytest.mark.slow  # half a minute of trials; tests/unit/planning/test_recalibrate.py has the rules


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(with_and_without, 2, str(folder), init=False, timeout_s=200)


def test_training_is_that_of_the_plan_alone_bit_by_bit(found):
    for rank in found[1]:
        assert rank["fingerprints"][0] == rank["fingerprints"][1] == found[1][0]["fingerprints"][0]
        assert rank["losses"][0] == rank["losses"][1] and len(rank["losses"][0]) >= 4
        assert rank["weights"]


def test_the_report_tells_the_rounds_and_each_collective(found):
    folder, ranks = found
    report = json.loads((folder / "with" / "osdp_report.json").read_text())
    rounds = report["recalibration"]
    assert [(r["plan"], r["fits"], r["measured"]["peak_bytes"]) for r in rounds] == ranks[0]["rounds"] == ranks[1]["rounds"]
    assert sum(r["runs"] for r in rounds) == 1
    running = next(r for r in rounds if r["runs"])
    assert running["plan"] == ranks[0]["fingerprints"][0] and running["fits"]
    assert running["measured"]["peak_bytes"] <= 4 * 2**20
    for figures in (report["measured"], running["measured"]):
        assert figures["peak_bytes"] > 0 and figures["median_step_s"] > 0
        assert all(c["seconds"] > 0 and c["bytes"] > 0 and c["group_size"] == 2 for c in figures["collectives"])
    kinds = {c["collective"] for c in report["measured"]["collectives"]}
    assert kinds == {name for name, seconds in report["estimated"]["collectives"].items() if seconds > 0}
    plain = json.loads((folder / "without" / "osdp_report.json").read_text())
    assert plain["recalibration"] == [] and plain["measured"]["collectives"]


def test_loops_are_measured_without_a_word_from_them(found):
    folder, ranks = found
    report = json.loads((folder / "loop" / "osdp_report.json").read_text())
    for rank in ranks:
        for name in ("loop", "plain"):
            case = rank[name]
            assert case["measured"] == ranks[0][name]["measured"]
            assert case["measured"].steps == 8 and case["measured"].median_step_s > 0 and case["measured"].collectives
        plan, peak = rank["plain"]["plan"], rank["plain"]["measured"].peak_bytes
        tried = next(past.observed.peak_bytes for past in rank["plain"]["rounds"] if past.plan.fingerprint == plan)
        assert peak == pytest.approx(tried, rel=0.02, abs=BLOCK_BYTES), "training needs what the trial showed"
    assert ranks[0]["loop"]["measured"].peak_bytes == pytest.approx(ranks[0]["loop"]["estimated"], rel=0.05, abs=BLOCK_BYTES)
    assert report["measured"]["peak_bytes"] == ranks[0]["loop"]["measured"].peak_bytes
