"""An Accelerate loop under a mixed plan trains as one process does, saves, goes on, and says what it cannot do."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

from hf_osdp.distributed.launcher import launched_rank, launched_world_size
from hf_osdp.errors import OSDPError, PlanError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plugin import OSDPPlugin
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
from tests.helpers import models
from tests.helpers.checkpointed import worst
from tests.helpers.layouts import mixed_plan
from tests.helpers.sampling import slow_but

LENGTH, GLOBAL_BATCH, STEPS, VOCABULARY = 12, 8, 3, 61


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


def train_loop(accelerator, model, optimizer, batches, clip: bool = True):
    """A plain Accelerate loop; the losses and gradient norms of its optimizer steps."""
    losses, norms, total = [], [], 0.0
    for batch in batches:
        with accelerator.accumulate(model):
            loss = exact_loss(model, batch)
            accelerator.backward(loss)
            mean = accelerator.reduce(loss.detach().double(), "mean").item()
            total += mean / accelerator.gradient_accumulation_steps
            if accelerator.sync_gradients:
                if clip:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                losses.append(total)
                total = 0.0
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def planned(kind: str, micro: int, reduce: bool, checkpointing: bool = False, from_rank_zero: bool = False):
    world = launched_world_size()
    model = tiny_model(kind, seed=launched_rank())
    if from_rank_zero and launched_rank() != 0:
        model = model.to("meta")
        model.tie_weights()
    accumulation = GLOBAL_BATCH // micro // world
    plan = mixed_plan(
        model, world, sequence_length=LENGTH, micro_batch_size=micro, accumulation_steps=accumulation, reduce=reduce
    )  # fmt: skip
    plugin = OSDPPlugin(
        osdp=OSDPConfig(plan=plan), activation_checkpointing=checkpointing, cpu_ram_efficient_loading=from_rank_zero
    )
    accelerator = OSDPAccelerator(fsdp_plugin=plugin, gradient_accumulation_steps=accumulation)
    loader = DataLoader(tokens()[: GLOBAL_BATCH * STEPS], batch_size=micro)
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), loader)
    losses, norms = train_loop(accelerator, model, optimizer, loader)
    return losses, norms, accelerator.get_state_dict(model)


@pytest.mark.on_ranks(2, shared=True)
def test_waiting_and_clipping_before_gradients_are_reduced_is_refused():
    model = tiny_model()
    plan = mixed_plan(model, 2, sequence_length=LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=True)
    accelerator = OSDPAccelerator(osdp=OSDPConfig(plan=plan), gradient_accumulation_steps=2)
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


# kind, micro-batch, reduce in each micro-step, activation checkpointing, weights on rank 0 only
CASES = {
    2: [("gpt2", 2, False, True, False), ("bert", 4, True, False, True)],
    4: [("gpt2", 1, False, False, False), ("gpt2", 1, True, False, False)],
}


@pytest.mark.parametrize("world_size", slow_but(CASES, daily=(2,)))
@pytest.mark.on_ranks(shared=True)
def test_loop_equals_one_process(world_size):
    for case in CASES[world_size]:
        (losses, norms, weights), (*wanted, want) = planned(*case), train_one_process(case[0])
        for got, each in zip((losses, norms), wanted, strict=True):
            assert max(abs(a - b) for a, b in zip(got, each, strict=True)) <= 1e-12, case
        assert launched_rank() or worst(weights, want) <= 1e-12, case


@pytest.mark.parametrize(
    ("layout", "precision"),
    slow_but(
        [("FULL_STATE_DICT", "fp16"), ("SHARDED_STATE_DICT", "no"), ("FULL_STATE_DICT", "bf16")],
        daily=[("FULL_STATE_DICT", "fp16")],
    ),
)
@pytest.mark.on_ranks(2, shared=True)
def test_saved_state_goes_on_exactly(tmp_path, layout, precision):
    def start(seed: int):
        model = tiny_model(seed=seed, dtype=torch.float32)
        plan = mixed_plan(model, 2, sequence_length=LENGTH, micro_batch_size=4, accumulation_steps=1, reduce=True)
        plugin = OSDPPlugin(osdp=OSDPConfig(plan=plan), state_dict_type=layout)
        accelerator = OSDPAccelerator(fsdp_plugin=plugin, mixed_precision=precision)
        return accelerator, *accelerator.prepare(model, new_optimizer(model), DataLoader(tokens(), batch_size=4))

    accelerator, model, optimizer, loader = start(0)
    batches = list(loader)
    train_loop(accelerator, model, optimizer, batches[:3])
    accelerator.save_state(tmp_path)
    want = train_loop(accelerator, model, optimizer, batches[3:6])
    accelerator.save_model(model, tmp_path / "weights")
    weights, is_main = accelerator.get_state_dict(model), accelerator.is_main_process
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(tmp_path / "gathered", is_main_process=is_main, save_function=accelerator.save)
    unwrapped.save_pretrained(tmp_path / "given", state_dict=dict(weights), is_main_process=is_main)
    accelerator.wait_for_everyone()
    for folder in ("weights", "gathered", "given") if is_main else ():
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
        assert all(torch.equal(value, weights[name]) for name, value in saved.items())
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "given")
    assert plain.lm_head.weight is plain.transformer.wte.weight
    accelerator, model, optimizer, loader = start(7)
    accelerator.load_state(tmp_path)
    assert train_loop(accelerator, model, optimizer, batches[3:6]) == want


@pytest.mark.on_ranks(2, shared=True)
def test_planner_chooses_the_batch_size():
    accelerator = OSDPAccelerator(osdp=OSDPConfig(hardware=preset("cpu", devices_per_node=2), memory_limit="1GiB"))
    model = tiny_model(dtype=torch.float32)
    optimizer = new_optimizer(model)
    plan = accelerator.plan(model, sequence_length=LENGTH, global_batch_size=GLOBAL_BATCH, optimizer=optimizer)
    assert (
        plan.global_batch_size == GLOBAL_BATCH and accelerator.gradient_accumulation_steps == plan.accumulation_steps
    )
    assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is False
    loader = DataLoader(tokens(), batch_size=plan.micro_batch_size)
    other = DataLoader(tokens(), batch_size=plan.micro_batch_size + 1)  # for evaluation, in batches of another size
    with pytest.raises(ValueError, match=f"use batch_size={plan.micro_batch_size}"):
        accelerator.prepare(tiny_model(), DataLoader(tokens(), batch_size=plan.micro_batch_size + 1))
    model, optimizer, loader, _ = accelerator.prepare(model, optimizer, loader, other)
    losses, _ = train_loop(accelerator, model, optimizer, loader)
    with pytest.raises(ValueError, match="2 models were given to prepare, but an OSDPAccelerator plans for one"):
        accelerator.prepare(tiny_model())
    found = [None, None]
    dist.all_gather_object(found, (plan.fingerprint, losses))
    assert found[0] == found[1] and losses[-1] < losses[0]


def prepared_without_loader(accumulation: int, **options) -> OSDPAccelerator:
    AcceleratorState._reset_state()
    given = {"hardware": preset("cpu", devices_per_node=2), "sequence_length": LENGTH, **options}
    accelerator, model = OSDPAccelerator(cpu=True, gradient_accumulation_steps=accumulation, osdp=given), tiny_model()
    accelerator.prepare(model, new_optimizer(model))
    return accelerator


@pytest.mark.on_ranks(2, shared=True)
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


@pytest.mark.on_ranks(2, shared=True)
def test_evaluation_needs_no_optimizer():
    accelerator = OSDPAccelerator(osdp={"hardware": preset("cpu", devices_per_node=2), "strategy": "fsdp"})
    plain = tiny_model()
    model, loader = accelerator.prepare(tiny_model(), DataLoader(tokens(), batch_size=4))
    assert accelerator.planned_run.plan.micro_batch_size == 4
    with torch.no_grad():
        want = [exact_loss(plain, batch).item() for batch in tokens().split(8)]
        losses = [accelerator.reduce(exact_loss(model, batch), "mean").item() for batch in loader]
    assert losses == pytest.approx(want, abs=1e-12)
    whole = model.transformer.ln_f.weight
    assert not hasattr(whole, "_local_tensor"), "the unit was freed; the trap that this guards against is gone"
    with pytest.raises(ValueError, match="not the sharded model's"):
        accelerator.prepare(model, torch.optim.AdamW([whole]))
    assert all(hasattr(parameter, "_local_tensor") for parameter in model.parameters())
    model.transformer.h.requires_grad_(False)
    with pytest.raises(
        PlanError, match=r"^The model has changed since it was planned: transformer.h.0.*, frozen, but was"
    ):
        accelerator.prepare(model, new_optimizer(model))


def prepare(loader: bool = True, optimizer_of=None, **changes) -> None:
    options = {"hardware": preset("cpu", devices_per_node=2), "operator_splitting": False, **changes}
    model = tiny_model()
    objects = [model, new_optimizer(optimizer_of or model), *([DataLoader(tokens(), batch_size=4)] if loader else [])]
    OSDPAccelerator(osdp=OSDPConfig(**options)).prepare(*objects)


@pytest.mark.on_ranks(2, shared=True)
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


@pytest.mark.on_ranks(1, init=False, env={"LOCAL_RANK": "-1", "WORLD_SIZE": "1"})
def test_one_process_is_measured_and_needs_no_group(tmp_path):
    accelerator = OSDPAccelerator(osdp=OSDPConfig(memory_limit="1GiB"))
    model, _, _ = accelerator.prepare(tiny_model(), new_optimizer(tiny_model()), DataLoader(tokens(), batch_size=8))
    plan = accelerator.planned_run.plan
    assert plan.world_size == 1 and "cpu (" in plan.hardware, "this machine was measured"
    assert not dist.is_initialized()
    accelerator.save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


class RankZeroRows(torch.utils.data.IterableDataset):
    """A stream that other ranks find empty."""

    def __iter__(self):
        yield from tokens() if launched_rank() == 0 else ()


@pytest.mark.on_ranks(2, shared=True)
def test_rank_without_samples_takes_the_length_that_others_found():
    hardware = preset("cpu", devices_per_node=2)
    accelerator, model = OSDPAccelerator(osdp=OSDPConfig(hardware=hardware), cpu=True), tiny_model()
    accelerator.prepare(model, new_optimizer(model), DataLoader(RankZeroRows(), batch_size=2))
    assert accelerator.planned_run.plan.sequence_length == LENGTH
