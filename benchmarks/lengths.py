"""Compare training on samples of unequal lengths with the stock Trainer, at the same samples in each step.

    python benchmarks/lengths.py --data FOLDER [--cases NAME...] [--turns N] [--epoch [--rows N]] [--json FILE]

Small models train on two CPU processes with gloo, 8 samples at once and 64 in a rank's step, on real text: sentences
of SST-2, pairs of RTE, lines of WikiText-2 (FOLDER has `glue/` and `wikitext-2/` with their files, and `tokenizers/`).
Contestants are the stock Trainer (DDP), our Trainer, and ours with `batch_by_tokens=True`, both under the limit that 8
of the longest samples need when the model is replicated. All processes stay alive and take a step in turn. `estimated`
is the plan's step over the measured one. With `--epoch` an epoch by tokens runs instead, and the highest peak of its
steps stands beside the limit. The last line is the headline.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
sys.path.insert(0, str(Path(__file__).parents[1]))  # Python adds only the script's own folder

import torch
import transformers
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.shared import Forks
from hf_osdp import OSDPConfig, Trainer
from hf_osdp.tracing.memory_tracker import MemoryTracker

AT_ONCE, TIMES, RANKS, LONGEST = 8, 8, 2, 256
CONTESTANTS = ("stock", "ours", "by tokens")
UNTIMED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Text, and a small model without dropout."""

    file: str
    columns: tuple[str, ...]
    tokenizer: str
    config: str
    architecture: str
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, folder: Path, most: int = 20_000) -> dict[str, Any]:
        """Return a Trainer's model, data of at most so many samples, and collator."""
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizers" / self.tokenizer)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        lines = (folder / self.file).read_text(encoding="utf-8").splitlines()
        if self.file.endswith(".txt"):
            rows = [{"text": line} for line in lines if line.strip()][:most]
        else:
            rows = list(map(json.loads, islice(lines, most)))
        texts = [[row[name] for row in rows] for name in self.columns]
        data = dict(tokenizer(*texts, truncation=True, max_length=LONGEST))
        if "label" in rows[0]:
            data["labels"] = [row["label"] for row in rows]
            collate: Any = DataCollatorWithPadding(tokenizer)
        else:
            collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes, vocab_size=len(tokenizer))
        model = getattr(transformers, self.architecture)(config)
        return {"model": model, "train_dataset": Dataset.from_dict(data), "data_collator": collate}


_BERT: dict[str, Any] = {
    "tokenizer": "bert-base-uncased", "config": "BertConfig", "architecture": "BertForSequenceClassification",
    "sizes": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
              "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}  # fmt: skip
CASES = {
    "SST-2": Case(file="glue/sst2/train.jsonl", columns=("sentence",), **_BERT),
    "RTE": Case(file="glue/rte/train.jsonl", columns=("sentence1", "sentence2"), **_BERT),
    "WikiText-2": Case(
        file="wikitext-2/train.txt", columns=("text",), tokenizer="gpt2", config="GPT2Config",
        architecture="GPT2LMHeadModel",
        sizes={"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": LONGEST, "resid_pdrop": 0.0,
               "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the text and tokenizers")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="texts")
    parser.add_argument("--turns", type=int, default=6, help="measured steps of each contestant")
    parser.add_argument("--epoch", action="store_true", help="measure the peaks of an epoch instead")
    parser.add_argument("--rows", type=int, default=20_000, metavar="N", help="most samples of that epoch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows to this file")
    options = parser.parse_args()
    found = {}
    if options.epoch:
        for case in options.cases:
            print(f"{case}: {_of_epoch(CASES[case], options.data, options.rows)}", flush=True)
        return 0
    for case in options.cases:
        rows = found[case] = measure(CASES[case], options.data, options.turns)
        print(
            f"\n{case}\n{'':<12}{'seconds of a step':>18}{'real tokens/s':>15}{'of stock':>10}{'micro-batches':>15}"
            f"{'estimated':>11}"
        )
        for name, row in rows.items():
            print(
                f"{name:<12}{row['step_s']:>18.2f}{row['tokens_per_s']:>15,.0f}"
                f"{row['tokens_per_s'] / rows['stock']['tokens_per_s']:>10.2f}{row['micro_batches']:>15.1f}"
                f"{row['estimated']:>11.2f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ratios = [f"{case} {rows['by tokens']['tokens_per_s'] / rows['stock']['tokens_per_s']:.2f}"
              for case, rows in found.items()]  # fmt: skip
    print(f"\nreal tokens a second, batch_by_tokens / stock Trainer: {', '.join(ratios)}")
    return 0


def measure(case: Case, data: Path, turns: int) -> dict[str, dict[str, float]]:
    """Return a row for each contestant."""
    with tempfile.TemporaryDirectory(prefix="lengths_") as folder:
        start = partial(Forks, world_size=RANKS)
        limit = start(_limit, case, data, folder, title="limit").answers()[0]
        contestants, planned_s = [], {}
        for name in CONTESTANTS:
            contestants.append(start(_train, case, data, name, limit, turns + UNTIMED, f"{folder}/{name}", title=name))
            planned_s[name] = contestants[-1].answers()[0]  # it is ready
        steps: dict[str, list[list[tuple[float, int, int]]]] = {name: [] for name in CONTESTANTS}
        for turn in range(turns + UNTIMED):
            for contestant in contestants:
                step = contestant.ask("go")
                if turn >= UNTIMED:
                    steps[contestant.title].append(step)
        for contestant in contestants:
            contestant.answers()  # it has ended
    rows = {}
    for name, taken in steps.items():
        seconds = [max(step_s for step_s, *_ in step) for step in taken]
        tokens = sum(tokens for step in taken for _, tokens, _ in step)
        rows[name] = {
            "step_s": statistics.median(seconds),
            "tokens_per_s": tokens / sum(seconds),
            "estimated": planned_s[name] / statistics.median(seconds),
            "micro_batches": statistics.fmean(calls for step in taken for *_, calls in step),
        }
    return rows


def _of_epoch(case: Case, data: Path, rows: int) -> str:
    """Return what the highest peak of an epoch's steps was, on any rank."""
    with tempfile.TemporaryDirectory(prefix="lengths_") as folder:
        start = partial(Forks, world_size=RANKS)
        limit = start(_limit, case, data, folder, title="limit").answers()[0]
        peaks = start(_peaks, case, data, rows, limit, f"{folder}/epoch", title="epoch").answers()
    highest = max(max(found) for found in peaks)
    steps = f"{len(peaks[0])} steps"
    return f"highest peak {highest / 2**20:.1f} MiB of {limit / 2**20:.1f} MiB in {steps}, {highest / limit:.3f}"


class Peaks(TrainerCallback):
    """Collect the peak of the tensors of each step but the first, which makes the optimizer's states."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._tracker: MemoryTracker | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            optimizer = kwargs["optimizer"]
            parameters = list(kwargs["model"].parameters())
            states = [value for state in optimizer.state.values() for value in state.values()]
            grads = [parameter.grad for parameter in parameters]
            tensors = [*parameters, *kwargs["model"].buffers(), *grads, *states]
            self._tracker = MemoryTracker(block_bytes=1, device_type="cpu")
            self._tracker.track([one for one in tensors if isinstance(one, torch.Tensor)])
            self._tracker.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
            self.found.append(self._tracker.peak_bytes)


class Turns(TrainerCallback):
    """Take a step when asked to, and answer by its seconds, real tokens and calls of the model."""

    def __init__(self, pipe: Connection, model: torch.nn.Module) -> None:
        self._pipe, self._began = pipe, 0.0
        self._tokens = self._calls = 0
        model.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        self._tokens += int(kwargs["attention_mask"].sum())
        self._calls += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
        self._pipe.recv()
        self._began, self._tokens, self._calls = time.perf_counter(), 0, 0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._began:
            self._pipe.send((time.perf_counter() - self._began, self._tokens, self._calls))


def _arguments(out: str, steps: int) -> TrainingArguments:
    torch.set_num_threads(1)
    return TrainingArguments(
        output_dir=out, max_steps=steps, num_train_epochs=1,
        per_device_train_batch_size=AT_ONCE, gradient_accumulation_steps=TIMES,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=10,
    )  # fmt: skip


def _limit(pipe: Connection, rank: int, case: Case, data: Path, out: str) -> None:
    """Send the bytes that the stock Trainer's micro-batch of the longest samples needs."""
    asked = OSDPConfig(strategy="ddp", micro_batch_size=AT_ONCE, hardware="cpu", recompute=False)
    plan = Trainer(args=_arguments(out, 1), osdp=asked, **case.arguments(data)).plan
    assert plan is not None
    pipe.send(plan.peak_bytes)


def _peaks(pipe: Connection, rank: int, case: Case, data: Path, rows: int, limit: int, out: str) -> None:
    """Train an epoch by tokens as one rank, and send its peaks."""
    asked, peaks = OSDPConfig(memory_limit=limit, batch_by_tokens=True, compare=False), Peaks()
    trainer = Trainer(args=_arguments(out, -1), osdp=asked, callbacks=[peaks], **case.arguments(data, rows))
    trainer.train()
    pipe.send(peaks.found)


def _train(pipe: Connection, rank: int, case: Case, data: Path, name: str, limit: int, steps: int, out: str) -> None:
    """Train as one rank of a contestant."""
    given = {"args": _arguments(out, steps), **case.arguments(data)}
    if name == "stock":
        trainer, planned_s = transformers.Trainer(**given), math.nan
    else:
        trainer = Trainer(**given, osdp=OSDPConfig(memory_limit=limit, batch_by_tokens=name == "by tokens"))
        assert trainer.plan is not None and trainer.plan.step_s is not None  # planned here
        planned_s = trainer.plan.step_s
    trainer.add_callback(Turns(pipe, trainer.model))
    pipe.send(planned_s)
    trainer.train()
    pipe.send("done")


if __name__ == "__main__":
    sys.exit(main())
