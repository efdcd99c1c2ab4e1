"""Dispatch modes that a callback enters in one event and leaves in another, around `AcrossLayouts`."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from hf_osdp.sharding.between_steps import AcrossLayouts


def test_mode_that_a_callback_enters_stays_until_it_leaves_it():
    counter = FlopCounterMode(display=False)
    with AcrossLayouts("on_step_begin"):
        counter.__enter__()
    assert len(_get_current_dispatch_mode_stack()) == 1
    torch.ones(2, 3) @ torch.ones(3, 4)
    with AcrossLayouts("on_step_end"):
        counter.__exit__(None, None, None)
    assert not _get_current_dispatch_mode_stack()
    torch.ones(2, 3) @ torch.ones(3, 4)
    assert counter.get_total_flops() == 2 * 2 * 3 * 4
