"""A loop on Accelerate under a plan: torchrun --nproc-per-node 2 docs/snippets/with_accelerator.py"""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from hf_osdp import OSDPAccelerator

accelerator = OSDPAccelerator(
    osdp={"memory_limit": "8MiB"}
)  # under `accelerate launch` the file can say it: OSDPAccelerator()
set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=32, vocab_size=256, bos_token_id=0, eos_token_id=0)
)
samples = torch.randint(0, 256, (96, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

plan = accelerator.plan(model, sequence_length=32, global_batch_size=16, optimizer=optimizer)
loader = DataLoader(samples, batch_size=plan.micro_batch_size, shuffle=True)  # samples that one process runs at once
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch in loader:
    with accelerator.accumulate(model):  # plan.accumulation_steps of these are one optimizer step
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

weights = accelerator.get_state_dict(model)  # whole, under Hugging Face names; empty on ranks other than 0
accelerator.unwrap_model(model).save_pretrained(
    "runs/with_accelerator",
    is_main_process=accelerator.is_main_process,
    state_dict=weights,
    save_function=accelerator.save,
)
accelerator.end_training()
