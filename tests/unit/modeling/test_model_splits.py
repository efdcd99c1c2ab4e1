"""Splitting a model: its units then, the splits that are tried, and that nothing happens to the model itself."""

from dataclasses import replace

import pytest
import torch

from hf_osdp.errors import DescriptionError
from hf_osdp.modeling.split.apply import split_copy
from hf_osdp.modeling.split.candidates import SHALLOW, possible_splits
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import DType
from hf_osdp.planner.search.compare import choose_description
from hf_osdp.planner.search.search import fastest_without_limit, least_memory, search
from hf_osdp.planner.split import WHOLE_BLOCKS, ModelSplit, OperatorSplit
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.tracing.describe import describe
from tests.helpers.architectures import tiny_architecture
from tests.helpers.hardware import bare_preset
from tests.helpers.models import tiny_model
from tests.helpers.problems import problem


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", layers=2, dtype=torch.float32)


@pytest.fixture(scope="module")
def described(llama):
    return describe(llama, sequence_length=12, recomputation=False)


def test_operator_units_are_block_parts_and_norms_the_roots(llama):
    root, *units = find_units(llama, operators=True)
    assert [unit.fqn for unit in units] == [
        "model.embed_tokens", "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.self_attn",
        "model.layers.1.mlp", "lm_head",
    ]  # fmt: skip
    norms = [f"layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")]
    assert {p.name for p in root.parameters} == {f"model.{name}.weight" for name in ("norm", *norms)}
    assert sum(unit.numel for unit in (root, *units)) == sum(p.numel() for p in llama.parameters())


def test_slices_are_units_whose_blocks_are_split_anyway(llama):
    before = [name for name, _ in llama.named_parameters()]
    for operators in (True, False):
        split = ModelSplit(operators=operators, sliced=(OperatorSplit(fqn="model.layers.1.mlp.down_proj", slices=3),))
        names = [unit.fqn for unit in find_units(split_copy(llama, split), operators=operators)]
        slices = [f"model.layers.1.mlp.down_proj.slices.{i}" for i in range(3)]
        assert [name for name in names if "down_proj" in name] == slices
        assert "model.layers.1.mlp.gate_proj" in names and "model.layers.1" not in names
        assert ("model.layers.0.mlp" in names, "model.layers.0" in names) == (operators, not operators)
    assert [name for name, _ in llama.named_parameters()] == before


def test_possible_splits_are_the_loss_in_chunks_but_in_fp16_and_large_operators(llama, described):
    splits = possible_splits(llama, described)
    assert ModelSplit(operators=True) in splits and WHOLE_BLOCKS not in splits and len(set(splits)) == len(splits)
    assert {split.loss_chunks for split in splits} == {1, 8}
    in_half = replace(described, compute_dtype=DType.FLOAT16)
    for whole in (possible_splits(llama, described, vocabulary=False), possible_splits(llama, in_half)):
        assert {split.loss_chunks for split in whole} == {1}
    assert possible_splits(llama, described, operators=False) == (ModelSplit(loss_chunks=8),)
    sizes = {name: p.numel() for name, p in llama.named_parameters()}
    largest = max(numel for name, numel in sizes.items() if ".mlp." in name)
    inside = {operator.fqn for split in splits for operator in split.sliced}
    assert inside and all(sizes[f"{name}.weight"] * 4 > largest for name in inside)


def test_possible_splits_leave_deep_models_and_other_heads_whole():
    sizes = (("llama", SHALLOW + 1), ("bert", 2))
    models = [tiny_model(name, layers=layers, dtype=torch.float32) for name, layers in sizes]
    deep, splits = (possible_splits(m, describe(m, sequence_length=12, recomputation=False)) for m in models)
    assert not any(split.operators for split in deep)
    assert splits and all(operator.fqn.startswith("bert.") for split in splits for operator in split.sliced)


def test_split_model_has_as_many_operations(llama, described):
    split = ModelSplit(operators=True, sliced=(OperatorSplit(fqn="model.layers.0.mlp.down_proj", slices=4),))
    other = describe(llama, sequence_length=12, split=split, recomputation=False)
    assert other.split == split and other.numel == described.numel
    phases = ([phase for s in one.segments for phase in (s.forward, s.backward)] for one in (described, other))
    whole, parts = (sum(phase.matmul_flops(2) for phase in some) for some in phases)
    assert whole == pytest.approx(parts)


HARDWARE = bare_preset("cpu", devices_per_node=4)
JOB = TrainingJob(global_batch_size=4)


def chosen(plain, limit: int, splits, describe_split, **options):
    return choose_description(problem(plain, HARDWARE, JOB, limit, **options), splits, describe_split)


def test_splits_are_tried_only_where_memory_binds(described):
    def never():
        raise AssertionError("nothing to gain")

    assert chosen(described, 10**12, never, never) is described
    assert chosen(described, 1, tuple, None, strategy="fsdp") is described, "single strategies take the model as it is"


@pytest.mark.slow
def test_the_split_with_the_fastest_plan_is_taken(llama, described):
    splits = possible_splits(llama, described)[:3]
    made = {split: describe(llama, sequence_length=12, split=split) for split in splits}
    limit = int(1.05 * min(least_memory(problem(d, HARDWARE, JOB)) for d in made.values()))
    best = chosen(described, limit, lambda: splits, made.__getitem__)
    fits = [d for d in (described, *made.values()) if least_memory(problem(d, HARDWARE, JOB)) <= limit]
    assert any(d is best for d in fits) and best is not described
    step_s = search(problem(best, HARDWARE, JOB, limit)).time.step_s
    assert all(step_s <= search(problem(d, HARDWARE, JOB, limit)).time.step_s * (1 + 1e-9) for d in fits)
    assert step_s > fastest_without_limit(problem(described, HARDWARE, JOB))


def test_splits_that_a_model_cannot_run_are_left_out():
    model = tiny_architecture("T5ForConditionalGeneration", num_layers=1, num_decoder_layers=1).float()
    options = {"sequence_length": 12, "recomputation": False}
    plain = describe(model, **options)
    wo = OperatorSplit(fqn="encoder.block.0.layer.1.DenseReluDense.wo", slices=2)
    split = ModelSplit(operators=True, sliced=(wo,))
    with pytest.raises(DescriptionError, match="does not run"):  # T5 asks for the dtype of this weight
        describe(model, **options, split=split)
    assert chosen(plain, 1, lambda: [split], lambda split: describe(model, **options, split=split)) is plain
