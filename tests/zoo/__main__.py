"""Describe, plan and train a small model of every model type that transformers' Auto classes know.

    python -m tests.zoo [--only CLASS ...] --out FILE
    python -m tests.zoo --csv docs/data/zoo.csv --markdown docs/models.md FILE ...

The types are those of the Auto mappings for causal, masked and sequence-to-sequence language models, pictures with text, image
classification, detection, segmentation, speech and audio. A rule for the names of fields makes each configuration small (`small_models`);
a type that the rule cannot shrink is listed so. Each model goes through four stages:

1. stock: two AdamW steps with clipping in one process in float64, finite and the same when repeated;
2. described: from the configuration alone, with the batch that hf_osdp makes of it, or that of stage 1 where it makes none, in bf16 as on
   CUDA;
3. planned: for two H100 under a limit half-way between the least possible and data parallelism's;
4. trained: the same two steps on two ranks under a plan that gives neighbouring units different layouts, compared with stage 1. Blocks are
   recomputed and on the host in turn, but for those whose forward changes buffers or fills a cache.

Rank 1 does the first stage while rank 0 does the second and third. Results are appended to a file as they come, and a further run with the
same file goes on. The exit code is 1 if a model trains unequal.
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from hf_osdp.versions import package_versions
from tests.helpers.distributed import RankFailure, run_ranks

from . import ranks
from .ranks import OUTCOMES, Row, append, line_of, try_all

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
WHY = {
    "Gemma4AssistantForCausalLM": "reads the keys and values of the model that it assists",
    "Gemma4UnifiedAssistantForCausalLM": "reads the keys and values of the model that it assists",
    "Granite4VisionForConditionalGeneration": "has heads of 64 values and no projector by default",
    "OmDetTurboForObjectDetection": "transformers implements no training, and its usual backbone needs timm",
    "OneFormerForUniversalSegmentation": "holds convolutions in plain lists, which stay in float32 and do not train",
}
"""Classes → why they are not trained, where an error does not say it."""
PAGE = Path(__file__).with_name("page.md")


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


def write(rows: Sequence[Row], table: Path | None, page: Path | None) -> None:
    rows = [
        row if row.outcome == ranks.EQUAL
        else replace(row, reason=WHY.get(row.name, row.reason or row.stock.removeprefix("yes"))) for row in rows
    ]  # fmt: skip
    if table is not None:
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*(field.name for field in fields(Row)), "outcome"])
            writer.writerows([*asdict(row).values(), row.outcome] for row in rows)
    if page is not None:
        page.write_text(markdown(rows), encoding="utf-8")


def markdown(rows: Sequence[Row]) -> str:
    by_task = {task: Counter(row.outcome for row in rows if row.task == task) for task in TASKS}
    by_task["all"] = Counter(row.outcome for row in rows)
    lines = [("task", *OUTCOMES), ("---", *["---:"] * len(OUTCOMES))]
    lines += [(task, *(str(found[outcome] or "") for outcome in OUTCOMES)) for task, found in by_task.items() if found]
    versions = package_versions()
    listed = {outcome: [row for row in rows if row.outcome == outcome] for outcome in OUTCOMES}
    return PAGE.read_text(encoding="utf-8").format(
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        tried=len(rows), all=len(types()), described=sum(row.is_described for row in rows),
        worst=f"{max((row.difference for row in listed[ranks.EQUAL] if row.difference), default=0.0):.0e}",
        tolerance=f"{ranks.TOLERANCE:.0e}",
        unequal=_named(listed[ranks.UNEQUAL]), refused=_named(listed[ranks.REFUSED]),
        untrained=_named(listed[ranks.PLANNED]),
        versions=", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "accelerate")),
    )  # fmt: skip


def _named(rows: Sequence[Row]) -> str:
    reasons = ((row.name, re.sub(r"[<>|*_`]", " ", row.reason or row.described)[:120].strip()) for row in rows)
    return "\n".join(f"- {name}: {reason}" for name, reason in reasons) or "None."


def run(rows: Sequence[Row], out: Path) -> None:
    """Try models on two ranks; where the ranks fail, the model that they were at is reported, and new ones go on."""
    left = list(rows)
    while left:
        part, before = left[:20], {row.name for row in read([out])}
        problem = ""
        try:
            run_ranks(try_all, 2, part, str(out), timeout_s=60 + 5 * ranks.SECONDS * len(part))
        except RankFailure as error:  # a rank that raises has appended the row
            problem = line_of(error) if error.error_type in ("died", "timeout") else ""
        done = {row.name for row in read([out])} - before
        if problem and (lost := next((row for row in part if row.name not in done), None)) is not None:
            append(out, replace(lost, reason=problem))
            done.add(lost.name)
        left = [row for row in left if row.name not in done]
        print(f"{len(rows) - len(left)} of {len(rows)}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results, for --csv and --markdown")
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="classes to try; default: all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append rows here; not those that are there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all rows as a table")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page of the documentation")
    options = parser.parse_args(arguments)
    if options.csv or options.markdown:
        write(read(options.files), options.csv, options.markdown)
        return 0
    if options.out is None:
        parser.error("give --out FILE, to which results are appended")
    known, done = types(), {row.name for row in read([options.out])}
    run([known[name] for name in options.only or known if name not in done], options.out)
    rows = read([options.out])
    print(dict(Counter(row.outcome for row in rows)))
    return int(any(row.outcome == ranks.UNEQUAL for row in rows))


if __name__ == "__main__":
    sys.exit(main())
