"""`python -m hf_osdp.run`: scripts that do not know hf_osdp train under a plan as in one process."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import accelerate
import pytest
import torch
import transformers

from tests.helpers.distributed import ROOT, TORCHRUN, run_program, run_ranks
from tests.helpers.hardware import take_preset
from tests.helpers.output import ends_of

NO_FSDP = {"ACCELERATE_USE_FSDP": "false"}
"""An Accelerator of another test may have left it switched on in this process."""
CONFIG = ROOT / "accelerate_configs" / "osdp_cpu.yaml"
MODEL = """
import json, os, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

set_seed(0)
config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=61, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                    bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).double()
rows = torch.randint(0, 61, (32, 12), generator=torch.Generator().manual_seed(3))
folder, batch = sys.argv[1], int(sys.argv[2])
"""  # noqa: E501
TRAINER = """
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

class Own(Seq2SeqTrainer):
    pass

args = Seq2SeqTrainingArguments(output_dir=folder, per_device_train_batch_size=batch, max_steps=4, logging_steps=1, report_to="none",
                                save_strategy="no", disable_tqdm=True, learning_rate=1e-2)
trainer = Own(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    json.dump(losses, open(f"{folder}/losses.json", "w"))
"""  # noqa: E501
LOOP = """
from accelerate import Accelerator
from helper import optimizer_of

def main():
    accelerator = Accelerator(True, cpu=False, project_dir=folder, mixed_precision=None, gradient_accumulation_steps=1)
    optimizer = optimizer_of(model)
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=batch)
    trained, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for data in loader:
        loss = trained(**data).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().double(), "mean").item())
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(trained).save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.end_training()
    if accelerator.is_main_process:
        json.dump(losses, open(f"{folder}/losses.json", "w"))

if __name__ == "__main__":
    main()
"""  # noqa: E501
HELPER = "import torch\n\ndef optimizer_of(model):\n    return torch.optim.AdamW(model.parameters(), lr=1e-2)\n"


@pytest.fixture
def scripts(tmp_path) -> Path:
    for name, text in {"train.py": MODEL + TRAINER, "loop.py": MODEL + LOOP, "helper.py": HELPER}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run_stock(script: str, folder: str) -> None:
    sys.argv = [script, folder, "8"]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def run_main(script: str, folder: str) -> None:
    from hf_osdp import run

    take_preset()
    run.main([script, folder, "4"])


@pytest.mark.parametrize("name", ["train.py", "loop.py"])
def test_unmodified_script_trains_under_a_plan_as_alone(scripts, name):
    losses = {}
    for how, world, more in ((run_main, 2, {}), (run_stock, 1, {"LOCAL_RANK": "-1"})):
        folder = scripts / how.__name__
        folder.mkdir()
        run_ranks(how, world, str(scripts / name), str(folder), init=False, env={**NO_FSDP, **more})
        losses[how] = json.loads((folder / "losses.json").read_text())
    report = json.loads((scripts / "run_main" / "osdp_report.json").read_text())
    assert report["plan"]["world_size"] == 2 and not (scripts / "run_stock" / "osdp_report.json").exists()
    torch.testing.assert_close(losses[run_main], losses[run_stock], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIG, "-m", "hf_osdp.run", "train.py"],
        [*TORCHRUN, "--nproc-per-node", "2", "-m", "hf_osdp.run", "-m", "loop"],
    ],
)
def test_launchers_start_it(scripts, command):
    (scripts / "out").mkdir()
    done = run_program([*command, "out", "4"], cwd=scripts, **NO_FSDP)
    assert done.returncode == 0, ends_of(done.stderr)
    assert json.loads((scripts / "out" / "osdp_report.json").read_text())["plan"]["world_size"] == 2
    assert len(json.loads((scripts / "out" / "losses.json").read_text())) == 4


@pytest.mark.parametrize(
    ("arguments", "variables", "line"),
    [
        ([], {}, "hf_osdp.run needs a script or -m MODULE"),
        (["-m"], {}, "hf_osdp.run needs a script or -m MODULE"),
        (["nowhere.py"], {}, "There is no file nowhere.py"),
        (["train.py"], {"ACCELERATE_USE_DEEPSPEED": "true"}, "The launcher's file asks for DeepSpeed"),
        (["train.py"], {"ACCELERATE_USE_FSDP": "true"}, "The launcher's file asks for FSDP without OSDP"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(scripts, monkeypatch, capsys, arguments, variables, line):
    from hf_osdp import run

    monkeypatch.chdir(scripts)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run.main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"error: {line}") and said.count("\n") == 1


def test_a_class_made_from_the_stock_one_before_is_refused():
    from hf_osdp.run import _replace

    class Stock:
        pass

    class Early(Stock):
        pass

    with pytest.raises(ValueError, match=r"Early was derived from Stock before hf_osdp.run could replace it"):
        _replace(Stock, type("Trainer", (), {}))


OFF = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "{'osdp': False}"}


@pytest.mark.on_ranks(2, init=False, env=OFF)
def test_osdp_false_in_the_launchers_file_changes_nothing(tmp_path):
    from hf_osdp import run

    (tmp_path / "nothing.py").write_text("")
    run.main([str(tmp_path / "nothing.py")])
    assert (transformers.Trainer.__module__, accelerate.Accelerator.__module__) == (
        "transformers.trainer",
        "accelerate.accelerator",
    )
