"""`coterie compress` writes a smaller model that loads again, says what it measured, and refuses in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from experiments.decoders import write_decoder
from safetensors.torch import load_file

from coterie.cli.compress import _Bars, _Lines
from coterie.compress.folder import WEIGHTS, read_notes
from coterie.compress.text import calibration_and_held_out, last_states, perplexity, windows_of
from coterie.data.tasks import load_task
from coterie.errors import ConfigError, DataError, ModelError, RunError
from coterie.experiments.calibrating import Calibration
from coterie.experiments.compression import compress_model, read_texts
from coterie.maths.keys import root_key
from coterie.models.loading import load_whole

Coterie = Callable[..., Any]
KEY = root_key(0).fold("calibration")
SHORT = ("--samples", "6", "--length", "12", "--held-out", "40")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of two layers of width 32. Read only."""
    return write_decoder(tmp_path_factory.mktemp("decoder") / "llama", "llama")


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 lines, parted by blank ones. Read only."""
    place = tmp_path_factory.mktemp("prose") / "prose.txt"
    place.write_text("\n\n".join(text for text, _ in toy.reviews(80)), encoding="utf-8")
    return place


def test_a_decoder_is_compressed_measured_and_loads_again(
    coterie: Coterie, decoder: Path, prose: Path, tmp_path: Path
) -> None:
    told = coterie("compress", decoder, "--ratio", "0.5", "--method", "svd-llm", "--text", prose, *SHORT, "-o", "small")
    assert told.code == 0, told
    for word in ("q_proj", "down_proj", "perplexity", "held-out tokens", "small: model.safetensors", "before"):
        assert word in told.out
    notes = read_notes(tmp_path / "small")
    figures = notes.figures
    network, tokenizer = load_whole(tmp_path / "small")
    assert figures["bytes"]["after"] == sum(4 * value.numel() for value in network.parameters())
    assert figures["bytes"]["before"] > figures["bytes"]["after"]
    windows = windows_of(tokenizer, read_texts(str(prose)), 12)
    _, held = calibration_and_held_out(windows, 6, 4, KEY)
    found, tokens = perplexity(network, held)
    assert tokens == figures["perplexity"]["tokens"] == 44
    assert figures["perplexity"]["after"] == pytest.approx(found, rel=1e-5)
    original, _ = load_whole(decoder)
    assert figures["perplexity"]["before"] == pytest.approx(perplexity(original, held)[0], rel=1e-5)
    assert set(figures["output_error"]) == set(notes.ranks) and len(notes.ranks) == 14
    assert all(0 < error < 1 for error in figures["output_error"].values())
    assert json.loads((tmp_path / "small" / "compression.json").read_text())["method"] == "svd-llm"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_of_half_precision_stays_so_and_its_sizes_are_those_of_the_files(
    coterie: Coterie, decoder: Path, prose: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    network, tokenizer = load_whole(decoder)
    network.to(dtype).save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    told = coterie("compress", "./half", "--ratio", "0.5", "--text", prose, *SHORT, "-o", "small")
    assert told.code == 0, told
    figures = read_notes(tmp_path / "small").figures
    for place, said in (("half", "before"), ("small", "after")):
        stored = load_file(tmp_path / place / WEIGHTS)
        assert {value.dtype for value in stored.values()} == {dtype}
        assert figures["bytes"][said] == sum(2 * value.numel() for value in stored.values())
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["dtype"] == figures["dtype"] == str(dtype).removeprefix("torch.")
    # What is told of the model afterwards is of the rounded factors.
    loaded, _ = load_whole(tmp_path / "small")
    _, held = calibration_and_held_out(windows_of(tokenizer, read_texts(str(prose)), 12), 6, 4, KEY)
    assert figures["perplexity"]["after"] == pytest.approx(perplexity(loaded, held)[0], rel=1e-6)


def test_the_seed_chooses_the_text(coterie: Coterie, decoder: Path, prose: Path, tmp_path: Path) -> None:
    errors = {}
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert coterie("compress", decoder, "--text", prose, *SHORT, "--seed", seed, "-o", out).code == 0
        figures = read_notes(tmp_path / out).figures
        assert figures["calibration"]["seed"] == seed
        errors[out] = figures["output_error"]
    assert errors["a"] == errors["b"] != errors["c"]


def test_an_encoder_is_told_how_far_its_states_move(
    coterie: Coterie, tiny_base: Path, prose: Path, tmp_path: Path
) -> None:
    told = coterie("compress", tiny_base, "--ratio", "0.8", "--text", prose, *SHORT, "--method", "asvd", "alpha=0.4")
    assert told.code == 0 and "last hidden states: moved by" in told.out and "perplexity" not in told.out
    place = tmp_path / f"{tiny_base.name}-asvd-0.8"
    notes = read_notes(place)
    assert notes.options == {"alpha": 0.4} and "pooler.dense" not in notes.ranks
    (before, tokenizer), (after, _) = load_whole(tiny_base), load_whole(place)
    windows = windows_of(tokenizer, read_texts(str(prose)), 12)
    assert (windows[:, 0] == tokenizer.cls_token_id).all() and (windows[:, -1] == tokenizer.sep_token_id).all()
    _, held = calibration_and_held_out(windows, 6, 4, KEY)
    states = [last_states(network, held) for network in (before, after)]
    moved = float((states[1] - states[0]).norm() / states[0].norm())
    assert notes.figures["hidden_states"]["relative_error"] == pytest.approx(moved, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--ratio", "0"), "ratio 0 is the share of parameters to keep: it must be above 0 and at most 1"),
        (("--ratio", "1.2"), "above 0 and at most 1"),
        (("--ratio", "0.001"), "would keep a rank below 1 at ratio 0.001; take at least"),
        (("--layers", "nothing"), "no linear layer is called 'nothing'"),
        (("--method", "svdllm"), "there is no compressor 'svdllm'; did you mean 'svd-llm'?"),
        (("updat=true",), "compressor 'svd-llm' has no option 'updat'; did you mean 'update'?"),
        (("update=perhaps",), "option update of 'svd-llm': must be a valid boolean"),
        (("--method", "svd", "alpha=1"), "compressor 'svd' has no option 'alpha'; it has none"),
        (("--samples", "100000"), "the calibration text is too short: it gives"),
        (("--length", "5000"), "windows of 5000 tokens are longer than the model takes; use at most 2048"),
        (("--text", "nowhere.txt"), "nowhere.txt: cannot be read"),
        (("--text", "moviee"), "there is no task 'moviee'; did you mean 'movie'?"),
        (("-o", "."), "is where you are; name a new folder"),
        (("-o", "something/small"), "something/small: cannot be written (Not a directory); name another place"),
        (("-o", "x" * 252), "cannot be written (File name too long)"),
        (("--method", "asvd", "alpha=nan"), "asvd: alpha nan must lie between 0 and 4"),
        (("--method", "asvd", "alpha=.inf"), "asvd: alpha inf must lie between 0 and 4"),
        (("--method", "dobi", "rate=nan"), "rate nan, a step as a share of a layer's size, above 0 and at most 1"),
        (("--method", "dobi", "rate=1e300"), "above 0 and at most 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    coterie: Coterie, decoder: Path, prose: Path, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    (tmp_path / "something").write_text("")
    complaint = coterie("compress", decoder, "--text", prose, *SHORT, *arguments).complaint
    assert complaint.startswith("coterie: error: ") and told in complaint
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def test_models_that_do_not_suit_are_refused(coterie: Coterie, tiny_base: Path, decoder: Path, prose: Path) -> None:
    assert "there is no model folder './nowhere'" in coterie("compress", "./nowhere", "--text", prose).complaint
    for method in (("qsvd",), ("dobi", "learned=true")):
        told = coterie("compress", tiny_base, "--text", prose, *SHORT, "--method", *method).complaint
        assert "BertModel is no language model" in told
    assert coterie("compress", decoder, "--text", prose, *SHORT, "-o", "small", "--layers", "q_proj,v_proj").code == 0
    assert "is compressed already" in coterie("compress", "small", "--text", prose, *SHORT).complaint


def test_a_compressed_model_is_the_base_of_a_run(coterie: Coterie, tiny_base: Path, prose: Path, small: Path) -> None:
    assert coterie("compress", tiny_base, "--text", prose, *SHORT, "-o", "factored").code == 0
    told = coterie("run", small, "rounds=1", "model.base=./factored")
    assert told.code == 0 and "pooled" in told.err


def test_calibration_text_and_held_out_text_have_no_window_in_common() -> None:
    windows = torch.arange(60).reshape(20, 3)
    text, held = calibration_and_held_out(windows, 12, 5, root_key(1))
    seen = {tuple(row) for row in text.tolist()}
    assert len(seen) == 12 and not seen & {tuple(row) for row in held.tolist()}
    assert torch.equal(held, windows[15:])
    assert not torch.equal(text, calibration_and_held_out(windows, 12, 5, root_key(2))[0])
    with pytest.raises(DataError, match="too short: it gives 20 windows of 3 tokens"):
        calibration_and_held_out(windows, 16, 5, root_key(1))


def test_a_task_s_training_texts_serve_as_text(toy_assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(toy_assets))
    texts = read_texts("movie")
    assert len(texts) > 100 and texts[0].endswith("\n")
    # It has no test set of its own; what is split off as one is not calibrated on.
    task = load_task("movie", seed_key=root_key(0))
    assert len(texts) == len(task.train)
    assert not {text.strip() for text, _ in task.test.contents()} & {text.strip() for text in texts}


def test_a_folder_that_is_there_is_told_before_the_model_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ModelError, match="is there already"):
        compress_model("./nowhere", tmp_path, ratio=0.5, calibration=Calibration("nowhere.txt"))


def test_a_place_that_cannot_be_written_is_told_before_the_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.mkdir", refused)
    with pytest.raises(RunError, match=r"new/small: cannot be written \(Permission denied\); name another place"):
        compress_model("./nowhere", tmp_path / "new" / "small", ratio=0.5, calibration=Calibration("nowhere.txt"))
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"nowhere\.txt"):
        compress_model("./nowhere", tmp_path / "new" / "small", ratio=0.5, calibration=Calibration("nowhere.txt"))
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_there_and_a_folder_without_a_name_are_told_in_one_line(
    decoder: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Calibration(str(prose), samples=6, length=12, held_out=40)
    with pytest.raises(ConfigError, match=r"^device 'nowhere': [^\n]+$"):
        compress_model(str(decoder), tmp_path / "x", ratio=0.5, method="svd", calibration=text, device="nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="is where you are; name a new folder"):
        compress_model(str(decoder), Path("."), ratio=0.5, method="svd", calibration=text)


def test_what_takes_long_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 14.0])
    monkeypatch.setattr("coterie.cli.compress.time.monotonic", lambda: next(clock))
    lines = _Lines()
    for done in range(4):
        lines.at("decomposing", done, 30)
    assert capsys.readouterr().err.splitlines() == ["decomposing 1/30", "decomposing 3/30"]
    monkeypatch.undo()
    bars = _Bars()
    bars.at("decomposing", 30, 30)
    bars.end()
    assert "30/30" in capsys.readouterr().err
