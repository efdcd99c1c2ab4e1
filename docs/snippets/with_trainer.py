"""The Trainer under a plan: torchrun --nproc-per-node 2 docs/snippets/with_trainer.py"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from hf_osdp import OSDPConfig, Trainer

set_seed(0)  # a small model and made data, the same on every rank; yours come here
model = GPT2LMHeadModel(
    GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=32, vocab_size=256, bos_token_id=0, eos_token_id=0)
)
dataset = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (64, 32))]

args = TrainingArguments(
    output_dir="runs/with_trainer",
    # x 2 processes = 16 samples of one optimizer step; the planner says how many run at once
    per_device_train_batch_size=8,
    max_steps=6,
    learning_rate=1e-2,
    use_cpu=True,  # leave out on GPUs
    report_to="none",
)
trainer = Trainer(model=model, args=args, train_dataset=dataset, osdp=OSDPConfig(memory_limit="8MiB"))
for unit in trainer.plan.units:
    print(unit.fqn or "(root)", unit.describe(trainer.plan.world_size))
# then the estimate stands beside the measurement, in the log and in runs/with_trainer/osdp_report.json
trainer.train()
trainer.save_model()  # as transformers writes it: from_pretrained("runs/with_trainer") reads it, without hf_osdp
