"""What a user calls on a model after training: save_pretrained, torch.save, generate, on all ranks and on one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel

from hf_osdp.distributed import process_group
from hf_osdp.errors import OSDPError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.gradients import local
from tests.distributed.test_integration_trainer import LENGTH, arguments, tiny_model, tokens
from tests.helpers.layouts import mixed_plan

PROMPT = torch.arange(5)[None]


def assert_saved(folder: str, weights: dict[str, torch.Tensor]) -> GPT2LMHeadModel:
    model = GPT2LMHeadModel.from_pretrained(folder)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    return model


@pytest.mark.on_ranks(2, shared=True)
def test_sharded_model_saves_and_generates_on_all_ranks_only(tmp_path):
    model = tiny_model()
    plan = mixed_plan(model, 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=1, reduce=True)
    args = arguments(str(tmp_path), max_steps=2, per_device_train_batch_size=2)
    trainer = Trainer(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=plan))
    trainer.train()
    model, rank = trainer.model, dist.get_rank()
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    trainer.train()
    assert (
        hooks == sum(len(module._forward_hooks) for module in model.modules())
        and type(model).__qualname__ == "GPT2LMHeadModel"
    )

    weights = trainer.accelerator.get_state_dict(model)
    model.save_pretrained(tmp_path / "gathered")
    model.save_pretrained(
        tmp_path / "given", state_dict=trainer.accelerator.get_state_dict(model), is_main_process=rank == 0
    )
    dist.barrier()
    for name in ("gathered", "given") if rank == 0 else ():
        assert assert_saved(tmp_path / name, weights).config.architectures == ["GPT2LMHeadModel"]
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "gathered")
    generated = plain.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=6, do_sample=False), generated)
    uneven = torch.arange(5 + rank)[None]  # the shorter prompt takes a step more
    assert torch.equal(
        model.generate(uneven, max_length=12, do_sample=False), plain.generate(uneven, max_length=12, do_sample=False)
    )

    for saved in (model, {"model": model.state_dict()}):
        with pytest.raises(OSDPError, match=r"one rank's shards.*save_pretrained\(folder\) on every rank"):
            torch.save(saved, tmp_path / f"saved{rank}.pt")
    copied = copy.deepcopy(model.state_dict())
    assert all(torch.equal(local(copied[name]), local(value)) for name, value in model.state_dict().items())
    process_group.ALL_CALL_S = 1.0
    if rank == 0:
        said = r"GPT2LMHeadModel.generate gathers a sharded model.*ranks \[0\] called it and, within 1 s, ranks \[1\] did not"  # noqa: E501
        with pytest.raises(OSDPError, match=said):
            model.generate(PROMPT, max_new_tokens=2)
        with pytest.raises(OSDPError, match=r"GPT2LMHeadModel.save_pretrained gathers"):
            model.save_pretrained(tmp_path / "alone")
    dist.barrier()
    process_group.ALL_CALL_S = 300.0
    assert torch.equal(model.generate(PROMPT, max_new_tokens=6, do_sample=False), generated)


def test_model_of_one_process_is_pickled_after_training(tmp_path):
    model = tiny_model()
    args = arguments(str(tmp_path), max_steps=1, per_device_train_batch_size=2)
    Trainer(model=model, args=args, train_dataset=tokens(), osdp=OSDPConfig(hardware=preset("cpu"))).train()
    text = pickle.dumps(model)
    assert b"hf_osdp" not in text
    again = pickle.loads(text)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.on_ranks(2, shared=True)
def test_accelerate_loop_ending_as_transformers_examples_saves_right_weights(tmp_path):
    accelerator = OSDPAccelerator(osdp=OSDPConfig(hardware=preset("cpu", devices_per_node=2), strategy="fsdp"))
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(tokens(8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(tmp_path / "plain", **options)
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path / "given", **options, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.wait_for_everyone()
    for name in ("plain", "given") if accelerator.is_main_process else ():
        assert_saved(tmp_path / name, weights)
