"""Bad input on the command line: of hf-osdp, and of the recipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from hf_osdp.cli.app import app

from .bad_inputs import BadInput, NotRefused, raised

CASES: list[BadInput] = []
RECIPES = Path(__file__).parents[2] / "recipes"
SIZES = "--sequence-length 16 --global-batch-size 32"
DEVICES = "--device titan-rtx --devices-per-node 4"


def small_model(folder: Path) -> None:
    """A configuration, without weights."""
    from transformers import GPT2Config

    GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500, n_positions=64).save_pretrained(folder / "model")


def command(names: str, line: str, text: str, prepare: Callable[[Path], object] = small_model, *, beside: str = "") -> None:
    """A command that ends with one line on stderr, nothing on stdout, and exit code 1 where nothing fits, else 2."""

    def said(folder: Path) -> str:
        with _inside(folder):
            done = CliRunner().invoke(app, text.split())
        if done.exit_code not in (1, 2) or done.stdout or not done.stderr.startswith("hf-osdp: ") or not done.stderr.endswith("\n"):
            raise NotRefused(f"exit code {done.exit_code}, stdout {done.stdout!r}, stderr {done.stderr!r}") from done.exception
        return done.stderr.removeprefix("hf-osdp: ").removesuffix("\n")

    shown = text.replace(f" {SIZES}", "")
    shown = shown if "--profile" in shown else shown.replace(f" {DEVICES}", "")  # the two together are what is wrong
    CASES.append(BadInput(place="The command line", given=f"hf-osdp {shown}{beside}", names=names, line=line, said=said, prepare=prepare))


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def configuration(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(content)


command("'pln'", "No such command 'pln'‹...› hf-osdp --help says what there is.", "pln model")
command("--memory", "No such option‹...›--memory‹...› hf-osdp --help says what there is.", f"plan model {SIZES} --memory 8GiB")
command(
    "'--global-batch-size'", "Missing option '--global-batch-size'; hf-osdp --help says what there is.", "plan model --sequence-length 16"
)
command(
    "--sequence-length 0",
    "--sequence-length 0‹rule›; hf-osdp --help says what there is.",
    "plan model --sequence-length 0 --global-batch-size 8",
)
command(
    "fp8",
    "--precision fp8 is not one of 'no', 'bf16', 'fp16'; hf-osdp --help says what there is.",
    f"plan model {SIZES} {DEVICES} --precision fp8",
)
command("--device", "Neither was given: use either --device with one of ‹names›, or --profile FILE.", f"plan model {SIZES}")
command("'abacus'", "Hardware 'abacus' is not known; use one of ‹names›, or measure this machine.", f"plan model {SIZES} --device abacus")
command(
    "--profile",
    "Both were given: use either --device with one of ‹names›, or --profile FILE.",
    f"plan model {SIZES} {DEVICES} --profile p.json",
)
command(
    "p.json",
    "Cannot read the profile p.json: No such file or directory; give a file that can be read.",
    f"plan model {SIZES} --profile p.json",
)
command(
    "'8GB?'",
    "--memory-limit='8GB?' is not a number of bytes; write it as bytes or with a unit, for example 8GiB or 500MB.",
    f"plan model {SIZES} {DEVICES} --memory-limit 8GB?",
)
command(
    "'-1'",
    "--memory-limit='-1' is not a number of bytes; write it as bytes or with a unit, for example 8GiB or 500MB.",
    f"plan model {SIZES} {DEVICES} --memory-limit=-1",
)
command(
    "1TiB",
    "--memory-limit 1TiB is more than the 24.0 GiB of TITAN RTX; use at most 25769803776 bytes, or leave it out for all of them.",
    f"plan model {SIZES} {DEVICES} --memory-limit 1TiB",
)
command(
    "100.0 KiB",
    "No plan fits 100.0 KiB per device: the least that osdp needs on 1 device is ‹bytes›, at micro-batch size ‹b› "
    "in ‹moment› of ‹unit› (‹largest parts›). Use a memory limit of ‹bytes›.",
    f"plan model {SIZES} --device cpu --memory-limit 100KiB --activation-checkpointing",
)
command(
    "=5",
    "micro_batch_size=5 does not divide the 8 samples of each rank (global_batch_size=32 over 4 processes); use a divisor of 8, or None.",
    f"plan model {SIZES} {DEVICES} --micro-batch-size 5",
)
command(
    "=32",
    "global_batch_size=32 does not divide by 5 processes; use 30 or 35.",
    f"plan model {SIZES} --device titan-rtx --devices-per-node 5",
)
command(
    "hsdp",
    "strategy=hsdp needs a group size between 1 and 1, the number of devices, that divides it, and there is none; use fsdp or ddp.",
    f"plan model {SIZES} --device cpu --strategy hsdp --activation-checkpointing",
)
command(
    "float16",
    "The float16 rate of CPU is not known (known: float32, float64, bfloat16); use one of those or measure it.",
    f"plan model {SIZES} --device cpu --precision fp16",
)
command(
    "=65",
    "sequence_length=65 is more than the 64 positions that GPT2LMHeadModel has (max_position_embeddings=64); use at"
    " most 64, or a configuration with more.",
    f"plan model --sequence-length 65 --global-batch-size 32 {DEVICES}",
)
command(
    "LlamaDecoderLayer",
    "block_classes (LlamaDecoderLayer) match nothing in GPT2LMHeadModel; use one of its classes: ‹classes›.",
    f"plan model {SIZES} {DEVICES} --block-classes LlamaDecoderLayer",
)
command(
    "'AutoModelForNothing'",
    "transformers has no class 'AutoModelForNothing'; use for example AutoModelForCausalLM.",
    f"plan model {SIZES} {DEVICES} --auto-class AutoModelForNothing",
)
command(
    "--lora-targets",
    "--lora-targets c_attn has no effect without --lora-rank; give both, or neither.",
    f"plan model {SIZES} {DEVICES} --lora-targets c_attn",
)
command(
    "no/such/plan.json",
    "--output no/such/plan.json: there is no folder 'no/such'; make it, or name another.",
    f"plan model {SIZES} {DEVICES} --output no/such/plan.json",
)
command("plan.pdf", "Plot file 'plan.pdf' ends in '.pdf'; use one of .png, .svg, .html.", f"plan model {SIZES} {DEVICES} --plot plan.pdf")
command(
    "'none.json'",
    "MODEL 'none.json': there is no such file or folder; give a config.json, a folder that has one, or a hub id.",
    f"plan none.json {SIZES} {DEVICES}",
)
command(
    "'config.json'",
    "MODEL 'config.json' has no configuration that transformers can read: ‹reason›.",
    f"plan config.json {SIZES} {DEVICES}",
    configuration("{"),
    beside=", cut short",
)
command(
    "model_type",
    "MODEL 'config.json' has no configuration that transformers can read: ‹reason›.",
    f"plan config.json {SIZES} {DEVICES}",
    configuration("{}"),
    beside=", which is empty",
)
command(
    "63",
    "AutoModelForCausalLM cannot be built from GPT2Config: ‹reason with 63›. Pass auto_class, or the model itself.",
    f"plan config.json {SIZES} {DEVICES}",
    configuration('{"model_type": "gpt2", "n_layer": 2, "n_embd": 63, "n_head": 4}'),
    beside=", of 4 heads and 63 columns",
)
command("plan.json", "Cannot read the plan plan.json: No such file or directory; give a file that can be read.", "explain plan.json")
command(
    "plan.json",
    "plan.json holds a list, not a plan. Write it again with Plan.save.",
    "explain plan.json",
    lambda folder: (folder / "plan.json").write_text("[]"),
    beside=", a list",
)
command(
    "'1,x'",
    "--micro-batch-sizes '1,x' must be whole numbers of at least 1 with commas between, for example 1,2,4.",
    "profile model --output p.json --micro-batch-sizes 1,x",
)
command(
    "--save-total-limit 2",
    "--save-total-limit 2 has no effect without --output-dir; give both, or neither.",
    f"doctor model {SIZES} {DEVICES} --save-total-limit 2",
)
command("checkpoint-30", "There is no checkpoint checkpoint-30; give the path of one.", "convert checkpoint-30 out --to whole")


def recipe(names: str, line: str, flags: str, files: dict[str, str] | None = None) -> None:
    """Arguments of a recipe, which prints `error: ` and the line."""

    def prepare(folder: Path) -> None:
        for name, content in (files or {}).items():
            (folder / name).write_text(content)

    def parse(folder: Path) -> object:
        sys.path.insert(0, str(RECIPES))
        try:
            from recipe_arguments import DataArguments, MaskedModelArguments, OSDPArguments, parse_arguments
            from transformers import TrainingArguments

            argv = [str(folder / flag) if flag in (files or {}) else flag for flag in flags.split()]
            return parse_arguments((MaskedModelArguments, DataArguments, OSDPArguments, TrainingArguments), argv)
        finally:
            sys.path.remove(str(RECIPES))

    shown = flags if not files else f"{flags}, with {'; '.join(files.values())}"
    CASES.append(BadInput(place="Recipes", given=shown, names=names, line=line, said=raised(parse), prepare=prepare))


recipe("'--memorylimit'", "Some specified arguments are not used by the ‹parser›: ['--memorylimit', '8GiB']", "--memorylimit 8GiB")
recipe("'fast'", "argument ‹--learning_rate›: invalid float value: 'fast'", "--learning_rate fast")
recipe("=10", "vocab_size=10 is too small for byte-level text; use at least 257.", "--vocab_size 10")
recipe("=2.0", "mlm_probability=2.0 must lie between 0 and 1; BERT has 0.15.", "--mlm_probability 2")
recipe("=100", "validation_split_percentage=100 must be between 1 and 99.", "--validation_split_percentage 100")
recipe("=0", "block_size=0 must be at least 1.", "--block_size 0")
recipe("dataset_name", "Both dataset_name and train_file were given; choose one.", "--dataset_name a --train_file b.txt")
recipe("'rings'", "grouping='rings' is not known; use one of group_sharding, communication_with_groups, none.", "--grouping rings")
recipe(
    "grouping=none",
    "grouping=none is strategy fsdp, so strategy=ddp cannot stand beside it; leave one of the two out.",
    "--grouping none --strategy ddp",
)
recipe("lora_targets", "lora_alpha and lora_targets need lora_rank beside them.", "--lora_targets c_attn")
recipe("run.yaml", "FOLDER/run.yaml holds a list; it must map argument names to values.", "run.yaml", {"run.yaml": "- a list"})
recipe(
    "speed",
    "FOLDER/run.yaml has unknown keys speed; known are ‹names› and those of TrainingArguments.",
    "run.yaml",
    {"run.yaml": "speed: 9"},
)
recipe(
    "max_steps: ['many']",
    "FOLDER/run.yaml has max_steps: ['many'], but it takes a whole number.",
    "run.yaml",
    {"run.yaml": "max_steps: [many]"},
)
recipe(
    "line 1",
    "FOLDER/run.yaml is not YAML (line 1, column 14: expected the node content, but found '<stream end>').",
    "run.yaml",
    {"run.yaml": "vocab_size: {"},
)
