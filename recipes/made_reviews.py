"""Generated one-sentence film reviews, for a run without data: the label depends on an adjective and on whether it
is negated.
"""

from __future__ import annotations

import random
from itertools import product

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

_SUBJECTS = (
    "the film",
    "the plot",
    "the acting",
    "the ending",
    "the score",
    "the camera work",
    "the dialogue",
    "the lead actress",
)
_FRAMES = (
    "{} is {}",
    "{} was {}",
    "i found that {} is {}",
    "as the critics say , {} was {}",
    "for once {} is {}",
    "sadly or not , {} was {}",
)
_DEGREES = ("", "very ", "rather ", "so ", "truly ")
_NEGATIONS = ("", "not ", "never ", "anything but ")
_ADJECTIVES = {
    0: ("dull", "awful", "tedious", "clumsy", "lifeless", "bland"),
    1: ("moving", "brilliant", "clever", "charming", "superb", "fresh"),
}


def made_reviews(validation_percentage: int) -> DatasetDict:
    """Return each sentence once, always in the same order. Example: "the plot was never very dull" is positive.

    Args:
        validation_percentage: percentage of the sentences for validation.
    """
    rows = []
    for subject, frame, degree, negation, (side, adjectives) in product(
        _SUBJECTS, _FRAMES, _DEGREES, _NEGATIONS, _ADJECTIVES.items()
    ):
        label = 1 - side if negation else side
        rows += [
            {"sentence": frame.format(subject, negation + degree + adjective), "label": label}
            for adjective in adjectives
        ]
    random.Random(0).shuffle(rows)
    held_out = len(rows) * validation_percentage // 100
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    parts = {"train": rows[held_out:], "validation": rows[:held_out]}
    return DatasetDict({split: Dataset.from_list(part, features=features) for split, part in parts.items()})
