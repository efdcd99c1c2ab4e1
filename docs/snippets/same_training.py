"""Is it the same training as in one process, in float64? torchrun --nproc-per-node 2 docs/snippets/same_training.py"""

import copy

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from hf_osdp import OptimalShardedDataParallel, OSDPConfig

set_seed(0)
config = GPT2Config(
    n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,  # dropout draws other numbers on each rank
)  # fmt: skip
model = GPT2LMHeadModel(config).double()
alone = copy.deepcopy(model)
samples = torch.randint(0, 64, (5, 8, 16))  # five optimizer steps of eight samples


def loss_of(some_model, tokens):
    """Next-token loss in float64: transformers' own is taken in float32."""
    logits = some_model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(logits.device))


config = OSDPConfig(
    strategy="fsdp", sequence_length=16, global_batch_size=8, micro_batch_size=2
)  # or memory_limit=..., as in your run
sharded = OptimalShardedDataParallel(model, config)
ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (sharded, alone))
rank, world, micro = dist.get_rank(), dist.get_world_size(), sharded.plan.micro_batch_size
for step in samples:
    shares = step[rank::world].split(micro)
    for number, share in enumerate(shares, start=1):
        sharded.backward(loss_of(sharded, share) / len(shares), is_last=number == len(shares))
    loss_of(alone, step).backward()
    for optimizer in (ours, theirs):
        optimizer.step()
        optimizer.zero_grad()

whole = sharded.full_state_dict()  # on rank 0
if rank == 0:
    furthest = max((whole[name] - value).abs().max().item() for name, value in alone.state_dict().items())
    print(f"after {len(samples)} steps no weight is further off than {furthest:.1e}")
    assert furthest < 1e-12
dist.destroy_process_group()
