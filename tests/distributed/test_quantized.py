"""A base in 4 bits under a plan: trained as in one process with the same base, in every layout and storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments, default_data_collator

from hf_osdp import OSDPConfig, Trainer
from hf_osdp.sharding.apply import apply_plan, verify_applied
from hf_osdp.tracing.describe import describe
from tests.helpers.layouts import plan_of
from tests.helpers.models import SAMPLES, SEQUENCE_LENGTH, tiny_batch, tiny_model
from tests.helpers.quantized import adapted, in_4_bits
from tests.helpers.training import train_sharded, train_whole

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; pip install 'hf_osdp[bnb]'")
peft = pytest.importorskip("peft", reason="the extra peft is not installed")


def model_of(storage: torch.dtype, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    base = tiny_model("llama", dtype=dtype, scale=5.0)
    return adapted(in_4_bits(base, quant_storage=storage, **options), dtype)


@pytest.mark.parametrize(
    ("layout", "storage", "options"),
    [
        ("everything", torch.float32, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("zero3", torch.uint8, {"compress_statistics": False, "quant_type": "fp4"}),
                ("replicate", torch.bfloat16, {}),
            )
        ),
    ],
)
@pytest.mark.on_ranks(2)
def test_adapters_train_as_in_one_process(layout, storage, options):
    model = model_of(storage, **options)
    units = describe(model, sequence_length=SEQUENCE_LENGTH).units
    plan = plan_of(units, dist.get_world_size(), layout)
    apply_plan(model, plan, units)
    verify_applied(model, plan, units)
    trained = train_sharded(model, plan)
    if dist.get_rank() == 0:
        whole = train_whole(model_of(storage, **options))
        assert trained.losses == pytest.approx(whole.losses, rel=1e-6)
        assert trained.norms == pytest.approx(whole.norms, rel=1e-5)
        adapters = [name for name in whole.parameters if "lora_" in name]
        assert len(adapters) == 56
        for name in adapters:
            torch.testing.assert_close(trained.parameters[name], whole.parameters[name], rtol=1e-3, atol=1e-5)


def train_with_trainer(folder: Path, base: str, checkpoint: str | None = None) -> list[float]:
    """The losses of every step, of adapters in float32 on a base that `from_pretrained` quantizes for training in
    bf16.
    """
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=config)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = torch.cat([tiny_batch(step)["input_ids"] for step in range(4)]).tolist()
    args = TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=SAMPLES // 2,
        learning_rate=0.05, bf16=True, use_cpu=True, logging_steps=1, report_to="none", disable_tqdm=True,
        log_level="error",
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        data_collator=default_data_collator, osdp=OSDPConfig(hardware="cpu", strategy="fsdp", compare=False),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder / "adapters"))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow  # tests/compatibility trains one every day
@pytest.mark.on_ranks(2)
def test_trainer_saves_adapters_as_peft_does_and_resumes(tmp_path):
    base = str(tmp_path / "base")
    tiny_model("llama", dtype=torch.bfloat16, layers=2).save_pretrained(base, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    losses = train_with_trainer(tmp_path, base)
    assert train_with_trainer(tmp_path, base, str(tmp_path / "checkpoint-2")) == losses and len(losses) == 4
    saved = tmp_path / "adapters"
    assert not list(saved.glob("model*.safetensors")), "the base is not saved again"
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama", dtype=torch.bfloat16, layers=2), saved)
    weights = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert len(weights) == 28 and all(p.abs().max() > 0 for name, p in weights.items() if "lora_B" in name)
