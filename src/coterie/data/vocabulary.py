"""Tokens of different tokenisers as strings that can be compared."""

from __future__ import annotations

from typing import Any

END = "\x03"
"""The end token of every tokeniser, whatever it calls it."""

_MARKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})


def token_strings(tokenizer: Any, size: int) -> list[str]:
    """The tokens of ids 0 … size - 1, with a space where a word begins, in whichever way the tokeniser marks that.

    size: how many logits a model has, which may be more than its tokens; those in excess are empty strings.
    """
    count = min(size, len(tokenizer))
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(count)))]
    pieces = any(token.startswith("##") for token in tokens)
    strings = [_plain(token, pieces) for token in tokens]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id < count:
        strings[tokenizer.eos_token_id] = END
    return strings + [""] * (size - count)


def _plain(token: str, pieces: bool) -> str:
    if not pieces:
        return token.translate(_MARKS)
    return token.removeprefix("##") if token.startswith("##") else f" {token}"
