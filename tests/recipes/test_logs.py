"""The log: what counts as training time, and what is not finite."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.recipes.conftest import Written


@pytest.mark.parametrize(
    ("tokens", "figure", "rate", "logged"), [(16, "tokens_per_s", 8 * 16, (2,)), (None, "samples_per_s", 8, (1, 2))]
)
def test_log_leaves_evaluations_and_checkpoints_out_of_training_time(
    monkeypatch, tmp_path, tokens, figure, rate, logged
):
    """Two steps of 1 s and 8 samples; between them an evaluation of 30 s and a checkpoint of 20 s."""
    import reporting

    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(reporting.time, "perf_counter", lambda: clock.now)
    sizes = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "world_size": 2}
    args = SimpleNamespace(output_dir=str(tmp_path), device=torch.device("cpu"), **sizes)
    log = reporting.JSONLog(SimpleNamespace(accelerator=SimpleNamespace(scaler=None)), tokens)
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    log.on_train_begin(args, state, None)
    for step in (1, 2):
        clock.now += 1
        state.global_step = step
        log.on_step_end(args, state, None)
        if step in logged:
            log.on_log(args, state, None, logs={"loss": 2.0, "learning_rate": 0.1, "grad_norm": float("inf")})
        clock.now += 30
        log.on_evaluate(args, state, None)
        clock.now += 20
        log.on_save(args, state, None)
    log.on_log(args, SimpleNamespace(global_step=2, is_world_process_zero=False), None, logs={"loss": 1.0})
    lines = Written(tmp_path).log
    assert [line[figure] for line in lines] == pytest.approx([rate] * len(logged))
    assert all(line["grad_norm"] is None and line["loss_scale"] == 1.0 for line in lines)
