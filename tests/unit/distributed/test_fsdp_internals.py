"""FSDP2's private parts that this package relies on (torch 2.11 to 2.13): a failure names what torch has changed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_common as common
import torch.distributed.fsdp._fully_shard._fsdp_param as parameters
import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups
import torch.distributed.fsdp._fully_shard._fsdp_state as states
import torch.distributed.fsdp._fully_shard._fully_shard as modules

import hf_osdp
from hf_osdp.distributed import fsdp_internals

GROUP, STATE, PARAMETER = groups.FSDPParamGroup, states.FSDPState, parameters.FSDPParam
PARTS: dict[object, tuple[str, ...]] = {
    # names that a class or module has
    GROUP: ("unshard", "wait_for_unshard", "reshard", "pre_forward", "pre_backward", "post_backward", "_to_sharded",
            "use_training_state", "is_sharded", "is_unsharded"),
    STATE: ("_pre_backward", "_root_post_backward_final_callback", "_lazy_init",
            "_register_root_post_backward_final_callback"),
    PARAMETER: ("reset_sharded_param", "alloc_all_gather_outputs", "_sharded_local_tensor",
                "accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed"),
    parameters.ParamModuleInfo: ("module", "param_name", "shared_modules", "shared_param_names"),
    common.TrainingState: ("IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"),
    modules.FSDPModule: ("_get_fsdp_state", "set_custom_all_gather", "set_custom_reduce_scatter"),
    groups: ("foreach_all_gather", "foreach_all_gather_copy_out", "record_function", "RegisterPostBackwardFunction"),
    GROUP._register_post_backward_hook: ("RegisterPostBackwardFunction.apply(self, *",),
    collectives.AllGatherResult: ("all_gather_output", "all_gather_event", "all_gather_work",
                                  "param_all_gather_input_dtypes", "param_all_gather_input_numels",
                                  "all_gather_input_split_sizes"),
    collectives.DefaultAllGather: ("allocate",),
    collectives.DefaultReduceScatter: ("allocate",),
    # what their code says
    GROUP.__init__: (
        "self._all_gather_result", "self._post_forward_indices", "self._training_state", "self._partial_reduce_output",
        "self._all_gather_comm", "self._reduce_scatter_comm", "self.reshard_after_backward", "self.reduce_grads",
        "self.all_reduce_grads", "self.unshard_in_backward", "self.fsdp_params", "self.modules", "self.mesh_info",
        "self.post_forward_mesh_info", "self.offload_policy",
    ),
    GROUP.unshard: ("self._all_gather_result is not None", "self.is_unsharded", "PRE_BACKWARD",
                    "self._all_gather_result = foreach_all_gather(\n                self.fsdp_params,"),
    GROUP.wait_for_unshard: ("foreach_all_gather_copy_out(\n                    self._all_gather_result,"
                             "\n                    self.fsdp_params,",),
    GROUP.pre_forward: ("self.unshard(", "self.wait_for_unshard()"),
    GROUP.pre_backward: ("self.unshard(", "self.wait_for_unshard()", "_backward_prefetch"),
    GROUP._backward_prefetch: ("self._prefetch_unshard(",),
    GROUP._prefetch_unshard: (".unshard(", "use_training_state"),
    GROUP.post_forward: ("self.reshard()",),
    GROUP.post_backward: ("_unsharded_param", "unsharded_accumulated_grad", "self.reshard_after_backward"),
    GROUP._to_sharded: ("to_sharded()",),
    STATE.__init__: ("self._fsdp_param_group", "self._auto_reshard_after_forward",
                     "self._modules_to_run_forward"),
    STATE.init: ("self._modules",),
    STATE._root_pre_forward: ("self._state_ctx.iter_forward_root",),
    STATE._lazy_init: ("self._state_ctx.all_states",),
    STATE._pre_forward: ("self._training_state = TrainingState.FORWARD",),
    STATE._pre_backward: (".pre_backward(",),
    STATE._root_post_backward_final_callback: ("!= TrainingState.POST_BACKWARD", ".post_backward()"),
    STATE._register_root_post_backward_final_callback: ("self._root_post_backward_final_callback",),
    PARAMETER.__init__: ("self._module_info", "self.unsharded_accumulated_grad", "self.offload_to_cpu",
                         "self.post_forward_mesh_info", "self.all_gather_outputs"),
    PARAMETER.init_dtype_attrs: ("self.param_dtype", "self.orig_dtype"),
    PARAMETER._init_sharded_param: ("self.sharded_param", "self._sharded_param_data", "self.fsdp_placement",
                                   "self.mesh_info"),
    PARAMETER.init_unsharded_param: ("_unsharded_param",),
    common.DDPMeshInfo: ("self.replicate_process_group",),
    modules: ("_is_fsdp_managed_module",),
}  # fmt: skip
PRIVATE = re.compile(
    r"_fully_shard\b|\b_(all_gather_result|post_forward_indices|training_state|partial_reduce_output|all_gather_comm|"
    r"reduce_scatter_comm|get_fsdp_state|fsdp_param_groups?|to_sharded|unsharded_param|module_info|lazy_init|"
    r"root_post_backward_final_callback|pre_backward|auto_reshard_after_forward|state_ctx|module_fqn)\b"
)


@pytest.mark.parametrize(
    ("owner", "part"),
    [(owner, part) for owner, parts in PARTS.items() for part in parts],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)
def test_fsdp2_has_the_private_parts_that_its_file_names(owner, part):
    named = hasattr(owner, part) or part in getattr(owner, "__dataclass_fields__", ())
    assert named or part in inspect.getsource(inspect.unwrap(owner)), f"torch {torch.__version__} has changed it"


def test_one_file_names_fsdp2s_private_parts():
    package = Path(hf_osdp.__file__).parent
    naming = {path.name for path in package.rglob("*.py") if PRIVATE.search(path.read_text(encoding="utf-8"))}
    assert naming == {Path(fsdp_internals.__file__).name}
    assert len(Path(fsdp_internals.__file__).read_text(encoding="utf-8").splitlines()) <= 300
