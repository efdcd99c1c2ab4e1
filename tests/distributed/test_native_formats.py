"""A plan said in transformers' own words is what transformers then runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_osdp.modeling.units import find_units
from hf_osdp.sharding.host_offload import parameter_groups
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model


def loaded(folder: str) -> dict[str, bool]:
    """Whether each unit's gathered parameters are freed after forward, of a model that transformers shards."""
    plan = plan_of(find_units(tiny_model("gpt2")), 2, "zero3")
    config = DistributedConfig(fsdp_size=2, fsdp_plan=plan.to_fsdp_plan())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    groups = {name: parameter_groups(module) for name, module in model.named_modules()}
    return {name: group.post_forward_mesh_info is not None for name, (group,) in ((n, g) for n, g in groups.items() if g)}


@pytest.mark.skipif(
    "fsdp_plan" not in {field.name for field in dataclasses.fields(DistributedConfig)}, reason="transformers before 5.23 has no fsdp_plan"
)
def test_transformers_shards_by_an_exported_plan(tmp_path: Path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    plan = plan_of(find_units(tiny_model("gpt2")), 2, "zero3")
    blocks = {unit.fqn: unit.reshard_after_forward for unit in plan.units if ".h." in unit.fqn}
    for units in run_ranks(loaded, 2, str(tmp_path)):
        assert {name: freed for name, freed in units.items() if name} == blocks != {}
