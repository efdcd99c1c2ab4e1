"""What gives the wrong inputs of docs/data/bad_inputs.csv: options, optimizers, models, batches; plans, profiles and
checkpoints, each by what is done to a sound one; and the command line, of hf-osdp and of the recipes.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import GPT2Config
from typer.testing import CliRunner

from hf_osdp.checkpoint.folders import MANIFEST_NAME, FileRecord, Manifest
from hf_osdp.checkpoint.layouts import find_model, find_optimizer, read_weights
from hf_osdp.checkpoint.resume import check_checkpoint, warn_of_changes
from hf_osdp.checkpoint.safe import load_file
from hf_osdp.cli.app import app
from hf_osdp.distributed import process_group
from hf_osdp.distributed.process_group import prepare_group
from hf_osdp.integrations.launch import launch_request
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.integrations.plugin import OSDPPlugin, requested_options
from hf_osdp.modeling.split.operators import split_operators
from hf_osdp.modeling.units import find_units, refuse_changed
from hf_osdp.planner.cost.evaluation import EvaluationLoop
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.optimizers import spec_of_trainer_name
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile, SegmentTimes, SegmentWork, TimePoint, with_block_times
from hf_osdp.planner.search.search import search
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.job import RunFolder
from hf_osdp.preparation.plan_run import check_given_plan
from hf_osdp.preparation.preflight import merged_findings, not_writable, split_ties
from hf_osdp.reading import MOST_BYTES
from hf_osdp.sharding.optimizer import check_optimizer, spec_of_optimizer
from hf_osdp.sharding.optimizer_steps import parameter_names, release_parameters, step_on_shards
from tests.helpers.descriptions import transformer
from tests.helpers.evaluations import evaluation_of
from tests.helpers.models import tiny_model
from tests.helpers.problems import problem

Give = Callable[[], object]
"""Gives a wrong input; raises what the user is told."""
BATCH: dict[str, object] = {"sequence_length": 8, "global_batch_size": 8}


def option(given: str, folder: Path) -> Give:
    """Options as they stand in a script, a mapping or a YAML file."""
    options = eval(f"dict({given})", {"nan": math.nan})
    return lambda: OSDPConfig.from_options(options)


def trainer(given: str, folder: Path) -> Give:
    def asked(osdp: object = None, fsdp_config: dict[str, object] | None = None) -> object:
        fsdp = {"fsdp": [], "fsdp_plugin_args": None, "fsdp_config": fsdp_config, "torch_compile": False}
        return OSDPPlugin(osdp=requested_options(osdp, SimpleNamespace(**fsdp)) or {})

    return lambda: eval(given, {"Trainer": asked, "TrainingArguments": asked})


def plain_loop(given: str, folder: Path) -> Give:
    names = {
        "OptimalShardedDataParallel": OptimalShardedDataParallel, "model": tiny_model("gpt2"), "config": BATCH,
        "Linear": nn.Linear,
        "OSDPConfig": lambda *_, **options: {**BATCH, **options}, "AdamW": lambda *_: torch.optim.AdamW(weights()),
    }  # fmt: skip
    return lambda: eval(given, names)


TWO = {
    "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}  # fmt: skip


def launched(given: str, folder: Path) -> Give:
    """A key of accelerate's configuration file, which becomes a variable, or a variable of a launcher or a user."""
    if ": " in given:
        name, value = given.split(": ", 1)
        usual = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "{'osdp': True}"}
        return lambda: launch_request({**usual, name.upper(): value}).plan_options
    name, value = given.split("=")

    def read() -> None:
        with mock.patch.dict(os.environ, {**TWO, name: value}), mock.patch.object(process_group, "_NAME_S", 0):
            prepare_group()

    return read


class Noisy(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=-0.1)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


def released(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    release_parameters(optimizer, parameter_names(model))


def with_state() -> None:
    layer = nn.Linear(4, 4)
    used = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    used.step()
    released(used, layer)


def of_slices() -> None:
    model = tiny_model("gpt2")
    split_operators(model, [OperatorSplit(fqn="transformer.h.0.mlp.c_fc", slices=2)])
    step_on_shards(torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]), model)


def untied() -> nn.Module:
    loose = tiny_model("gpt2")
    loose.lm_head.weight = nn.Parameter(loose.lm_head.weight.detach().clone())
    return loose


OPTIMIZERS: dict[str, Give] = {
    "torch.optim.Muon(...) beside an operator in slices": of_slices,
    "torch.optim.LBFGS(...)": lambda: spec_of_optimizer(torch.optim.LBFGS(weights()), device_type="cpu"),
    "an optimizer of one's own that adds noise": lambda: check_optimizer(Noisy(weights(), {})),
    "an optimizer of another model": lambda: released(torch.optim.AdamW(weights()), nn.Linear(4, 4)),
    "an optimizer that took steps before sharding": with_state,
}


def too_large_evaluation() -> object:
    fitted = evaluation_of(world=1, outputs=2**20)
    loop = EvaluationLoop(batch_size=8, micro_batch_size=8, keeps_outputs=True, moved_after=8, samples=64)
    return replace(fitted, room_bytes=fitted.model.peak(replace(loop, moved_after=2))[0]).of(loop)


MODELS: dict[str, Give] = {
    'block_classes="LlamaDecoderLayer" for GPT-2': lambda: find_units(tiny_model("gpt2"), ["LlamaDecoderLayer"]),
    "parameters of complex numbers": lambda: find_units(nn.Sequential(*2 * [nn.Linear(2, 2, dtype=torch.complex64)])),
    "a head that was replaced, and tie_word_embeddings=True": lambda: merged_findings([split_ties(untied())]),
    "global_batch_size=33 on 4 processes": lambda: TrainingJob(global_batch_size=33).micro_batch_sizes(4),
    "micro_batch_size=5 of 8 samples": lambda: TrainingJob(
        global_batch_size=32, micro_batch_size=5).micro_batch_sizes(4),
    'mixed_precision="fp8"': lambda: Precision.named("fp8"),
    'hardware="abacus"': lambda: preset("abacus"),
    "an evaluation that keeps logits of batches that do not fit": too_large_evaluation,
    "memory_limit=4KiB": lambda: search(
        problem(transformer(), preset("cpu", devices_per_node=2), TrainingJob(global_batch_size=2), 4096)
    ),
}  # fmt: skip
FOLDERS = {
    "output_dir, which is a file": "out", "output_dir below a file": "out/run",
    "output_dir on a disk that takes no files": "/proc/run",
}  # fmt: skip


def output_folder(given: str, folder: Path) -> Give:
    """Where a run is to write."""
    (folder / "out").write_text("mine")
    return lambda: merged_findings([not_writable(RunFolder(path=folder / FOLDERS[given]))])


def optimizer(given: str, folder: Path) -> Give:
    return OPTIMIZERS.get(given) or (lambda: spec_of_trainer_name(given.split('"')[1], device_type="cpu"))


Change = Callable[[Any], object] | str | bytes | int | None
"""Of sound JSON, or what a file holds in its place: text, bytes, so many zero bytes; None is no file."""


@cache
def description() -> ModelDescription:
    return transformer()


FOUR = preset("cpu", devices_per_node=4)


@cache
def plan() -> Plan:
    """Of four processes."""
    return search(problem(description(), FOUR, TrainingJob(global_batch_size=8), 2**33)).plan


def unsigned_plan() -> dict[str, Any]:
    """Its JSON without the fingerprint."""
    return {name: value for name, value in json.loads(plan().to_json()).items() if name != "fingerprint"}


@cache
def profile() -> Profile:
    """With times of one segment, of another model."""
    other = transformer(hidden=32)
    times = SegmentTimes(
        class_name=other.units[1].class_name, parameter_shapes=tuple(p.shape for p in other.units[1].parameters),
        sequence_length=other.sequence_length, compute_dtype=DType.FLOAT32, work=SegmentWork.of(other.segments[0]),
        points=(TimePoint(samples=1, forward_s=1.0, backward_s=2.0),),
    )  # fmt: skip
    return Profile(hardware=FOUR, segments=(times,))


def write(path: Path, content: Any, change: Change) -> None:
    """Write sound content after a change, or what stands in its place."""
    match change:
        case None:
            return
        case int():
            with path.open("wb") as file:
                file.truncate(change)
        case str() | bytes():
            path.write_bytes(change if isinstance(change, bytes) else change.encode())
        case _:
            change(content)
            path.write_text(json.dumps(content))


def set_to(name: str, value: object) -> Change:
    return lambda content: content.update({name: value})


ANY_FILES: dict[str, Change] = {
    "no such file": None, "another version": set_to("version", 99), "an unknown key": set_to("colour", "red"),
}  # fmt: skip
PLAN_FILES: dict[str, Change] = {
    **ANY_FILES, "an empty file": "", "a file that was cut short": '{"world_size": 4, "units": [', "a list": "[]",
    "bytes that are no text": b"\x89PNG\xff", f"a file of {MOST_BYTES + 1} bytes": MOST_BYTES + 1,
    "brackets without end": "[" * 5000, "a key that stands twice": '{"world_size": 4, "world_size": 8}',
    "a missing key": lambda content: content.pop("units"), "a text in place of a number": set_to("world_size", "4"),
    "NaN": set_to("step_s", float("nan")), "1e400": '{"step_s": 1e400}', "world_size 0": set_to("world_size", 0),
    "a negative peak": set_to("peak_bytes", -1),
    "a group of 3 of 4 ranks": lambda content: content["units"][2].update(shard_size=3),
    "a unit that stands twice": lambda content: content["units"].append(content["units"][2]),
    "an edited plan with its old fingerprint": set_to("fingerprint", "0123456789abcdef"),
}  # fmt: skip


def beside_plan(**options: object) -> None:
    check_given_plan(plan(), OSDPConfig(**options), plan().peak_bytes)


def frozen_later() -> None:
    model = tiny_model("gpt2")
    units = find_units(model)
    refuse_changed(model.requires_grad_(False), units)


OTHER_RUNS: dict[str, Give] = {
    "4 processes' plan on 2": lambda: plan().check(description(), 2),
    "a plan of a model with other units": lambda: plan().check(transformer(layers=5), 4),
    "a plan of a model with other shapes": lambda: plan().check(transformer(hidden=32), 4),
    "global_batch_size=16 beside a plan of 8": lambda: beside_plan(global_batch_size=16),
    "samples of 64 tokens beside a plan of 32": lambda: beside_plan(sequence_length=64),
    "memory_limit=1MiB beside a plan of more": lambda: beside_plan(memory_limit=2**20),
    "a model that was frozen after it was planned": frozen_later,
}
PROFILES: dict[str, Change] = {
    **ANY_FILES,
    "a file that was cut short": '{"hardware": ',
    "a bandwidth of 0": lambda content: content["hardware"]["device"].update(memory_bytes_per_s=0.0),
    "nodes of no devices": lambda content: content["hardware"].update(devices_per_node=0),
}


def plan_file(given: str, folder: Path) -> Give:
    write(folder / "plan.json", unsigned_plan(), PLAN_FILES[given])
    return lambda: Plan.load(folder / "plan.json")


def profile_file(given: str, folder: Path) -> Give:
    if given == "a profile of another model":
        return lambda: with_block_times(description(), profile())
    write(folder / "profile.json", json.loads(profile().to_json()), PROFILES[given])
    return lambda: Profile.load(folder / "profile.json")


class Opens:
    """Unpickled, it would run something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/nowhere/at/all",))


OUTSIDE = {"../../secret": {"size": 1, "crc32": 1}}
ALPHA = "adapter default's lora_alpha"
FILES_OF_CHECKPOINTS: dict[str, tuple[str, Change]] = {
    "a file that was cut short": ("model.bin", b"wei"),
    "a file with a changed byte": ("model.bin", b"Weights"),
    "a manifest that was cut short": (MANIFEST_NAME, '{"format": 1'),
    "a manifest of a later version": (MANIFEST_NAME, set_to("format", 99)),
    "a manifest that names a file outside": (MANIFEST_NAME, lambda manifest: manifest["files"].update(OUTSIDE)),
    "model.safetensors of other content": ("model.safetensors", b"no tensors"),
    "adapters with another lora_alpha": (MANIFEST_NAME, set_to("settings", {ALPHA: "8"})),
}
READERS: dict[str, Callable[[Path], object]] = {
    "resume_from_checkpoint, which is not there": lambda inside: check_checkpoint(inside / "no"),
    "adapters with another lora_alpha": lambda inside: warn_of_changes(inside, {ALPHA: "16"}, None),
    "a folder without weights": find_model,
    "a folder without optimizer states": find_optimizer,
    "a pickle that would run something": lambda inside: load_file(inside / "optimizer.bin"),
    "model.safetensors of other content": lambda inside: read_weights(find_model(inside)),
}


def checkpoint(given: str, folder: Path) -> Give:
    """A checkpoint of one file, after a damage."""
    inside = folder / "checkpoint-30"
    inside.mkdir()
    (inside / "model.bin").write_bytes(b"weights")
    manifest = json.loads(Manifest(files={"model.bin": FileRecord.of(inside / "model.bin")}, world_size=2).to_json())
    (inside / MANIFEST_NAME).write_text(json.dumps(manifest))
    if given == "a file that is missing":
        (inside / "model.bin").unlink()
    if given == "a pickle that would run something":
        torch.save({"state": Opens()}, inside / "optimizer.bin")
    if given in FILES_OF_CHECKPOINTS:
        name, change = FILES_OF_CHECKPOINTS[given]
        write(inside / name, manifest, change)
    return lambda: READERS.get(given, check_checkpoint)(inside)


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
    words = _written(given, folder).replace("SIZES", SIZES).replace("DEVICES", DEVICES).split()[1:]
    GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500, n_positions=64).save_pretrained(folder / "model")
    (folder / "lengths.txt").write_text("8\n99\n")

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


SECTIONS: dict[str, Callable[[str, Path], Give]] = {
    "Options of OSDPConfig": option, "Trainer": trainer, "Plain loops": plain_loop, "Launchers": launched,
    "Optimizers": optimizer, "Models and batches": lambda given, folder: MODELS[given],
    "Output folders": output_folder, "Plan files": plan_file, "Profiles": profile_file, "Checkpoints": checkpoint,
    "Plans of another run": lambda given, folder: OTHER_RUNS[given], "The command line": command, "Recipes": recipe,
}  # fmt: skip
"""By the section of a row: what prepares a folder for a wrong input, and returns what gives it."""
