"""A plan for eight GPUs, made on a laptop: python docs/snippets/plan_on_paper.py"""

from dataclasses import replace

from transformers import GPT2Config

from hf_osdp import InfeasibleError, PlanningProblem, TrainingJob, describe, preset, search

config = GPT2Config(
    n_layer=12, n_embd=768, n_head=12
)  # GPT-2 small; AutoConfig.from_pretrained(...) reads one from the hub

description = describe(
    config, sequence_length=512, device_type="cuda"
)  # what each part of the model costs; no weights are made
hardware = preset("rtx-3090", devices_per_node=8)  # eight devices and their links, at the rates that trainings reach
job = TrainingJob(global_batch_size=64)  # samples of one optimizer step, over all devices

problem = PlanningProblem(
    description=description, hardware=hardware, job=job, memory_limit_bytes=4 * 2**30
)  # 4 GiB on each device
found = search(problem)
plan = found.plan
print(
    f"{plan.micro_batch_size} samples at once, {plan.accumulation_steps} micro-steps, {plan.samples_per_s:.0f}"
    " samples/s"
)
for unit in plan.units:
    print(f"{unit.fqn or '(root)':24} {unit.describe(plan.world_size)}")
peak = found.memory.peak
print(
    f"peak {plan.peak_bytes / 2**30:.2f} GiB, in {peak.phase} of {peak.unit}; step {plan.step_s:.2f} s;"
    f" {plan.proven_optimal=}"
)

try:
    search(replace(problem, memory_limit_bytes=2 * 2**30))
except InfeasibleError as error:
    print(error)
