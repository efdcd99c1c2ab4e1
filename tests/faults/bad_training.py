"""Bad optimizers, models, batches and output folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_osdp.integrations.optimizers import spec_of_optimizer, spec_of_trainer_name
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import search
from hf_osdp.planning.preflight.checks import RunFolder, not_writable, refuse_errors
from hf_osdp.planning.preflight.run import check_model
from hf_osdp.sharding.optimizer import parameter_names, release_parameters
from hf_osdp.sharding.optimizer_check import check_optimizer
from tests.helpers.descriptions import transformer
from tests.helpers.models import tiny_model
from tests.helpers.problems import problem

from .bad_inputs import BadInput, raised

CASES: list[BadInput] = []


def case(place: str, given: str, names: str, line: str, do: Callable[[Path], object], **more: Any) -> None:
    """Something that raises."""
    CASES.append(BadInput(place=place, given=given, names=names, line=line, said=raised(do), **more))


class TrustRatio(torch.optim.Optimizer):
    """Scales by norms, under a name that says nothing of it."""

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad * (parameter.norm() / parameter.grad.norm()), alpha=-0.1)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


def of_another_model() -> None:
    release_parameters(torch.optim.AdamW(weights()), parameter_names(nn.Linear(4, 4)))


def with_state() -> None:
    layer = nn.Linear(4, 4)
    used = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    used.step()
    release_parameters(used, parameter_names(layer))


def optimizer(given: str, names: str, line: str, do: Callable[[], object]) -> None:
    """An optimizer that cannot be used."""
    case("Optimizers", given, names, line, lambda folder: do())


optimizer(
    'TrainingArguments(optim="adafactor")',
    "'adafactor'",
    "optim='adafactor' factors a parameter's second moment over its rows and columns, which shards of a parameter "
    "do not allow; use one of adamw_torch, adamw_torch_fused, sgd, adagrad, rmsprop.",
    lambda: spec_of_trainer_name("adafactor", device_type="cpu"),
)
optimizer(
    'TrainingArguments(optim="adamw_bnb_8bit")',
    "'adamw_bnb_8bit'",
    "optim='adamw_bnb_8bit' holds its states in blocks that are quantized together, which shards of a parameter do "
    "not allow; use one of adamw_torch, adamw_torch_fused, sgd, adagrad, rmsprop.",
    lambda: spec_of_trainer_name("adamw_bnb_8bit", device_type="cpu"),
)
optimizer(
    'TrainingArguments(optim="schedule_free_adamw")',
    "'schedule_free_adamw'",
    "optim='schedule_free_adamw' is not known to work on sharded parameters; use one of adamw_torch, "
    "adamw_torch_fused, sgd, adagrad, rmsprop.",
    lambda: spec_of_trainer_name("schedule_free_adamw", device_type="cpu"),
)
optimizer(
    "torch.optim.Muon(...)",
    "Muon",
    "Muon orthogonalises each whole matrix, which shards of a parameter do not allow; use an element-wise optimizer"
    " such as AdamW, Adam, SGD or RMSprop.",
    lambda: check_optimizer(torch.optim.Muon(weights())),
)
optimizer(
    "torch.optim.LBFGS(...)",
    "LBFGS",
    "The memory of the optimizer LBFGS is not known; use one of torch.optim's adadelta, adagrad, adam, adamax, "
    "adamw, nadam, radam, rmsprop, sgd.",
    lambda: spec_of_optimizer(torch.optim.LBFGS(weights()), device_type="cpu"),
)
optimizer(
    "an optimizer of one's own that takes norms of parameters",
    "TrustRatio",
    "TrustRatio is not element-wise: two steps on a matrix and on its shards differ by ‹n› % of the update; use an "
    "element-wise optimizer such as AdamW, Adam, SGD or RMSprop.",
    lambda: check_optimizer(TrustRatio(weights(), {})),
)
optimizer(
    "an optimizer of another model",
    "(4, 4)",
    "The optimizer holds a parameter of shape (4, 4) that the model does not have; make it from model.parameters(), and where a"
    " loss has parameters of its own, make it a module of the model.",
    of_another_model,
)
optimizer(
    "an optimizer that took steps before sharding",
    "AdamW",
    "AdamW has state from before the model was sharded: it has taken steps, or makes state when it is made; "
    "make it from the sharded model's parameters, or give a new AdamW, Adam, SGD or RMSprop.",
    with_state,
)


def model(given: str, names: str, line: str, do: Callable[[], object]) -> None:
    """A model that cannot be trained."""
    case("Models and batches", given, names, line, lambda folder: do())


def untied() -> nn.Module:
    loose = tiny_model("gpt2")
    loose.lm_head.weight = nn.Parameter(loose.lm_head.weight.detach().clone())
    return loose


model(
    'block_classes="LlamaDecoderLayer" for GPT-2',
    "LlamaDecoderLayer",
    "block_classes (LlamaDecoderLayer) match nothing in GPT2LMHeadModel; use one of its classes: ‹classes›.",
    lambda: find_units(tiny_model("gpt2"), ["LlamaDecoderLayer"]),
)
model(
    "parameters of complex numbers",
    "torch.complex64",
    "Parameters of torch.complex64 cannot be planned (known: float64, float32, bfloat16, float16, int64, int32, "
    "int16, int8, uint8, bool); convert them first.",
    lambda: find_units(nn.Sequential(*(nn.Linear(2, 2, dtype=torch.complex64) for _ in range(2)))),
)
model(
    "a head that was replaced, and tie_word_embeddings=True",
    "lm_head.weight",
    "The configuration ties lm_head.weight to transformer.wte.weight, but the model has two parameters: they would "
    "be trained apart, and a saved model is loaded with one of them. Call model.tie_weights(), or set "
    "config.tie_word_embeddings=False.",
    lambda: check_model(untied()),
)
model(
    "model.requires_grad_(False)",
    "52 parameters",
    "All 52 parameters are frozen: there is nothing to train; set requires_grad=True on some of them.",
    lambda: check_model(tiny_model("gpt2").requires_grad_(False)),
)
model(
    "global_batch_size=33 on 4 processes",
    "=33",
    "global_batch_size=33 does not divide by 4 processes; use 32 or 36.",
    lambda: TrainingJob(global_batch_size=33).micro_batch_sizes(4),
)
model(
    "micro_batch_size=5 of 8 samples",
    "=5",
    "micro_batch_size=5 does not divide the 8 samples of each rank (global_batch_size=32 over 4 processes); use a divisor of 8, or None.",
    lambda: TrainingJob(global_batch_size=32, micro_batch_size=5).micro_batch_sizes(4),
)
model('mixed_precision="fp8"', "'fp8'", "mixed_precision='fp8' is not known; use no, bf16 or fp16.", lambda: Precision.named("fp8"))
model(
    'hardware="abacus"',
    "'abacus'",
    "Hardware 'abacus' is not known; use one of ‹names›, or measure this machine.",
    lambda: preset("abacus"),
)
model(
    "memory_limit=4KiB",
    "4.0 KiB",
    "No plan fits 4.0 KiB per device: the least that osdp needs on 2 devices is ‹bytes›, at micro-batch size ‹b› in"
    " ‹moment› of ‹unit› (‹largest parts›). Use a memory limit of ‹bytes›.",
    lambda: search(problem(transformer(), preset("cpu", devices_per_node=2), TrainingJob(global_batch_size=2), 4096)),
)


# ---------------------------------------------------------------------------------------------------------------- folders


def folder_of_run(given: str, names: str, line: str, name: str, prepare: Callable[[Path], object] = lambda folder: None) -> None:
    """Where a run is to write."""

    def do(folder: Path) -> None:
        found = not_writable(RunFolder(path=folder / name))
        refuse_errors([] if found is None else [found])

    case("Output folders", given, names, line, do, prepare=prepare)


folder_of_run(
    "output_dir, which is a file",
    "FOLDER/out",
    "Output folder FOLDER/out is a file; give a folder that can be written.",
    "out",
    lambda folder: (folder / "out").write_text("mine"),
)
folder_of_run(
    "output_dir below a file",
    "FOLDER/out/run",
    "Output folder FOLDER/out/run: FOLDER/out is a file; give a folder that can be written.",
    "out/run",
    lambda folder: (folder / "out").write_text("mine"),
)
folder_of_run(
    "output_dir on a disk that takes no files",
    "/proc",
    "Output folder /proc/run: /proc cannot be written (‹reason›); give a folder that can be written.",
    "/proc/run",
)
