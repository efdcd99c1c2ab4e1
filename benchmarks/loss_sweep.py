"""Train every class of transformers that takes labels by a plan with smaller micro-batches, and compare with the stock
Trainer.

    python -m benchmarks.loss_sweep [--only NAME ...] [--part I/N] [--out FILE]
    python -m benchmarks.loss_sweep --markdown docs/loss_sweep.md FILE ...

A scan finds the classes; each is built with a small configuration, made by rules for the names of its fields. It
trains two steps of 8 samples in float64, in one process: under the stock Trainer, and under a plan. If the planner may
choose the micro-batch, the memory limit is between what micro-batches of 4 and of 8 samples need at least. Losses and
gradient norms must agree within 1e-9. The exit code is 1 if a class trains unequal.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.utils import logging

import hf_osdp
from hf_osdp.modeling.batch import training_batch
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import SearchResult, least_memory
from hf_osdp.planning import problem as planning_problem
from hf_osdp.report.content import package_versions

SAMPLES, TOKENS, WAVE, VOCABULARY, STEPS = 8, 24, 3200, 120, 2
TOLERANCE = 1e-9
MOST_PARAMETERS = 3 * 10**7
SECONDS = 45
"""CPU time limit of a class."""
_OSDP = {"hardware": "cpu", "compare": False, "operator_splitting": False, "recompute": False}
_SIZES: dict[str, int] = {
    r"(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|attention_hidden_size|projection_dim|lru_width)": 32,  # noqa: E501
    r"(.*intermediate_size|.*ffn_dim|d_ff|hidden_dim|n_inner|ffn_hidden_size|.*intermediate_dim)": 64,
    r"(num_.*layers|n_layers?|(encoder|decoder)_layers|layers|num_blocks|depth)": 2,
    r"(.*attention_heads|n_heads?|num_heads|num_key_value_heads|multi_query_group_num|.*num_kv_heads)": 2,
    r"(head_dim|d_kv|d_head|attention_head_size|.*v_head_dim|qk_nope_head_dim|kv_channels|q_lora_rank|kv_lora_rank)": 16,  # noqa: E501
    r"qk_rope_head_dim": 8,
    r".*vocab_size": VOCABULARY,
    r"(max_.*positions?(_embeddings)?|n_positions)": 64,
    r"(num_(local_)?experts|n_routed_experts|moe_num_experts)": 4,
    r"(num_experts_per_tok|moe_topk|moe_k|num_selected_experts)": 2,
    r"(n_group|topk_group|first_k_dense_replace|num_nextn_predict_layers|num_mtp_layers)": 1,
    r"image_size": 32,
    r"patch_size": 8,
}
"""Patterns of names of fields → their values, if the default is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one class."""

    name: str
    outcome: str
    """`equal`, `kept`, `unequal`, `refused` or `not built`."""
    detail: str = ""
    micro_batch_size: int = 0
    worst: float = 0.0
    """Largest relative difference of a loss or gradient norm."""


def classes() -> Iterator[str]:
    """Yield the names of all classes whose forward takes labels."""
    for name in sorted(dir(transformers)):
        cls = getattr(transformers, name, None)
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.config_class is not None:
            if "labels" in inspect.signature(cls.forward).parameters:
                yield name


# ------------------------------------------------------------------------------------------------- small models and
# data


def shrink(config: PreTrainedConfig) -> None:
    """Make a configuration and those inside it small, without dropout and other random choices."""
    layers = max(
        (v for k, v in vars(config).items() if isinstance(v, int) and re.fullmatch(r"num_hidden_layers|n_layers?", k)),
        default=0,
    )
    spare = iter(range(VOCABULARY - 1, 0, -1))
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif name == "apply_spec_augment":
            setattr(config, name, False)
        elif isinstance(value, int) and not isinstance(value, bool) and not name.startswith("_"):
            is_token = name.endswith(("token_id", "token_index")) and value >= VOCABULARY
            size = next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name)), value)
            setattr(config, name, next(spare) if is_token else min(value, size))
        elif isinstance(value, float) and re.search(r"drop|mask_(time|feature)_prob|jitter", name):
            setattr(config, name, 0.0)
        elif isinstance(value, dict) and "mrope_section" in value:
            value["mrope_section"] = [2, 3, 3]
        elif isinstance(value, (list, tuple)):
            setattr(config, name, _shorter(name, value, layers))


def _shorter(name: str, values: Any, layers: int) -> Any:
    """Return a field with a value for each layer for two layers, and others smaller by their name."""
    if layers > 2 and len(values) == layers:
        return values[:1] + values[-1:]
    if name in ("image_size", "patch_size"):
        return type(values)(min(size, _SIZES[name]) for size in values)
    return [1] * len(values) if name == "depths" else values


def built(name: str) -> PreTrainedModel:
    """Return a small model of a class in float64; the same weights at each call."""
    cls = getattr(transformers, name)
    config = cls.config_class()
    shrink(config)
    config._experts_implementation = "eager"
    text = config.get_text_config()
    for each in (config, text):
        each.pad_token_id = 0 if getattr(each, "pad_token_id", None) is None else each.pad_token_id
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in cls(config).parameters())
    if numel > MOST_PARAMETERS:
        raise ValueError(f"{numel:,} parameters with small sizes")
    torch.manual_seed(0)
    model = cls(config).double()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    made = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # some start as zeros, which hide differences
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=made)
    return model


def rows_of(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return samples with which the model computes a loss; raise ValueError if none are found."""
    made = torch.Generator().manual_seed(2)
    count = SAMPLES * STEPS
    batch = {
        name: value
        for name, value in training_batch(model, WAVE if model.main_input_name == "input_values" else TOKENS)(
            count
        ).items()
        if isinstance(value, torch.Tensor)
    }
    for name, value in batch.items():
        if value.is_floating_point():
            batch[name] = torch.randn(value.shape, generator=made)
        elif name in ("input_ids", "decoder_input_ids"):
            batch[name] = torch.randint(3, 90, value.shape, generator=made)
            if isinstance(end := getattr(model.config, "eos_token_id", None), int):
                batch[name][..., -1] = end  # some classifiers look for it
    problems = []
    for labels in _possible_labels(model, batch.pop("labels", None), made, count):
        rows = [{name: value[index] for name, value in {**batch, "labels": labels}.items()} for index in range(count)]
        try:
            loss = model.train()(**collated(rows[:SAMPLES])).loss
        except TimeoutError:
            raise
        except Exception as error:  # a model can raise any exception
            problems.append(f"{type(error).__name__}: {error}")
            continue
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad and loss.isfinite():
            return rows
        problems.append("no loss")
    raise ValueError(problems[0] if problems else "no labels")


def _possible_labels(
    model: Any, usual: torch.Tensor | None, made: torch.Generator, count: int
) -> Iterator[torch.Tensor]:
    """Yield labels of several shapes: tokens of which some are ignored, classes, numbers, maps and pictures."""
    kind, most = type(model).__name__, getattr(model.config, "num_labels", None) or 2
    if usual is not None and not usual.is_floating_point():
        known = min(VOCABULARY, getattr(model.config, "vocab_size", None) or VOCABULARY)
        ids = torch.randint(
            0, most if usual.dim() == 1 or "TokenClass" in kind else known, usual.shape, generator=made
        )
        if usual.dim() > 1 and "CTC" not in kind:
            ignored = torch.rand(usual.shape, generator=made) < torch.linspace(0.1, 0.6, count).view(
                -1, *[1] * (usual.dim() - 1)
            )
            ignored[:, -1] = False
            yield ids.masked_fill(ignored, -100)
        yield ids.clamp(min=3) if "CTC" in kind else ids
    tokens = torch.randint(0, 50, (count, TOKENS), generator=made)
    yield tokens.masked_fill(torch.rand(tokens.shape, generator=made) < 0.3, -100)
    yield torch.randint(0, most, (count,), generator=made)
    yield torch.randint(0, most, (count, TOKENS), generator=made)
    yield torch.randn(count, generator=made)
    yield torch.rand((count, most), generator=made).round()
    size = getattr(model.config, "image_size", None) or 32
    size = size[0] if isinstance(size, (list, tuple)) else size
    yield torch.randint(0, most, (count, size, size), generator=made)
    yield torch.rand((count, 3, size, size), generator=made)
    yield torch.rand((count, size, size), generator=made)


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# ---------------------------------------------------------------------------------------------------------- training


class InDouble(TorchFunctionMode):
    """Compute in float64 where models change to float32, as most losses do, so that sums of other sizes agree."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return func(
            *args,
            **{name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()},
        )


class Recorded:
    """Mixin that records the losses of micro-steps."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.__dict__.setdefault("losses", defaultdict(float))[self.state.global_step] += float(loss)  # type: ignore[attr-defined]
        return loss


class Stock(Recorded, transformers.Trainer):
    """The stock Trainer."""


class Ours(Recorded, hf_osdp.Trainer):
    """The Trainer under a plan."""


def trainer_of(cls: type, name: str, rows: Any, folder: str, **given: Any) -> Any:
    options: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "remove_unused_columns": False,
    }
    args = TrainingArguments(
        folder, max_steps=STEPS, logging_steps=1, optim="sgd", learning_rate=0.01, use_cpu=True,
        per_device_train_batch_size=SAMPLES,
        bf16=False, logging_nan_inf_filter=False, seed=5, **options,
    )  # fmt: skip
    return cls(model=built(name), args=args, train_dataset=rows, data_collator=collated, **given)


def figures(trainer: Any) -> list[float]:
    """Train, and return losses and gradient norms."""
    torch.manual_seed(7)
    with InDouble():
        trainer.train()
    return [
        *trainer.losses.values(),
        *(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry),
    ]


@contextmanager
def halved() -> Iterator[None]:
    """Search under a limit that needs micro-batches of half the samples, if the planner may choose them."""
    stock = planning_problem.search

    def search(problem: PlanningProblem) -> SearchResult:
        if problem.job.micro_batch_size is not None:
            return stock(problem)
        jobs = [replace(problem.job, micro_batch_size=size) for size in (SAMPLES // 2, SAMPLES)]
        half, whole = (least_memory(replace(problem, job=job)) for job in jobs)
        if half < whole:
            return stock(replace(problem, memory_limit_bytes=(half + whole) // 2))
        # in the smallest models accumulated gradients need more than the activations of the other samples
        return stock(replace(problem, job=jobs[0]))

    planning_problem.search = search
    try:
        yield
    finally:
        planning_problem.search = stock


def tried(name: str, folder: str) -> Result:
    """Try one class."""
    try:
        rows = rows_of(built(name))
        expected = figures(trainer_of(Stock, name, rows, folder))
    except TimeoutError:
        raise
    except Exception as error:  # a model can raise any exception
        return Result(name=name, outcome="not built", detail=_line(error))
    try:
        with halved():
            trainer = trainer_of(Ours, name, rows, folder, osdp=_OSDP)
        found = figures(trainer)
    except TimeoutError:
        raise
    except Exception as error:
        return Result(name=name, outcome="refused", detail=_line(error))
    worst, size = worst_of(found, expected), trainer.plan.micro_batch_size
    if worst > TOLERANCE and not worst_of(figures(trainer_of(Stock, name, rows, folder)), expected) <= TOLERANCE:
        return Result(name=name, outcome="not built", detail="the stock Trainer's own results differ from run to run")
    outcome = "unequal" if worst > TOLERANCE else "equal" if size < SAMPLES else "kept"
    return Result(name=name, outcome=outcome, micro_batch_size=size, worst=worst)


def worst_of(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference; infinity if figures are missing or not finite."""
    if len(found) != len(expected) or not all(map(math.isfinite, found + expected)):
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after some seconds of CPU time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def sweep(names: list[str], report: Callable[[Result], None]) -> None:
    """Try the classes one by one."""
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                with limited(SECONDS):
                    report(tried(name, folder))
            except TimeoutError as error:
                report(Result(name=name, outcome="not built", detail=str(error)))


# ---------------------------------------------------------------------------------------------------------- the page


def markdown(results: list[Result]) -> str:
    """Return the page of the documentation."""
    counts = Counter(result.outcome for result in results)
    outcomes = "\n".join(
        f"| {name} | {counts[name]} |" for name in ("equal", "kept", "unequal", "refused", "not built")
    )
    worst = max((result.worst for result in results if result.outcome in ("equal", "kept")), default=0.0)
    reasons = Counter(_reason(result.detail) for result in results if result.outcome == "not built")
    versions = package_versions()
    return PAGE.format(
        tried=len(results), found=len([*classes()]), outcomes=outcomes, worst=f"{worst:.0e}",
        equal=_listed(results, "equal"), kept=_listed(results, "kept"),
        refused="\n".join(f"- {r.name}: {r.detail}" for r in results if r.outcome == "refused") or "None.",
        reasons="\n".join(f"| {reason} | {number} |" for reason, number in reasons.most_common()),
        versions=", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "accelerate")),
    )  # fmt: skip


def _listed(results: list[Result], outcome: str) -> str:
    """Return the classes with an outcome, by the ending of their names."""
    groups: dict[str, list[str]] = defaultdict(list)
    for result in results:
        if result.outcome == outcome:
            model, _, head = result.name.partition("For")
            groups[f"For{head}" if head else "others"].append(model)
    return "\n".join(f"- {head} ({len(names)}): {', '.join(names)}" for head, names in sorted(groups.items()))


def _reason(detail: str) -> str:
    """Return the kind of a reason, for counting."""
    kinds = {
        "longer than": "takes longer than the time limit",
        "parameters with small": "large even with small sizes",
        "DescriptionError": "inputs of another kind than text, images or sounds",
        "differ from run": "the stock Trainer's own results differ from run to run, or are not finite",
    }
    return next(
        (kind for text, kind in kinds.items() if text in detail),
        "the generic configuration or batch does not suit the class",
    )


PAGE = """# Losses under smaller micro-batches

A comparison with the stock Trainer for classes of transformers whose forward takes `labels`: two steps of 8 samples in float64, one
process, under a memory limit that micro-batches of 8 do not meet. Which micro-batches may change is
[found in a trace](losses.md). Losses and gradient norms agree within 1e-9 (the largest relative difference is {worst}).

| outcome | classes |
| --- | --- |
{outcomes}

`equal`: the planner ran smaller micro-batches. `kept`: the loss does not add up over micro-batches,
so these stay as the arguments have
them. `refused`: an error in one line,
before training. `not built`: no small model or batch was made by the generic rules, or the stock
Trainer failed on it.

{tried} of the {found} classes that the scan finds were tried so far. Written by `python -m benchmarks.loss_sweep --out FILE`
(`--part I/N` divides the classes; a further run with the same file goes on), then
`python -m benchmarks.loss_sweep --markdown docs/loss_sweep.md FILE ...`; two CPU cores, {versions}, November 2026.

## Equal with smaller micro-batches
{equal}

## Kept
{kept}

## Refused
{refused}

## Not built
| reason | classes |
| --- | --- |
{reasons}
"""  # noqa: E501


def main(arguments: list[str] | None = None) -> int:
    """Try classes, or write the page from the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="classes to try; default: all that the scan finds")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="try only the I-th of N parts of the classes")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="append a line of JSON for each class; classes already there are left out",
    )
    parser.add_argument("--markdown", nargs="+", type=Path, metavar="FILE", help="write a page from files of results")
    options = parser.parse_args(arguments)
    if options.markdown:
        page, *files = options.markdown
        page.write_text(markdown(read(files)), encoding="utf-8")
        return 0
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    part, parts = map(int, options.part.split("/"))
    done = {result.name for result in read([options.out])} if options.out and options.out.exists() else set()
    results: list[Result] = []

    def report(result: Result) -> None:
        results.append(result)
        print(
            f"{result.name}: {result.outcome} {result.micro_batch_size} {result.worst:.1e} {result.detail}",
            file=sys.stderr,
            flush=True,
        )
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")

    sweep([name for name in (options.only or [*classes()])[part - 1 :: parts] if name not in done], report)
    print(dict(Counter(result.outcome for result in results)))
    return int(any(result.outcome == "unequal" for result in results))


def read(files: list[Path]) -> list[Result]:
    """Return the results in files, in the order of names."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted((Result(**json.loads(line)) for line in lines), key=lambda result: result.name)


if __name__ == "__main__":
    sys.exit(main())
