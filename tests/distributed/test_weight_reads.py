"""Weights that are read without a call of their module train as in one process, or backward ends with an error."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_osdp.distributed.mesh import Meshes, collective_device
from hf_osdp.errors import OSDPError, UnreducedGradientError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import move_to_device
from hf_osdp.sharding.host import host_parameters
from hf_osdp.sharding.optimizer_steps import step_by_device
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.weight_reads import WeightReads
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import LAYOUTS, plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.read_back import verify_applied
from tests.helpers.training import Trained, assert_trained_alike, train_sharded, train_whole, wrap_blocks

STEPS = 3
TOLERANCE = 1e-12


def _blocks(model: nn.Module) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def _weight(module: nn.Module) -> torch.Tensor:
    """Read a weight as careful code does, which takes a shard for a part of something to be put together."""
    weight = module.weight
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _matrix(model: nn.Module) -> nn.Module:
    mlp = _blocks(model)[1].mlp
    return mlp.down_proj if hasattr(mlp, "down_proj") else mlp.c_fc


def fused_forward(model: nn.Module) -> None:
    """Have forward read the head's weight and never call the head, as fused losses do."""

    def forward(self, input_ids):
        hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return types.SimpleNamespace(logits=hidden @ _weight(self.lm_head).T)

    model.forward = types.MethodType(forward, model)


def loss_reads_head(model, batch):
    hidden = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states[-1]
    logits = hidden @ _weight(model.get_output_embeddings()).T
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def loss_with_penalties(model, batch):
    """The head, the embedding, the last norm, a block's norm and matrix: called in forward, and read in the loss."""
    loss = tiny_loss(model, batch)
    norm = getattr(_blocks(model)[1], "ln_1", None) or _blocks(model)[1].input_layernorm
    last = getattr(model.base_model, "ln_f", None) or model.base_model.norm
    read = (model.lm_head, model.get_input_embeddings(), norm, _matrix(model), last)
    return loss + 0.3 * sum(_weight(module).pow(2).mean() for module in read)


def read_first(model: nn.Module) -> None:
    """Have forward read the second block's matrix before any block runs, and call the head twice."""

    def forward(self, input_ids):
        scale = _weight(_matrix(self)).mean()
        hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return types.SimpleNamespace(logits=self.lm_head(hidden) * (1 + scale) + self.lm_head(hidden.tanh()))

    model.forward = types.MethodType(forward, model)


def two_forwards(model, batch):
    """The model is called twice before backward."""
    flipped = {**batch, "input_ids": batch["input_ids"].flip(1)}
    return tiny_loss(model, batch) + 0.5 * tiny_loss(model, flipped)


def loss_calls_backbone(model, batch):
    """The model itself is never called."""
    hidden = model.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    logits = hidden @ _weight(model.lm_head).T
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def loss_calls_embedding(model, batch):
    """The embedding is called before the model, as with soft prompts, and the head once more after it."""
    embedded = model.get_input_embeddings()(batch["input_ids"])
    output = model(inputs_embeds=embedded * 1.1, output_hidden_states=True)
    logits = output.logits + model.lm_head(output.hidden_states[1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def add_parameters(model: nn.Module) -> None:
    """Parameters that no forward uses, one of them without dimensions."""
    dtype = next(model.parameters()).dtype
    model.temperature = nn.Parameter(torch.full((3,), 1.2, dtype=dtype))
    model.logit_scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))


def loss_uses_parameters(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits * model.logit_scale.exp() / model.temperature.sum()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _nothing(model: nn.Module) -> None:
    pass


KINDS: dict[str, tuple[Callable[[nn.Module], None], Callable]] = {
    "forward_reads_head": (fused_forward, tiny_loss),
    "loss_reads_head": (_nothing, loss_reads_head),
    "penalties": (_nothing, loss_with_penalties),
    "read_first": (read_first, tiny_loss),
    "two_forwards": (_nothing, two_forwards),
    "loss_calls_backbone": (_nothing, loss_calls_backbone),
    "loss_calls_embedding": (_nothing, loss_calls_embedding),
    "own_parameters": (add_parameters, loss_uses_parameters),
}
CASES = {
    f"{model}-{kind}-{layout}{suffix}": (model, kind, layout, options)
    for model in ("gpt2", "llama")
    for kind in KINDS
    for layout in LAYOUTS
    for suffix, options in (
        ("", {}),
        ("-accumulate", {"accumulation_steps": 2}),
        ("-checkpointing", {"checkpointing": True}),
    )
    if not options or layout in ("mixed", "everything")
}
RECOMPUTED = ("forward_reads_head", "read_first")
EVERYDAY = {
    2: {f"llama-{kind}-zero3" for kind in KINDS} | {f"gpt2-{kind}-mixed-checkpointing" for kind in RECOMPUTED},
    4: {f"llama-{kind}-everything-accumulate" for kind in ("forward_reads_head", "penalties", "own_parameters")},
}


def _model(name: str, kind: str) -> nn.Module:
    model = tiny_model(name)
    KINDS[kind][0](model)
    return model


def sharded(model: nn.Module, layout: str, meshes: Meshes | None = None, **options: object) -> tuple[nn.Module, Plan]:
    units = find_units(model)
    plan = plan_of(units, dist.get_world_size(), layout, **options)
    apply_plan(model, plan, units, meshes=meshes)
    verify_applied(model, plan, units)
    return move_to_device(model, collective_device()), plan


def run_cases(names: tuple[str, ...]) -> dict[str, Trained]:
    meshes, results = Meshes(collective_device().type), {}
    for name in names:
        model_name, kind, layout, options = CASES[name]
        model = _model(model_name, kind)
        if options.get("checkpointing"):
            wrap_blocks(model)
        steps = options.get("accumulation_steps", 1)
        placed = sharded(model, layout, meshes, accumulation_steps=steps, reduce_every_micro_step=None)
        results[name] = train_sharded(*placed, loss_of=KINDS[kind][1], steps=STEPS)
    return results if dist.get_rank() == 0 else {}


@functools.cache
def reference(model_name: str, kind: str, accumulation_steps: int) -> Trained:
    return train_whole(
        _model(model_name, kind), accumulation_steps=accumulation_steps, loss_of=KINDS[kind][1], steps=STEPS
    )


@functools.cache
def results(world_size: int, slow: bool) -> dict[str, Trained]:
    names = tuple(name for name in CASES if (name not in EVERYDAY[world_size]) == slow)
    limit_s = 600 if slow else 240
    return run_ranks(run_cases, world_size, names, timeout_s=limit_s, shared=True, nodes=world_size // 2)[0]


@pytest.mark.parametrize(
    "world_size, name",
    [
        pytest.param(world_size, name, marks=[] if name in everyday else [pytest.mark.slow, pytest.mark.timeout(660)])
        for world_size, everyday in EVERYDAY.items()
        for name in CASES
    ],
)
def test_training_with_read_weights_equals_one_process(world_size, name):
    model_name, kind, _, options = CASES[name]
    alone = reference(model_name, kind, options.get("accumulation_steps", 1))
    errors = results(world_size, name not in EVERYDAY[world_size])[name].worst_error(alone)
    assert max(errors.values()) < TOLERANCE, errors


UNGUARDED = tuple(
    (model, kind, layout)
    for model, kind in (
        ("llama", "forward_reads_head"),
        ("llama", "loss_reads_head"),
        ("gpt2", "penalties"),
        ("llama", "read_first"),
    )
    for layout in ("zero3", "replicate", "mixed")
)


def _warm_forward(model: nn.Module) -> None:
    """Have forward read a weight of a unit that an earlier call has left gathered, before the unit runs."""

    def forward(self, input_ids):
        with torch.no_grad():
            self.base_model(input_ids=input_ids, use_cache=False)
        scale = _weight(_matrix(self)).mean()
        hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return types.SimpleNamespace(logits=self.lm_head(hidden) * (1 + scale))

    model.forward = types.MethodType(forward, model)


@pytest.mark.on_ranks(2)
def test_guard_raises_on_all_ranks_where_reads_are_not_gathered():
    """Without the mechanism, a read of each kind is an error, or right where the weight happened to be gathered."""
    WeightReads.read = lambda self, group: None
    meshes, raised = Meshes("cpu"), set()
    for name, kind, layout in UNGUARDED:
        try:
            trained = train_sharded(*sharded(_model(name, kind), layout, meshes), loss_of=KINDS[kind][1], steps=STEPS)
        except UnreducedGradientError as error:
            assert str(error).startswith("Unit '") and "got a gradient for a shard of its weight" in str(error)
            raised.add(kind)
        else:
            assert_trained_alike(trained, lambda name=name, kind=kind: reference(name, kind, 1))
    assert raised == {kind for _, kind, _ in UNGUARDED}, "the guard is needed for every way to read"
    warm = tiny_model("llama")
    _warm_forward(warm)
    with pytest.raises(UnreducedGradientError, match=r"Unit 'model\.layers\.1' got a gradient for its weight"):
        train_sharded(*sharded(warm, "zero2", meshes))


@pytest.mark.on_ranks(2, shared=True)
def test_second_backward_through_a_read_weight_is_refused():
    model, _ = sharded(tiny_model("llama"), "zero3")
    tiny_loss(model, tiny_batch(0)).backward(retain_graph=True)  # nothing was read
    with pytest.raises(OSDPError, match="retain_graph=True lets backward run again"):
        loss_reads_head(model, tiny_batch(0)).backward(retain_graph=True)


@pytest.mark.on_ranks(2, shared=True)
def test_evaluation_reads_whole_weights_and_leaves_shards():
    meshes = Meshes("cpu")
    for kind, (_, loss_of) in KINDS.items():
        model, _ = sharded(_model("llama", kind), "mixed", meshes)
        losses = []
        for _ in range(2):  # the second after what the first has left gathered
            with torch.no_grad():
                losses.append(loss_of(model, tiny_batch(0)).item())
            full_state_dict(model)
            model.to(torch.float64)
        assert not [name for name, p in model.named_parameters() if p.dim() and not isinstance(p, DTensor)]
        with torch.no_grad():
            alone = loss_of(_model("llama", kind), tiny_batch(0)).item()
        assert abs(losses[0] - alone) < TOLERANCE and losses[0] == losses[1], kind


def _with_empty() -> nn.Module:
    model = tiny_model("llama")
    model.model.layers[0].empty = nn.Parameter(torch.zeros(4, 0, dtype=torch.float64))
    return model


def _loss_with_empty(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return tiny_loss(model, batch) + model.model.layers[0].empty.sum()


@pytest.mark.on_ranks(2, shared=True)
def test_parameter_without_elements_trains_as_alone():
    """As MobileBERT has where hidden size and embedding size are equal; FSDP2 cannot reduce it."""
    model, plan = sharded(_with_empty(), "mixed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step_by_device(optimizer, host_parameters(model))
    trained = train_sharded(model, plan, loss_of=_loss_with_empty, steps=STEPS, optimizer=optimizer)
    assert_trained_alike(
        trained, lambda: train_whole(_with_empty(), accumulation_steps=1, loss_of=_loss_with_empty, steps=STEPS)
    )
