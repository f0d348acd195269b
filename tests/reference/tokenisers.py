"""Small byte-level tokenisers for decoders, with the special tokens that a test wants."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("the", "a", "film", "is", "good", "bad", "one", "two", "yes", "no", "why", "very")


def tokenizer(*, adds_begin: bool = False, padding_side: str = "right", **special: str) -> PreTrainedTokenizerFast:
    """Words with or without a space before them, and single letters; `special`: bos_token, eos_token, pad_token."""
    pieces = [*special.values(), *"abcdefghijklmnopqrstuvwxyzĠ", *WORDS, *(f"Ġ{word}" for word in WORDS)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="Ġ", continuing_subword_prefix=""))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if adds_begin:
        name = special["bos_token"]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, vocabulary[name])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side=padding_side, **special)


def write_tokenizer(folder: Path, **options: str) -> None:
    tokenizer(**options).save_pretrained(folder)
