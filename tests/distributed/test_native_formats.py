"""A plan said in transformers' own words is what transformers then runs."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_osdp.distributed.fsdp_internals import parameter_groups
from hf_osdp.modeling.units import find_units
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model


@pytest.fixture
def saved(tmp_path) -> str:
    tiny_model("gpt2").save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.skipif(
    "fsdp_plan" not in {field.name for field in dataclasses.fields(DistributedConfig)},
    reason="transformers before 5.23 has no fsdp_plan",
)
@pytest.mark.on_ranks(2, shared=True)
def test_transformers_shards_by_an_exported_plan(saved):
    plan = plan_of(find_units(tiny_model("gpt2")), 2, "zero3")
    model = AutoModelForCausalLM.from_pretrained(
        saved, distributed_config=DistributedConfig(fsdp_size=2, fsdp_plan=plan.to_fsdp_plan())
    )
    groups = {name: parameter_groups(module) for name, module in model.named_modules() if name}
    freed = {
        name: group.post_forward_mesh_info is not None for name, (group,) in ((n, g) for n, g in groups.items() if g)
    }
    assert freed == {unit.fqn: unit.reshard_after_forward for unit in plan.units if ".h." in unit.fqn} != {}
