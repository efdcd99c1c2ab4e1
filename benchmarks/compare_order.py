"""Compare the order of strategies that `hf-osdp compare` prints with the order of measured steps.

    python benchmarks/compare_order.py [--cases NAME...] [--limit SIZE] [--steps N] [--json FILE]

Small models are trained by the Trainer on two CPU processes with gloo: by the stock Trainer, which is DDP, by it with
Accelerate's FSDP2, and under each strategy of ours, for one memory limit. The machine and the model's blocks are
profiled once, and every plan is made for this profile. Estimates are those of `compare`, of which `ddp` also stands
beside the stock Trainer, and `fsdp, as it comes` beside stock FSDP2, if their plans run all samples at once and
recompute nothing. What does not fit has no estimate, and a strategy of ours then runs without the limit.

All processes stay alive and take a few steps in turn, so that changes in the machine's speed affect all alike. A step
is everything that the Trainer does from the beginning of one step to that of the next, including data and callbacks,
on the slower rank; medians are shown. Two rows are in the wrong order if the one that is estimated as faster is
measured as slower by more than 2 %. The last line is the headline; the exit code is 1 if an order is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
sys.path.insert(0, str(Path(__file__).parents[1]))  # Python adds only the script's own folder

import torch
import torch.distributed as dist
import transformers
import transformers.trainer
from datasets import Dataset
from transformers import PreTrainedConfig, TrainerCallback, TrainingArguments, default_data_collator

from benchmarks.shared import Forks
from benchmarks.trainer_overhead.contestant import StockOnCpu
from hf_osdp import InfeasibleError, OSDPConfig, Trainer
from hf_osdp.measurement.block_times import TimedModel
from hf_osdp.measurement.machine import measure_profile
from hf_osdp.report.content import REPORT_FILE

TOKENS, SAMPLES, VOCABULARY, RANKS = 128, 4, 2048, 2
ESTIMATES = {
    "stock DDP": "ddp", "stock FSDP2": "fsdp, as it comes", "osdp": "osdp", "fsdp": "fsdp", "zero2": "zero2",
    "ddp": "ddp",
}  # fmt: skip
"""Contestants, and the rows of `compare` that estimate them."""
TURN, UNTIMED_TURNS = 5, 2
"""Steps of a contestant before it is the next one's turn; the first turns, in which ours measures its steps, do not
count.
"""
SAME = 1.02
"""Ratio below which times count as equal."""
PROFILE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model without dropout, and a limit under which not everything fits."""

    config: str
    architecture: str
    block: str
    limit: str
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def configuration(self) -> PreTrainedConfig:
        return getattr(transformers, self.config)(
            **self.sizes, vocab_size=VOCABULARY, architectures=[self.architecture], bos_token_id=0, eos_token_id=0
        )

    def arguments(self, steps: int) -> dict[str, Any]:
        """Return a Trainer's model and data."""
        torch.manual_seed(0)
        model = getattr(transformers, self.architecture)(self.configuration())
        ids = torch.randint(0, VOCABULARY, (SAMPLES * RANKS * steps, TOKENS)).tolist()
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        return {"model": model, "train_dataset": data, "data_collator": default_data_collator}


def _gpt2(layers: int, width: int, heads: int, limit: str) -> Case:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": TOKENS, **dropout}
    return Case(config="GPT2Config", architecture="GPT2LMHeadModel", block="GPT2Block", sizes=sizes, limit=limit)


CASES = {
    "demo": _gpt2(6, 192, 6, "65MiB"),
    "GPT-2": _gpt2(12, 128, 4, "60MiB"),
    "BERT": Case(
        config="BertConfig", architecture="BertForMaskedLM", block="BertLayer", limit="90MiB",
        sizes={"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
               "max_position_embeddings": TOKENS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "Llama": Case(
        config="LlamaConfig", architecture="LlamaForCausalLM", block="LlamaDecoderLayer", limit="90MiB",
        sizes={"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 704, "max_position_embeddings": TOKENS},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contestant; times are in seconds."""

    name: str
    measured_s: float
    optimizer_s: float
    estimated_s: float | None
    """None if it does not fit."""
    terms: dict[str, float]
    """Estimated seconds of the plan that ran; empty for the stock Trainer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="models")
    parser.add_argument("--limit", help="memory limit of each process; default: each case's own")
    parser.add_argument("--steps", type=int, default=60, help=f"measured steps of each contestant, in turns of {TURN}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows to this file")
    options = parser.parse_args()
    found = {}
    for case in options.cases:
        limit = options.limit or CASES[case].limit
        found[case] = measure(CASES[case], limit, UNTIMED_TURNS - (-options.steps // TURN))
        show(f"{case}, {CASES[case].architecture}, limit {limit}", found[case])
    if options.json:
        rows = {case: [asdict(row) for row in rows] for case, rows in found.items()}
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    right = sum(not wrong_pairs(rows) for rows in found.values())
    errors = [abs(row.estimated_s / row.measured_s - 1) for rows in found.values() for row in rows if row.estimated_s]
    print(
        f"order of compare: as measured for {right} of {len(found)} models; estimates {statistics.fmean(errors):.1%}"
        f" off on average, {max(errors):.1%} at worst;"
        f" {', '.join(f'{case} {against_best(rows)}' for case, rows in found.items())}"
    )
    return int(right < len(found))


def measure(case: Case, limit: str, turns: int) -> list[Row]:
    """Return the rows of a case."""
    with tempfile.TemporaryDirectory(prefix="compare_order_") as folder:
        start = partial(Forks, world_size=RANKS)
        profile = f"{folder}/profile.json"
        start(_profile, case, profile, title="profile").answers()
        contestants = []
        for name in ESTIMATES:
            contestants.append(start(_train, case, name, limit, profile, turns * TURN, f"{folder}/{name}", title=name))
            contestants[-1].answers()  # it is ready
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ESTIMATES}
        for turn in range(turns):
            for contestant in list(contestants):
                try:
                    ranks = contestant.ask("go")
                except EOFError:
                    if not contestant.title.startswith("stock"):
                        raise
                    contestants.remove(contestant)  # such as stock FSDP2 of BERT, whose tied bias it refuses
                    continue
                if turn >= UNTIMED_TURNS:
                    seconds[contestant.title] += [max(times) for times in zip(*ranks, strict=True)]
        for contestant in contestants:
            contestant.answers()  # it has ended
        reports = {name: Path(folder) / name / REPORT_FILE for name in ESTIMATES if not name.startswith("stock")}
        contents = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in reports.items()}
    compared = {row["strategy"]: row for row in contents["osdp"]["strategies"]}
    estimates = {name: compared[of].get("step_s") for name, of in ESTIMATES.items()}
    at_once = {of: compared[of].get("micro_batch_size") == SAMPLES for of in compared}
    if not at_once["ddp"] or any(unit["recomputation"] for unit in contents["ddp"]["estimated"]["units"]):
        estimates["stock DDP"] = None
    if not at_once["fsdp, as it comes"]:
        estimates["stock FSDP2"] = None
    return [
        Row(
            name=name,
            measured_s=statistics.median(step for step, _ in seconds[name]),
            optimizer_s=statistics.median(optimizer for _, optimizer in seconds[name]),
            estimated_s=estimates[name],
            terms=contents[name]["estimated"]["step_breakdown"] if name in contents else {},
        )
        for name in ESTIMATES
        if seconds[name]
    ]


def _profile(pipe: Connection, rank: int, case: Case, path: str) -> None:
    """Write the profile of this machine and of the model's blocks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = (1, SAMPLES // 2, SAMPLES)
    model = TimedModel(model_or_config=case.configuration(), sequence_length=TOKENS, micro_batch_sizes=sizes)
    profile = measure_profile(device_type="cpu", seconds=PROFILE_S, model=model)
    if rank == 0:
        profile.save(path)
    pipe.send("done")


class Turns(TrainerCallback):
    """Take a few steps when asked to, and answer by the seconds of each and of its optimizer."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._seconds: list[tuple[float, float]] = []
        self._began: float | None = None
        self._optimizer_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the previous step, which includes the Trainer's work around it, and wait for the next turn."""
        self._end_step()
        if state.global_step % TURN == 0:
            self._pipe.send(self._seconds)
            self._pipe.recv()
            self._seconds = []
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer_s = -time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer_s += time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_step()
        self._pipe.send(self._seconds)

    def _end_step(self) -> None:
        if self._began is not None:
            self._seconds.append((time.perf_counter() - self._began, self._optimizer_s))


def _train(pipe: Connection, rank: int, case: Case, name: str, limit: str, profile: str, steps: int, out: str) -> None:
    """Train as one rank of a contestant."""
    torch.set_num_threads(1)
    arguments: dict[str, Any] = {
        "output_dir": out, "max_steps": steps, "per_device_train_batch_size": SAMPLES, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 10,
    }  # fmt: skip
    if name == "stock FSDP2":
        transformers.trainer.Accelerator = StockOnCpu
        arguments |= {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "transformer_layer_cls_to_wrap": [case.block],
                "reshard_after_forward": True,
            },
        }
    args = TrainingArguments(**arguments)
    if name.startswith("stock"):
        trainer = transformers.Trainer(args=args, **case.arguments(steps))
    else:
        asked = {"strategy": name, "profile": profile, "compare": name == "osdp"}
        try:
            trainer = Trainer(args=args, osdp=OSDPConfig(**asked, memory_limit=limit), **case.arguments(steps))
            assert trainer.plan is not None  # planned here, which may be infeasible
        except InfeasibleError:
            trainer = Trainer(args=args, osdp=OSDPConfig(**asked), **case.arguments(steps))
    trainer.add_callback(Turns(pipe))
    trainer.train()
    pipe.send("done")


def wrong_pairs(rows: Sequence[Row]) -> list[str]:
    """Return the pairs of rows that are estimated in another order than they are measured."""
    estimated = sorted((row for row in rows if row.estimated_s), key=lambda row: row.estimated_s or 0)
    return [
        f"{one.name} before {other.name}"
        for one, other in itertools.combinations(estimated, 2)
        if one.estimated_s != other.estimated_s and one.measured_s > SAME * other.measured_s
    ]


def against_best(rows: Sequence[Row]) -> str:
    """Return the measured ratio of the plan to the fastest other row that fits."""
    plan = next(row for row in rows if row.name == "osdp")
    best = min((row for row in rows if row.estimated_s and row is not plan), key=lambda row: row.measured_s)
    return f"osdp / {best.name} {plan.measured_s / best.measured_s:.2f}"


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the table of a case, and whether its order is right."""
    print(f"\n{title}: milliseconds of a step, and of its optimizer")
    print(f"{'':<12}{'estimated':>10}{'measured':>10}{'ratio':>7}{'optimizer':>11}{'measured':>10}  other terms")
    for row in sorted(rows, key=lambda row: row.measured_s):
        estimated = f"{1e3 * row.estimated_s:.1f}" if row.estimated_s else "no fit"
        ratio = f"{row.estimated_s / row.measured_s:.2f}" if row.estimated_s else ""
        shown = {name: f"{1e3 * seconds:.1f}" for name, seconds in row.terms.items() if seconds}
        others = ", ".join(
            f"{name.removesuffix('_s')} {shown[name]}"
            for name in ("compute_s", "exposed_s", "copy_s")
            if name in shown
        )
        print(
            f"{row.name:<12}{estimated:>10}{1e3 * row.measured_s:>10.1f}{ratio:>7}{shown.get('optimizer_s', ''):>11}"
            f"{1e3 * row.optimizer_s:>10.1f}  {others}".rstrip()
        )
    wrong = wrong_pairs(rows)
    print(f"order of compare: {'wrong, ' + ', '.join(wrong) if wrong else 'as measured'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
