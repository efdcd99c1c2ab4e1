"""What Accelerate's dynamo plugin asks for becomes an option of the plan."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from accelerate.utils.other import is_compiled_module

from hf_osdp.integrations.accelerator import OSDPAccelerator
from tests.helpers.models import tiny_model


@pytest.fixture(autouse=True)
def fresh_state():
    """An earlier test's accelerator would answer for this one's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


REGIONAL = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)


@pytest.mark.parametrize("asked", [{"dynamo_backend": "inductor"}, {"dynamo_plugin": REGIONAL}])
def test_inductor_compiles_blocks_by_the_plan_and_accelerate_nothing(asked):
    for accelerator in (OSDPAccelerator(cpu=True, osdp={}, **asked), OSDPAccelerator(cpu=True, osdp={}, **asked)):
        assert accelerator.plugin.osdp.compile
        assert accelerator.state.dynamo_plugin.backend == DynamoBackend.INDUCTOR, "others share the state"
        model = accelerator.prepare_model(torch.nn.Linear(2, 2), evaluation_mode=True)
        assert not is_compiled_module(model)


@pytest.mark.parametrize(
    ("osdp", "variable", "asked", "compiles"),
    [
        ({}, "", {}, False),
        ({}, "INDUCTOR", {}, True),
        ({}, "", {"dynamo_plugin": TorchDynamoPlugin(backend="inductor", disable=True)}, False),
    ],
)
def test_blocks_are_compiled_as_options_launcher_and_dynamo_ask(monkeypatch, osdp, variable, asked, compiles):
    if variable:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", variable)
    assert OSDPAccelerator(cpu=True, osdp=osdp, **asked).plugin.osdp.compile == compiles


def test_model_wrapped_by_torch_compile_is_unwrapped_and_blocks_compiled():
    accelerator = OSDPAccelerator(cpu=True, osdp={})
    model = tiny_model("gpt2")
    assert accelerator._without_wrappers(model) is model
    assert not accelerator.plugin.osdp.compile
    assert accelerator._without_wrappers(torch.compile(model)) is model
    assert accelerator.plugin.osdp.compile
    with pytest.raises(ValueError, match="so compile=True would have no effect; leave one of the two out"):
        OSDPAccelerator(cpu=True, osdp={"plan": "plan.json"})._without_wrappers(torch.compile(model))


@pytest.mark.parametrize(
    "asked", [{"backend": "aot_eager"}, {"mode": "max-autotune"}, {"fullgraph": True}, {"dynamic": True},
              {"options": {"max_autotune": True}}]
)  # fmt: skip
def test_other_backends_modes_and_options_are_refused_in_one_line(asked):
    with pytest.raises(ValueError, match="cannot be planned; use inductor with its defaults") as caught:
        OSDPAccelerator(cpu=True, osdp={}, dynamo_plugin=TorchDynamoPlugin(**{"backend": "inductor", **asked}))
    assert "\n" not in str(caught.value)


def test_compilation_beside_a_given_plan_is_refused():
    with pytest.raises(ValueError, match="plan runs a given plan as it is"):
        OSDPAccelerator(cpu=True, osdp={"plan": "plan.json"}, dynamo_backend="inductor")
