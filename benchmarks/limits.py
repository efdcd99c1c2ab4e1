"""Plot estimated tokens per second against the memory limit, for the planner's choice and common strategies (figure of
the README).

    python benchmarks/limits.py --plot docs/images/limits.png --csv docs/data/limits.csv

Nothing is measured. Devices and links are presets, at the rates that trainings reach. Every strategy has its own best
batch at every limit.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import altair as alt
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from hf_osdp import InfeasibleError, PlanningProblem, TrainingJob, describe, preset, search
from hf_osdp.planner.description import DType
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.compare import as_scripts_run
from hf_osdp.planner.training_job import Precision
from hf_osdp.report.plots import check_plot_path, save_chart

GIB = 2**30
LLAMA_3_8B = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192, architectures=["LlamaForCausalLM"],
)  # fmt: skip
QWEN_3_1_7B = Qwen3Config(
    hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    intermediate_size=6144,
    vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
)  # fmt: skip
PLANNED, FSDP, RECOMPUTED, HSDP, DDP = (
    "hf_osdp",
    "FSDP2 as it comes",
    "FSDP2, all recomputed",
    "HSDP, all recomputed",
    "DDP",
)
_BF16 = Precision.named("bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One panel of the figure."""

    title: str
    model: PreTrainedConfig
    device: str
    nodes: int
    devices_per_node: int
    sequence_length: int
    limits_gib: tuple[int, ...]
    global_batch_size: int = 64

    def problem(self) -> PlanningProblem:
        """Return the planner's problem at the highest limit."""
        hardware = preset(self.device, nodes=self.nodes, devices_per_node=self.devices_per_node)
        description = describe(
            self.model, sequence_length=self.sequence_length, device_type="cuda", compute_dtype=DType.BFLOAT16,
            capability=hardware.device.capability,
        )  # fmt: skip
        job = TrainingJob(global_batch_size=self.global_batch_size, precision=_BF16)
        return PlanningProblem(
            description=description, hardware=hardware, job=job, memory_limit_bytes=self.limits_gib[-1] * GIB
        )

    def rows(self) -> Iterator[dict[str, str | int | float]]:
        """Yield each strategy's rate at each limit; a strategy that does not fit yields none."""
        asked = self.problem()
        recomputed = as_scripts_run(asked, recompute=True)
        lines = {
            PLANNED: asked,
            FSDP: replace(as_scripts_run(asked, recompute=False), strategy=Strategy.FSDP),
            RECOMPUTED: replace(recomputed, strategy=Strategy.FSDP),
            HSDP: replace(recomputed, strategy=Strategy.HSDP),
            DDP: replace(recomputed, strategy=Strategy.DDP),
        }
        for name, problem in lines.items():
            for limit in self.limits_gib:
                try:
                    plan = search(replace(problem, memory_limit_bytes=limit * GIB)).plan
                except InfeasibleError:
                    continue
                yield {
                    "case": self.title, "strategy": name, "limit_gib": limit,
                    "peak_gib": round((plan.peak_bytes or 0) / GIB, 2),
                    "micro_batch": plan.micro_batch_size,
                    "tokens_per_s": round((plan.samples_per_s or 0) * self.sequence_length),
                }  # fmt: skip


CASES = (
    Case(
        title="Qwen3-1.7B on two machines of 4 RTX 4090, 10 GbE between them",
        model=QWEN_3_1_7B,
        device="rtx-4090",
        nodes=2,
        devices_per_node=4,
        sequence_length=2048,
        limits_gib=tuple(range(8, 25)),
    ),
    Case(
        title="Llama-3-8B on one machine of 8 A100 80 GB, NVLink",
        model=LLAMA_3_8B,
        device="a100-80",
        nodes=1,
        devices_per_node=8,
        sequence_length=4096,
        limits_gib=tuple(range(20, 81, 4)),
    ),
)
_COLORS = {PLANNED: "#d62728", HSDP: "#9467bd", FSDP: "#1f77b4", RECOMPUTED: "#7f7f7f", DDP: "#2ca02c"}


def chart(rows: list[dict[str, str | int | float]]) -> alt.HConcatChart:
    """Return a chart with one panel per case; each line begins at the lowest limit under which the strategy fits."""
    panels = []
    for case in CASES:
        own = [row for row in rows if row["case"] == case.title]
        limits = [float(row["limit_gib"]) for row in own]
        x = alt.X(
            "limit_gib:Q",
            title="memory limit, GiB of each device",
            scale=alt.Scale(domain=[min(limits), max(limits)], nice=False),
        )
        y = alt.Y("tokens_per_s:Q", title="tokens/s, estimated", axis=alt.Axis(format="~s"))
        present = [name for name in _COLORS if any(row["strategy"] == name for row in own)]
        scale = alt.Scale(domain=present, range=[_COLORS[name] for name in present])
        color = alt.Color(
            "strategy:N", title=None, scale=scale, legend=alt.Legend(orient="bottom", columns=4, labelLimit=300)
        )
        line = alt.Chart({"values": own}).mark_line(interpolate="step-after", strokeWidth=3, point={"size": 40})
        about = f"{case.sequence_length} tokens a sample, {case.global_batch_size} samples a step, bf16, AdamW"
        title = alt.TitleParams(case.title, subtitle=about, anchor="start")
        panels.append(line.encode(x=x, y=y, color=color).properties(width=430, height=280, title=title))
    both = alt.hconcat(*panels, spacing=30)
    return (
        both.configure_axis(labelFontSize=12, titleFontSize=12)
        .configure_legend(labelFontSize=12)
        .configure_view(stroke=None)
    )


def main(arguments: list[str] | None = None) -> None:
    """Search every case, then write the plot and its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot to this .png, .svg or .html file")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="plot the figures of an earlier --csv instead of searching"
    )
    options = parser.parse_args(arguments)
    if options.plot:
        check_plot_path(options.plot)
    if options.read:
        with options.read.open(encoding="utf-8", newline="") as file:
            rows: list[dict[str, str | int | float]] = [dict(row) for row in csv.DictReader(file)]
    else:
        rows = [row for case in CASES for row in case.rows()]
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if options.plot:
        save_chart(chart(rows), options.plot)
    for row in rows:
        print(*row.values(), sep=", ")


if __name__ == "__main__":
    main()
