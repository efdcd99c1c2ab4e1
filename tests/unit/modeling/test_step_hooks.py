"""Hooks of every optimizer's step go while a step runs them."""

from collections.abc import Callable

import torch

from hf_osdp.modeling.step_hooks import after_step, before_step


def step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def test_hooks_removed_during_a_step_leave_others_alone():
    said, before = [], (len(before_step), len(after_step))
    for hooks in (before_step, after_step):
        removers: list[Callable[[], object]] = []
        removers.append(hooks.add(lambda optimizer, removers=removers: said.append("leaves") or removers[0]()))
        removers.append(hooks.add(lambda optimizer: said.append("stays")))
        step()
        step()
        for remove in removers:
            remove()
    step()
    assert said == ["leaves", "stays", "stays"] * 2
    assert (len(before_step), len(after_step)) == before
