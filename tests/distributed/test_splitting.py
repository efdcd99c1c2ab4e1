"""Operators in slices are gathered one at a time; the Trainer with the loss in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import TrainingArguments

from hf_osdp.distributed.fsdp_internals import parameter_groups
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.parts import LinearSlice
from hf_osdp.modeling.split.apply import losses_of
from hf_osdp.planner.split import ModelSplit
from hf_osdp.preparation.config import OSDPConfig
from tests.helpers.layouts import mixed_plan
from tests.helpers.models import SEQUENCE_LENGTH, tiny_batch, tiny_model
from tests.helpers.training import loop_of

from .cases.layouts import OPERATORS, sliced

WORLD, LAYERS = 2, 2


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, int]]:
    """Most bytes that slices show unsharded at once, and most of them."""
    slices = [module for module in model.modules() if isinstance(module, LinearSlice)]
    groups = [group for module in slices for group in parameter_groups(module)]
    seen, wait = {"bytes": 0, "slices": 0}, FSDPParamGroup.wait_for_unshard

    def watch(group: FSDPParamGroup) -> None:
        wait(group)
        shown = [p.unsharded_param for g in groups if g.is_unsharded for p in g.fsdp_params]
        seen["bytes"] = max(seen["bytes"], sum(p.numel() * p.itemsize for p in shown))
        seen["slices"] = max(seen["slices"], sum(g.is_unsharded for g in groups))

    FSDPParamGroup.wait_for_unshard = watch
    try:
        yield seen
    finally:
        FSDPParamGroup.wait_for_unshard = wait


@pytest.mark.on_ranks(WORLD, shared=True)
def test_one_slice_is_gathered_at_once():
    """In forward and backward, with every unit freed after use."""
    for name, slices in (("gpt2", 4), ("llama", 2)):
        case = sliced(name, slices, layout="zero3")
        whole = [case.model().get_submodule(fqn) for fqn in OPERATORS[name]]
        largest = max(sum(p.numel() * p.itemsize for p in operator.parameters()) for operator in whole)
        loop, _ = loop_of(case)
        with watched(loop.model) as seen:
            loop.step(0)
        assert seen["slices"] == 1
        assert largest / slices <= seen["bytes"] < largest / slices * 1.1  # the first slices have one row more


@pytest.mark.slow
@pytest.mark.on_ranks(WORLD, shared=True)
def test_trainer_logs_and_evaluates_as_with_whole_logits(tmp_path):
    """With micro-steps, labels that do not count, and metrics that read logits; the loss is in float32."""
    ids = tiny_batch(0)["input_ids"].repeat(4, 1)
    data = [{"input_ids": row, "labels": row.where(row > turn, -100)} for turn, row in enumerate(ids)]
    found = []
    for chunks in (1, 5):
        model = tiny_model("llama", layers=LAYERS)
        plan = mixed_plan(
            model, WORLD, sequence_length=SEQUENCE_LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=True
        )
        args = TrainingArguments(
            str(tmp_path / str(chunks)), per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-2, logging_steps=1,
            use_cpu=True, report_to=[], seed=1, save_strategy="no", max_steps=3,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=args, train_dataset=data, eval_dataset=data[:6],
            osdp=OSDPConfig(plan=replace(plan, split=ModelSplit(loss_chunks=chunks))),
            compute_metrics=lambda given: {"largest": float(given.predictions.max())},
        )  # fmt: skip
        trainer.train()
        metrics = trainer.evaluate()
        assert bool(list(losses_of(trainer.model))) == (chunks > 1)
        logged = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
        found.append([*logged, metrics["eval_loss"], metrics["eval_largest"]])
    assert len(found[0]) == 8 and found[1] == pytest.approx(found[0], rel=2e-6)
