"""What Accelerate's dynamo plugin asks for becomes an option of the plan."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from accelerate.utils.other import is_compiled_module

from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from tests.helpers.models import tiny_model


@pytest.fixture(autouse=True)
def fresh_state():
    """An earlier test's accelerator would answer for this one's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


REGIONAL = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
DISABLED = TorchDynamoPlugin(backend="inductor", disable=True)


@pytest.mark.parametrize(
    ("variable", "asked", "compiles"),
    [
        ("", {}, False),
        ("INDUCTOR", {}, True),
        ("", {"dynamo_plugin": DISABLED}, False),
        ("", {"dynamo_backend": "inductor"}, True),
        ("", {"dynamo_plugin": REGIONAL}, True),
    ],
)
def test_blocks_are_compiled_as_launcher_and_dynamo_ask_and_accelerate_compiles_nothing(
    monkeypatch, variable, asked, compiles
):
    if variable:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", variable)
    for accelerator in (OSDPAccelerator(cpu=True, osdp={}, **asked), OSDPAccelerator(cpu=True, osdp={}, **asked)):
        assert accelerator.config.compile == compiles
        backend = accelerator.state.dynamo_plugin.backend
        assert not compiles or backend == DynamoBackend.INDUCTOR, "others share the state"
        assert not is_compiled_module(accelerator.prepare_model(torch.nn.Linear(2, 2), evaluation_mode=True))


def test_model_wrapped_by_torch_compile_is_refused():
    for act in (OSDPAccelerator(cpu=True, osdp={}).prepare, OptimalShardedDataParallel):
        with pytest.raises(ValueError, match=r"give the model itself, and OSDPConfig\(compile=True\)"):
            act(torch.compile(tiny_model("gpt2")))


def test_what_a_plan_cannot_compile_is_refused_in_one_line():
    for asked in ({"backend": "aot_eager"}, {"mode": "max-autotune"}, {"fullgraph": True}, {"dynamic": True},
                  {"options": {"max_autotune": True}}):  # fmt: skip
        with pytest.raises(ValueError, match="cannot be planned; use inductor with its defaults"):
            OSDPAccelerator(cpu=True, osdp={}, dynamo_plugin=TorchDynamoPlugin(**{"backend": "inductor", **asked}))
    AcceleratorState._reset_state(reset_partial_state=True)
    given = {"plan": "plan.json"}
    with pytest.raises(ValueError, match="plan runs a given plan as it is"):
        OSDPAccelerator(cpu=True, osdp=given, dynamo_backend="inductor")
