"""What Accelerate's dynamo plugin asks for becomes an option of the plan."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from hf_osdp.integrations.accelerator import OSDPAccelerator


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.mark.parametrize(
    "asked", [{"dynamo_backend": "inductor"}, {"dynamo_plugin": TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)}]
)
def test_inductor_compiles_blocks_by_the_plan_and_accelerate_nothing(asked):
    accelerator = OSDPAccelerator(cpu=True, osdp={}, **asked)
    assert accelerator.plugin.osdp.compile
    assert accelerator.state.dynamo_plugin.backend == DynamoBackend.NO


def test_nothing_is_compiled_where_nobody_asks():
    assert not OSDPAccelerator(cpu=True, osdp={}).plugin.osdp.compile


def test_launchers_variable_is_heard(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    assert OSDPAccelerator(cpu=True, osdp={}).plugin.osdp.compile


@pytest.mark.parametrize("asked", [{"backend": "aot_eager"}, {"backend": "inductor", "mode": "max-autotune"}])
def test_other_backends_and_modes_are_refused_in_one_line(asked):
    with pytest.raises(ValueError, match="cannot be planned; use inductor in its default mode") as caught:
        OSDPAccelerator(cpu=True, osdp={}, dynamo_plugin=TorchDynamoPlugin(**asked))
    assert "\n" not in str(caught.value)
