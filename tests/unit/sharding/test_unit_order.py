"""FSDP2's private parts that `unit_order.py` relies on, read in torch 2.11 to 2.13: a failure here says which one
has changed.
"""

from __future__ import annotations

import inspect

import pytest
import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups
import torch.distributed.fsdp._fully_shard._fsdp_state as states
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (
            groups.FSDPParamGroup.__init__,
            ("_all_gather_result", "_post_forward_indices", "_training_state", "reshard_after_backward"),
        ),
        (groups.FSDPParamGroup.unshard, ("self._all_gather_result is not None", "self.is_unsharded", "PRE_BACKWARD")),
        (groups.FSDPParamGroup.pre_forward, ("self.unshard(", "self.wait_for_unshard()")),
        (groups.FSDPParamGroup.pre_backward, ("self.unshard(", "self.wait_for_unshard()", "_backward_prefetch")),
        (groups.FSDPParamGroup._prefetch_unshard, (".unshard(", "use_training_state")),
        (
            groups.FSDPParamGroup.post_backward,
            ("_unsharded_param", "unsharded_accumulated_grad", "self.reshard_after_backward"),
        ),
        (groups.FSDPParamGroup._to_sharded, ("to_sharded()",)),
        (states.FSDPState._pre_backward, (".pre_backward(",)),
        (states.FSDPState._root_post_backward_final_callback, ("!= TrainingState.POST_BACKWARD", ".post_backward()")),
        (FSDPParam.init_unsharded_param, ("_unsharded_param",)),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_fsdp2_has_what_the_order_of_units_relies_on(function, parts):
    source = inspect.getsource(inspect.unwrap(function))
    assert [part for part in parts if part not in source] == []
