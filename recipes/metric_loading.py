"""Metrics of the library `evaluate`: the ones beside this file, which need no network, else the hub's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import evaluate
import numpy as np
from transformers import EvalPrediction

METRICS = Path(__file__).resolve().parent / "metrics"


def load_metric(name: str) -> Callable[[EvalPrediction], dict[str, float]]:
    """What a Trainer calls with logits and labels.

    Metrics are programs: whoever names one runs it. So a name is no path; ours lie beside this file.

    Args:
        name: a folder of `recipes/metrics`, or a metric on the hub.

    Raises:
        ValueError: there is no such metric, or it cannot be fetched.
    """
    if not re.fullmatch(r"\w[\w.-]{0,95}", name) or (Path(name).exists() and not (METRICS / name).is_dir()):
        raise ValueError(f"metric={name!r} must be the name of a metric, such as accuracy, and no file or folder.")
    local = METRICS / name
    try:
        metric = evaluate.load(str(local) if local.is_dir() else name, keep_in_memory=True)
    except (OSError, ImportError) as error:
        ours = ", ".join(sorted(path.name for path in METRICS.iterdir() if path.is_dir()))
        raise ValueError(f"Cannot load the metric {name}: {error} Without a network there are {ours}.") from None

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        return metric.compute(predictions=np.argmax(logits, axis=-1), references=prediction.label_ids)

    return compute
