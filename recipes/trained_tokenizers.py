"""Tokenizers that are trained on the text, where none is named; the same text gives the same tokenizer."""

from __future__ import annotations

from collections import Counter

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    TOKENIZER_MAPPING,
    BertTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
)

from hf_osdp.distributed.consensus import on_rank_zero

END_OF_TEXT = "<|endoftext|>"
_BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ALPHABET = 1000
"""Characters that a WordPiece vocabulary has at most, as the tokenizers library has it by default."""


def train_causal_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE with one special token, as GPT-2 has it. Collective: rank 0 trains.

    Args:
        texts: what to train on.
        vocab_size: entries, special token included.
    """
    content = on_rank_zero(lambda: _byte_level(texts, vocab_size))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(content), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT
    )


def train_masked_tokenizer(texts: list[str], vocab_size: int, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """WordPiece for models that have BERT's tokenizer, else the byte-level BPE of RoBERTa; both with a mask. Collective: rank 0 trains.

    Args:
        texts: what to train on.
        vocab_size: entries, special tokens included.
        config: whose tokenizer it will be.
    """
    if type(config) in TOKENIZER_MAPPING and TOKENIZER_MAPPING[type(config)] is BertTokenizer:
        return BertTokenizer(vocab=on_rank_zero(lambda: _word_pieces(texts, vocab_size)))
    content = on_rank_zero(lambda: _trained(RobertaTokenizer(), texts, vocab_size))
    return RobertaTokenizer(tokenizer_object=Tokenizer.from_str(content))


def _byte_level(texts: list[str], vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def _trained(blank: PreTrainedTokenizerBase, texts: list[str], vocab_size: int) -> str:
    return blank.train_new_from_iterator(texts, vocab_size, show_progress=False).backend_tokenizer.to_str()


def _word_pieces(texts: list[str], vocab_size: int) -> dict[str, int]:
    """A WordPiece vocabulary. The trainer numbers pieces inside words in the order of a hash map, which is another in each run,
    and breaks ties by number: those of one character are given to it in order, as if they were special."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    counts = Counter(char for text in texts for char in tokenizer.normalizer.normalize_str(text) if not char.isspace())
    pieces = sorted(f"##{char}" for char, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_ALPHABET])
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, limit_alphabet=_ALPHABET, special_tokens=[*_BERT_TOKENS, *pieces], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()
