"""The road that every recipe goes: begin, evaluate, train, save, evaluate."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import step_log
from datasets import disable_progress_bars
from trainer_log import TrainerLog
from transformers import TrainingArguments, set_seed
from transformers.integrations import get_available_reporting_integrations

from hf_osdp import Trainer, checkpoint_to_resume


def begin(args: TrainingArguments) -> str | None:
    """Seed, and leave the word to rank 0.

    Returns:
        The checkpoint to go on from, if any.

    Raises:
        ValueError: there is nothing to do, a tracker is not installed, or there is no checkpoint where one should be.
    """
    if not (args.do_train or args.do_eval):
        raise ValueError("Nothing to do; give do_train, do_eval or both.")
    known = get_available_reporting_integrations()
    if missing := [name for name in args.report_to if name not in known]:
        raise ValueError(f"report_to={','.join(missing)} is not installed here; install it, or use one of {', '.join([*known, 'none'])}.")
    quiet_other_ranks(args.process_index)
    set_seed(args.seed)
    return find_checkpoint(args.resume_from_checkpoint, args.output_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a run says of its model before and after training."""

    name: str
    measure: Callable[[Trainer], float]
    """Evaluates, and saves the metrics."""
    decimals: int

    def text(self, trainer: Trainer, when: str) -> str:
        """`perplexity after training: 165.40`."""
        return f"{self.name}{when}: {self.measure(trainer):.{self.decimals}f}"


def train_and_evaluate(
    trainer: Trainer, checkpoint: str | None, score: Score | None = None, *, tokens_per_sample: int | None = None
) -> None:  # fmt: skip
    """Train and save the model, as `do_train` asks; its score before and after it, as `do_eval` asks.

    Args:
        trainer: ready to train.
        checkpoint: where to go on from.
        score: by default the perplexity.
        tokens_per_sample: for the log, where the loss is that of tokens.
    """
    args, score = trainer.args, score or Score(name="perplexity", measure=perplexity, decimals=2)
    goes_on = checkpoint is not None or not args.do_train
    trainer.add_callback(TrainerLog(trainer, tokens_per_sample=tokens_per_sample, goes_on=goes_on))
    if args.do_eval:
        say(args, score.text(trainer, " before training" if args.do_train else ""))
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        if args.do_eval:
            say(args, score.text(trainer, " after training"))
        say(args, f"model saved in {args.output_dir}")
    trainer.accelerator.end_training()


def say(args: TrainingArguments, text: str) -> None:
    """Print on rank 0."""
    if args.process_index == 0:
        print(text, flush=True)


def perplexity(trainer: Trainer) -> float:
    """exp of the mean loss of a token on the validation text; also saved with the other metrics."""
    metrics = trainer.evaluate()
    metrics["perplexity"] = step_log.perplexity(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)
    return metrics["perplexity"]


def quiet_other_ranks(rank: int) -> None:
    """One voice: progress and notes come from rank 0. Errors come from everyone."""
    warnings.filterwarnings("ignore", message=r".*pin_memory.*")
    # Of BERT's logits, a view; torch warns of operations in place on it, of which there are none.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    # GPT-2's class name does not say which loss it has, and the note that follows sounds like a fault.
    logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "`loss_type=None`" not in record.getMessage())
    if rank != 0:
        disable_progress_bars()
        logging.getLogger().setLevel(logging.ERROR)


def find_checkpoint(wanted: str | None, output_dir: str, *, marker: str = "trainer_state.json") -> str | None:
    """The checkpoint to go on from: a folder, or with `true`, or after a restart, the last complete one in the output folder.

    Args:
        wanted: what `resume_from_checkpoint` says.
        output_dir: where the run writes.
        marker: a file that every checkpoint has.

    Raises:
        ValueError: the folder holds no checkpoint.
    """
    asked = str(wanted).lower()
    known = {"none": None, "false": False, "true": True, "last": True}
    if asked not in known and not (Path(wanted) / marker).is_file():
        raise ValueError(f"resume_from_checkpoint={wanted} holds no checkpoint; give a checkpoint-N folder, or true for the last one.")
    found = checkpoint_to_resume(output_dir, known.get(asked, wanted), marker=marker)
    return None if found is None else str(found)
