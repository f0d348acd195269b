"""SVD compressors of foundation models: every method makes one ranked list of rank-one terms for each layer.

`METHODS` names them: svd, asvd (arXiv 2312.05821), svd-llm (arXiv 2403.07378), svd-llm-v2 (arXiv 2503.12340), dobi
(arXiv 2502.02723), qsvd (arXiv 2510.16292). `rank_layers` decomposes along real text, `cut` puts factors in the place
of matrices, `folder` writes and reads them. Models of several ratios that are cut from one decomposition are nested.
"""

from collections.abc import Mapping

from coterie.compress.asvd import ASVD
from coterie.compress.base import Compressor, Ranking
from coterie.compress.dobi import Dobi
from coterie.compress.factored import FactoredLinear
from coterie.compress.network import Compressed, cut, rank_layers
from coterie.compress.qsvd import QSVD
from coterie.compress.ranked import Ranked
from coterie.compress.svd import SVD
from coterie.compress.svd_llm import SVDLLM
from coterie.compress.svd_llm_v2 import SVDLLMV2

METHODS: Mapping[str, type[Compressor]] = {
    "svd": SVD,
    "asvd": ASVD,
    "svd-llm": SVDLLM,
    "svd-llm-v2": SVDLLMV2,
    "dobi": Dobi,
    "qsvd": QSVD,
}

__all__ = [
    "ASVD",
    "METHODS",
    "QSVD",
    "SVD",
    "SVDLLM",
    "SVDLLMV2",
    "Compressed",
    "Compressor",
    "Dobi",
    "FactoredLinear",
    "Ranked",
    "Ranking",
    "cut",
    "rank_layers",
]
