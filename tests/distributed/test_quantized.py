"""A base in 4 bits under a plan: trained as in one process with the same base, in every layout and storage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.sharding.apply import apply_plan
from hf_osdp.tracing.describe import describe
from tests.helpers.layouts import plan_of
from tests.helpers.models import SEQUENCE_LENGTH, tiny_model
from tests.helpers.quantized import adapted, in_4_bits
from tests.helpers.read_back import verify_applied
from tests.helpers.training import train_sharded, train_whole

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; pip install 'hf_osdp[bnb]'")
peft = pytest.importorskip("peft", reason="the extra peft is not installed")


def model_of(storage: torch.dtype, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    base = tiny_model("llama", dtype=dtype, scale=5.0)
    return adapted(in_4_bits(base, quant_storage=storage, **options), dtype)


@pytest.mark.parametrize(
    ("layout", "storage", "options"),
    [
        ("everything", torch.float32, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("zero3", torch.uint8, {"compress_statistics": False, "quant_type": "fp4"}),
                ("replicate", torch.bfloat16, {}),
            )
        ),
    ],
)
@pytest.mark.on_ranks(2, shared=True)
def test_adapters_train_as_in_one_process(layout, storage, options):
    model = model_of(storage, **options)
    units = describe(model, sequence_length=SEQUENCE_LENGTH, recomputation=False).units
    plan = plan_of(units, dist.get_world_size(), layout)
    apply_plan(model, plan, units)
    verify_applied(model, plan, units)
    trained = train_sharded(model, plan)
    if dist.get_rank() == 0:
        whole = train_whole(model_of(storage, **options))
        assert trained.losses == pytest.approx(whole.losses, rel=1e-6)
        assert trained.norms == pytest.approx(whole.norms, rel=1e-5)
        adapters = [name for name in whole.parameters if "lora_" in name]
        assert len(adapters) == 56
        for name in adapters:
            torch.testing.assert_close(trained.parameters[name], whole.parameters[name], rtol=1e-3, atol=1e-5)
