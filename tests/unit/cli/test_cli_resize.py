"""Configurations made longer or wider build, and keep what they should."""

from __future__ import annotations

import pytest
from transformers import BartConfig, BertConfig, DistilBertConfig, FalconConfig, GPT2Config, LlamaConfig, RobertaConfig, T5Config, ViTConfig

from hf_osdp.cli import what_if
from hf_osdp.cli.options import Request
from hf_osdp.cli.what_if import ChangedModels, head_step, position_names, with_heads, with_positions
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.tracing.describe import describe
from tests.helpers.sampling import slow_but

CONFIGS = {
    "gpt2": GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=100, n_positions=16),
    "bert": BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=80, vocab_size=100),
    "llama": LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=96,
                         vocab_size=100),
    "t5": T5Config(num_layers=1, d_model=32, num_heads=4, d_kv=8, d_ff=64, vocab_size=100),
    "roberta": RobertaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=80, vocab_size=100,
                             max_position_embeddings=18),
    "vit": ViTConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=64, image_size=32),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_wider_models_keep_their_head_size_and_build(name):
    config = CONFIGS[name]
    heads = config.num_attention_heads + 2 * head_step(config)
    wide = with_heads(config, heads)
    assert wide.num_attention_heads == heads
    assert wide.hidden_size // heads == config.hidden_size // config.num_attention_heads
    pairs = getattr(config, "num_key_value_heads", None)
    if isinstance(pairs, int):
        assert heads / wide.num_key_value_heads == config.num_attention_heads / pairs
    parameters = [sum(p.numel() for p in build_on_meta(c).parameters()) for c in (config, wide)]
    assert parameters[1] > parameters[0] and config.num_attention_heads < heads


@pytest.mark.parametrize(
    "config",
    [
        DistilBertConfig(n_layers=1, dim=32, n_heads=4, hidden_dim=128, vocab_size=100),
        FalconConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=128, vocab_size=100),
        BartConfig(encoder_layers=1, decoder_layers=1, d_model=32, encoder_attention_heads=4, decoder_attention_heads=4,
                   encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=100),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_every_matrix_of_a_block_grows_with_the_width(config):
    before, after = (
        {name: p.shape for name, p in build_on_meta(c).named_parameters() if ".0." in name and p.dim() == 2}
        for c in (config, with_heads(config, 2 * config.num_attention_heads))
    )
    assert before and before.keys() == after.keys()
    for name, shape in before.items():
        if "query_key_value" not in name:  # Falcon shares keys and values
            assert after[name] == (2 * shape[0], 2 * shape[1]), name
    assert getattr(with_heads(config, 8), "decoder_attention_heads", 8) == 8


def test_heads_that_share_keys_come_together():
    assert head_step(CONFIGS["llama"]) == 4
    assert head_step(CONFIGS["gpt2"]) == 1


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="multiple of its num_attention_heads"):
        head_step(GPT2Config(n_embd=30, n_head=4))


def test_positions_are_raised_and_never_lowered():
    config = CONFIGS["gpt2"]
    assert position_names(config) == ("n_positions",)
    assert with_positions(config, 64).n_positions == 64
    assert with_positions(config, 8).n_positions == 16 == config.n_positions


@pytest.fixture
def models():
    """The questions of one model, described short."""

    def make(name: str, length: int, limit: int, **options) -> ChangedModels:
        config = CONFIGS[name]
        request = Request(model=name, sequence_length=length, global_batch_size=2, device="titan-rtx", **options)
        case = PlanningProblem(
            description=describe(config, sequence_length=length, device_type="cuda"),
            hardware=preset("titan-rtx"),
            job=TrainingJob(global_batch_size=2),
            memory_limit_bytes=limit,
        )
        return ChangedModels(request, case, config)

    return make


@pytest.mark.parametrize(
    ("name", "field"),
    slow_but([("gpt2", "n_positions"), ("roberta", "max_position_embeddings")], daily=[("roberta", "max_position_embeddings")]),
)
def test_a_sequence_beyond_the_positions_says_that_they_were_raised(models, monkeypatch, name, field):
    monkeypatch.setattr(what_if, "_LONGEST", 64)
    asked = models(name, 16, 2**30)
    row = asked.longest_sequence()
    assert row.result.plan.sequence_length == 64
    assert row.change == f"64 tokens or more, {field} raised to it"
    with pytest.raises(ValueError, match="positions"):
        describe(asked.config, sequence_length=64)


def test_images_have_no_sequence_to_lengthen(models):
    row = models("vit", 16, 2**30).longest_sequence()
    assert row.result is None and "do not depend on it" in row.reason


def test_a_model_that_cannot_be_widened_says_so(models):
    asked = models("gpt2", 16, 2**30)
    asked.config = GPT2Config(n_layer=1, n_embd=30, n_head=4)
    assert "multiple of its num_attention_heads" in asked.widest().reason
