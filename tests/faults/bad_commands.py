"""Wrong input on the command line: of hf-osdp, and of the recipes."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from hf_osdp.cli.app import app

from .bad_files import Give

RECIPES = Path(__file__).parents[2] / "recipes"
SIZES, DEVICES = "--sequence-length 16 --global-batch-size 32", "--device titan-rtx --devices-per-node 4"


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder; recipes can be imported."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(RECIPES))
    try:
        yield
    finally:
        sys.path.remove(str(RECIPES))
        os.chdir(before)


def _written(given: str, folder: Path) -> str:
    """Write the file that stands behind `, with NAME: CONTENT`. Returns what stands before."""
    words, _, file = given.partition(", with ")
    if file:
        name, content = file.split(": ", 1)
        (folder / name).write_text(content)
    return words


def command(given: str, folder: Path) -> Give:
    """A command that ends with one line on stderr, nothing on stdout, and exit code 1 where nothing fits, else 2."""
    from transformers import GPT2Config

    words = _written(given, folder).replace("SIZES", SIZES).replace("DEVICES", DEVICES).split()[1:]
    GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500, n_positions=64).save_pretrained(folder / "model")

    def run() -> None:
        with _inside(folder):
            done = CliRunner().invoke(app, words)
        said = re.fullmatch(r"hf-osdp: (.*)\n", done.stderr, re.DOTALL)
        if done.exit_code not in (1, 2) or done.stdout or not said:
            raise AssertionError(f"exit code {done.exit_code}, {done.stdout!r}, {done.stderr!r}") from done.exception
        raise ValueError(said[1])

    return run


def recipe(given: str, folder: Path) -> Give:
    """Arguments of a recipe, which prints `error: ` and the line."""
    words = _written(given, folder)

    def parse() -> object:
        with _inside(folder):
            module = importlib.import_module("run_mlm" if "--grouping" in words or "--mlm" in words else "run_clm")
            argv = [str(folder / word) if (folder / word).exists() else word for word in words.split()]
            kinds = (module.ModelArguments, module.DataArguments, module.TrainingArguments)
            model_args, *_, options = module.parse_arguments(kinds, argv)
            return module.with_grouping(model_args.grouping, options) if "--grouping" in words else options

    return parse


SECTIONS = {"The command line": command, "Recipes": recipe}
