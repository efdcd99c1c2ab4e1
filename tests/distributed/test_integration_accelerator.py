"""An Accelerate loop under a mixed plan trains as one process does, goes on, and says what it cannot do; what else it
trains and saves is in tests/compatibility.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

from hf_osdp.distributed.launcher import launched_rank
from hf_osdp.errors import OSDPError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plugin import OSDPPlugin
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
from tests.helpers import models
from tests.helpers.checkpointed import worst
from tests.helpers.layouts import mixed_plan

LENGTH, GLOBAL_BATCH, STEPS, VOCABULARY = 12, 8, 3, 61
on_two_ranks = pytest.mark.on_ranks(2, shared=True)


def tiny_model(kind: str = "gpt2", **options) -> torch.nn.Module:
    return models.tiny_model(kind, scale=10.0, layers=2, **options)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (GLOBAL_BATCH * STEPS * 2, LENGTH), generator=torch.Generator().manual_seed(3))


def exact_loss(model, batch: torch.Tensor) -> torch.Tensor:
    """Mean over tokens in the logits' own dtype."""
    logits = model(input_ids=batch).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())


def new_optimizer(model) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)


def train_one_process(kind: str):
    model, losses, norms = tiny_model(kind), [], []
    optimizer = new_optimizer(model)
    for batch in islice(tokens().split(GLOBAL_BATCH), STEPS):
        loss = exact_loss(model, batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: value.detach() for name, value in model.state_dict().items()}


def train_loop(accelerator, model, optimizer, batches):
    """A plain Accelerate loop; the losses and gradient norms of its optimizer steps."""
    losses, norms, total = [], [], 0.0
    for batch in batches:
        with accelerator.accumulate(model):
            loss = exact_loss(model, batch)
            accelerator.backward(loss)
            mean = accelerator.reduce(loss.detach().double(), "mean").item()
            total += mean / accelerator.gradient_accumulation_steps
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                losses.append(total)
                total = 0.0
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def under_a_mixed_plan(
    model: torch.nn.Module, micro: int = 4, *, reduce: bool = True, precision: str = "no", **plugin: Any
) -> OSDPAccelerator:
    steps = GLOBAL_BATCH // micro // 2
    plan = mixed_plan(
        model, 2, sequence_length=LENGTH, micro_batch_size=micro, accumulation_steps=steps, reduce=reduce
    )
    plugin = OSDPPlugin(osdp=OSDPConfig(plan=plan), **plugin)
    return OSDPAccelerator(fsdp_plugin=plugin, gradient_accumulation_steps=steps, mixed_precision=precision)


@on_two_ranks
@pytest.mark.parametrize(
    ("kind", "micro", "options"),
    [
        ("gpt2", 2, {"reduce": False, "activation_checkpointing": True}),
        ("bert", 4, {"cpu_ram_efficient_loading": True}),
    ],
)
def test_loop_equals_one_process(kind, micro, options):
    """Ranks begin with other weights, or rank 0 alone has any."""
    model = tiny_model(kind, seed=launched_rank())
    if "cpu_ram_efficient_loading" in options and launched_rank() != 0:
        model = model.to("meta")
        model.tie_weights()
    accelerator = under_a_mixed_plan(model, micro, **options)
    loader = DataLoader(tokens()[: GLOBAL_BATCH * STEPS], batch_size=micro)
    prepared = accelerator.prepare(model, new_optimizer(model), loader)
    *wanted, weights = train_one_process(kind)
    for got, want in zip(train_loop(accelerator, *prepared), wanted, strict=True):
        assert got == pytest.approx(want, rel=0, abs=1e-12)
    whole = accelerator.get_state_dict(prepared[0])
    assert launched_rank() or worst(whole, weights) <= 1e-12


@on_two_ranks
def test_waiting_and_clipping_before_gradients_are_reduced_is_refused():
    model = tiny_model()
    accelerator = under_a_mixed_plan(model, 2)
    model, _, loader = accelerator.prepare(model, new_optimizer(model), DataLoader(tokens()[:8], batch_size=2))
    with accelerator.accumulate(model):
        accelerator.backward(exact_loss(model, next(iter(loader))))
        for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
            with pytest.raises(OSDPError, match=r"^Gradients cannot be clipped before the last micro-step reduces"):
                clip(model.parameters(), 1.0)
    with pytest.raises(ValueError, match=r"^join_uneven_inputs cannot run with a sharded model"):
        accelerator.join_uneven_inputs([model], even_batches=False)
    with accelerator.join_uneven_inputs([model]):
        pass


@on_two_ranks
@pytest.mark.parametrize(("layout", "precision"), [("FULL_STATE_DICT", "fp16"), ("SHARDED_STATE_DICT", "no")])
def test_saved_state_goes_on_exactly(tmp_path, layout, precision):
    def start(seed: int):
        model = tiny_model(seed=seed, dtype=torch.float32)
        accelerator = under_a_mixed_plan(model, precision=precision, state_dict_type=layout)
        return accelerator, *accelerator.prepare(model, new_optimizer(model), DataLoader(tokens(), batch_size=4))

    accelerator, model, optimizer, loader = start(0)
    batches = list(loader)
    train_loop(accelerator, model, optimizer, batches[:3])
    accelerator.save_state(tmp_path)
    want = train_loop(accelerator, model, optimizer, batches[3:6])
    accelerator, model, optimizer, loader = start(7)
    accelerator.load_state(tmp_path)
    assert train_loop(accelerator, model, optimizer, batches[3:6]) == want


@on_two_ranks
def test_planner_chooses_the_batch_size():
    accelerator = OSDPAccelerator(osdp=OSDPConfig(hardware=preset("cpu", devices_per_node=2), memory_limit="1GiB"))
    model = tiny_model(dtype=torch.float32)
    optimizer = new_optimizer(model)
    plan = accelerator.plan(model, sequence_length=LENGTH, global_batch_size=GLOBAL_BATCH, optimizer=optimizer)
    assert plan.global_batch_size == GLOBAL_BATCH
    assert accelerator.gradient_accumulation_steps == plan.accumulation_steps
    assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is False
    loader, other = (DataLoader(tokens(), batch_size=plan.micro_batch_size + more) for more in (0, 1))
    with pytest.raises(ValueError, match=f"use batch_size={plan.micro_batch_size}"):
        accelerator.prepare(tiny_model(), other)
    model, optimizer, loader, _ = accelerator.prepare(model, optimizer, loader, other)  # the other for evaluation
    losses, _ = train_loop(accelerator, model, optimizer, loader)
    assert losses[-1] < losses[0]


def prepared_without_loader(accumulation: int, **options) -> OSDPAccelerator:
    AcceleratorState._reset_state()
    given = {"hardware": preset("cpu", devices_per_node=2), "sequence_length": LENGTH, **options}
    accelerator, model = OSDPAccelerator(cpu=True, gradient_accumulation_steps=accumulation, osdp=given), tiny_model()
    accelerator.prepare(model, new_optimizer(model))
    return accelerator


@on_two_ranks
def test_loop_whose_loader_is_not_prepared_keeps_its_accumulation():
    for steps, options, size, planned in (
        (4, {}, 2, 4), (1, {}, 8, 1), (1, {"micro_batch_size": 4}, 4, 2), (2, {"micro_batch_size": 4}, 4, 2),
    ):  # fmt: skip
        accelerator = prepared_without_loader(steps, global_batch_size=16, **options)
        assert accelerator.planned_run.plan.micro_batch_size == size
        assert accelerator.gradient_accumulation_steps == planned
    with pytest.raises(ValueError, match="plan takes 4 samples in a batch, but the first DataLoader gives 8"):
        accelerator.prepare(DataLoader(tokens(), batch_size=8))
    accelerator.prepare(DataLoader(tokens(), batch_size=4))
    accelerator.prepare(DataLoader(tokens(), batch_size=8))  # for evaluation
    with pytest.raises(ValueError, match="steps=4, but the plan accumulates 2 micro-batches; make them agree"):
        prepared_without_loader(4, global_batch_size=16, micro_batch_size=4)
    with pytest.raises(
        ValueError, match="global_batch_size=16 is not a multiple of 2 processes x 3 accumulation steps"
    ):
        prepared_without_loader(3, global_batch_size=16)


@on_two_ranks
def test_optimizer_of_what_an_evaluation_shows_is_refused():
    accelerator = OSDPAccelerator(osdp={"hardware": preset("cpu", devices_per_node=2), "strategy": "fsdp"})
    model, loader = accelerator.prepare(tiny_model(), DataLoader(tokens(), batch_size=4))
    assert accelerator.planned_run.plan.micro_batch_size == 4
    with torch.no_grad():
        exact_loss(model, next(iter(loader)))
    whole = model.transformer.ln_f.weight
    assert not hasattr(whole, "_local_tensor"), "the unit was freed; the trap that this guards against is gone"
    with pytest.raises(ValueError, match="not the sharded model's"):
        accelerator.prepare(model, torch.optim.AdamW([whole]))
    assert all(hasattr(parameter, "_local_tensor") for parameter in model.parameters())


def prepare(loader: bool = True, optimizer_of=None, **changes) -> None:
    options = {"hardware": preset("cpu", devices_per_node=2), "operator_splitting": False, **changes}
    model = tiny_model()
    objects = [model, new_optimizer(optimizer_of or model), *([DataLoader(tokens(), batch_size=4)] if loader else [])]
    OSDPAccelerator(osdp=OSDPConfig(**options)).prepare(*objects)


@on_two_ranks
def test_what_cannot_run_is_refused_in_one_line():
    for part, do in {
        "Both osdp and fsdp_plugin": lambda: OSDPAccelerator(osdp=OSDPConfig(), fsdp_plugin=OSDPPlugin()),
        "needs an OSDPPlugin": lambda: OSDPAccelerator(fsdp_plugin=object()),
        "sequence length is not known": lambda: prepare(loader=False),
        "batch size is not known": lambda: prepare(loader=False, sequence_length=LENGTH),
        "micro_batch_size=3, but the DataLoader": lambda: prepare(micro_batch_size=3),
        "global_batch_size=32, but batches of 4 on 2 processes": lambda: prepare(global_batch_size=32),
        "does not have": lambda: prepare(optimizer_of=tiny_model()),
    }.items():
        with pytest.raises((ValueError, OSDPError)) as caught:
            do()
        assert part in str(caught.value) and "\n" not in str(caught.value)


class RankZeroRows(torch.utils.data.IterableDataset):
    """A stream that other ranks find empty."""

    def __iter__(self):
        yield from tokens() if launched_rank() == 0 else ()


@on_two_ranks
def test_rank_without_samples_takes_the_length_that_others_found():
    hardware = preset("cpu", devices_per_node=2)
    accelerator, model = OSDPAccelerator(osdp=OSDPConfig(hardware=hardware), cpu=True), tiny_model()
    accelerator.prepare(model, new_optimizer(model), DataLoader(RankZeroRows(), batch_size=2))
    assert accelerator.planned_run.plan.sequence_length == LENGTH
