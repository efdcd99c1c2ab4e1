"""Measure the host's time of a model's operators as multiples of the mean operator that `operator_seconds` times.

    DIR/bin/python -m benchmarks.host_time.operators

DIR as for `python -m benchmarks.host_time`. Small models with the operators of large ones run forward and backward in
bf16 on the device whose kernels take no time. Each line has the operators that run a kernel and those that only make a
view or allocate, and the least CPU time of 50 runs; the last line is the fit of both, with the least relative errors.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.gpu_memory import MODELS
from benchmarks.gpu_suite.times import BLOCKS
from hf_osdp.measurement.rates import _Counter, _tiny_step
from hf_osdp.tracing.work import _MOVES_NOTHING

from .ranks import cpu_seconds

CHOSEN = {name: MODELS[name] for name in ("GPT-2 medium", "Llama 1B", "BERT large")} | {
    name: BLOCKS[name] for name in ("OPT", "T5")
}
SMALL = {
    "hidden_size": 128, "n_embd": 128, "d_model": 128, "word_embed_proj_dim": 128, "intermediate_size": 256,
    "ffn_dim": 256, "d_ff": 256, "num_attention_heads": 2, "n_head": 2, "num_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "vocab_size": 1000,
}  # fmt: skip
ROUNDS = 5
START = {"decoder_start_token_id": 0, "pad_token_id": 0}


class _Kinds(_Counter):
    views = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.views += func.is_view or func._overloadpacket in _MOVES_NOTHING
        return super().__torch_dispatch__(func, types, args, kwargs)


def least(run: Callable[[], object], times: int = 10) -> float:
    """Return the least CPU seconds of a run, in this thread and autograd's."""
    seconds = []
    for _ in range(times):
        before_s = cpu_seconds()
        run()
        seconds.append(cpu_seconds() - before_s)
    return min(seconds)


def main() -> None:
    os.environ |= {"FAKE_CUDA_MEM": "8G", "FAKE_CUDA_COMPUTE_MAX": "0", "FAKE_CUDA_COPY": "0"}
    transformers.logging.set_verbosity_error()
    tiny = _tiny_step(torch.device("cuda"))
    with _Kinds() as counted:
        tiny()
    print(f"the timed step: {counted.operators - counted.views} kernels, {counted.views} views")
    lines = []
    for name, model in CHOSEN.items():
        sizes = {key: SMALL.get(key, size) for key, size in model.sizes.items()} | {"vocab_size": 1000}
        config = getattr(transformers, model.config)(**sizes | (START if model.config == "T5Config" else {}))
        with torch.device("cuda"):
            made = getattr(transformers, model.architecture)(config).bfloat16().train()
            ids = torch.zeros(2, 64, dtype=torch.long)

        def step(made: torch.nn.Module = made, ids: torch.Tensor = ids) -> None:
            made.zero_grad()
            made(input_ids=ids, labels=ids).loss.backward()

        step()
        gc.collect()
        gc.freeze()
        with _Kinds() as seen:
            step()
        rounds = [(least(step), least(tiny)) for _ in range(ROUNDS)]
        operators = counted.operators * min(own for own, _ in rounds) / min(one for _, one in rounds)
        lines.append((seen.operators - seen.views, seen.views, operators))
        print(f"{name}: {lines[-1][0]} kernels, {lines[-1][1]} views: {operators:.0f} operators")
    counts = np.array(lines)
    fit = np.linalg.lstsq(counts[:, :2] / counts[:, 2:], np.ones(len(lines)), rcond=None)[0]
    errors = counts[:, :2] @ fit / counts[:, 2] - 1
    print(f"a kernel {fit[0]:.2f}, a view {fit[1]:.2f} operators; " + ", ".join(f"{error:+.0%}" for error in errors))


if __name__ == "__main__":
    main()
