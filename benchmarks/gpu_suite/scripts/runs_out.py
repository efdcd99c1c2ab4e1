"""A plain loop whose last rank finds less memory than its plan needs: `runs_out.py raise|replan cuda|cpu`.

On CUDA, torch's allocator gets a limit below the need of training, in the first start only. On the CPU, a block raises
the same error.
"""

import os
import sys

if "RANK" in os.environ:  # ranks that share the GPU of a machine
    own = {
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank-{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    os.environ.update(own)

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp import OptimalShardedDataParallel, OSDPConfig
from hf_osdp.distributed.launcher import restart_count

SIZES = {
    "cuda": {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 256},
    "cpu": {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 61, "n_positions": 32},
}
LIMITS = {"cuda": "6GiB", "cpu": "6MiB"}
SHORT = 1.5
"""Memory left in addition to the weights, in multiples of their bytes; gradients and AdamW's states need three."""


def main(on_oom: str, device: str) -> None:
    """Train three steps; print `PLAN fingerprint` at each start, and `END`."""
    sizes, world = SIZES[device], int(os.environ.get("WORLD_SIZE", 1))
    length, vocabulary = sizes["n_positions"], sizes["vocab_size"]
    # Ranks that share a GPU would each measure the other's context as their own.
    hardware = "cpu" if device == "cpu" else "h100" if world > 1 else None
    config = OSDPConfig(
        sequence_length=length, global_batch_size=32, memory_limit=LIMITS[device], on_oom=on_oom, hardware=hardware
    )  # fmt: skip
    model = OptimalShardedDataParallel(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), config)
    plan = model.plan
    if not restart_count() and int(os.environ.get("RANK", 0)) == world - 1:
        take_memory(model, device)
    say(f"PLAN {plan.fingerprint}")
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, vocabulary, (plan.micro_batch_size, length), device=device)
    for _ in range(3):
        for number in range(plan.accumulation_steps):
            loss = model(input_ids=ids, labels=ids).loss / plan.accumulation_steps
            model.backward(loss, is_last=number == plan.accumulation_steps - 1)
        optimizer.step()
        optimizer.zero_grad()
    say("END")


def say(text: str) -> None:
    """Print in one write, because ranks share a pipe."""
    os.write(1, f"{text}\n".encode())


def take_memory(model: torch.nn.Module, device: str) -> None:
    """Take memory away, as another program on the device would."""
    if device == "cuda":
        torch.cuda.empty_cache()
        weights = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
        limit = torch.cuda.memory_reserved() + SHORT * weights
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        return

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError(
            "Tried to allocate 512.00 KiB. Of the allocated memory 3.90 MiB is allocated by PyTorch"
        )

    model.module.transformer.h[1].mlp.register_forward_pre_hook(fail)


if __name__ == "__main__":
    main(*sys.argv[1:])
