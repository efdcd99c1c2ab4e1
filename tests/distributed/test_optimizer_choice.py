"""`OSDPConfig(other_optimizers=...)`: the planner takes another optimizer where it is faster or alone fits, and says so."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp.errors import InfeasibleError
from hf_osdp.integrations import trainer_facts
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.job import OptimizerSpec
from hf_osdp.planner.presets import preset
from hf_osdp.planning.choices import OptimizerChoice
from hf_osdp.planning.config import OSDPConfig

from .test_integration_trainer import LENGTH, arguments, tokens

pytest.importorskip("torchao.optim", reason="torchao is not installed; pip install 'hf_osdp[low-bit]'")
EIGHT_BITS = "adamw_torch_8bit"


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=61, n_positions=16))


def trainer_of(folder, osdp: OSDPConfig, cls: type = Trainer, **options) -> Trainer:
    args = arguments(str(folder), per_device_train_batch_size=4, **options)
    return cls(model=gpt2(), args=args, train_dataset=tokens(), osdp=osdp)


def config(**options) -> OSDPConfig:
    hardware = preset("cpu", devices_per_node=int(os.environ.get("WORLD_SIZE", "1")))
    return OSDPConfig(hardware=hardware, compare=False, operator_splitting=False, sequence_length=LENGTH, **options)


def least_bytes(folder, optim: str) -> int:
    with pytest.raises(InfeasibleError) as caught:
        trainer_of(folder, config(memory_limit="1MiB"), optim=optim)
    return caught.value.least_peak_bytes


@pytest.mark.on_ranks(2, init=False)
def test_trainer_takes_the_optimizer_that_fits_and_trains_with_it(tmp_path):
    between = (least_bytes(tmp_path, "adamw_torch") + least_bytes(tmp_path, EIGHT_BITS)) // 2
    trainer = trainer_of(tmp_path, config(memory_limit=between, other_optimizers=EIGHT_BITS), max_steps=1)
    with torch.compiler.set_stance("force_eager"):
        trainer.train()
    assert trainer.plan.peak_bytes <= between
    assert trainer.args.optim == EIGHT_BITS
    assert any(type(value).__name__ == "OptimState8bit" for states in trainer.optimizer.state.values() for value in states.values())
    line = trainer._run.optimizer.line
    assert line.startswith(f"Optimizer: {EIGHT_BITS}, with which a step takes ") and line.endswith("(adamw_torch does not fit).")


def test_the_one_of_the_arguments_stays_where_no_other_is_faster(tmp_path, capfd):
    trainer = trainer_of(tmp_path, config(other_optimizers=(EIGHT_BITS, "sgd"), memory_limit="8GiB"), optim="sgd")
    assert trainer.args.optim == "sgd"
    assert f"({EIGHT_BITS} " in capfd.readouterr().out


def test_what_fits_with_none_is_told_of_the_one_that_needs_least(tmp_path):
    with pytest.raises(InfeasibleError) as caught:
        trainer_of(tmp_path, config(memory_limit="1MiB", other_optimizers=EIGHT_BITS), optim="adamw_torch")
    assert caught.value.least_peak_bytes == least_bytes(tmp_path, EIGHT_BITS)


def test_a_limit_that_states_of_8_bits_meet_names_them(tmp_path):
    limit = least_bytes(tmp_path, EIGHT_BITS)
    with pytest.raises(InfeasibleError, match=f"states of 8 bits \\(optim='{EIGHT_BITS}'\\)"):
        trainer_of(tmp_path, config(memory_limit=limit), optim="adamw_torch")


class OwnOptimizer(Trainer):
    def create_optimizer(self, model=None):
        return super().create_optimizer(model)


def test_where_another_makes_the_optimizer_there_is_no_choice(tmp_path):
    asked = config(other_optimizers=EIGHT_BITS)
    line = f"other_optimizers='{EIGHT_BITS}' needs a Trainer that makes its optimizer from optim=..., which this run does not"
    with pytest.raises(ValueError, match=line):
        trainer_of(tmp_path, asked, OwnOptimizer)
    accelerator = OSDPAccelerator(cpu=True, osdp=asked)
    model = gpt2()
    with pytest.raises(ValueError, match=line):
        accelerator.plan(model, optimizer=torch.optim.AdamW(model.parameters()), global_batch_size=4)


@pytest.mark.parametrize(
    ("names", "line"),
    [("lomo", "optim='lomo' updates while backward runs"), ("adamw8", "optim='adamw8' is not known to work under a plan")],
)
def test_a_name_that_cannot_run_is_refused(tmp_path, names, line):
    with pytest.raises(ValueError, match=line):
        trainer_of(tmp_path, config(other_optimizers=names))


def test_a_restart_keeps_the_optimizer_that_training_began_with(tmp_path):
    trainer = trainer_of(tmp_path, config(memory_limit="8GiB"), optim="adamw_torch")
    spec = OptimizerSpec(name="adamw")

    def choices(begun: str | None) -> list[str]:
        return [name for name, _ in trainer_facts._optimizer_choices(trainer, config(other_optimizers=EIGHT_BITS), spec, begun)]

    assert choices(None) == ["adamw_torch", EIGHT_BITS]
    assert choices("AdamW8bit") == [EIGHT_BITS]
    assert choices("AdamW") == ["adamw_torch"]


def test_lines_of_a_choice():
    both = OptimizerChoice(name="b", step_s=(("a", 2.0), ("b", 1.0)))
    assert both.line == "Optimizer: b, with which a step takes 1.00 s by the estimate (a 2.00 s)."
    alone = replace(both, step_s=(("b", 1.0),))
    assert alone.line == "Optimizer: b, with which a step takes 1.00 s by the estimate, as training began."
