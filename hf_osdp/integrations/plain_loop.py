"""A model trained by a plan in a plain PyTorch loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoint.loop import Stateful, load_loop, save_loop
from ..checkpoint.writer import CheckpointWriter
from ..distributed.consensus import on_rank_zero, require_same_run
from ..distributed.mesh import Meshes
from ..distributed.restart import check_on_oom
from ..measurement.loop_meter import LoopWatch
from ..measurement.step_meter import Observation
from ..modeling.split_candidates import split_units
from ..planner.description import DType
from ..planner.hardware import Hardware
from ..planner.job import OptimizerSpec, Precision
from ..planner.plan import Plan
from ..planning.loop_checks import say_what_is_found
from ..planning.out_of_memory import explained, shared_problem, watch
from ..planning.preflight.model import check_model
from ..planning.wanted import Found, Wanted
from ..quantities import format_bytes, format_seconds
from ..sharding.accumulation import micro_step
from ..sharding.apply import apply_plan
from ..sharding.clip import clip_grad_norm_
from ..sharding.environment import form_process_group, mp_policy, prepare_model, training_device
from ..sharding.host_offload import move_to_device
from ..sharding.optimizer import prepare_new_optimizers
from ..sharding.scaler import OSDPGradScaler
from ..sharding.state import free_gathered, full_state_dict, load_full_state_dict
from ..sharding.verify import verify_applied

if TYPE_CHECKING:
    from ..modeling.batch import Inputs
    from ..planner.profile import Profile
    from ..planner.search.search import SearchResult
    from ..planning.recalibrate import Round

_log = logging.getLogger(__name__)


class OptimalShardedDataParallel(nn.Module):
    """Shards a model by the fastest plan that fits, and behaves like the model. Every rank makes it, from the same model.

    ```python
    model = OptimalShardedDataParallel(
        GPT2LMHeadModel(config), memory_limit="8GiB", sequence_length=512, global_batch_size=64
    )
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
    `scaler.unscale_(optimizer)` before clipping, `scaler.step(optimizer)` and `scaler.update()`. It is an `OSDPGradScaler`;
    torch's own GradScaler asks one mesh only, so that where units lie on several, some ranks step and others skip.

    Under torchrun the process group is formed if there is none: NCCL with CUDA, else gloo. The optimizer is made afterwards,
    from `model.parameters()`. Parameters and state dicts have the model's own names.

    Attributes:
        module: the model, sharded in place.
        plan: what runs; the same on every rank.
        report: the plan's estimates, on rank 0; None elsewhere and where a plan was given.
        rounds: plans that were tried under `recalibrate`, with estimate and measurement.
        measured: peak, step time and collectives of the first 8 optimizer steps, the same on every rank; None before they
            ended. Rank 0 logs them beside the estimate.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str | Path | None = None,
        *,
        memory_limit: int | float | str | None = None,
        memory_margin: float | None = None,
        sequence_length: int | None = None,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        strategy: str | None = None,
        block_classes: str | Sequence[str] | None = None,
        mixed_precision: str = "no",
        hardware: Hardware | str | None = None,
        optimizer: OptimizerSpec | None = None,
        inputs: Inputs | None = None,
        profile: Profile | str | Path | None = None,
        recalibrate: bool = False,
        recompute: bool | None = None,
        host_offload: bool | None = None,
        offload_activations: bool | None = None,
        reduce_every_micro_step: bool | None = None,
        operator_splitting: bool = True,
        on_oom: str = "raise",
    ) -> None:
        """
        Args:
            model: unsharded, equal in structure on every rank; rank 0's weights count.
            plan: a plan or its file; None plans here. A given plan is held against `memory_limit` and the three sizes below,
                where they are given; `strategy`, `hardware`, `optimizer` and `inputs` are for planning only.
            memory_limit: bytes on each device, or text such as `"8GiB"`; None takes what the hardware has.
            memory_margin: share of the limit that the plan leaves free; None: 0.04 on CUDA, nothing on the CPU.
            sequence_length: tokens of one sample.
            global_batch_size: samples of one optimizer step over all ranks.
            micro_batch_size: samples a rank runs at once; None lets the planner choose.
            strategy: the name of a single strategy; None is `"osdp"`.
            block_classes: class names of the blocks, in a sequence or as text with commas; None finds them.
            mixed_precision: `"no"`, `"bf16"` or `"fp16"`.
            hardware: what to plan for, or the name of a preset: one node with a device for each process. None measures this
                machine.
            optimizer: what the optimizer will hold; None stands for `torch.optim.AdamW(model.parameters())`, which steps with
                foreach kernels on CUDA and one tensor after the other on the CPU.
            inputs: for models that are not from transformers: a function from a number of samples to forward's keyword
                arguments, labels included.
            profile: what was measured on this machine, or the file of it, in place of `hardware`.
            recalibrate: before this returns, try the plan for a few steps on a throw-away copy of the model, correct the
                estimates by what is seen, and plan again, until the plan stands (at most 3 rounds). What runs was tried and fits.
            recompute: True recomputes every block in backward, False none; None leaves this and the next three to the planner.
            host_offload: True holds the states of every unit on the host, False of none.
            offload_activations: True has what every block saves for backward wait on the host, False of none.
            reduce_every_micro_step: True reduces all gradients in each micro-step, False in the last.
            operator_splitting: whether blocks may be cut into operator units, and operators into slices.
            on_oom: out of device memory all the same: `"raise"` says where and which plan is safer; `"replan"` starts the program again on
                all ranks, with the same command line, by that plan. The loop then goes on from its own last checkpoint.

        Raises:
            InfeasibleError: no plan meets the limit.
            PlanError: the given plan cannot be read, is for another model, number of processes or batch, or does not fit.
            HardwareError: the hardware's name is not known.
            ProfileError: the profile cannot be read, or holds times of another model.
            PreflightError: the run would fail, or train something else than was meant.
            ValueError: an argument is missing, out of range, or of no use beside a plan.
        """
        super().__init__()
        self._precision = Precision.named(mixed_precision)
        wanted = Wanted(
            memory_limit=memory_limit,
            memory_margin=memory_margin,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            strategy=strategy,
            block_classes=_names(block_classes),
            precision=self._precision,
            hardware=hardware,
            optimizer=optimizer,
            inputs=inputs,
            profile=profile,
            recalibrate=recalibrate or None,
            recompute=recompute,
            host_offload=host_offload,
            offload_activations=offload_activations,
            reduce_every_micro_step=reduce_every_micro_step,
            operator_splitting=None if operator_splitting else False,
        )
        wanted.check(planning=plan is None)
        check_on_oom(on_oom, planning=plan is None)
        form_process_group(needed=self._precision.compute is not None)
        require_same_run(model, wanted, plan=plan, device_type=training_device().type)
        check_model(model)
        prepare_model(model, self._precision)
        self.report: SearchResult | None = None
        self.rounds: tuple[Round, ...] = ()
        self.measured: Observation | None = None
        self._writer = CheckpointWriter()
        meshes: Meshes | None = None
        found: Found | None = None
        if plan is None:
            found = wanted.search(model)
            self.plan, self.rounds, meshes = found.plan, found.rounds, found.meshes
            self.report = None if found.problem is None else found.problem.result(found.plan)
        else:
            self.plan = wanted.load(plan)
        units = split_units(model, self.plan.split, wanted.block_classes, low_precision=self._precision.compute is not None)
        say_what_is_found(model, self.plan, units, wanted, found)
        apply_plan(model, self.plan, units, meshes=meshes, mp_policy=mp_policy(self._precision))
        verify_applied(model, self.plan, units)
        self.module = move_to_device(model, training_device())
        problem = shared_problem(None if found is None else found.problem)
        watch(self.module, self.plan, units, problem=problem, on_oom=on_oom, device=training_device())
        prepare_new_optimizers(self.module)
        skips = self._precision.compute is DType.FLOAT16
        self._watch = LoopWatch(self.module, training_device(), self._tell, micro_steps=self.plan.accumulation_steps if skips else None)

    # ------------------------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass.

        The estimate counts the loss alone as kept until backward. Outputs that are held meanwhile keep their logits too:
        write `loss = model(**batch).loss`.
        """
        with explained():
            return self.module(*args, **kwargs)

    def micro_step(self, *, is_last: bool = True) -> AbstractContextManager[None]:
        """Forward and backward of one micro-batch go inside; `is_last` where the optimizer steps after it."""
        return micro_step(self.module, is_last=is_last, plan=self.plan)

    def backward(self, loss: torch.Tensor, *, is_last: bool = True) -> None:
        """`loss.backward()` of one micro-batch, as `micro_step`. The loss is taken as it is: divide it by the number of micro-steps."""
        with explained(), self.micro_step(is_last=is_last):
            loss.backward()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients as one vector. Collective. Returns the norm before clipping."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def grad_scaler(self, **kwargs: Any) -> OSDPGradScaler:
        """The loss scaler for the model's device; without fp16 it is disabled, and the same loop runs.

        Args:
            **kwargs: for `torch.amp.GradScaler`, for example `init_scale`.
        """
        kwargs.setdefault("device", training_device().type)
        kwargs.setdefault("enabled", self._precision.compute is DType.FLOAT16)
        return OSDPGradScaler(**kwargs)

    def _tell(self, measured: Observation) -> None:
        """Keep what the first steps showed; rank 0 logs it."""
        self.measured = measured
        if dist.is_initialized() and dist.get_rank():
            return
        peak = None if self.report is None else self.report.memory.peak_bytes
        step_s = None if self.report is None else self.report.time.step_s
        texts = [_beside(peak, measured.peak_bytes, format_bytes), _beside(step_s, measured.median_step_s, format_seconds)]
        kinds = [f"{t.collective.value.replace('_', '-')} over {t.group_size}: {format_seconds(t.seconds)}" for t in measured.collectives]
        _log.info("Plan %s: peak %s, step %s%s.", self.plan.fingerprint, *texts, "; " + ", ".join(kinds) if kinds else "")

    # ---------------------------------------------------------------------------------------------------------- state

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under its own names: this rank's shards, as DTensors, also right after an evaluation."""
        free_gathered(self.module)
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's buffers under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's state under its own names: shards, as torch.distributed.checkpoint takes them."""
        return self.module.state_dict(*args, **kwargs)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole weights on the CPU, on rank 0; an empty dict elsewhere. Collective."""
        return full_state_dict(self.module)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load shards, as `state_dict` gives them, or whole weights, of which rank 0's count. Collective.

        Raises:
            RuntimeError: names or shapes do not fit.
        """
        if any(isinstance(value, DTensor) for value in state_dict.values()):
            self.module.load_state_dict(state_dict, strict=strict)
        else:
            load_full_state_dict(self.module, state_dict, strict=strict)

    def save_pretrained(self, path: str | Path, **kwargs: Any) -> None:
        """Write the whole model as Hugging Face does; rank 0 writes. Collective.

        Args:
            path: a directory.
            **kwargs: for the model's own `save_pretrained`.

        Raises:
            ValueError: the model has no `save_pretrained`.
            OSDPError: rank 0 could not write; on every rank.
        """
        if not hasattr(self.module, "save_pretrained"):
            raise ValueError(f"{type(self.module).__name__} has no save_pretrained; save full_state_dict() with torch.save.")
        state = self.full_state_dict()
        on_rank_zero(lambda: self.module.save_pretrained(path, state_dict=state, **kwargs))

    def save_checkpoint(
        self, path: str | Path, optimizer: torch.optim.Optimizer, *, scheduler: Stateful | None = None, scaler: Stateful | None = None,
        progress: Mapping[str, Any] | None = None, sharded: bool = True, in_background: bool = False,
    ) -> None:  # fmt: skip
        """Write all that the loop goes on from; the folder appears when it is complete. Collective.

        Args:
            path: the checkpoint's folder; `checkpoint-N` is found again by `last_checkpoint`.
            optimizer: of this model's parameters.
            scheduler: a learning rate scheduler, if there is one.
            scaler: the loss scaler, if there is one.
            progress: numbers, text and tensors of the loop's own, such as the step; rank 0's count.
            sharded: each rank writes its shards, and nothing is ever whole; else rank 0 writes whole tensors.
            in_background: shards are copied to the host's memory, and written while training goes on; `wait_for_checkpoint` at the end.

        Raises:
            CheckpointError: it, or the one before in the background, cannot be written; on every rank.
            ValueError: whole tensors were asked for in the background.
        """
        if in_background and not sharded:
            raise ValueError(
                "in_background=True writes shards while training goes on, but sharded=False asks for whole tensors; leave one out."
            )
        self._writer.in_background = in_background
        save_loop(
            self._writer, path, self.module, optimizer,
            others=_stateful(scheduler, scaler), progress=progress or {}, sharded=sharded, plan=self.plan,
        )  # fmt: skip

    def wait_for_checkpoint(self) -> None:
        """Until the checkpoint that is written in the background is complete. Collective.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        self._writer.wait()

    def load_checkpoint(
        self, path: str | Path, optimizer: torch.optim.Optimizer, *, scheduler: Stateful | None = None, scaler: Stateful | None = None
    ) -> dict[str, Any]:  # fmt: skip
        """Go on from a checkpoint, whatever plan and however many ranks wrote it. Collective.

        Args:
            path: the checkpoint's folder.
            optimizer: of this model's parameters, with the parameter groups that it was saved with.
            scheduler: as it was saved.
            scaler: as it was saved.

        Returns:
            The progress that was saved.

        Raises:
            CheckpointError: it is damaged, incomplete, or of another model; on every rank.
        """
        return load_loop(path, self.module, optimizer, others=_stateful(scheduler, scaler))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _stateful(scheduler: Stateful | None, scaler: Stateful | None) -> dict[str, Stateful]:
    """What has a state, by the name of Accelerate's file."""
    return {name: owner for name, owner in (("scheduler.bin", scheduler), ("scaler.pt", scaler)) if owner is not None}


def _beside(estimated: float | None, measured: float | None, text: Callable[[Any], str]) -> str:
    """`1.2 GiB estimated, 1.1 GiB measured`."""
    known = ((estimated, "estimated"), (measured, "measured"))
    return ", ".join("not " + name if value is None else f"{text(value)} {name}" for value, name in known)


def _names(block_classes: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Class names from a sequence, or from text with commas."""
    if block_classes is None:
        return None
    listed = block_classes.split(",") if isinstance(block_classes, str) else block_classes
    return tuple(name.strip() for name in listed if name.strip())
