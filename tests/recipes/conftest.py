"""Runs the recipes as a person does: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = "n_layer=2,n_head=2,n_embd=32,n_positions=32,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"


class Recipe:
    """`run_clm.py` with flags that make it small."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.output = folder / "out"

    def arguments(self, **changes: object) -> list[str]:
        """A short training of a tiny model; None leaves a flag out."""
        options: dict[str, object] = {
            "output_dir": self.output, "do_train": True, "do_eval": True, "config_overrides": TINY, "vocab_size": 300, "block_size": 32,
            "max_train_samples": 64, "max_eval_samples": 16, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8,
            "max_steps": 6, "learning_rate": 0.02, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "hardware": "cpu",
        }  # fmt: skip
        options.update(changes)
        return [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]

    def run(self, *positional: str, processes: int = 1, **changes: object) -> subprocess.CompletedProcess[str]:
        """Run it; with several processes, under `accelerate launch` with the configuration for the CPU."""
        script = [str(ROOT / "recipes" / "run_clm.py"), *positional, *self.arguments(**changes)]
        if processes == 1:
            command = [sys.executable, *script]
        else:
            config = ROOT / "accelerate_configs" / "osdp_cpu.yaml"
            launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
            command = [*launch, "--num_processes", str(processes), *script]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.folder / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(tmp_path)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Text and tokenizers beside the repository, or where HF_OSDP_SHARED_DATA says."""
    folder = Path(os.environ.get("HF_OSDP_SHARED_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no text data at {folder}; set HF_OSDP_SHARED_DATA")
    return folder


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run the recipe in this process, for what fails before anything is trained: its exit code and what it wrote to stderr."""
    from hf_osdp.integration.exits import run_script

    monkeypatch.syspath_prepend(str(ROOT / "recipes"))

    def run(recipe: Recipe, *positional: str, **changes: object) -> tuple[int, str]:
        import run_clm

        monkeypatch.chdir(recipe.folder)
        monkeypatch.setattr(sys, "argv", ["run_clm.py", *positional, *recipe.arguments(**changes)])
        capfd.readouterr()
        try:
            run_script(run_clm.main)
        except SystemExit as stop:
            return int(stop.code or 0), capfd.readouterr().err
        return 0, capfd.readouterr().err

    return run
