"""The notebook, run in a kernel as Jupyter runs it, and its committed outputs."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM

from hf_osdp import Plan

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "notebooks" / "plan_and_train.ipynb"
TINY = {
    "SMALL": {"n_layer": 2, "n_head": 2, "n_embd": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "LENGTH": 32, "VOCABULARY": 300, "SAMPLES": 128, "EPOCHS": 2, "BATCH": 8, "LIMIT": 3 * 2**20,
    "LARGE": {"n_layer": 2, "n_head": 2, "n_embd": 64}, "LARGE_LENGTH": 64, "LARGE_BATCH": 16,
    "LARGE_LIMIT": 1800 * 2**20,
}  # fmt: skip
CELL_SECONDS, END_SECONDS = 120, 10
MARK = "OSDP_TEST_NOTEBOOK"
MAX_BYTES = 1_000_000
PERPLEXITY = re.compile(
    r"perplexity (before training|after epoch \d+|of the saved model|after one epoch more): ([\d.]+)"
)


def with_values(notebook: nbformat.NotebookNode, values: dict[str, object]) -> nbformat.NotebookNode:
    """Other values after those of the cell tagged `parameters`, as papermill gives them."""
    (place,) = [index for index, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    known = re.findall(r"\b[A-Z_]+\b(?=[^=\n]* = )", notebook.cells[place].source)
    assert set(values) <= set(known), f"the notebook has no {set(values) - set(known)}"
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(lines))
    return notebook


def outputs_of(notebook: nbformat.NotebookNode, *kinds: str) -> list[nbformat.NotebookNode]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output for output in outputs if output.output_type in kinds or not kinds]


def text_of(notebook: nbformat.NotebookNode) -> str:
    """All that the outputs say, in order."""
    return "".join(
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs_of(notebook)
    )


def problems(notebook: nbformat.NotebookNode) -> list[str]:
    """Errors, and warnings: whatever a cell writes to stderr, but for what torchao and bitsandbytes say when they are
    imported without their kernels.
    """
    failed = [f"{output.ename}: {output.evalue}" for output in outputs_of(notebook, "error")]
    texts = (output.text for output in outputs_of(notebook, "stream") if output.name == "stderr")
    lines = (line for text in texts for line in text.splitlines())
    return failed + [
        line for line in lines if not line.startswith("Failed to load") and "is an Enum subclass" not in line
    ]


def charts(notebook: nbformat.NotebookNode) -> list[bytes]:
    outputs = outputs_of(notebook, "display_data", "execute_result")
    return [base64.b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.data]


def processes_with(mark: str) -> list[psutil.Process]:
    """Processes that have `mark` in their environment and still run."""
    found = psutil.process_iter(["environ", "status"])  # None for another user's
    return [
        p for p in found if (p.info["environ"] or {}).get(MARK) == mark and p.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Of the kernel: a user's, without a network and without a limit on threads. No process outlives the test."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not re.fullmatch(r"(OMP|MKL)_NUM_THREADS|TOKENIZERS_PARALLELISM", name)
    }
    yield {
        **kept,
        MARK: str(tmp_path),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for process in processes_with(str(tmp_path)):
        process.kill()


@pytest.mark.slow
def test_notebook_runs_in_a_kernel_and_leaves_no_process(tmp_path: Path, environment: dict[str, str]):
    """Two gloo ranks are forked twice; what they train, save and report is there, and they are gone."""
    folder = tmp_path / "out"
    notebook = with_values(nbformat.read(NOTEBOOK, as_version=4), {**TINY, "FOLDER": str(folder)})
    client = NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute(env=environment)
    end = time.monotonic() + END_SECONDS
    while (left := processes_with(str(tmp_path))) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left

    text = text_of(notebook)
    assert not problems(notebook)
    assert text.count("OSDP plan") == 2 and text.count("Estimated and measured") == 2  # by each training
    assert len(charts(notebook)) == 2
    perplexity = {when: float(value) for when, value in PERPLEXITY.findall(text)}
    assert perplexity["after epoch 2"] < 0.9 * perplexity["before training"]
    assert perplexity["of the saved model"] == pytest.approx(perplexity["after epoch 2"], rel=1e-4)
    assert perplexity["after one epoch more"] < perplexity["after epoch 2"]

    plan = Plan.load(folder / "plan.json")
    for name in (".", "more"):
        report = json.loads((folder / name / "osdp_report.json").read_text())
        assert Plan.from_json(json.dumps(report["plan"])) == plan
        estimated, measured = report["estimated"], report["measured"]
        assert (
            measured["peak_bytes"] == pytest.approx(estimated["peak_bytes"], rel=0.02)
            and estimated["peak_bytes"] <= TINY["LIMIT"]
        )
        assert measured["median_step_s"] > 0
        _, loaded = AutoModelForCausalLM.from_pretrained(folder / name, output_loading_info=True)
        assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
        assert (folder / name / "tokenizer.json").is_file()


def test_committed_outputs_are_of_one_complete_run():
    content = NOTEBOOK.read_text(encoding="utf-8")
    notebook = nbformat.reads(content, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not problems(notebook)
    assert len(charts(notebook)) == 2 and all(image.startswith(b"\x89PNG") for image in charts(notebook))
    assert "after one epoch more" in text_of(notebook)
    assert len(content) < MAX_BYTES
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_committed_outputs_name_no_path_of_a_machine():
    said = re.sub(r'"image/png": "[^"]*"', "", NOTEBOOK.read_text(encoding="utf-8"))
    assert not re.findall(
        r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|Users|var)\b[^\"]{0,60}|site-packages|file://", said
    )
