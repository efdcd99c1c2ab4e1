"""A loop on Accelerate that goes on where it was interrupted.

torchrun --nproc-per-node 2 --max-restarts 3 docs/snippets/fault_tolerant_loop.py
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from hf_osdp import OSDPAccelerator, StopSignal, last_checkpoint

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
FOLDER = "runs/fault_tolerant_loop"

accelerator = OSDPAccelerator(osdp={"memory_limit": "8MiB"})
set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=32, vocab_size=256, bos_token_id=0, eos_token_id=0)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
plan = accelerator.plan(model, sequence_length=32, global_batch_size=16, optimizer=optimizer)
model, optimizer = accelerator.prepare(model, optimizer)


def batches_of(step):
    """This rank's micro-batches of an optimizer step."""
    samples = torch.randint(0, 256, (16, 32), generator=torch.Generator().manual_seed(step))
    return samples.chunk(accelerator.num_processes)[accelerator.process_index].split(plan.micro_batch_size)


# begin
class Progress:
    """What the loop itself goes on from."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


progress = Progress()
accelerator.register_for_checkpointing(progress)
if (checkpoint := last_checkpoint(FOLDER)) is not None:
    accelerator.load_state(checkpoint)
    accelerator.print(f"goes on from step {progress.step}")

with StopSignal() as stop:
    while progress.step < STEPS and not stop.stopped:
        for batch in batches_of(progress.step):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        progress.step += 1
        if stop.agreed() or progress.step % 20 == 0:  # on every rank, after every step
            accelerator.save_state(f"{FOLDER}/checkpoint-{progress.step}")
accelerator.print(f"step {progress.step} of {STEPS}")
accelerator.end_training()
stop.exit()  # with code 143, where SIGTERM ended the loop
# end
