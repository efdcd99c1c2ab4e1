"""Evaluation and prediction in parts give what the stock Trainer gives, and are refused where they cannot fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import TrainingArguments

from hf_osdp.integrations.trainer import Trainer
from tests.distributed.test_trainer_steps import at_last_token, classes, collate, next_token
from tests.helpers.distributed import run_ranks
from tests.helpers.sampling import slow_but

CASES = {
    "tokens, loss alone": (next_token, 0, {"prediction_loss_only": True}),
    "tokens, logits kept": (next_token, 0, {}),
    "classes": (classes, 0, {}),
    "classes, moved after two": (classes, 0, {"eval_accumulation_steps": 2}),
    "classes at the last token": (at_last_token, 61, {}),
    "metrics of each batch": (classes, 0, {"batch_eval_metrics": True}),
}


def counted(seen: list[Any], prediction: Any, compute_result: bool = True) -> dict[str, float]:
    seen.append(prediction)
    values = [np.asarray(one.predictions, dtype=np.float64) for one in seen]
    labels = [np.asarray(one.label_ids) for one in seen]
    return {"sum": sum(map(np.sum, values)), "labels": sum(map(np.sum, labels))} if compute_result else {}


def results(name: str, folder: str, osdp: Any) -> tuple[dict[str, float], Any, Any, list[int]]:
    """Return metrics, predictions and labels, and the samples of each call of the model."""
    build, pad, arguments = CASES[name]
    args = TrainingArguments(
        output_dir=folder, max_steps=1, per_device_train_batch_size=4, per_device_eval_batch_size=5, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", seed=5, **arguments,
    )  # fmt: skip
    kind = transformers.Trainer if osdp is None else partial(Trainer, osdp=osdp)
    built = {**build(), "data_collator": partial(collate, False, False, pad)}
    rows = built["train_dataset"][:13]
    trainer = kind(args=args, eval_dataset=rows, compute_metrics=partial(counted, []), **built)
    sizes: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, given, keywords: sizes.append(len(keywords["input_ids"])), with_kwargs=True
    )
    if osdp is not None:
        trainer.plan  # noqa: B018  makes it
        run, fitted = trainer._run, trainer._run.evaluation
        small = replace(fitted.loop, micro_batch_size=2, moved_after=fitted.loop.moved_after or 1)
        room_bytes = fitted.model.peak(small)[0]
        trainer._run = replace(run, evaluation=replace(fitted, room_bytes=room_bytes))
    metrics = trainer.evaluate()
    trainer.compute_metrics = partial(counted, [])
    predicted = trainer.predict(rows)
    assert ("eval_sum" in metrics) is not args.prediction_loss_only
    metrics |= predicted.metrics
    return (
        {k: v for k, v in metrics.items() if k.endswith(("loss", "sum", "labels"))},
        predicted[0],
        predicted[1],
        sizes,
    )


def all_results(folder: str, names: tuple[str, ...], osdp: Any) -> list[Any]:
    return [results(name, f"{folder}/{name}", osdp) for name in names]


DAILY = [
    (1, ("tokens, logits kept",)),
    (2, ("tokens, loss alone", "classes, moved after two", "classes at the last token")),
]


@pytest.mark.parametrize(("ranks", "names"), slow_but([*DAILY, (1, tuple(CASES)), (2, tuple(CASES))], DAILY))
def test_evaluation_in_parts_equals_the_stock_trainer(tmp_path, ranks, names):
    osdp = {"strategy": "fsdp" if ranks > 1 else "osdp", "hardware": "cpu", "compare": False}
    want, got = (
        run_ranks(all_results, ranks, str(tmp_path), names, one, timeout_s=200, shared=True)[0] for one in (None, osdp)
    )
    for name, stock, ours in zip(names, want, got, strict=True):
        kept = name != "tokens, loss alone"
        assert max(ours[3]) == 2 if kept else 2 in ours[3], name
        assert max(stock[3]) == 5
        assert ours[0] == pytest.approx(stock[0], rel=1e-12), name
        assert ours[0].keys() == stock[0].keys()
        for mine, theirs in zip(ours[1:3], stock[1:3], strict=True):
            assert (mine is None) is (theirs is None)
            if mine is not None:
                np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-13)
