"""Fine-tune a language model on conversations, prompts or text with TRL's SFTTrainer, under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp.yaml recipes/sft.py --model_name_or_path Qwen/Qwen3-0.6B \
        --dataset_name trl-lib/Capybara --memory_limit 16GiB --output_dir runs/sft

The arguments are TRL's, such as `--use_peft --lora_r 16`, `--max_length 2048` or `--config FILE.yaml`, and those
below. For your own data, use `--train_file my.jsonl`, with a column `messages`, or `prompt` and `completion`, or
`text`.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from hf_osdp import OSDPConfig, with_osdp
from hf_osdp.integrations.launch import run_script


@dataclass
class SFTArguments(ScriptArguments):
    """Data and memory limit, in addition to TRL's `ScriptArguments`."""

    train_file: str | None = field(default=None, metadata={"help": "Local .jsonl file, instead of dataset_name."})
    memory_limit: str | None = field(
        default=None, metadata={"help": "Memory that training may use on each device; default: all of it."}
    )


def main() -> None:
    """Load the data and the model, train under a plan, and save the model."""
    parser = TrlParser((SFTArguments, SFTConfig, ModelConfig))
    parser.set_defaults(gradient_checkpointing=False)  # the planner decides which blocks to recompute
    script_args, args, model_args = parser.parse_args_and_config()
    if not model_args.model_name_or_path or bool(script_args.dataset_name) == bool(script_args.train_file):
        raise ValueError("Give model_name_or_path, and one of dataset_name and train_file.")
    if script_args.train_file:
        rows = load_dataset("json", data_files=script_args.train_file)
    else:
        rows = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    args.model_init_kwargs = {"dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    trainer = with_osdp(SFTTrainer)(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=rows[script_args.dataset_train_split],
        eval_dataset=rows[script_args.dataset_test_split] if args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
        osdp=OSDPConfig(memory_limit=script_args.memory_limit),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    run_script(main)
