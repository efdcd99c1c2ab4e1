"""The cells of a notebook that trains on two processes.

As a script it does the same: python docs/snippets/in_notebook.py
"""

from accelerate import notebook_launcher


# [cell]
def train(memory_limit: str) -> None:
    """All that touches the model happens in here: the launcher forks, and the notebook's own process must not have
    used torch.
    """
    import torch
    from torch.utils.data import DataLoader
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    from hf_osdp import OSDPAccelerator

    torch.set_num_threads(1)
    accelerator = OSDPAccelerator(osdp={"memory_limit": memory_limit}, cpu=True)
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=32, vocab_size=256, bos_token_id=0, eos_token_id=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(torch.randint(0, 256, (96, 32)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"{accelerator.num_processes} processes, loss {loss.item():.2f}")
    accelerator.end_training()


# [/cell]
if __name__ == "__main__":
    # [launch]
    notebook_launcher(train, ("8MiB",), num_processes=2)
    # [/launch]
