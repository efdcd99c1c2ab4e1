"""Made film reviews in one sentence, for a run without any data: what counts is an adjective, and whether it is denied."""

from __future__ import annotations

import random
from itertools import product

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

_SUBJECTS = ("the film", "the plot", "the acting", "the ending", "the score", "the camera work", "the dialogue", "the lead actress")
_FRAMES = (
    "{} is {}",
    "{} was {}",
    "i found that {} is {}",
    "as the critics say , {} was {}",
    "for once {} is {}",
    "sadly or not , {} was {}",
)
_DEGREES = ("", "very ", "rather ", "so ", "truly ")
_DENIALS = ("", "not ", "never ", "anything but ")
_ADJECTIVES = {
    0: ("dull", "awful", "tedious", "clumsy", "lifeless", "bland"),
    1: ("moving", "brilliant", "clever", "charming", "superb", "fresh"),
}


def made_reviews(validation_percentage: int) -> DatasetDict:
    """Every sentence once, always in the same order: "the plot was never very dull" is positive.

    Args:
        validation_percentage: part of the sentences that are held out.
    """
    rows = []
    for subject, frame, degree, denial, (side, adjectives) in product(_SUBJECTS, _FRAMES, _DEGREES, _DENIALS, _ADJECTIVES.items()):
        label = 1 - side if denial else side
        rows += [{"sentence": frame.format(subject, denial + degree + adjective), "label": label} for adjective in adjectives]
    random.Random(0).shuffle(rows)
    held_out = len(rows) * validation_percentage // 100
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    parts = {"train": rows[held_out:], "validation": rows[:held_out]}
    return DatasetDict({split: Dataset.from_list(part, features=features) for split, part in parts.items()})
