"""Adapters of methods that change the base: PEFT on the unchanged base computes what the engine's model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.world import base, text, world
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification

from coterie.adapters.inject import eject
from coterie.adapters.peft_folder import load_peft
from coterie.algorithms import FedExLoRA, FedExTruncated
from coterie.engines.in_process import InProcess, Progress
from coterie.experiments.adapters import flattened, write_adapters
from coterie.maths.keys import Key, root_key
from coterie.models.loading import Base, from_network
from coterie.protocol import BaseLog, Dense, LowRank, Model, Predict
from coterie.training.asks import Ask, Done, TrainSettings

peft = pytest.importorskip("peft")

DATA = text(12, seed=5)
LARGE = TrainSettings(optimizer="sgd", lr=1.0, batch_size=4, steps=4, weight_decay=0.0, clip=None)
"""Steps so large that the residuals change the logits visibly."""


def gpt2() -> Base:
    """A random GPT-2 whose adapted layers are Conv1D, stored (d_in, d_out), and not square."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = GPT2Config(
            vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=32, num_labels=2, pad_token_id=0
        )
        network = GPT2ForSequenceClassification(settings)
    return from_network(network, None, ["c_attn"], root_key(0).fold("head"), attention="eager")


def by_engine(run: InProcess, progress: Progress) -> Tensor:
    """Logits of the global model on the base with all its patches."""
    run.executor.set_base(progress.state.base, "base")
    model = run.algorithm.global_model(progress.state)
    assert model is not None
    ask = Ask("server", Predict(model, "test"), "base", progress.heads["base/all"], DATA, Key(0))
    (done,) = run.executor.answer([ask])
    assert isinstance(done, Done)
    logits: Tensor = done.answer.logits  # type: ignore[union-attr]
    return logits


def by_peft(folder: Path, network: Any) -> Tensor:
    """Logits of PEFT's adapter on a base that was never patched, text by text."""
    eject(network)
    loaded = peft.PeftModel.from_pretrained(network, str(folder)).eval()
    found = []
    for i in range(len(DATA)):
        ids = DATA.ids[int(DATA.offsets[i]) : int(DATA.offsets[i + 1])].long()
        with torch.no_grad():
            found.append(loaded(input_ids=ids[None]).logits[0])
    return torch.stack(found)


@pytest.mark.parametrize("make", [base, gpt2])
@pytest.mark.parametrize("algorithm", [FedExLoRA(), FedExTruncated(residual_rank=2)])
@pytest.mark.parametrize("rounds", [1, 3])
def test_peft_gives_the_logits_of_the_engines_global_model(
    make: Callable[[], Base], algorithm: FedExLoRA, rounds: int, tmp_path: Path
) -> None:
    """Of one round with the patch beside the average, of three with all patches rewritten at the layer's rank."""
    run = world(algorithm, ranks=(4, 4, 4), rounds=rounds, train=LARGE, network=make())
    *_, last = run.rounds(run.begin())
    write_adapters(run, last.progress, {"base": "toy"}, ["no", "yes"], tmp_path)
    wanted, alone = by_engine(run, last.progress), by_engine(run, _without_patches(last.progress))
    assert float((wanted - alone).abs().max()) > 1e-3
    for name in ("global", "client-c1"):
        torch.testing.assert_close(by_peft(tmp_path / name, make().network), wanted, rtol=1e-4, atol=1e-5)
    rank = 4 + rounds * (3 * 4 if type(algorithm) is FedExLoRA else 2)
    for term in load_peft(tmp_path / "global").adapter.values():
        assert term.rank == rank if rank <= 16 else term.rank <= 32


def test_many_patches_are_rewritten_at_the_rank_that_their_sum_has() -> None:
    key = root_key(1)

    def term(name: str) -> LowRank:
        """Of rank 3, all within the same three directions."""
        return LowRank(key.fold("B").normal((20, 3)), key.fold(name).normal((3, 12)), 0.5)

    log = BaseLog(tuple({"x": term(f"patch {i}")} for i in range(5)))
    made = flattened(Model(lora={"x": term("lora")}), log, "me")["x"]
    exact = sum(patch["x"].product().double() for patch in log.patches) + term("lora").product().double()
    assert made.rank == 3 and made.scale == 1.0 and made.B.dtype == torch.float32
    torch.testing.assert_close(made.product().double(), exact, rtol=1e-5, atol=1e-5)


def test_what_adds_up_to_nothing_keeps_one_rank() -> None:
    one = LowRank(torch.ones(4, 3), torch.ones(3, 4))
    made = flattened(Model(lora={"x": one}), BaseLog(({"x": LowRank(-one.B, one.A)},)), "me")["x"]
    assert made.rank == 1 and float(made.product().abs().max()) == 0.0


def _without_patches(progress: Progress) -> Progress:
    state = type(progress.state)(progress.state.lora)
    return Progress(progress.round, state, progress.heads, progress.finished)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_a_matrix_is_written_as_factors_that_lose_nothing(shape: tuple[int, int]) -> None:
    W = root_key(5).normal(shape)
    (term,) = flattened(Model(delta={"layer": Dense(W)}), BaseLog(), "global").values()
    assert torch.equal(term.product(), W) and term.rank == min(shape)
