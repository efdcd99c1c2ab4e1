"""The notebook, run in a kernel as Jupyter runs it, and its committed outputs."""

from __future__ import annotations

import base64
import json
import os
import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from hf_osdp import Plan
from tests.recipes.conftest import RECIPES

NOTEBOOK = RECIPES / "notebooks" / "plan_and_train.ipynb"
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 64}
TINY = {
    "SMALL": {**SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "LENGTH": 32, "VOCABULARY": 300,
    "SAMPLES": 128, "EPOCHS": 2, "BATCH": 8, "LIMIT": 3 * 2**20, "LARGE": SIZES, "LARGE_LENGTH": 64,
    "LARGE_BATCH": 16, "LARGE_LIMIT": 1800 * 2**20,
}  # fmt: skip
PERPLEXITY = re.compile(
    r"perplexity (before training|after epoch \d+|of the saved model|after one epoch more): ([\d.]+)"
)
PATHS = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|Users|var)\b[^\"]{0,60}|site-packages|file://")


def with_values(notebook: NotebookNode, values: dict[str, object]) -> NotebookNode:
    """Other values after those of the cell tagged `parameters`, as papermill gives them."""
    (place,) = [index for index, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    assert set(values) <= set(re.findall(r"\b[A-Z_]+\b(?=[^=\n]* = )", notebook.cells[place].source))
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(lines))
    return notebook


def check_outputs(notebook: NotebookNode) -> str:
    """Two charts, no error and no warning, but for what torchao and bitsandbytes say when they are imported without
    their kernels. Returns all text.
    """
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    lines = [line for text in said for line in text.splitlines()]
    assert not [output.evalue for output in outputs if output.output_type == "error"]
    assert not [line for line in lines if not line.startswith("Failed to load") and "is an Enum subclass" not in line]
    charts = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(charts) == 2 and all(base64.b64decode(chart).startswith(b"\x89PNG") for chart in charts)
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.slow
def test_notebook_runs_in_a_kernel(tmp_path, monkeypatch):
    """Two gloo ranks are forked twice, with a user's environment; what they train, save and report is there."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = tmp_path / "out"
    notebook = with_values(nbformat.read(NOTEBOOK, as_version=4), {**TINY, "FOLDER": str(folder)})
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute(env=environment)
    text = check_outputs(notebook)
    assert text.count("OSDP plan") == 2 and text.count("Estimated and measured") == 2  # by each training
    perplexity = {when: float(value) for when, value in PERPLEXITY.findall(text)}
    assert perplexity["after epoch 2"] < 0.9 * perplexity["before training"]
    assert perplexity["of the saved model"] == pytest.approx(perplexity["after epoch 2"], rel=1e-4)
    assert perplexity["after one epoch more"] < perplexity["after epoch 2"]
    for name in (".", "more"):
        report = json.loads((folder / name / "osdp_report.json").read_text())
        assert Plan.from_json(json.dumps(report["plan"])) == Plan.load(folder / "plan.json")
        peaks = [report[kind]["peak_bytes"] for kind in ("estimated", "measured")]
        assert peaks[1] == pytest.approx(peaks[0], rel=0.02) and peaks[0] <= TINY["LIMIT"]
        assert (folder / name / "model.safetensors").is_file() and (folder / name / "tokenizer.json").is_file()


def test_committed_outputs_are_of_one_complete_run_and_name_no_path_of_a_machine():
    content = NOTEBOOK.read_text(encoding="utf-8")
    notebook = nbformat.reads(content, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "after one epoch more" in check_outputs(notebook) and len(content) < 1_000_000
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not PATHS.findall(re.sub(r'"image/png": "[^"]*"', "", content))
