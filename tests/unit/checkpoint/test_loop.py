"""A loop's checkpoints: read by what fits, with its random states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hf_osdp.checkpoint.folders import MANIFEST_NAME
from hf_osdp.checkpoint.states import load_loop, load_random_states, save_random_states
from hf_osdp.errors import CheckpointError
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
