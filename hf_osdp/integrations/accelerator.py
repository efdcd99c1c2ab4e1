"""`OSDPAccelerator`: Accelerate's `Accelerator` that shards each unit by a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DynamoBackend
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..checkpoint.writer import CheckpointWriter
from ..distributed.launcher import launched_world_size
from ..distributed.process_group import host_barrier, prepare_group
from ..distributed.said_once import say_uncaught_once
from ..distributed.stop import Stopped
from ..errors import OSDPError, refuse_first
from ..modeling.units import dtype_of
from ..planner.training_job import Precision
from ..preparation.beside import ModelsBeside
from ..preparation.config import OSDPConfig
from ..preparation.out_of_memory import out_of_memory_explained
from ..sharding.gradients import clip_grad_norm_
from ..sharding.micro_batches import parts_of_step
from ..sharding.state import full_state_dict
from ..sharding.steps import micro_step
from .accelerator_preparation import AcceleratorPreparation
from .launch import launch_request
from .plugin import OSDPPlugin

_REFUSED = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")
"""Arguments of `Accelerator` that decide how the model is sharded."""
Parameters = torch.Tensor | Iterable[torch.Tensor]


class OSDPAccelerator(AcceleratorPreparation):
    """An `Accelerator` that plans when a model is prepared, for the first DataLoader's batch size, and shards each
    unit by the plan.

    To let the planner choose the batch size as well, call `plan` first and build the DataLoader with
    `batch_size=plan.micro_batch_size`. The first DataLoader given to `prepare` is for training; others, for
    evaluation, may have batches of any size.

    The first 8 optimizer steps of the loop are measured (`measured`) and printed next to the estimate; with a
    `project_dir` both are written to `osdp_report.json` there. In a shorter loop, `end_training` reports them. A
    single process shards nothing and computes as with the stock `Accelerator`: its plan sets the batch size, and which
    units are kept on the host, under FSDP2.

    Args:
        *args: as for `Accelerator`.
        osdp: options of the plan; those not set here come from the file given to `accelerate launch`.
        **kwargs: as for `Accelerator`; `fsdp_plugin=OSDPPlugin(...)` sets more than the plan's options. Without
            `cpu=True` it still runs on the CPU if the launcher asks for it or the machine has no accelerator.

    Raises:
        ValueError: an option cannot be used, or several processes were started that do not form one process group.
        LaunchError: ranks of the launch are missing.
    """

    def __init__(
        self,
        *args: Any,
        osdp: OSDPConfig | Mapping[str, object] | None = None,
        fsdp_plugin: object = None,
        cpu: bool = False,
        kwargs_handlers: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        say_uncaught_once()
        other = next((name for name in _REFUSED if kwargs.get(name) is not None), None)
        plugin, handlers = plugin_for(osdp, fsdp_plugin), list(kwargs_handlers or ())
        hooks = {getattr(handler, "comm_hook", DDPCommunicationHookType.NO) for handler in handlers}
        hook = next(iter(hooks - {DDPCommunicationHookType.NO}), None)
        refuse_first({
            f"{other} and OSDP both decide how the model is sharded; leave {other} out, or use accelerate's"
            " Accelerator.": other is not None,
            f"comm_hook={hook} is for DDP and has no effect under a plan; use OSDPConfig(communication='bf16').":
                hook is not None,
        })  # fmt: skip
        cpu = cpu or launch_request().use_cpu or not torch.accelerator.is_available()
        self._earlier_error = id(sys.exc_info()[1])  # being handled: of a training that failed before this one
        methods = {getattr(handler, "init_method", None) for handler in handlers}
        if methods <= {None, "env://"}:  # else the launcher's variables do not say where ranks meet
            prepare_group()
        super().__init__(*args, fsdp_plugin=plugin, cpu=cpu, kwargs_handlers=handlers, **kwargs)
        if self.num_processes == 1 and launched_world_size() > 1:
            raise ValueError(
                f"{launched_world_size()} processes were launched, but this one is not connected to the others;"
                " pass cpu=True (TrainingArguments(use_cpu=True) with the Trainer) to run them on the CPU."
            )
        self.plugin, self.config = plugin, with_dynamo(plugin.config, self.state)
        self.precision = precision_of(
            self.mixed_precision, plugin.mixed_precision_policy, single_process=self.num_processes == 1
        )
        self.beside = ModelsBeside(self.device, self.config.also)
        self._writer = CheckpointWriter(in_background=self.config.async_save)
        self._select_fsdp()

    def wait_for_everyone(self) -> None:
        """Wait on the host, since a rank may save for longer than NCCL's timeout, and may not see a GPU with its
        local rank's number.
        """
        host_barrier()

    def end_training(self) -> None:
        """Complete the last checkpoint, report the measurement if the loop was short, and end as the stock
        `Accelerator`.

        While an exception propagates, as in a `finally`, other ranks may not call this: then only trackers end.
        `StopSignal.exit` counts as a normal end.
        """
        error = sys.exc_info()[1]
        if error is not None and id(error) != self._earlier_error and not isinstance(error, Stopped):
            for tracker in self.trackers:
                tracker.finish()
            return
        if self.meter is not None:
            self.meter.finish()
        self._writer.wait()
        super().end_training()

    def out_of_memory_explained(self) -> AbstractContextManager[None]:
        """Explain out-of-memory errors raised in this context, once a model has been prepared."""
        return out_of_memory_explained(lambda: self._out_of_memory)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward as `Accelerator.backward`, and explain an out-of-memory error in it."""
        if self._waits_for_cuts:
            raise OSDPError(
                "With batch_by_tokens=True a batch is a whole step, which accelerator.micro_batches(model, batch)"
                " cuts; use it in the loop, or leave the option out."
            )
        with self.out_of_memory_explained():
            super().backward(loss, **kwargs)

    def micro_batches(
        self, model: nn.Module, batches: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], float]]:
        """Cut this rank's samples of one optimizer step, with `OSDPConfig(batch_by_tokens=True)` by length; see
        `OptimalShardedDataParallel.micro_batches`. Collective.

        ```python
        for step in loader:                         # batches of plan.samples_per_rank samples
            for batch, share in accelerator.micro_batches(model, step):
                accelerator.backward(model(**batch).loss * share)
            optimizer.step()
        ```
        """
        self._waits_for_cuts = False
        return parts_of_step(model, batches, self._planned.plan, self._planned.budget)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context of a micro-step that is not the last; the plan decides which gradients are reduced in
        it.
        """
        if not self.is_fsdp2:
            return super().no_sync(model)
        return micro_step(model, is_last=False)

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Refuse uneven inputs under FSDP: a rank without a batch would make the others wait for ever."""
        if self.is_fsdp2 and not (self.even_batches if even_batches is None else even_batches):
            raise ValueError(
                "join_uneven_inputs cannot run with a sharded model; leave it out, with even_batches=True."
            )
        return super().join_uneven_inputs(joinables, even_batches)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return copies of the full weights under their Hugging Face names on rank 0, and an empty dict on other
        ranks.
        """
        return full_state_dict(model) if self.is_fsdp2 else super().get_state_dict(model, unwrap=unwrap)

    def clip_grad_norm_(self, parameters: Parameters, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip by the norm over all units, on any meshes, and return the norm before clipping."""
        self._check_gradients()
        if not self.is_fsdp2:
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Parameters, clip_value: float) -> None:
        """Clip each gradient's elements."""
        self._check_gradients()
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value, foreach=False)  # gradients may be on several meshes

    def _check_gradients(self) -> None:
        if self.is_fsdp2 and not self.sync_gradients:
            raise OSDPError(
                "Gradients cannot be clipped before the last micro-step reduces them; clip only if"
                " accelerator.sync_gradients."
            )


def plugin_for(osdp: OSDPConfig | Mapping[str, object] | None, plugin: object) -> OSDPPlugin:
    """Return the given plugin, else one for the `osdp` configuration or for the launcher's options."""
    is_off = plugin is None and osdp is None and launch_request().osdp is False
    refuse_first({
        "The launcher's file has osdp: false, but OSDPAccelerator always plans; use accelerate's Accelerator instead.":
            is_off,
        f"fsdp_plugin is a {type(plugin).__name__}; OSDPAccelerator needs an OSDPPlugin.":
            plugin is not None and not isinstance(plugin, OSDPPlugin),
        "Both osdp and fsdp_plugin were given; put the configuration into OSDPPlugin(osdp=...).":
            plugin is not None and osdp is not None,
    })  # fmt: skip
    return plugin if isinstance(plugin, OSDPPlugin) else OSDPPlugin(osdp={} if osdp is None else osdp)


def precision_of(mixed_precision: str, policy: MixedPrecisionPolicy | None, *, single_process: bool) -> Precision:
    """Return the precision of the user's policy if there is one, else of FSDP2, or of autocast if `single_process`."""
    named = Precision.named(mixed_precision, autocast=single_process)
    if policy is None:
        return named
    compute, reduce = (
        None if dtype is None else dtype_of(dtype) for dtype in (policy.param_dtype, policy.reduce_dtype)
    )
    if single_process and compute is not named.compute:
        computes = "each parameter's dtype" if compute is None else compute.value
        raise ValueError(
            f"mixed_precision_policy computes in {computes}, but a single process computes as"
            f" mixed_precision={mixed_precision!r} says; make them agree."
        )
    return Precision(compute=compute, reduce=reduce, autocast=named.autocast)


def with_dynamo(config: OSDPConfig, state: AcceleratorState) -> OSDPConfig:
    """Let the plan compile blocks if dynamo was requested; Accelerate would compile the whole model."""
    dynamo = state.dynamo_plugin
    if dynamo.backend == DynamoBackend.NO or dynamo.disable:
        return config
    stock = {"backend": "inductor", "mode": "default", "fullgraph": False, "dynamic": None, "options": None}
    asked = {
        "backend": dynamo.backend.value.lower(), "mode": dynamo.mode or "default", "fullgraph": bool(dynamo.fullgraph),
        "dynamic": dynamo.dynamic, "options": dynamo.options or None,
    }  # fmt: skip
    if refused := [f"{name}={value!r}" for name, value in asked.items() if value != stock[name]]:
        raise ValueError(
            f"torch.compile with {', '.join(refused)} cannot be planned; use inductor with its defaults, or leave it"
            " out."
        )
    return replace(config, compile=True)
