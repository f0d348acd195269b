"""Small decoders with tokenisers of their own, trained on the spot; sentences whose endings are a matter of chance."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from training.small import filled
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coterie.data.sequences import SequenceSet, tokenise_sequences
from coterie.maths.keys import root_key
from coterie.models.loading import Base, from_language_network

ANIMALS = ("cat", "dog", "bird", "fish", "horse", "snail")
DEEDS = ("sleeps", "jumps", "eats", "swims", "runs", "crawls", "sings")


def sentences(count: int, name: str) -> tuple[list[str], list[str]]:
    """Prompts and answers: what an animal does is drawn by odds, of deeds of its own."""
    key = root_key(11).fold(name)
    draws = {part: key.fold(part).unit(count) for part in ("animal", "deed")}
    prompts, answers = [], []
    for i in range(count):
        animal = int(draws["animal"][i] * len(ANIMALS))
        odds = (0.5, 0.75, 1.0)  # of three deeds, which depend on the animal
        place = next(k for k, limit in enumerate(odds) if draws["deed"][i] < limit)
        prompts.append(f"the old {ANIMALS[animal]}")
        answers.append(f" {DEEDS[(2 * animal + 3 * place) % len(DEEDS)]} well")
    return prompts, answers


@cache
def tokeniser(size: int) -> Any:
    """Byte-level BPE of so many tokens, trained on such sentences: few tokens cut words into pieces, many do not."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([a + b for a, b in zip(*sentences(400, "corpus"), strict=True)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def decoder(size: int, width: int = 32) -> Base:
    """A random decoder of two layers with that tokeniser."""
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    targets = ("q_proj", "v_proj", "o_proj", "down_proj")
    return from_language_network(filled(LlamaForCausalLM(config)), tokeniser(size), targets, attention="eager")


def tokens(base: Base, count: int, name: str) -> SequenceSet:
    """The sentences of that name in a base's own tokens."""
    return tokenise_sequences(*sentences(count, name), base.tokenizer, 40)
