"""Describe, plan and train a small model of every model type that transformers' Auto classes know.

    python -m benchmarks.zoo [--only CLASS ...] [--part I/N] [--minutes M] --out FILE
    python -m benchmarks.zoo --csv docs/data/zoo.csv --markdown docs/models.md FILE ...

The types are those of the Auto mappings for causal, masked and sequence-to-sequence language models, pictures with text, image
classification, detection, segmentation, speech and audio. A rule for the names of fields makes each configuration small (`small_models`);
a type that the rule cannot shrink is listed so. Each model goes through four stages:

1. stock: two AdamW steps with clipping in one process in float64, finite and the same when repeated;
2. described: from the configuration alone, with the batch that hf_osdp makes of it, in bf16 as on CUDA;
3. planned: for two H100 under a limit half-way between the least possible and data parallelism's;
4. trained: the same two steps on two ranks under a plan that gives neighbouring units different layouts, compared with stage 1.

Rank 1 does the first stage while rank 0 does the second and third. Results are appended to a file as they come, and a further run with the
same file goes on, in the order of a hash of the names, so that a part is a fair sample. The exit code is 1 if a model trains unequal.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.loss_sweep import shuffled
from benchmarks.zoo_ranks import SECONDS, UNEQUAL, Row, append, line_of, try_all
from tests.helpers.distributed import RankFailure, run_ranks

TASKS = {
    "causal": "CAUSAL_LM", "masked": "MASKED_LM", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image-text-to-text": "IMAGE_TEXT_TO_TEXT", "image classification": "IMAGE_CLASSIFICATION",
    "detection": "OBJECT_DETECTION", "zero-shot detection": "ZERO_SHOT_OBJECT_DETECTION",
    "image segmentation": "IMAGE_SEGMENTATION", "semantic segmentation": "SEMANTIC_SEGMENTATION",
    "instance segmentation": "INSTANCE_SEGMENTATION", "universal segmentation": "UNIVERSAL_SEGMENTATION",
    "speech": "SPEECH_SEQ_2_SEQ", "audio classification": "AUDIO_CLASSIFICATION", "CTC": "CTC",
    "audio frames": "AUDIO_FRAME_CLASSIFICATION", "speaker": "AUDIO_XVECTOR",
}  # fmt: skip
"""Tasks → parts of the names of Auto mappings."""


def types() -> dict[str, Row]:
    """Return an empty row for each class of the mappings, by name."""
    import transformers.models.auto.modeling_auto as auto

    found: dict[str, Row] = {}
    for task, part in TASKS.items():
        for model_type, names in getattr(auto, f"MODEL_FOR_{part}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, Row(task=task, model_type=model_type, name=name))
    return found


# ------------------------------------------------------------------------------------------------------- results


def read(files: Sequence[Path]) -> list[Row]:
    """Return the rows in files, the last of each class, in the order of tasks and names."""
    lines = [line for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines()]
    rows = {row.name: row for row in (Row(**json.loads(line)) for line in lines)}
    return sorted(rows.values(), key=lambda row: (list(TASKS).index(row.task), row.model_type, row.name))


def run(rows: Sequence[Row], out: Path, seconds: float) -> None:
    """Try models on two ranks; where the ranks fail, the model that they were at is reported, and new ones go on."""
    end, left = time.monotonic() + seconds, list(rows)
    while left and time.monotonic() < end:
        part, before = left[:10], {row.name for row in read([out])}
        problem = ""
        try:
            run_ranks(try_all, 2, part, str(out), timeout_s=60 + 3 * SECONDS * len(part))
        except RankFailure as error:
            problem = line_of(error)
        done = {row.name for row in read([out])} - before
        if problem and (lost := next((row for row in part if row.name not in done), None)) is not None:
            append(out, replace(lost, reason=problem))
            done.add(lost.name)
        left = [row for row in left if row.name not in done]
        print(f"{len(rows) - len(left)} of {len(rows)}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Try models, or write the table and the page from the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results, for --csv and --markdown")
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="classes to try; default: all")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="try only the I-th of N parts")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="M", help="stop after the ranks' next pause"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="append rows here; classes already there are left out"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all rows as a table")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page of the documentation")
    options = parser.parse_args(arguments)
    if options.csv or options.markdown:
        write(read(options.files), options.csv, options.markdown)
        return 0
    if options.out is None:
        parser.error("give --out FILE, to which results are appended")
    known, done = types(), {row.name for row in read([options.out])}
    part, parts = map(int, options.part.split("/"))
    names = shuffled(options.only or list(known))[part - 1 :: parts]
    run([known[name] for name in names if name not in done], options.out, 60 * options.minutes)
    rows = read([options.out])
    print(dict(Counter(row.outcome for row in rows)))
    return int(any(row.outcome == UNEQUAL for row in rows))


if __name__ == "__main__":
    sys.exit(main())
