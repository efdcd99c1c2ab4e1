"""Memory that runs out on a real GPU: the message, and a program that goes on by a safer plan. `pytest -m gpu tests/gpu`"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOT = Path(__file__).parents[2]
TRAINS = """
import os, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from hf_osdp import OptimalShardedDataParallel

config = GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=8192, n_positions=256, bos_token_id=0, eos_token_id=0)
model = OptimalShardedDataParallel(
    GPT2LMHeadModel(config), sequence_length=256, global_batch_size=32, memory_limit="6GiB", on_oom=sys.argv[1],
)
plan = model.plan
if "OSDP_RESTART_COUNT" not in os.environ:  # another program takes what the plan needs
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.8 * (plan.peak_bytes - 2**29) / total)
print("PLAN", plan.fingerprint, flush=True)
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, 8192, (plan.micro_batch_size, 256), device="cuda")
for _ in range(3):
    for number in range(plan.accumulation_steps):
        model.backward(model(input_ids=ids, labels=ids).loss / plan.accumulation_steps, is_last=number == plan.accumulation_steps - 1)
    optimizer.step()
    optimizer.zero_grad()
print("END", flush=True)
"""


@pytest.mark.parametrize("on_oom", ["raise", "replan"])
def test_memory_that_runs_out(on_oom, tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(tmp_path / "train.py"), on_oom], env=env, capture_output=True, text=True, timeout=300)
    said = re.search(
        r"Out of memory on \S+ in (.*): the plan was estimated to need (.*), (.*) were allocated and (.*) more asked", done.stderr
    )
    assert said, done.stderr[-3000:]
    plans = re.findall(r"PLAN (\w+)", done.stdout)
    if on_oom == "raise":
        assert done.returncode == 1 and len(plans) == 1
    else:
        assert done.returncode == 0 and done.stdout.endswith("END\n") and len(set(plans)) == len(plans) > 1
