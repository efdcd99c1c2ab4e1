"""`OptimalShardedDataParallel`: a model sharded by a plan, for plain PyTorch loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoint.states import Stateful, load_loop, stage_loop
from ..checkpoint.writer import CheckpointWriter
from ..distributed.consensus import on_rank_zero, require_same
from ..distributed.mesh import world_size
from ..distributed.process_group import require_all
from ..distributed.said_once import say_uncaught_once
from ..errors import refuse_first
from ..measurement.step_meter import Observation, StepMeter
from ..modeling.identity import model_texts, optimizer_texts
from ..modeling.wrapping import under_autocast
from ..planner.cost.evaluate import PlanEstimate
from ..planner.description import DType
from ..planner.optimizers import spec_of_trainer_name
from ..planner.plan import Plan
from ..planner.training_job import OptimizerSpec, Precision
from ..preparation.announce import announce_result, plan_and_announce
from ..preparation.beside import ModelsBeside
from ..preparation.config import OSDPConfig, merged_config
from ..preparation.job import Job
from ..preparation.out_of_memory import OutOfMemoryHandler, out_of_memory_explained
from ..preparation.samples import loop_options
from ..sharding.apply import apply_plan
from ..sharding.environment import form_process_group, move_to_device, mp_policy, prepare_model, training_device
from ..sharding.gradients import OSDPGradScaler, clip_grad_norm_
from ..sharding.micro_batches import parts_of_step
from ..sharding.optimizer import spec_of_optimizer
from ..sharding.optimizer_steps import bind_optimizer, prepare_new_optimizers
from ..sharding.optimizers import kind_of
from ..sharding.state import free_gathered, full_state_dict, load_full_state_dict
from ..sharding.steps import micro_step
from .plugin import refuse_compiled


class OptimalShardedDataParallel(nn.Module):
    """A model sharded by the fastest plan that fits, with the interface of the model. Every rank makes it, from the
    same model.

    ```python
    config = OSDPConfig(memory_limit="8GiB", sequence_length=512, global_batch_size=64)
    model = OptimalShardedDataParallel(GPT2LMHeadModel(model_config), config)
    optimizer = torch.optim.AdamW(model.parameters())
    for batches in loader:                       # model.plan.accumulation_steps micro-batches of model.plan.micro_batch_size
        for number, batch in enumerate(batches, start=1):
            with model.micro_step(is_last=number == len(batches)):
                loss = model(**batch).loss
                (loss / len(batches)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("out")
    ```

    fp16 needs loss scaling, with `scaler = model.grad_scaler()`: `scaler.scale(loss / len(batches)).backward()`, then
    `scaler.unscale_(optimizer)` before clipping, `scaler.step(optimizer)` and `scaler.update()`. It is an
    `OSDPGradScaler`; torch's own GradScaler checks one mesh only, so with units on several meshes some ranks would
    step and others skip.

    Under torchrun it forms the process group if there is none: NCCL with CUDA, else gloo. Make the optimizer
    afterwards, from `model.parameters()`. Parameters and state dicts have the model's own names.

    Attributes:
        module: the model, sharded in place.
        plan: the plan that runs; the same on every rank.
        report: the plan's estimated memory and time; None for a given plan.
        measured: peak and step time of the first 8 optimizer steps, the same on every rank; None until
            they have ended. Rank 0 prints them with the estimate.
    """  # noqa: E501

    def __init__(
        self,
        model: nn.Module,
        config: OSDPConfig | Mapping[str, object] | None = None,
        *,
        mixed_precision: str = "no",
        optimizer: OptimizerSpec | str | None = None,
    ) -> None:
        """Plan for the model, or use the configuration's plan, and shard the model. Collective.

        Args:
            model: unsharded, with the same structure on every rank; rank 0's weights are used.
            config: options of the plan; planning needs `sequence_length` and `global_batch_size`. A given `plan` runs
                unchanged; the sizes and `memory_limit`, if set, must agree with it.
            mixed_precision: `"no"`, `"bf16"` or `"fp16"`. A single process runs the model's forward under
                `torch.autocast`, with outputs in float32, as `Accelerator` does.
            optimizer: the `OptimizerSpec` of the optimizer, or its name as in `TrainingArguments.optim`; None means
                `torch.optim.AdamW(model.parameters())`.

        Raises:
            InfeasibleError: no plan meets the limit.
            PlanError: the given plan cannot be read, is for another model, number of processes or batch, or does not
            fit. HardwareError, ProfileError: the hardware is not known, or the profile is of another model.
            PreflightError: the run would fail, or train something other than intended.
            ValueError: an option is missing, out of range, or has no effect here.
        """
        super().__init__()
        say_uncaught_once()
        refuse_compiled(model)
        config = loop_options(merged_config(config), model)
        _check(config, optimizer)
        form_process_group(needed=False)
        precision, device = Precision.named(mixed_precision, autocast=world_size() == 1), training_device()
        prepare_model(model, precision)
        if isinstance(optimizer, str):
            optimizer = spec_of_trainer_name(optimizer, device_type=device.type)
        beside = ModelsBeside(device, config.also)
        job = Job(
            config=config,
            world_size=world_size(),
            device_type=device.type,
            precision=precision,
            optimizer=optimizer or spec_of_optimizer(None, device_type=device.type),
            cuts_by_length=bool(config.batch_by_tokens),
            against_unit_steps=None if optimizer is None else "only the optimizer's OptimizerSpec is known",
            **beside.facts(model),
        )
        run = self._run = plan_and_announce(model, job)
        beside.place(sharded=run.shards_beside)
        self.plan: Plan = run.plan
        self.report: PlanEstimate | None = run.estimate
        self.measured: Observation | None = None
        writer = self._writer = CheckpointWriter(
            plan=run.plan, settings={**model_texts(model), "precision": mixed_precision}
        )
        precision = run.inputs.job.precision  # without autocast if units are on the host
        apply_plan(model, run.plan, run.units, mp_policy=mp_policy(precision))
        self.module = move_to_device(model, device)
        if precision.autocast and precision.compute is not None:
            model.forward = under_autocast(model.forward, getattr(torch, precision.compute.value), device.type)
        self._out_of_memory = OutOfMemoryHandler(
            model, run.plan, run.units, hardware=run.hardware, on_oom=config.on_oom, device=device
        )
        plan, units = run.plan, run.units  # so that `bind` does not keep the run alive

        def bind(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            writer.settings = {**optimizer_texts(optimizer), **writer.settings}
            require_same(writer.settings)
            bind_optimizer(module, plan, units, [optimizer])

        prepare_new_optimizers(self.module, bind)
        self._scales = precision.compute is DType.FLOAT16
        self._meter = StepMeter(
            self.module, device, self._report, plan, may_skip=self._scales, beside=beside.placed_tensors
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  what the model returns
        """Run the model's forward pass.

        The estimate assumes that only the loss is kept until backward: write `loss = model(**batch).loss`, which frees
        the logits.
        """
        with out_of_memory_explained(lambda: self._out_of_memory):
            return self.module(*args, **kwargs)

    def micro_step(self, *, is_last: bool = True) -> AbstractContextManager[None]:
        """Return the context for forward and backward of one micro-batch; `is_last` if the optimizer steps after
        it.
        """
        return micro_step(self.module, is_last=is_last)

    def micro_batches(
        self, batches: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], float]]:
        """Cut this rank's samples of one optimizer step into micro-batches of the plan, or by length under
        `batch_by_tokens=True`; as many as on other ranks. Collective.

        ```python
        for step in loader:                         # model.plan.samples_per_rank samples
            for batch, share in model.micro_batches(step):
                (model(**batch).loss * share).backward()
            optimizer.step()
        ```

        The body runs within its `micro_step`. That is the same step only if losses are means over samples that all
        have a label; for a sum over tokens that is divided by a count of the whole step, leave `share` out.

        Args:
            batches: one or several of what a collator returns, with tensors of shape (samples, tokens) or (samples,).

        Yields:
            Keyword arguments of forward, and their samples as a share of the step's.

        Raises:
            OSDPError: a batch cannot be cut by rows.
        """
        return parts_of_step(self.module, batches, self.plan, self._run.budget)

    def backward(self, loss: torch.Tensor, *, is_last: bool = True) -> None:
        """Run `loss.backward()` of one micro-batch within `micro_step`; divide the loss by the number of
        micro-steps yourself.
        """
        with out_of_memory_explained(lambda: self._out_of_memory), self.micro_step(is_last=is_last):
            loss.backward()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm over all gradients, and return the norm before clipping. Collective."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def grad_scaler(self, **kwargs: Any) -> OSDPGradScaler:
        """Return the loss scaler, with the keywords of `torch.amp.GradScaler`; without fp16 it is disabled, so the
        same loop works.
        """
        return OSDPGradScaler(**{"device": training_device().type, "enabled": self._scales, **kwargs})

    def _report(self, measured: Observation) -> None:
        self.measured = measured
        announce_result(self._run, measured, None)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters under its own names: this rank's shards, as DTensors, even right after an
        evaluation.
        """
        free_gathered(self.module)
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's buffers under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state under its own names: shards, for torch.distributed.checkpoint."""
        return self.module.state_dict(*args, **kwargs)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the full weights on the CPU on rank 0, an empty dict on others. Collective."""
        return full_state_dict(self.module)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        """Load shards, as `state_dict` returns them, or rank 0's full weights. Collective.

        Raises:
            RuntimeError: names or shapes do not match.
        """
        if any(isinstance(value, DTensor) for value in state_dict.values()):
            self.module.load_state_dict(state_dict, strict=strict)
        else:
            load_full_state_dict(self.module, state_dict, strict=strict)

    def save_pretrained(self, path: str | Path, **kwargs: Any) -> None:
        """Write the whole model as its own `save_pretrained` does, with its keywords; rank 0 writes. Collective.

        Raises:
            ValueError: the model has no `save_pretrained`.
            OSDPError: rank 0 could not write; on every rank.
        """
        if not hasattr(self.module, "save_pretrained"):
            raise ValueError(
                f"{type(self.module).__name__} has no save_pretrained; save full_state_dict() with torch.save."
            )
        require_all(f"{type(self.module).__name__}.save_pretrained")
        state = self.full_state_dict()
        on_rank_zero(lambda: self.module.save_pretrained(path, state_dict=state, **kwargs))  # type: ignore[operator]

    def save_checkpoint(
        self, path: str | Path, optimizer: torch.optim.Optimizer, *, scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        progress: Mapping[str, Any] | None = None, sharded: bool = True, in_background: bool = False,
    ) -> None:  # fmt: skip
        """Write everything that the loop needs to resume; the folder appears when it is complete. Collective.

        Args:
            path: the checkpoint's folder; `last_checkpoint` finds folders named `checkpoint-N`.
            optimizer: the optimizer of this model's parameters.
            scheduler: a learning rate scheduler, if there is one.
            scaler: the loss scaler, if there is one.
            progress: the loop's own numbers, text and tensors, such as the step; rank 0's are saved.
            sharded: whether each rank writes its shards, without gathering; else rank 0 writes full tensors.
            in_background: copy shards to host memory and write them while training continues; call
                `wait_for_checkpoint` at the end.

        Raises:
            CheckpointError: it, or the previous one in the background, cannot be written; on every rank.
            ValueError: full tensors were requested in the background.
        """
        if in_background and not sharded:
            raise ValueError(
                "in_background=True writes shards while training continues, but sharded=False asks for full tensors;"
                " leave one out."
            )
        self._writer.in_background = in_background
        others = _stateful(scheduler, scaler)
        with self._writer.new(path, optimizer=kind_of(optimizer).name) as staging:
            stage_loop(staging, self.module, optimizer, others=others, progress=progress or {}, sharded=sharded)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint in the background is complete; raise on all ranks if it could not be written.

        Collective.
        """
        self._writer.wait()

    def load_checkpoint(
        self, path: str | Path, optimizer: torch.optim.Optimizer, *, scheduler: Stateful | None = None,
        scaler: Stateful | None = None
    ) -> dict[str, Any]:  # fmt: skip
        """Load a checkpoint of any plan and number of ranks, and return its progress; pass the same arguments as when
        saving. Collective.

        Raises:
            CheckpointError: it is damaged, incomplete, or of another model; on every rank.
        """
        return load_loop(path, self.module, optimizer, others=_stateful(scheduler, scaler), writer=self._writer)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  the model's own
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _check(config: OSDPConfig, optimizer: OptimizerSpec | str | None) -> None:
    """Raise ValueError if planning lacks an option, or an option has no effect in a plain loop, before anything is
    changed.
    """
    missing = [name for name in ("sequence_length", "global_batch_size") if getattr(config, name) is None]
    refuse_first({
        f"optimizer is of type {type(optimizer).__name__}; give an OptimizerSpec, and make the optimizer from the"
        " sharded model's parameters.": not isinstance(optimizer, (OptimizerSpec, str, type(None))),
        "async_save=True has no effect in a plain loop; leave it out, and use save_checkpoint(in_background=True).":
            config.async_save,
        f"Planning needs {' and '.join(missing)}; set {'them' if len(missing) > 1 else 'it'} in OSDPConfig.":
            missing and config.plan is None,
    })  # fmt: skip


def _stateful(scheduler: Stateful | None, scaler: Stateful | None) -> dict[str, Stateful]:
    """Return the given objects by the name of Accelerate's file for their state."""
    return {name: owner for name, owner in (("scheduler.bin", scheduler), ("scaler.pt", scaler)) if owner is not None}
