"""One process: the Trainer's checkpoints do not show in how many slices operators were."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

from hf_osdp.integration.trainer import Trainer
from hf_osdp.planner.cut import OperatorSplit
from hf_osdp.splitting.split import split_operators
from tests.helpers.models import VOCABULARY, tiny_model


def trainer(folder, slices: int, seed: int) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, VOCABULARY, (16, 12), generator=generator)]
    model = tiny_model("gpt2", seed=seed, layers=2)
    split_operators(model, [OperatorSplit(fqn=fqn, slices=slices) for fqn in ("lm_head", "transformer.h.0.mlp.c_fc")])
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=4, save_steps=2, save_strategy="steps", use_cpu=True, report_to=[],
        disable_tqdm=True, learning_rate=1e-2, seed=1,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=data)


@pytest.mark.parametrize("slices", [2, 4])
def test_the_trainer_resumes_in_any_number_of_slices(tmp_path, slices):
    first = trainer(tmp_path, 4, seed=0)
    first.train()
    whole = {name: value.shape for name, value in tiny_model("gpt2", layers=2).state_dict().items() if name != "lm_head.weight"}
    assert {name: value.shape for name, value in load_file(tmp_path / "checkpoint-4" / "model.safetensors").items()} == whole
    again = trainer(tmp_path / "again", slices, seed=5)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    state = again.model.state_dict()
    assert max((state[name] - value).abs().max().item() for name, value in first.model.state_dict().items()) < 1e-12
