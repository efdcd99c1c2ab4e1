"""A loop's checkpoints: read by what fits, with its random states."""

from __future__ import annotations

import random

import numpy as np
import peft
import pytest
import torch

from hf_osdp.checkpoint.folders import MANIFEST_NAME
from hf_osdp.checkpoint.resume import warn_of_changes
from hf_osdp.checkpoint.states import load_loop, load_random_states, save_random_states
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.errors import CheckpointError
from hf_osdp.modeling.identity import model_texts
from tests.helpers.models import tiny_model

from .checkpoints import saved, trained


def test_replaced_checkpoint_keeps_no_states_of_another_layout(tmp_path):
    folder = saved(tmp_path / "checkpoint-1", sharded=True)
    (folder / MANIFEST_NAME).unlink()  # as another program writes it
    model, optimizer = trained(seed=5)
    saved(folder, sharded=False, model=model, optimizer=optimizer)
    assert not (folder / "pytorch_model_fsdp_0").exists() and not (folder / "optimizer_0").exists()
    again, its = trained(seed=9)
    load_loop(folder, again, its, others={})
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_random_states_go_on_and_new_ranks_get_their_own(tmp_path):
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    save_random_states(tmp_path, 0)
    draw = lambda: (torch.rand(2).tolist(), random.random(), np.random.rand())  # noqa: E731
    want = draw()
    load_random_states(tmp_path, 0)
    assert draw() == want
    others = []
    for rank in (1, 2, 1):
        load_random_states(tmp_path, rank)
        others.append(draw())
    assert others[0] == others[2] and len({str(each) for each in (want, *others)}) == 3
    load_random_states(tmp_path / "nowhere", 0)


@pytest.mark.parametrize("sharded", [True, False])
def test_checkpoint_of_another_model_or_lacking_files_is_refused(tmp_path, sharded):
    folder = saved(tmp_path / "checkpoint-1", sharded=sharded)
    for other in (tiny_model("llama", layers=1), tiny_model("gpt2", layers=2)):
        with pytest.raises(CheckpointError, match="is not of this model"):
            load_loop(folder, other, torch.optim.AdamW(other.parameters()), others={})
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"lacks scaler.pt, which this run needs"):
        load_loop(folder, model, optimizer, others={"scaler.pt": torch.amp.GradScaler("cpu")})


@pytest.mark.parametrize("sharded", [True, False])
def test_weights_are_not_rounded_when_they_are_loaded(tmp_path, sharded):
    model = tiny_model("gpt2", layers=1).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters())
    folder = saved(tmp_path / "checkpoint-1", sharded=sharded, model=model, optimizer=optimizer)
    with pytest.raises(
        CheckpointError, match=r"in torch.bfloat16, which this model would round to torch.float16; load"
    ):
        load_loop(folder, model.to(torch.float16), optimizer, others={})
    load_loop(folder, model.double(), optimizer, others={})


def adapted(**options):
    given = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, **options}
    return peft.get_peft_model(tiny_model("gpt2", layers=1), peft.LoraConfig(**given))


def test_adapters_and_dtypes_of_a_resumed_training_are_compared(tmp_path):
    texts = model_texts(adapted(lora_alpha=8))
    writer = CheckpointWriter(settings=texts)
    with writer.new(tmp_path / "checkpoint-1"):
        pass
    same = adapted(lora_alpha=8, revision="main", inference_mode=True, task_type="CAUSAL_LM")
    warn_of_changes(tmp_path / "checkpoint-1", model_texts(same), None)
    warn_of_changes(tmp_path / "checkpoint-1", {}, None)
    others = {
        r"adapter default's lora_alpha 8, and this run has 16": adapted(lora_alpha=16),
        r"adapter default's use_dora False, and this run has True": adapted(lora_alpha=8, use_dora=True),
        r"dtypes of parameters torch.float64, and this run has torch.float32": adapted(lora_alpha=8).float(),
    }
    for line, model in others.items():
        with pytest.raises(CheckpointError, match=f"was saved with {line}; make the model that was saved"):
            warn_of_changes(tmp_path / "checkpoint-1", model_texts(model), None)
