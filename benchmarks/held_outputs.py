"""Peak of two ways to write an Accelerate loop, beside the plan's estimate: one keeps the logits through backward.

OMP_NUM_THREADS=1 python -m benchmarks.held_outputs
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp import OSDPAccelerator
from hf_osdp.quantities import format_bytes

_TOKENS, _SAMPLES = 512, 4


def peak(*, keeps_outputs: bool) -> tuple[int, int]:
    """Return the measured and the estimated peak of a small GPT-2 with a whole vocabulary, one sample at once."""
    accelerator = OSDPAccelerator(cpu=True, osdp={"sequence_length": _TOKENS, "hardware": "cpu", "compare": False})
    config = GPT2Config(n_layer=2, n_embd=128, n_head=2, n_positions=_TOKENS)
    model = GPT2LMHeadModel(config)
    loader = DataLoader(torch.randint(0, config.vocab_size, (_SAMPLES, _TOKENS)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for ids in loader:
        if keeps_outputs:
            outputs = model(input_ids=ids, labels=ids)
            accelerator.backward(outputs.loss)
        else:
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    assert accelerator.measured is not None and accelerator.planned_run is not None
    return accelerator.measured.peak_bytes, accelerator.planned_run.plan.peak_bytes or 0


if __name__ == "__main__":
    for line, keeps in (("outputs = model(**batch)", True), ("loss = model(**batch).loss", False)):
        measured, estimated = peak(keeps_outputs=keeps)
        print(f"{line}: measured {format_bytes(measured)}, estimated {format_bytes(estimated)}")
