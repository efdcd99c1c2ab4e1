"""A plain PyTorch loop under a plan: torchrun --nproc-per-node 2 docs/snippets/plain_loop.py"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from hf_osdp import OptimalShardedDataParallel, OSDPConfig

set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=32, vocab_size=256, bos_token_id=0, eos_token_id=0)
)
samples = torch.randint(0, 256, (96, 32))

config = OSDPConfig(memory_limit="8MiB", sequence_length=32, global_batch_size=16)
model = OptimalShardedDataParallel(model, config)  # forms the process group
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # made afterwards, from the sharded parameters
loader = DataLoader(samples, batch_size=model.plan.micro_batch_size, sampler=DistributedSampler(samples))

micro_steps = model.plan.accumulation_steps
for number, batch in enumerate(loader, start=1):
    last = number % micro_steps == 0
    with model.micro_step(is_last=last):
        loss = model(input_ids=batch, labels=batch).loss
        (loss / micro_steps).backward()
    if last:
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

model.save_pretrained("runs/plain_loop")  # every rank calls it, rank 0 writes
dist.destroy_process_group()
