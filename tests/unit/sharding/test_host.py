"""What the device holds while units with states on the host are stepped."""

from __future__ import annotations

import weakref

import torch
from torch import nn

import hf_osdp.sharding.host as host
from hf_osdp.sharding.optimizer_steps import step_parts


class Counted:
    """Torch, whose `empty` makes the device's tensors; counts the bytes of those that live."""

    def __init__(self) -> None:
        self._made, self.most = [], 0

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, **options):
        tensor = torch.empty(*args, **options)
        self._made.append((weakref.ref(tensor), tensor.nbytes))
        self.most = max(self.most, self.live)
        return tensor

    @property
    def live(self) -> int:
        return sum(nbytes for tensor, nbytes in self._made if tensor() is not None)


def test_device_holds_states_of_one_unit_at_most(monkeypatch):
    for sizes in ([[8000]] * 3, [[1000] * 4] * 3, [[1000], [1000], [8000]]):
        units = [[nn.Parameter(torch.randn(n)) for n in unit] for unit in sizes]
        optimizer = torch.optim.AdamW([parameter for unit in units for parameter in unit])
        states = host.HostStates(units, step_parts)
        monkeypatch.setattr(host, "torch", counted := Counted())
        for step in range(3):
            for unit in units:
                for parameter in unit:
                    parameter.grad = torch.randn_like(parameter)
            if step == 0:
                optimizer.step()
                continue
            with states(optimizer, (), {}):
                assert counted.live == 0
        assert counted.most == 2 * 4 * max(map(sum, sizes))
