"""Measure what low-bit communication costs in perplexity: small GPT-2 and BERT from scratch on WikiText-2, fully
sharded, same seeds.

    python benchmarks/wire_loss.py --data DIR [--steps N] [--seeds 1 2 3] [--models gpt2 bert] [--communication NAME ...] [--plot FILE]

DIR contains `wikitext-2/`. Two processes train each model as `OptimalShardedDataParallel` does. The plan is for a slow
link, so that each parameter is gathered twice and each gradient is reduced in the coarsest allowed format. Results
that exist in --output are reused. BERT's perplexity is that of masked tokens. The exit code is 1 if the mean
perplexity with int8 is outside the range of exact runs, or that with int4 more than 1 % above their mean.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # Python adds only the script's own folder

from benchmarks.optimizer_seeds import is_outside, show  # noqa: E402
from hf_osdp import OptimalShardedDataParallel, OSDPConfig  # noqa: E402
from hf_osdp.planner.hardware import Hardware, Link  # noqa: E402
from hf_osdp.planner.presets import preset  # noqa: E402
from hf_osdp.planner.training_job import EXACT, FORMATS  # noqa: E402

MODELS = ("gpt2", "bert")
WORSE = 1.01
"""Largest allowed increase of perplexity with int4, relative to exact runs."""
LINK = Link(latency_s=1e-4, bytes_per_s=1.25e6, source="10 Mbit/s, so that the planner takes the coarsest format")
VOCABULARY, LENGTH, SAMPLES, WIDTH, LAYERS = 2048, 64, 8, 128, 2
LEARNING_RATE, WARM_UP = 2e-3, 50


def main() -> int:
    """Run the missing trainings, print the tables, and return the exit code."""
    options = parse()
    run_missing(options)
    found: dict[str, dict[str, list[float]]] = {}
    bad = False
    for model in options.models:
        found[model] = {
            name: [result(options, model, name, seed)["perplexity"] for seed in options.seeds]
            for name in options.communication
        }
        print(f"\n{model}: perplexity after {options.steps} steps")
        show(
            "communication",
            found[model],
            options.seeds,
            options.markdown and options.markdown.with_stem(f"{options.markdown.stem}_{model}"),
        )
        mean = {name: statistics.mean(values) for name, values in found[model].items()}
        for name in mean:
            print(f"{name}: {mean[name] / mean[EXACT] - 1:+.2%} of the mean of exact runs" if EXACT in mean else "")
        bad |= bool(is_outside(found[model], "int8", EXACT)) or mean.get("int4", 0) > WORSE * mean.get(EXACT, math.inf)
    if options.plot:
        plot(found, options)
    return int(bad)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with wikitext-2/")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="steps of each run (default 1000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--communication", nargs="+", choices=FORMATS, default=FORMATS, metavar="NAME")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/wire_loss"), metavar="DIR", help="folder for the results"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="also write one table per model, to this name plus the model's"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also plot the training losses to this .png or .svg file"
    )
    return parser.parse_args()


def result_file(options: argparse.Namespace, model: str, communication: str, seed: int) -> Path:
    return options.output.resolve() / f"{model}-{communication}-{seed}-{options.steps}.json"


def result(options: argparse.Namespace, model: str, communication: str, seed: int) -> dict:
    return json.loads(result_file(options, model, communication, seed).read_text(encoding="utf-8"))


def run_missing(options: argparse.Namespace) -> None:
    """Run the missing trainings one after the other, in two processes."""
    options.output.mkdir(parents=True, exist_ok=True)
    wanted = [
        (model, name, seed) for model in options.models for seed in options.seeds for name in options.communication
    ]
    missing = [run for run in wanted if not result_file(options, *run).exists()]
    if not missing:
        return
    ids = options.output.resolve() / "tokens.pt"
    if not ids.exists():
        torch.save(tokens(options.data), ids)
    runs = [(*run, str(result_file(options, *run))) for run in missing]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "benchmarks.wire_loss",
    ]
    task = json.dumps({"runs": runs, "steps": options.steps, "tokens": str(ids)})
    subprocess.run([*command, task], cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


# ------------------------------------------------------------------------------------------------- one of two
# processes


def work(task: dict) -> None:
    """Train all runs of a task one after the other."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    ids = torch.load(task["tokens"], weights_only=True)
    for model, communication, seed, file in task["runs"]:
        began = time.monotonic()
        found = train(model, communication, seed, task, ids)
        if dist.get_rank() == 0:
            Path(file).write_text(json.dumps(found), encoding="utf-8")
            print(
                f"{model} {communication} seed {seed}: {found['perplexity']:.2f} in {time.monotonic() - began:.0f} s",
                flush=True,
            )
    dist.destroy_process_group()


def train(model_name: str, communication: str, seed: int, task: dict, ids: dict[str, torch.Tensor]) -> dict:
    """Train a model; return its perplexity, and its mean loss in each fiftieth of the steps."""
    torch.manual_seed(seed)
    rank, steps = int(os.environ["RANK"]), task["steps"]
    config = OSDPConfig(
        communication=communication,
        strategy="fsdp", hardware=slow_link(), memory_limit="2GiB", sequence_length=LENGTH,
        global_batch_size=SAMPLES, micro_batch_size=SAMPLES // 2, recompute=False,
    )  # fmt: skip
    model = OptimalShardedDataParallel(build(model_name), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP))
    )
    order = torch.Generator().manual_seed(seed)
    rows, losses = epochs(ids["train"], order), []
    for step in range(steps):
        batch = torch.stack([next(rows) for _ in range(SAMPLES)])[rank::2]
        loss = model(**inputs(model_name, batch, seed=1000 * step + rank)).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    found = math.exp(evaluate(model, model_name, ids["validation"], rank))
    mean = torch.stack(losses)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    smooth = [chunk.mean().item() for chunk in mean.split(max(1, steps // 50))]
    return {"perplexity": found, "losses": smooth}


def slow_link() -> Hardware:
    return replace(preset("cpu", devices_per_node=2), intra_node=LINK)


def tokens(data: Path) -> dict[str, torch.Tensor]:
    """Return rows of tokens of both texts, by a byte-level BPE trained on the training text; the last token is the
    mask.
    """
    from tokenizers import ByteLevelBPETokenizer

    tokenizer, rows = ByteLevelBPETokenizer(), {}
    tokenizer.train(str(data / "wikitext-2" / "train.txt"), vocab_size=VOCABULARY - 1, show_progress=False)
    for part in ("train", "validation"):
        ids = torch.tensor(tokenizer.encode((data / "wikitext-2" / f"{part}.txt").read_text(encoding="utf-8")).ids)
        rows[part] = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows


def build(model_name: str) -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    if model_name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=LAYERS, n_embd=WIDTH, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY,
                resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=4,
            max_position_embeddings=LENGTH,
            vocab_size=VOCABULARY, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def inputs(model_name: str, rows: torch.Tensor, *, seed: int) -> dict[str, torch.Tensor]:
    """Return a batch: all tokens for GPT-2; for BERT 15 % are masked, and only these have labels."""
    if model_name == "gpt2":
        return {"input_ids": rows, "labels": rows}
    masked = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.15
    return {"input_ids": rows.masked_fill(masked, VOCABULARY - 1), "labels": rows.masked_fill(~masked, -100)}


def epochs(rows: torch.Tensor, order: torch.Generator):
    """Yield rows without end, shuffled again in each epoch."""
    for _ in count():
        for index in torch.randperm(len(rows), generator=order).tolist():
            yield rows[index]


@torch.no_grad()
def evaluate(model: torch.nn.Module, model_name: str, rows: torch.Tensor, rank: int) -> float:
    """Return the mean loss of the first 2048 rows of the validation text; each process computes half."""
    model.eval()
    batches = enumerate(rows[:2048].split(32))
    losses = [model(**inputs(model_name, batch, seed=number)).loss for number, batch in batches if number % 2 == rank]
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def plot(found: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> None:
    """Plot the training losses, one panel per model: mean over seeds, and range from lowest to highest."""
    import altair as alt

    rows = []
    for model, by_name in found.items():
        for name in by_name:
            runs = [result(options, model, name, seed)["losses"] for seed in options.seeds]
            for number, values in enumerate(zip(*runs, strict=True), start=1):
                step = number * options.steps // len(runs[0])
                over_seeds = {"loss": statistics.mean(values), "low": min(values), "high": max(values)}
                rows.append({"model": model, "communication": name, "step": step, **over_seeds})
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("step:Q", title="optimizer step"), color=alt.Color("communication:N", sort=list(options.communication))
    )
    scale = alt.Scale(zero=False)
    layers = base.mark_area(opacity=0.15).encode(
        y=alt.Y("low:Q", scale=scale, title="loss"), y2="high:Q"
    ) + base.mark_line().encode(y=alt.Y("loss:Q", scale=scale, title="loss"))
    layers.properties(width=330, height=240).facet(column=alt.Column("model:N", title=None)).resolve_scale(
        y="independent"
    ).save(str(options.plot), **({"scale_factor": 2} if options.plot.suffix == ".png" else {}))


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        work(json.loads(sys.argv[1]))
        sys.exit(0)
    sys.exit(main())
