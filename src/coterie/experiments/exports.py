"""Adapters out of a finished run: as they are, or merged into a whole model."""

from __future__ import annotations

import shutil
from pathlib import Path

from coterie.adapters.inject import eject
from coterie.adapters.peft_folder import load_peft, save_peft
from coterie.errors import ConfigError, RunError, nearest
from coterie.experiments.adapters import GLOBAL
from coterie.experiments.build import model_place
from coterie.experiments.folders import ADAPTERS, SUMMARY, read_config
from coterie.maths.keys import root_key
from coterie.models.loading import load_base
from coterie.protocol import BaseLog


def export(run: str | Path, destination: str | Path, *, client: str | None = None, merged: bool = False) -> None:
    """Writes the global adapter of a finished run, or a client's, to a new folder.

    merged: a model in the transformers format with the adapter added to its weights, head and tokeniser
    included, instead of a PEFT folder.

    Raises:
        ConfigError: no run, a run that is not finished, or no such model in it.
        ModelError: a destination that holds something else, an adapter or base model that is damaged.
        RunError: the disk refuses.
    """
    source, target = adapter_folder(Path(run), client), Path(destination)
    if merged:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target} is there already; name a new folder")
        _merge(Path(run), source, target)
        return
    held = load_peft(source)
    save_peft(
        target,
        held.adapter,
        base_name=held.base_name or "",
        head=held.head,
        task_type="SEQ_CLS",
        label_names=held.labels,
        fan_in_fan_out=bool(held.config.get("fan_in_fan_out")),
    )


def adapter_folder(run: Path, client: str | None) -> Path:
    """The adapter of a client in a finished run, or the global one; raises ConfigError when it is not there."""
    config, _ = read_config(run)
    if not (run / SUMMARY).is_file():
        raise ConfigError(f"{run} is not finished; coterie resume {run}")
    name = GLOBAL if client is None else f"client-{client}"
    if not (run / ADAPTERS / name).is_dir():
        clients = [path.name.removeprefix("client-") for path in (run / ADAPTERS).glob("client-*")]
        if client is None:
            raise ConfigError(f"{config.method} has no global model; choose a client's with --client ID")
        raise ConfigError(f"there is no client {client!r}{nearest(client, clients)}")
    return run / ADAPTERS / name


def _merge(run: Path, source: Path, target: Path) -> None:
    """The base model of the run with W + s B A in place of W, and the adapter's head."""
    from transformers.utils.logging import disable_progress_bar

    config, _ = read_config(run)
    held = load_peft(source)
    head, labels = held.head or {}, held.labels or ()
    base = load_base(
        model_place(config.model.base),
        targets=config.model.targets,
        num_labels=len(labels),
        dtype="float32",
        head_key=root_key(config.seed).fold("head"),
    )
    base.set_log(BaseLog((held.adapter,)))
    eject(base.network)
    parameters = dict(base.network.named_parameters())
    for name, value in head.items():
        parameters[name].data.copy_(value)
    names = dict(enumerate(labels))
    base.network.config.id2label = names  # type: ignore[union-attr]
    base.network.config.label2id = {label: index for index, label in names.items()}  # type: ignore[union-attr]
    fresh = target.with_name(f".{target.name}.new")
    disable_progress_bar()
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        base.network.save_pretrained(fresh)  # type: ignore[operator]
        base.tokenizer.save_pretrained(str(fresh))
        if target.exists():
            target.rmdir()
        fresh.rename(target)
    except OSError as error:
        raise RunError(
            f"{target}: cannot be written ({error.strerror or error}); free space, then export again"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
