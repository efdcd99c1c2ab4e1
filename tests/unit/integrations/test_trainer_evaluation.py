"""What a Trainer's evaluation needs is found, and refused, before its first step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_osdp.errors import PreflightError
from hf_osdp.integrations.trainer import Trainer, with_osdp
from hf_osdp.integrations.trainer_evaluation import generation_of
from tests.helpers.trainers import small_arguments, small_trainer, token_rows

LENGTH, NEW = 12, 9


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def llama(vocabulary: int = 61, layers: int = 3) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=vocabulary, eos_token_id=None)
    return LlamaForCausalLM(config)


def trainer_of(folder: Any, model: nn.Module, *, limit: str = "1GiB", data: Any = None, **arguments: Any) -> Any:
    kind, data = transformers.Seq2SeqTrainingArguments, token_rows() if data is None else data
    args = small_arguments(folder, kind, **{"max_steps": 1, "per_device_train_batch_size": 1, **arguments})
    osdp = {"memory_limit": limit, "operator_splitting": False, "recompute": False}
    return small_trainer(
        folder, with_osdp(transformers.Seq2SeqTrainer), model, args=args, osdp=osdp, train_dataset=data,
        eval_dataset=data, compute_metrics=lambda prediction: {},
    )  # fmt: skip


@pytest.mark.parametrize("make", [t5, llama])
def test_cache_takes_what_generation_has_in_the_end(tmp_path, make):
    model = make()
    trainer = trainer_of(tmp_path, model, generation_num_beams=2)
    model.generation_config.max_new_tokens = NEW
    batch = torch.stack([row["input_ids"] for row in token_rows(1)])
    cache = model.generate(
        input_ids=batch, num_beams=2, min_new_tokens=NEW, max_new_tokens=NEW, return_dict_in_generate=True
    ).past_key_values
    parts = [getattr(cache, f"{kind}_attention_cache", None) for kind in ("self", "cross")]
    layers = [layer for part in parts if part is not None for layer in part.layers] or cache.layers
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    taken += 3 * LENGTH * 32 * 4 * bool(parts[0])  # what the encoder gives, once and for each beam
    of_a_token = 2 * sum(layer.keys[:, :, :1].nbytes for layer in (parts[0] or cache).layers)
    assert 0 <= generation_of(trainer, LENGTH).cache_bytes - taken <= of_a_token  # the last one may not be fed again


def test_generation_is_refused_before_training_where_its_cache_cannot_fit(tmp_path):
    generates = {"predict_with_generate": True, "generation_num_beams": 4, "per_device_eval_batch_size": 16}
    with pytest.raises(PreflightError, match=r"in batches of 8 needs .* \(generation\), .*; set per_device_"):
        trainer_of(tmp_path, t5(), limit="8MiB", generation_max_length=4096, **generates).train()
    trainer = trainer_of(tmp_path, t5(), limit="8MiB", generation_max_length=16, **generates)
    assert trainer.plan is not None and trainer._run.evaluation.loop.generation is not None


def test_evaluation_is_refused_before_training_with_a_batch_size_that_fits(tmp_path):
    def trainer(size: int) -> Any:
        asked = {"per_device_eval_batch_size": size, "eval_accumulation_steps": 2}
        data = token_rows(64, vocabulary=9000)
        return trainer_of(tmp_path, llama(9000, layers=1), limit="30MiB", data=data, **asked)

    too_large = trainer(32)
    with pytest.raises(PreflightError, match=r"in batches of 32 needs .* set per_device_eval_batch_size=\d+ or") as no:
        too_large.train()
    assert too_large.state.global_step == 0
    size = int(str(no.value).partition("batch_size=")[2].partition(" ")[0])
    with pytest.raises(PreflightError, match=f"batches of {size + 1} needs"):
        trainer(size + 1).plan  # noqa: B018
    fits = trainer(size)
    assert fits.plan is not None and "to fit, eval_acc" not in fits._run.evaluation.line


def test_rollouts_that_cannot_fit_are_refused_before_training_with_what_to_lower(tmp_path):
    trl = pytest.importorskip("trl", reason="needs the extra `trainers`")
    from tests.compatibility.data import prompts, tokenizer

    args = small_arguments(
        tmp_path, trl.GRPOConfig, max_steps=1, num_generations=2, gradient_accumulation_steps=8,
        max_completion_length=4096, bf16=False,
    )  # fmt: skip

    def trainer(limit: str) -> Any:
        return small_trainer(
            tmp_path, with_osdp(trl.GRPOTrainer), llama(), args=args, osdp={"memory_limit": limit, "report": False},
            train_dataset=prompts(), processing_class=tokenizer(),
            reward_funcs=lambda completions, **rest: [0.0] * len(completions),
        )  # fmt: skip

    with pytest.raises(PreflightError, match=r"Generating 16 completions at once needs .*; lower steps_per_generat"):
        trainer("32MiB").plan  # noqa: B018
    run = trainer("8GiB")
    assert run.plan is not None
    (generation,) = run._run.inputs.others
    assert generation.name == "generation"
    assert generation.peak_bytes > 16 * 2 * 3 * 16 * 4 * 4096  # 16 caches of 3 layers, two heads of 8


def test_vllm_inside_trl_gets_its_share(tmp_path):
    trainer = trainer_of(tmp_path, llama())
    vars(trainer.args).update(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.25)
    assert trainer.plan is not None
    run = trainer._run
    assert run.hardware.beside_bytes == round(0.25 * run.hardware.device.memory_bytes)
    assert run.plan.memory_limit_bytes == 2**30


def test_generation_of_a_model_without_heads_is_not_known():
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=61)
    trainer = SimpleNamespace(args=SimpleNamespace(), model=transformers.MambaForCausalLM(config))
    assert generation_of(trainer, LENGTH) is None


def test_a_prediction_without_an_evaluation_goes_to_the_host_earlier_where_it_would_not_fit(tmp_path):
    def trainer(kind: Any) -> Any:
        torch.manual_seed(0)
        asked = {"do_predict": True, "per_device_train_batch_size": 1}
        return small_trainer(tmp_path, kind, llama(), arguments=asked, train_dataset=token_rows())

    want, ours = trainer(transformers.Trainer).predict(token_rows(40)), trainer(Trainer)
    assert ours.plan is not None and ours.args.eval_accumulation_steps is None
    fitted = ours._run.evaluation
    least = fitted.model.peak(replace(fitted.loop, samples=40, moved_after=2))[0]
    ours._run = replace(ours._run, evaluation=replace(fitted, room_bytes=least))
    moved: list[int | None] = []
    step = ours.prediction_step

    def noted(*args: Any, **kwargs: Any) -> Any:
        moved.append(ours.args.eval_accumulation_steps)
        return step(*args, **kwargs)

    ours.prediction_step = noted
    got = ours.predict(token_rows(40))
    assert moved == [2] * 5
    assert (got.predictions == want.predictions).all() and (got.label_ids == want.label_ids).all()
