"""Wrong options of OSDPConfig, the Trainer, loops and launchers; optimizers, models, batches and output folders."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from hf_osdp.distributed.process_group import prepare_group
from hf_osdp.integrations.launch import launch_request
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.integrations.trainer_arguments import requested_config
from hf_osdp.modeling.split.operators import split_operators
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.optimizers import spec_of_trainer_name
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import search
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.job import RunFolder
from hf_osdp.preparation.preflight import merged_findings, not_writable, split_ties
from hf_osdp.sharding.optimizer import check_optimizer, spec_of_optimizer
from hf_osdp.sharding.optimizer_steps import parameter_names, release_parameters, step_on_shards
from tests.helpers.descriptions import transformer
from tests.helpers.models import tiny_model
from tests.helpers.problems import problem

from .bad_files import Give

BATCH: dict[str, object] = {"sequence_length": 8, "global_batch_size": 8}


def option(given: str, folder: Path) -> Give:
    """Options as they stand in a script, a mapping or a YAML file."""
    options = eval(f"dict({given})", {"nan": math.nan})
    return lambda: OSDPConfig.from_options(options)


def trainer(given: str, folder: Path) -> Give:
    def asked(osdp: object = None, fsdp_config: dict[str, object] | None = None) -> object:
        fsdp = {"fsdp": [], "fsdp_plugin_args": None, "fsdp_config": fsdp_config}
        return requested_config(osdp, SimpleNamespace(**fsdp, torch_compile=False))

    return lambda: eval(given, {"Trainer": asked, "TrainingArguments": asked})


def plain_loop(given: str, folder: Path) -> Give:
    names = {
        "OptimalShardedDataParallel": OptimalShardedDataParallel, "model": nn.Linear(2, 2), "config": BATCH,
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
        with mock.patch.dict(os.environ, {**TWO, name: value}):
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
MODELS: dict[str, Give] = {
    'block_classes="LlamaDecoderLayer" for GPT-2': lambda: find_units(tiny_model("gpt2"), ["LlamaDecoderLayer"]),
    "parameters of complex numbers": lambda: find_units(nn.Sequential(*2 * [nn.Linear(2, 2, dtype=torch.complex64)])),
    "a head that was replaced, and tie_word_embeddings=True": lambda: merged_findings([split_ties(untied())]),
    "global_batch_size=33 on 4 processes": lambda: TrainingJob(global_batch_size=33).micro_batch_sizes(4),
    "micro_batch_size=5 of 8 samples": lambda: TrainingJob(
        global_batch_size=32, micro_batch_size=5).micro_batch_sizes(4),
    'mixed_precision="fp8"': lambda: Precision.named("fp8"),
    'hardware="abacus"': lambda: preset("abacus"),
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


SECTIONS: dict[str, Any] = {
    "Options of OSDPConfig": option, "Trainer": trainer, "Plain loops": plain_loop, "Launchers": launched,
    "Optimizers": optimizer, "Models and batches": lambda given, folder: MODELS[given],
    "Output folders": output_folder,
}  # fmt: skip
