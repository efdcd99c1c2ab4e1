"""A plain loop whose last rank finds less memory than its plan needs: `runs_out.py raise|replan cuda|cpu`.

On CUDA torch's allocator gets a limit below the plan's peak, in the first start only; on the CPU a block raises what CUDA's allocator would.
"""

import os
import sys

if "RANK" in os.environ:  # ranks of one machine that share its GPU
    own = {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank-{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ.update(own)

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp import OptimalShardedDataParallel

LENGTH, VOCABULARY = 256, 8192
SHORT = 0.8
"""Of what the plan needs beside what libraries hold."""
LIBRARIES_BYTES = 2**29


def main(on_oom: str, device: str) -> None:
    """Train three steps; prints `PLAN fingerprint` in each start and `END`."""
    width, limit, hardware = (512, "6GiB", None) if device == "cuda" else (64, "24MiB", "cpu")
    config = GPT2Config(
        n_layer=6, n_embd=width, n_head=8, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    model = OptimalShardedDataParallel(
        GPT2LMHeadModel(config), sequence_length=LENGTH, global_batch_size=32, memory_limit=limit, on_oom=on_oom, hardware=hardware,
    )  # fmt: skip
    plan = model.plan
    if "OSDP_RESTART_COUNT" not in os.environ and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        take_memory(model, plan.peak_bytes, device)
    print("PLAN", plan.fingerprint, flush=True)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, VOCABULARY, (plan.micro_batch_size, LENGTH), device=device)
    for _ in range(3):
        for number in range(plan.accumulation_steps):
            loss = model(input_ids=ids, labels=ids).loss / plan.accumulation_steps
            model.backward(loss, is_last=number == plan.accumulation_steps - 1)
        optimizer.step()
        optimizer.zero_grad()
    print("END", flush=True)


def take_memory(model: torch.nn.Module, needed_bytes: int, device: str) -> None:
    """As another program does that takes what the plan needs."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(SHORT * (needed_bytes - LIBRARIES_BYTES) / total)
        return

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 512.00 KiB. Of the allocated memory 3.90 MiB is allocated by PyTorch")

    model.module.transformer.h[1].mlp.register_forward_pre_hook(fail)


if __name__ == "__main__":
    main(*sys.argv[1:])
