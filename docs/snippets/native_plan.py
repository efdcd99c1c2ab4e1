"""A plan in transformers' own words, run by transformers alone: torchrun --nproc-per-node 2
docs/snippets/native_plan.py FOLDER
"""

import sys

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_osdp import PlanningProblem, TrainingJob, describe, preset, search

folder = sys.argv[1]  # of a saved model, or its name on the hub
config = AutoConfig.from_pretrained(folder)
problem = PlanningProblem(
    description=describe(config, sequence_length=16),
    hardware=preset("cpu", devices_per_node=2),
    job=TrainingJob(global_batch_size=4, recompute=False),
    memory_limit_bytes=64 * 2**20,
    strategy="fsdp",  # one group size for all units, which is what transformers can say
)
plan = search(problem).plan

styles = plan.to_fsdp_plan()  # PlanError, with the reason, where these words do not suffice
print(styles)
model = AutoModelForCausalLM.from_pretrained(
    folder, distributed_config=DistributedConfig(fsdp_size=2, fsdp_plan=styles)
)
