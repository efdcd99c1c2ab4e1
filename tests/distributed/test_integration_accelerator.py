"""An Accelerate loop under a mixed plan trains as one process does, saves, goes on, and says what it cannot do."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, set_seed

from hf_osdp.errors import OSDPError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.launch import launched_rank, launched_world_size
from hf_osdp.integrations.plugin import OSDPPlugin
from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import OSDPConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.mixed import mixed_plan
from tests.helpers.sampling import slow_but

LENGTH, GLOBAL_BATCH, STEPS, VOCABULARY = 12, 8, 5, 61


def tiny_model(kind: str = "gpt2", seed: int = 0, dtype: torch.dtype = torch.float64):
    set_seed(seed)
    if kind == "gpt2":
        config = GPT2Config(
            n_layer=4, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=16, initializer_range=0.2,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config).to(dtype)
    config = BertConfig(
        num_hidden_layers=4, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=VOCABULARY,
        max_position_embeddings=16, initializer_range=0.2, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return BertForMaskedLM(config).to(dtype)


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
            total += accelerator.reduce(loss.detach().double(), "mean").item() / accelerator.gradient_accumulation_steps
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
    plugin = OSDPPlugin(osdp=OSDPConfig(plan=plan), activation_checkpointing=checkpointing, cpu_ram_efficient_loading=from_rank_zero)
    accelerator = OSDPAccelerator(osdp_plugin=plugin, gradient_accumulation_steps=accumulation)
    loader = DataLoader(tokens()[: GLOBAL_BATCH * STEPS], batch_size=micro)
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), loader)
    losses, norms = train_loop(accelerator, model, optimizer, loader)
    return losses, norms, accelerator.get_state_dict(model)


# kind, micro-batch, reduce in each micro-step, activation checkpointing, weights on rank 0 only
CASES = {
    1: [("gpt2", 4, False, False, False)],
    2: [
        ("gpt2", 2, True, False, False),
        ("gpt2", 2, False, True, False),
        ("bert", 4, True, False, True),
    ],
    4: [("gpt2", 1, False, False, False)],
}


def planned_in_turn(cases: list[tuple]) -> list[tuple]:
    return [planned(*case) for case in cases]


@pytest.mark.parametrize("world", slow_but(CASES, daily=(1, 2)))
def test_equals_one_process(world):
    results = run_ranks(planned_in_turn, world, CASES[world], init=False)
    for index, case in enumerate(CASES[world]):
        losses, norms, weights = train_one_process(case[0])
        for rank in results:
            got_losses, got_norms, _ = rank[index]
            assert max(abs(a - b) for a, b in zip(got_losses, losses, strict=True)) <= 1e-12, case
            assert max(abs(a - b) for a, b in zip(got_norms, norms, strict=True)) <= 1e-12, case
        state = results[0][index][2]
        assert set(state) == set(weights)
        assert max((state[name] - value).abs().max().item() for name, value in weights.items()) <= 1e-12, case


def save_and_load(folder: str, layout: str, precision: str):
    def start(seed: int):
        model = tiny_model(seed=seed, dtype=torch.float32)
        plan = mixed_plan(model, 2, sequence_length=LENGTH, micro_batch_size=4, accumulation_steps=1, reduce=True)
        plugin = OSDPPlugin(osdp=OSDPConfig(plan=plan), state_dict_type=layout)
        accelerator = OSDPAccelerator(fsdp_plugin=plugin, mixed_precision=precision)
        return accelerator, *accelerator.prepare(model, new_optimizer(model), DataLoader(tokens(), batch_size=4))

    accelerator, model, optimizer, loader = start(0)
    batches = list(loader)
    train_loop(accelerator, model, optimizer, batches[:3])
    accelerator.save_state(folder)
    want = train_loop(accelerator, model, optimizer, batches[3:6])
    accelerator.save_model(model, f"{folder}/weights")
    weights = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(f"{folder}/pretrained", state_dict=dict(weights), is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    accelerator, model, optimizer, loader = start(7)
    accelerator.load_state(folder)
    return want, train_loop(accelerator, model, optimizer, batches[3:6]), weights


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("FULL_STATE_DICT", "fp16"),
        pytest.param("SHARDED_STATE_DICT", "no", marks=pytest.mark.slow),
        pytest.param("FULL_STATE_DICT", "bf16", marks=pytest.mark.slow),
    ],
)
def test_saved_state_goes_on_exactly(tmp_path, layout, precision):
    want, got, weights = run_ranks(save_and_load, 2, str(tmp_path), layout, precision, init=False)[0]
    assert got == want
    for folder in ("weights", "pretrained"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
        assert all(torch.equal(value, weights[name]) for name, value in saved.items())
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "pretrained")
    assert model.lm_head.weight is model.transformer.wte.weight


def plan_first(limit: str):
    accelerator = OSDPAccelerator(osdp=OSDPConfig(hardware=preset("cpu", devices_per_node=2), memory_limit=limit))
    model = tiny_model(dtype=torch.float32)
    optimizer = new_optimizer(model)
    plan = accelerator.plan(model, sequence_length=LENGTH, global_batch_size=GLOBAL_BATCH, optimizer=optimizer)
    assert plan.global_batch_size == GLOBAL_BATCH
    assert accelerator.gradient_accumulation_steps == plan.accumulation_steps
    assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is False
    loader = DataLoader(tokens(), batch_size=plan.micro_batch_size)
    other = DataLoader(tokens(), batch_size=plan.micro_batch_size + 1)  # for evaluation, in batches of another size
    with pytest.raises(ValueError, match=f"use batch_size={plan.micro_batch_size}"):
        accelerator.prepare(tiny_model(), DataLoader(tokens(), batch_size=plan.micro_batch_size + 1))
    model, optimizer, loader, _ = accelerator.prepare(model, optimizer, loader, other)
    losses, _ = train_loop(accelerator, model, optimizer, loader)
    with pytest.raises(ValueError, match="2 models were given to prepare, but an OSDPAccelerator plans for one"):
        accelerator.prepare(tiny_model())
    return plan.fingerprint, losses


def test_planner_chooses_the_batch_size():
    first, second = run_ranks(plan_first, 2, "1GiB", init=False)
    assert first == second
    assert first[1][-1] < first[1][0]


def evaluate_only():
    accelerator = OSDPAccelerator(osdp={"hardware": preset("cpu", devices_per_node=2), "strategy": "fsdp"})
    model, loader = accelerator.prepare(tiny_model(), DataLoader(tokens(), batch_size=4))
    assert accelerator.planned_run.plan.micro_batch_size == 4
    with torch.no_grad():
        losses = [accelerator.reduce(exact_loss(model, batch), "mean").item() for batch in loader]
    with pytest.raises(ValueError, match="not the sharded model's"):
        gathered = [p for p in model.parameters() if not hasattr(p, "_local_tensor")]
        assert gathered, "every unit was freed; the trap that this guards against is gone"
        accelerator.prepare(model, torch.optim.AdamW(gathered))
    return sum(losses) / len(losses)


def test_evaluation_without_an_optimizer():
    model = tiny_model()
    with torch.no_grad():
        want = sum(exact_loss(model, batch).item() for batch in tokens().split(8)) / len(tokens().split(8))
    assert abs(run_ranks(evaluate_only, 2, init=False)[0] - want) < 1e-12


def cannot_run() -> list[str]:
    """What each of these says, one after the other in the same processes."""
    hardware = preset("cpu", devices_per_node=2)

    def prepared(loader: bool = True, optimizer_of=None, **changes):
        options = {"hardware": hardware, "compare": False, "operator_splitting": False, **changes}
        model = tiny_model()
        objects = [model, new_optimizer(optimizer_of or model)]
        objects += [DataLoader(tokens(), batch_size=4)] if loader else []
        OSDPAccelerator(osdp=OSDPConfig(**options)).prepare(*objects)

    def another_batch_size():
        """The loader for training does not match the plan; the one for evaluation, which does, does not help."""
        model = tiny_model()
        accelerator = OSDPAccelerator(osdp=OSDPConfig(hardware=hardware, compare=False, micro_batch_size=4))
        accelerator.plan(model, sequence_length=LENGTH, global_batch_size=8)
        accelerator.prepare(model, new_optimizer(model), DataLoader(tokens(), batch_size=3), DataLoader(tokens(), batch_size=4))

    cases = [
        lambda: OSDPAccelerator(osdp=OSDPConfig(), fsdp_plugin=OSDPPlugin()),
        lambda: OSDPAccelerator(osdp_plugin=OSDPPlugin(), fsdp_plugin=OSDPPlugin()),
        lambda: OSDPAccelerator(fsdp_plugin=object()),
        another_batch_size,
        lambda: prepared(loader=False),
        lambda: prepared(loader=False, sequence_length=LENGTH),
        lambda: prepared(micro_batch_size=3),
        lambda: prepared(global_batch_size=32),
        lambda: prepared(block_classes="NoBlock"),
        lambda: prepared(memory_limit="1KiB"),
        lambda: prepared(hardware=preset("cpu", devices_per_node=3)),
        lambda: prepared(hardware="cray"),
        lambda: prepared(hardware="h100", nodes=3),
        lambda: prepared(sequence_length=1000),
        lambda: prepared(optimizer_of=tiny_model()),
    ]
    messages = []
    for case in cases:
        try:
            case()
            messages.append("")
        except (ValueError, OSDPError) as error:
            messages.append(str(error))
    return messages


def test_what_cannot_run_says_so_in_one_line():
    first, second = run_ranks(cannot_run, 2, init=False)
    assert first == second
    parts = [
        "Both osdp and fsdp_plugin",
        "Both osdp_plugin and fsdp_plugin",
        "needs an OSDPPlugin",
        "first DataLoader gives 3; use batch_size=4 for training, and give that DataLoader first",
        "sequence length is not known",
        "batch size is not known",
        "micro_batch_size=3, but the DataLoader",
        "global_batch_size=32, but batches of 4 on 2 processes",
        "NoBlock",
        "1.0 KiB",
        "3 devices, but 2 processes",
        "'cray' is not known",
        "nodes=3 does not divide",
        "1000",
        "does not have",
    ]
    for message, part in zip(first, parts, strict=True):
        assert part in message and "\n" not in message, (part, message)


def stock_after_all():
    accelerator = Accelerator(cpu=True)
    return str(accelerator.distributed_type)


def test_importing_changes_nothing_in_accelerate():
    assert run_ranks(stock_after_all, 2, init=False)[0].endswith("MULTI_CPU")


def one_process(folder: str):
    accelerator = OSDPAccelerator(osdp=OSDPConfig(memory_limit="1GiB"))
    model, _, _ = accelerator.prepare(tiny_model(), new_optimizer(tiny_model()), DataLoader(tokens(), batch_size=8))
    plan = accelerator.planned_run.plan
    assert plan.world_size == 1 and "cpu (" in plan.hardware, "this machine was measured"
    assert not dist.is_initialized()
    accelerator.save_model(model, folder)
    return sorted(path.name for path in Path(folder).iterdir())


def test_one_process_without_a_group(tmp_path):
    variables = {"RANK": "", "LOCAL_RANK": "-1", "WORLD_SIZE": "1"}
    del variables["RANK"]
    assert "model.safetensors" in run_ranks(one_process, 1, str(tmp_path), init=False, env=variables)[0]
