"""The estimated peak beside FSDP2's own step on fake tensors: python docs/snippets/estimate_and_simulation.py"""

from transformers import GPT2Config

from hf_osdp import PlanningProblem, TrainingJob, describe, preset, search
from hf_osdp.preparation.simulate import simulate

config = GPT2Config(n_layer=4, n_embd=256, n_head=4)
description = describe(config, sequence_length=256, device_type="cuda")
job = TrainingJob(global_batch_size=16)
hardware = preset("rtx-3090", devices_per_node=8)
found = search(PlanningProblem(description=description, hardware=hardware, job=job, memory_limit_bytes=2 * 2**30))

simulated = simulate(config, found.plan, description=description, job=job, device_type="cuda")
estimated = found.memory.peak_bytes
print(f"estimated {estimated / 2**20:.1f} MiB, simulated {simulated.peak_bytes / 2**20:.1f} MiB")
