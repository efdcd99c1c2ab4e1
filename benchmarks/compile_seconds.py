"""Measure the seconds that Inductor takes for one kind of block: first forward and backward of a compiled block,
without a cache.

    python benchmarks/compile_seconds.py [--device cuda]

`hf_osdp/preparation/block_forms.py` estimates the cost of compilation with these figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # before torch reads it
sys.path.insert(0, str(Path(__file__).parents[1]))  # Python adds only the script's own folder

import torch
from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig

from hf_osdp.planner.block_forms import BlockForms
from hf_osdp.tracing.block_forms import change_blocks

_SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "LlamaDecoderLayer": LlamaConfig(**_SIZES, intermediate_size=704, num_key_value_heads=2),
    "BertLayer": BertConfig(**_SIZES, intermediate_size=1024),
    "GPT2Block": GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    for name, config in (
        ("(warm-up)", CONFIGS["LlamaDecoderLayer"]),
        *CONFIGS.items(),
    ):  # the first one looks for the compiler and headers
        model = AutoModel.from_config(config).to(device)
        change_blocks(model, BlockForms(compiled_classes=tuple(CONFIGS)))
        steps = [step_s(model, device) for _ in range(4)]
        print(f"{name}: first step {steps[0]:.1f} s, then {statistics.median(steps[1:]):.2f} s", flush=True)
        torch._dynamo.reset()


def step_s(model: torch.nn.Module, device: str) -> float:
    """Return the seconds of one forward and backward with two samples of 64 tokens."""
    started = time.perf_counter()
    model(torch.randint(0, 99, (2, 64), device=device)).last_hidden_state.square().mean().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
