"""What a user calls on a model after training: save_pretrained, torch.save, generate, on all ranks and on one."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel

from hf_osdp.distributed import process_group
from hf_osdp.errors import OSDPError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import OSDPConfig
from tests.distributed.test_integration_trainer import LENGTH, arguments, tiny_model, tokens
from tests.helpers.distributed import run_ranks
from tests.helpers.mixed import mixed_plan

PROMPT = torch.arange(5)[None]


def trained(folder: str, steps: int = 2) -> Trainer:
    model = tiny_model()
    plan = mixed_plan(model, 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=1, reduce=True)
    args = arguments(folder, max_steps=steps, per_device_train_batch_size=2)
    trainer = Trainer(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    trainer.train()
    return trainer


def line_of(call) -> str:
    with pytest.raises(OSDPError) as caught:
        call()
    return str(caught.value)


def used_after_training(folder: str) -> dict[str, object]:
    trainer = trained(folder)
    model, rank = trainer.model, dist.get_rank()
    weights = trainer.accelerator.get_state_dict(model)
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    trainer.train()
    found = {"hooks": (hooks, sum(len(module._forward_hooks) for module in model.modules())), "class": type(model).__qualname__}
    weights = trainer.accelerator.get_state_dict(model)
    model.save_pretrained(f"{folder}/gathered")
    model.save_pretrained(f"{folder}/given", state_dict=trainer.accelerator.get_state_dict(model), is_main_process=rank == 0)
    dist.barrier()
    found["weights"] = weights
    found["generated"] = model.generate(PROMPT, max_new_tokens=6, do_sample=False)
    uneven = torch.arange(5 + rank)[None]
    found["uneven"] = model.generate(uneven, max_length=12, do_sample=False)  # the shorter prompt takes a step more
    found["torch.save"] = line_of(lambda: torch.save(model, f"{folder}/model{rank}.pt"))
    found["state_dict"] = line_of(lambda: torch.save({"model": model.state_dict()}, f"{folder}/state{rank}.pt"))
    copied = copy.deepcopy(model.state_dict())
    assert all(torch.equal(copied[name].to_local(), value.to_local()) for name, value in model.state_dict().items())
    process_group.ALL_CALL_S = 1.0
    if rank == 0:
        found["alone"] = line_of(lambda: model.generate(PROMPT, max_new_tokens=2))
        found["saved alone"] = line_of(lambda: model.save_pretrained(f"{folder}/alone"))
    dist.barrier()
    process_group.ALL_CALL_S = 300.0
    found["again"] = model.generate(PROMPT, max_new_tokens=6, do_sample=False)
    return found


def test_a_sharded_model_is_saved_and_generates_on_all_ranks_and_refuses_one(tmp_path):
    found, other = run_ranks(used_after_training, 2, str(tmp_path), init=False)
    assert found["hooks"][0] == found["hooks"][1] and found["class"] == "GPT2LMHeadModel"
    for name in ("gathered", "given"):
        model = GPT2LMHeadModel.from_pretrained(tmp_path / name)
        assert model.config.architectures == ["GPT2LMHeadModel"]
        assert all(torch.equal(value, found["weights"][key]) for key, value in model.state_dict().items()), name
    for prompt, rank in ((PROMPT, found), (PROMPT, other)):
        want = model.generate(prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(rank["generated"], want) and torch.equal(rank["again"], want)
    assert torch.equal(other["uneven"], model.generate(torch.arange(6)[None], max_length=12, do_sample=False))
    for name in ("torch.save", "state_dict"):
        assert "one rank's shards" in found[name] and "save_pretrained(folder) on every rank" in found[name]
    assert "GPT2LMHeadModel.generate gathers a sharded model" in found["alone"]
    assert "ranks [0] called it and, within 1 s, ranks [1] did not" in found["alone"]
    assert "GPT2LMHeadModel.save_pretrained gathers" in found["saved alone"]


def test_a_model_of_one_process_is_pickled_after_training(tmp_path):
    model = tiny_model()
    args = arguments(str(tmp_path), max_steps=1, per_device_train_batch_size=2)
    Trainer(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(hardware=preset("cpu"), compare=False)).train()
    text = pickle.dumps(model)
    assert b"hf_osdp" not in text
    again = pickle.loads(text)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def loop_of_the_examples(folder: str) -> dict[str, torch.Tensor]:
    """As transformers' `run_clm_no_trainer.py` ends."""
    accelerator = OSDPAccelerator(osdp=OSDPConfig(hardware=preset("cpu", devices_per_node=2), compare=False, strategy="fsdp"))
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(tokens(8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    main = accelerator.is_main_process
    unwrapped.save_pretrained(f"{folder}/plain", is_main_process=main, save_function=accelerator.save)
    unwrapped.save_pretrained(
        f"{folder}/given", is_main_process=main, save_function=accelerator.save, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.wait_for_everyone()
    return accelerator.get_state_dict(model)


def test_an_accelerate_loop_ends_with_the_right_weights(tmp_path):
    weights = run_ranks(loop_of_the_examples, 2, str(tmp_path), init=False)[0]
    for name in ("plain", "given"):
        state = GPT2LMHeadModel.from_pretrained(Path(tmp_path) / name).state_dict()
        assert set(state) == set(weights) and all(torch.equal(value, weights[key]) for key, value in state.items())
