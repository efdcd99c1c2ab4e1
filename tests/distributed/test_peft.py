"""LoRA adapters through peft: planned for, saved and loaded in its own format; `cases/optimizers.py` trains them."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from hf_osdp import Trainer
from hf_osdp.modeling.batch import training_batch
from tests.helpers.models import SEQUENCE_LENGTH, VOCABULARY, tiny_batch, tiny_model
from tests.helpers.sampling import slow_but

from .cases.optimizers import TARGETS

peft = pytest.importorskip("peft", reason="the extra peft is not installed")

STEPS = 4


@pytest.mark.parametrize("layout", slow_but(["FULL_STATE_DICT", "SHARDED_STATE_DICT"], daily=["SHARDED_STATE_DICT"]))
@pytest.mark.on_ranks(2, shared=True)
def test_adapters_and_states_by_names_are_saved_and_go_on(tmp_path, layout):
    """LoRA-FA's, one for each pair of matrices, which it also needs whole."""
    from peft.optimizers import create_lorafa_optimizer

    def losses(checkpoint: str | None = None, strategy: str = "osdp") -> list[float]:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS["llama"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(tiny_model("llama"), config)
        args = TrainingArguments(
            str(tmp_path), max_steps=STEPS, save_steps=2, per_device_train_batch_size=2, use_cpu=True, logging_steps=1,
            report_to="none", disable_tqdm=True, fsdp_config={"state_dict_type": layout, "osdp": {"hardware": "cpu"}},
        )  # fmt: skip
        rows = [{name: value[0] for name, value in tiny_batch(step).items()} for step in range(2 * STEPS)]
        optimizer = create_lorafa_optimizer(model, r=3, lora_alpha=6, lr=0.05)
        trainer = Trainer(
            model=model, args=args, train_dataset=rows, optimizers=(optimizer, None), osdp={"strategy": strategy}
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(tmp_path / "adapters"))
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    assert losses() == losses(str(tmp_path / "checkpoint-2"))
    assert not list((tmp_path / "adapters").glob("model*.safetensors")), "the base is not saved again"
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapters")
    weights = {name: p for name, p in loaded.named_parameters() if "lora_B" in name}
    assert len(weights) == 8 and all(p.abs().max() > 0 for p in weights.values()), "which begin at zero"
    with pytest.raises(ValueError, match="needs them whole"):
        losses(strategy="fsdp")


@pytest.mark.parametrize("trains", slow_but([False, True], daily=[False]))
@pytest.mark.on_ranks(2, shared=True)
def test_adalora_keeps_its_matrices_whole(tmp_path, trains):
    class Allocate(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            getattr(model, "module", model).base_model.update_and_allocate(state.global_step + 1)

    def logged(osdp: object) -> list[float]:
        torch.manual_seed(1)
        config = peft.AdaLoraConfig(
            init_r=6, target_r=3, tinit=1, tfinal=1, deltaT=1, total_step=8, target_modules=TARGETS["llama"],
            task_type="CAUSAL_LM",
        )  # fmt: skip
        args = TrainingArguments(
            str(tmp_path), max_steps=STEPS, save_strategy="no", per_device_train_batch_size=2, use_cpu=True,
            logging_steps=1, report_to="none", disable_tqdm=True, learning_rate=0.05,
        )  # fmt: skip
        rows = [{name: value[0] for name, value in tiny_batch(step).items()} for step in range(2 * STEPS)]
        model = peft.get_peft_model(tiny_model("llama"), config)
        trainer = Trainer(model=model, args=args, train_dataset=rows, osdp=osdp, callbacks=[Allocate()])
        trainer.train()
        return [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]

    with pytest.raises(ValueError, match="adamw beside AdaLoRA needs them whole; use osdp or ddp"):
        logged({"hardware": "cpu", "strategy": "fsdp"})
    planned = {"hardware": "cpu", "memory_limit": "2MiB", "operator_splitting": False}
    assert not trains or logged(planned) == pytest.approx(logged(False), rel=1e-4)


def test_inputs_are_those_of_the_model_inside():
    model = peft.get_peft_model(tiny_model("bert"), peft.LoraConfig(r=2, target_modules=["query"]))
    batch = training_batch(model, SEQUENCE_LENGTH)(2)
    assert {"input_ids", "attention_mask", "labels"} <= set(batch) and model.config.vocab_size == VOCABULARY
