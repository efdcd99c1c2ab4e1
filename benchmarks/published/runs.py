"""Estimate a published run: its model, layout and batch on the preset of its device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import library, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.quantized import quantize
from hf_osdp.planner.cost.evaluate import PlanEstimate, estimate_plan
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import DType, GatherSpan, ModelDescription
from hf_osdp.planner.files import plain, validated, write_whole
from hf_osdp.planner.hardware import FSDP_OPERATORS, GB, Hardware, Link
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.planner.wire import WireFormat
from hf_osdp.preparation.cache import cache_folder, code_hash
from hf_osdp.reading import read_json
from hf_osdp.tracing.describe import describe

from .rows import ATTENTION, OPTIMIZERS, STRATEGIES, Row

HOPPER_FLASH_2 = 335e12
"""FLOP/s of FlashAttention-2 on an H100, forward and backward, causal, heads of 128, as its authors' chart shows
them at 16,384 tokens (Dao-AILab/flash-attention, assets/flash2_h100_fwd_bwd_benchmark.png). The published runs use
it; torch 2.11 and later run cuDNN's kernel there, which the preset describes."""
FLASH_1_SHARE = 0.5
"""Rate of FlashAttention's first version beside its second, which is twice as fast (arXiv 2307.08691). MPT's
runs of 2023 are estimated with the first: they say "flash", and their long rows fit no other."""
NETWORK_SHARE = 0.95
"""Share of its line rate that NCCL reaches on RDMA, 192 of 200 and 380 of 400 GB/s (GTC 2024, S62129)."""
FABRICS = {
    ("mosaicml", "a100-80"): 200.0,
    ("mosaicml", "a100-40"): 200.0,
    ("foundation-model-stack", "a100-80"): 50.0,
    ("foundation-model-stack", "h100"): 100.0,
}
"""GB/s of a node's network that a source states, where it differs from the preset's: 1600, 400 and 800 Gb/s."""
HEAD_OF_BERT = "BertForQuestionAnswering"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row's run as the planner sees it."""

    row: Row
    description: ModelDescription
    plan: Plan
    job: TrainingJob

    @classmethod
    def of(cls, row: Row) -> Run:
        """Describe the row's model and lay it out as the run did."""
        description, world = described(row), row.count("gpus")
        batch = Batch(micro_batch_size=row.count("micro_batch"), accumulation_steps=row.accumulation)
        layouts = [_layout(row, unit.span, batch) for unit in description.units]
        job = TrainingJob(
            global_batch_size=world * batch.micro_batch_size * batch.accumulation_steps, precision=precision_of(row),
            optimizer=OPTIMIZERS[row["optimizer"]],
        )  # fmt: skip
        return cls(
            row=row, description=description, plan=Plan.of(description, layouts, batch, world_size=world), job=job
        )

    @property
    def tokens(self) -> int:
        """Tokens of one device in a step."""
        return self.plan.micro_batch_size * self.plan.accumulation_steps * self.row.count("seq")

    def estimate(self, hardware: Hardware) -> PlanEstimate:
        """Return the estimate of the run on this hardware."""
        return estimate_plan(self.plan, self.description, self.job, hardware)

    def tokens_per_s(self, hardware: Hardware) -> float:
        """Return the estimated tokens a second of one device."""
        time = self.estimate(hardware).time
        assert time is not None
        return self.tokens / time.step_s

    def needed_bytes(self, hardware: Hardware) -> int:
        """Return the least memory of a device in which the planner would call the run feasible."""
        tensors = self.estimate(hardware).memory.peak_bytes
        return hardware.limit_for(tensors + hardware.outside_bytes(self.plan.communicators))


def hardware_of(row: Row, *, data_sheet: bool = False) -> Hardware:
    """Return the preset of the row's devices, with the attention kernel and the network of the run."""
    nodes = row.count("nodes")
    found = preset(row.device, nodes=nodes, devices_per_node=row.count("gpus") // nodes, data_sheet=data_sheet)
    if not data_sheet:
        rate = HOPPER_FLASH_2 if row.device == "h100" else found.device.attention_flops_per_s
        share = FLASH_1_SHARE if row["source"].startswith("mosaicml") else 1.0
        found = replace(found, device=replace(found.device, attention_flops_per_s=rate and share * rate))
    if (line := FABRICS.get((row["source"].partition("/")[0], row.device))) is not None:
        link = Link(
            latency_s=found.inter_node.latency_s,
            bytes_per_s=NETWORK_SHARE * line * GB,
            source="stated by the row's source",
        )
        found = replace(found, inter_node=link)
    return found.running({"gather": FSDP_OPERATORS["gather"]})


def precision_of(row: Row) -> Precision:
    """Return the dtypes of gathered parameters and reduced gradients, or autocast."""
    text = row["precision"]
    if (
        text in ("bf16-true", "pure bf16 (parameters, gradients, moments)")
        or row.is_in_4_bits
        or (text == "bf16" and (row["lora_rank"] or "torchtune" in row["source"]))
    ):
        return Precision()  # weights in bf16
    if text in ("fp16 (amp)", "fp16 autocast, fp32 weights", "bf16 autocast, fp32 params"):
        return Precision(compute=DType.FLOAT16 if "fp16" in text else DType.BFLOAT16, autocast=True)
    if text.startswith("fp16"):
        return Precision(compute=DType.FLOAT16, reduce=DType.FLOAT16)
    reduce = DType.BFLOAT16 if "bf16 reduce" in text else DType.FLOAT32
    return Precision(compute=DType.BFLOAT16, reduce=reduce)


def _layout(row: Row, span: GatherSpan, batch: Batch) -> UnitLayout:
    kind, world = STRATEGIES[row["strategy"]], row.count("gpus")
    sizes = {"full shard": world, "hybrid": world // row.count("nodes"), "replicas": 1}
    return UnitLayout(
        shard_size=sizes[kind],
        reshard_after_forward=span is not GatherSpan.STEP and kind != "replicas",
        reduce_every_micro_step=kind != "replicas" or batch.accumulation_steps == 1,
        # apex holds gradients in fp16; a replica, as torch's DDP, has those of its parameters' dtype
        replica_wire=WireFormat.BF16 if kind == "replicas" and "apex" in row["precision"] and world > 1 else None,
    )


def described(row: Row, *, own_loss: bool = False) -> ModelDescription:
    """Return the description of a row's model, from the cache if it is there; `own_loss`: with transformers' loss."""
    device = preset(row.device).device
    precision, weights = precision_of(row), DType.BFLOAT16 if "bf16" in row["precision"] else DType.FLOAT32
    options: dict[str, Any] = {
        "sequence_length": row.count("seq"),
        "compute_dtype": precision.compute,
        "autocast": precision.autocast,
        "device_type": "cuda",
        "capability": device.capability,
        "activation_checkpointing": row["checkpointing"] == "full",
        "recomputation": False,
    }
    loss = None if own_loss else next((one for name, one in LOSSES.items() if row["model"].startswith(name)), None)
    config = config_of(row)
    in_low = weights if precision.compute is None else None
    rank = row.count("lora_rank", 0)
    key = repr(
        (
            code_hash(),
            sorted(options.items()),
            config.to_json_string(),
            loss and loss.__name__,
            in_low,
            rank,
            row.is_in_4_bits,
            row["source"],
            row["notes"] if rank else "",
        )
    )
    folder = cache_folder()
    path = folder and folder / "published" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if path is not None and path.exists():
        return validated(ModelDescription, read_json(path, "cache"), ValueError)
    model = build_on_meta(config, transformers.BertForQuestionAnswering if "SQuAD" in row["model"] else None)
    if in_low is not None:
        model = model.to(getattr(torch, in_low.value))
    if row.is_in_4_bits:
        quantize(model, "nf4", weights)
        if row["source"].endswith("refs/a100_80gb.csv"):
            _prepare_as_peft(model)
    if rank:
        model = _with_adapters(model, row)
    if loss is not None:
        options["loss"] = loss
    found = describe(model, **options)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain(found)))
    return found


def _with_adapters(model: nn.Module, row: Row) -> nn.Module:
    """Add LoRA adapters to all projections of the blocks, or to those of attention where the row says so.

    They are in float32, or in the base's dtype: FSDP1 flattens parameters of one dtype only, except where peft's
    policy wraps adapters by themselves, and torchtune has one dtype for all.
    """
    import peft

    of_attention = "LoRA on q,k,v,o" in row["notes"]
    config = peft.LoraConfig(
        r=row.count("lora_rank"), task_type="CAUSAL_LM", lora_dropout=0.1 if of_attention else 0.0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"] if of_attention else "all-linear",
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)
    alike = "torchtune" in row["source"] or ("FSDP1" in row["strategy"] and not of_attention)
    for parameter in adapted.parameters() if alike else ():
        parameter.data = parameter.data.to(torch.bfloat16) if parameter.requires_grad else parameter.data
    return adapted


def _prepare_as_peft(model: nn.Module) -> None:
    """Cast to float32 what is not quantized, as peft's `prepare_model_for_kbit_training`, which trl called."""
    for parameter in model.parameters():
        if type(parameter).__name__ != "Params4bit":
            parameter.data = parameter.data.float()
    # here, since it makes each model of the process foreign
    AttentionInterface.register("published", _flash_attention)
    AttentionMaskInterface.register("published", sdpa_mask)
    model.set_attn_implementation("published")


def _flash_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend in bf16, to which transformers' FlashAttention-2 casts what is in float32."""
    in_low = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    return sdpa_attention_forward(module, *in_low, *args, **options)


def config_of(row: Row) -> Any:
    """Return the configuration of the transformers model that is nearest to the row's."""
    layers, hidden, heads, vocabulary, length = map(row.count, ("layers", "hidden", "heads", "vocab", "seq"))
    attention = {"attn_implementation": ATTENTION[row["attention"]]}
    if row["model"].startswith("mpt"):
        return transformers.GPT2Config(
            n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocabulary, n_positions=length,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            activation_function="gelu",
            architectures=["GPT2LMHeadModel"], **attention,
        )  # fmt: skip
    if row["model"].startswith("BERT"):
        return transformers.BertConfig(
            num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=vocabulary,
            intermediate_size=4 * hidden, architectures=[HEAD_OF_BERT], **attention,
        )  # fmt: skip
    if row["model"].startswith("GPTBigCode"):
        return transformers.GPTBigCodeConfig(
            n_layer=layers, n_embd=hidden, n_head=heads, n_inner=row.count("ffn"), n_positions=length,
            vocab_size=vocabulary, architectures=["GPTBigCodeForCausalLM"], **attention,
        )  # fmt: skip
    if row["model"].startswith("vit"):
        return transformers.ViTConfig(
            num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
            intermediate_size=row.count("ffn"), patch_size=16 if "patch16" in row["model"] else 32,
            num_labels=vocabulary,
            architectures=["ViTForImageClassification"], **attention,
        )  # fmt: skip
    like_llama = {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocabulary,
        "num_key_value_heads": row.count("kv_heads", heads), "max_position_embeddings": length, **attention,
    }  # fmt: skip
    if row["model"].startswith("Mistral"):  # its window of 4096 is the whole sample
        return transformers.MistralConfig(
            **like_llama, intermediate_size=row.count("ffn"), sliding_window=None, architectures=["MistralForCausalLM"]
        )
    if row["model"].startswith("Mixtral"):
        return transformers.MixtralConfig(
            **like_llama, intermediate_size=row.count("ffn"), architectures=["MixtralForCausalLM"]
        )
    if row["model"].startswith("PowerLM"):
        return transformers.GraniteConfig(
            **like_llama, intermediate_size=row.count("ffn"), tie_word_embeddings=True,
            architectures=["GraniteForCausalLM"],
        )  # fmt: skip
    if row["model"].startswith("Qwen3-30B-A3B"):
        return transformers.Qwen3MoeConfig(
            **like_llama, intermediate_size=6144, moe_intermediate_size=row.count("ffn"), num_experts=128,
            num_experts_per_tok=8, head_dim=128, architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip
    if row["model"].startswith("Qwen"):  # the first Qwen: Llama's blocks, half of the stated width in each projection
        return transformers.LlamaConfig(
            num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=vocabulary,
            intermediate_size=row.count("ffn"), max_position_embeddings=length, attention_bias=True,
            architectures=["LlamaForCausalLM"], **attention,
        )  # fmt: skip
    return transformers.LlamaConfig(
        **like_llama, intermediate_size=row.count("ffn", 0) or _WIDTHS[row["model"]],
        tie_word_embeddings="3.2" in row["model"], architectures=["LlamaForCausalLM"],
    )  # fmt: skip


_WIDTHS = {"llama-3.1-8b": 14336, "llama-3-8b": 14336, "llama-2-13b": 13824}


library.define("published::loss", "(Tensor logits, Tensor labels) -> (Tensor loss, Tensor sums)")
library.define("published::loss_backward", "(Tensor grad, Tensor logits, Tensor sums, Tensor labels) -> Tensor")


@library.register_fake("published::loss")
def _loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.new_empty((), dtype=torch.float32), logits.new_empty(logits.shape[0], dtype=torch.float32)


@library.register_fake("published::loss_backward")
def _loss_backward(grad: object, logits: torch.Tensor, sums: object, labels: object) -> torch.Tensor:
    return torch.empty_like(logits)


class _FusedCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits in their own dtype as one kernel in each pass, without further copies of them."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss, sums = torch.ops.published.loss(logits, labels)
        ctx.save_for_backward(logits, sums, labels)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.published.loss_backward(grad, *ctx.saved_tensors), None


def fused_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of logits that are never copied to float32, as llm-foundry computes it."""
    logits = model(input_ids=batch["input_ids"]).logits
    labels = batch["labels"].roll(-1, dims=-1)
    loss: torch.Tensor = _FusedCrossEntropy.apply(logits.flatten(0, -2), labels.flatten())
    return loss


def plain_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of logits in their own dtype, as GPTBigCode computed it in transformers 4.48."""
    logits = model(input_ids=batch["input_ids"]).logits[..., :-1, :].contiguous()
    labels = batch["labels"][..., 1:].contiguous()
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


LOSSES = {"mpt": fused_loss, "GPTBigCode": plain_loss}
"""Losses that differ from those of the installed transformers, by the first letters of the model's name."""
