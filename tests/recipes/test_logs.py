"""The log: what counts as training time, what is not finite, and what of an earlier run stays."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.recipes.conftest import log_of


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    import trainer_log

    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(trainer_log.time, "perf_counter", lambda: time.now)
    return time


@pytest.mark.parametrize("logged_before", [True, False])
def test_log_leaves_evaluations_and_checkpoints_out_of_training_time(clock, tmp_path, logged_before):
    """Two steps of 1 s and 8 samples; an evaluation of 30 s and a checkpoint of 20 s between them, after a line or without one."""
    from trainer_log import TrainerLog

    args = SimpleNamespace(output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, world_size=2)
    accelerator = SimpleNamespace(scaler=None, device=SimpleNamespace(type="cpu"))
    trainer = SimpleNamespace(args=args, accelerator=accelerator, is_world_process_zero=lambda: True)
    log, state = TrainerLog(trainer, tokens_per_sample=16, goes_on=False), SimpleNamespace(global_step=0, epoch=0.0)
    logs = {"loss": 2.0, "learning_rate": 0.1, "grad_norm": 1.0}
    log.on_train_begin(args, state, None)
    for step in (1, 2):
        clock.now += 1
        state.global_step = step
        log.on_step_end(args, state, None)
        if step == 2 or logged_before:
            log.on_log(args, state, None, logs=logs)
        clock.now += 30
        log.on_evaluate(args, state, None)
        clock.now += 20
        log.on_save(args, state, None)
    assert [line["tokens_per_s"] for line in log_of(tmp_path)] == pytest.approx([8 * 16] * (1 + logged_before))


def test_log_of_a_resumed_run_keeps_its_lines(clock, tmp_path):
    from step_log import LogFile

    for goes_on, want in ((False, [1]), (True, [1, 1]), (False, [1])):
        LogFile(str(tmp_path), is_rank_zero=True, goes_on=goes_on).write(step=1, gradient_norm=float("inf"), learning_rate=None)
        LogFile(str(tmp_path), is_rank_zero=False, goes_on=goes_on).write(step=2)
        assert [line["step"] for line in log_of(tmp_path)] == want
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 1, "gradient_norm": None, "learning_rate": None}
