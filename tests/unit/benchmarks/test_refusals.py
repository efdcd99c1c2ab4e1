"""Benchmarks refuse wrong options in one line, and claim nothing where nothing can be measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_memory, headline
from benchmarks.gpu_suite import __main__ as suite


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nothing_claimed_without_a_device(tmp_path, monkeypatch, capsys):
    assert suite.main(["--minutes", "1", "--out", str(tmp_path)]) == suite.NOTHING_MEASURED
    assert headline.main(["--device", "cuda"]) == headline.NOTHING_MEASURED
    assert capsys.readouterr().err.count("nothing was measured") == 2
    monkeypatch.setattr("sys.argv", ["gpu_memory.py", "--quick"])
    assert gpu_memory.main() == 0 and "nothing was measured" in capsys.readouterr().out
