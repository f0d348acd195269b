"""What a run is, as data: one schema for YAML files, the command line and Python.

`load(path, overrides)` reads a file with dotted overrides (`train.lr=1e-3`), `parse(mapping)` a dict. Everything has
a default but `method` and `task`. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from coterie.errors import ConfigError, nearest

RECORDED = "recorded"
"""The key under which a run's config.yaml holds what is no setting (versions, plan); ignored on reading."""

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A part of a configuration: immutable, and refusing keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """base: an asset (minilm, smollm2), a folder or a hub name. targets: layer names as PEFT reads them, "all-linear",
    or None for PEFT's default. max_length: tokens after which a text is cut. quantization: load the frozen weights in
    so many bits, which needs bitsandbytes; None: as they are."""

    base: str = "minilm"
    targets: Literal["all-linear"] | list[str] | None = None
    max_length: Annotated[int, Field(ge=2)] = 128
    quantization: Literal["8bit", "4bit"] | None = None


class LoraSection(Section):
    """The scale s of s B A.

    constant: alpha / (the largest rank) for everybody, so that products of different ranks mean the same, which
    methods that work on B A itself need. standard: alpha / r_i. rslora: alpha / sqrt(r_i). `scale`, when given, is
    everybody's s. Dropout is a matter of training: train.dropout.
    """

    alpha: Annotated[float, Field(gt=0)] = 8.0
    scaling: Literal["constant", "standard", "rslora"] = "constant"
    scale: Annotated[float, Field(gt=0)] | None = None


class ClientsSection(Section):
    """ranks, reference_ranks: one number, or a list that is dealt out in turn. reference_ranks are what clients can
    download (FedPA-LoRA's R_i), by default their own ranks. groups: names of what clients belong to, dealt out in turn;
    by default, of a natural partition the one group that a client's examples are of, else "all"."""

    count: Positive = 10
    ranks: Positive | Annotated[list[Positive], Field(min_length=1)] = 4
    reference_ranks: Positive | Annotated[list[Positive], Field(min_length=1)] | None = None
    groups: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    ids: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]] | None = None

    @model_validator(mode="after")
    def _ids_fit(self) -> Self:
        if self.ids is not None and (len(self.ids) != self.count or len(set(self.ids)) != self.count):
            raise ValueError(f"ids must be {self.count} different names, one for each client")
        return self


class Columns(Section):
    """The columns (JSON keys) of an own file or hub data set, where they are not called as here.

    text, pair, label: of a classification task; `pair` is the second text where the task is on pairs. question,
    choices (one column, or one for each choice), answer, context: of multiple choice. prompt, answer, or text alone:
    of instructions. group: what an example naturally belongs to, such as a hospital, in all of them."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    group: str | None = None
    question: str | None = None
    choices: str | Annotated[list[str], Field(min_length=2)] | None = None
    answer: str | None = None
    context: str | None = None
    prompt: str | None = None


class PartSection(Section):
    """One task of a mixture; its name alone stands for it where nothing else is to be said.

    name: what its examples belong to, also in the names of data sets; task: the task's name, where it is not the same.
    classes: those to keep, by name, in the order of their numbers. train_limit: at most so many examples for the
    clients (null: all; 0: none), beside which server_data.public are set aside where there are more; test_limit: of its
    test. The rest is as in `TaskSection`."""

    name: str
    task: str = ""
    classes: Annotated[list[str], Field(min_length=2)] | None = None
    train_limit: Annotated[int, Field(ge=0)] | None = 5000
    test_limit: Positive | None = None
    path: str | None = None
    test_path: str | None = None
    columns: Columns | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"{self.name!r} is no short name; write {{name: mine, task: {self.task or self.name}}}")
        object.__setattr__(self, "task", self.task or self.name)
        return self


class TaskSection(Section):
    """name: see `coterie.data.LOADERS`, or hub:owner/name, hub-choices:owner/name, hub-instructions:owner/name, or
    choices:<task> for a classification task as multiple choice between its classes. The limits count examples.

    path is a benchmark's folder, or the file of the tasks file, choices-file and instructions-file, to which
    test_path, columns and test_fraction (the share split off where there is no test_path) belong; hub data sets take
    columns and test_fraction too. template: the prompt of a language model, with {question}, {prompt} or {text} for
    the example's own; score: whether a choice's score is the sum or the mean over its tokens.

    parts: of the task mixture, the classification tasks that it consists of, each with limits of its own."""

    name: str
    train_limit: Positive | None = None
    test_limit: Positive | None = None
    path: str | None = None
    test_path: str | None = None
    columns: Columns | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    template: str | None = None
    score: Literal["sum", "mean"] | None = None
    parts: Annotated[list[PartSection], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _parts_of_a_mixture(self) -> Self:
        if (self.name == "mixture") != (self.parts is not None):
            raise ValueError("parts belong to the task mixture: write {name: mixture, parts: [sms, movie]}")
        own = ("train_limit", "test_limit", "path", "test_path", "columns", "test_fraction", "template", "score")
        given = [name for name in own if getattr(self, name) is not None]
        if self.parts is not None and given:
            raise ValueError(f"a mixture has no {given[0]} of its own; leave it out, or give it to parts that take it")
        return self


class PartitionSection(Section):
    """How the task's training examples are shared out; of each client's share, validation_fraction and test_fraction
    are held out: its own validation, which the deployed model is scored on round by round, and its own test.

    kind: see `coterie.data.PARTITIONERS`; beta belongs to dirichlet and quantity, shards (of one label, for each
    client) to shards. To mixture belong alpha (0: each client one group; larger: the Dirichlet parameter of the
    clients' mixtures) or weights (a mixture for each client: numbers in the sorted order of groups, or by name), and
    floor, below which a drawn weight becomes 0.

    validation_size, test_size: so many examples for every client, in the proportions of groups that it holds, in place
    of fractions. The validation comes out of its share, the test out of the task's test set."""

    kind: str = "dirichlet"
    beta: Annotated[float, Field(gt=0)] = 0.5
    shards: Positive = 2
    alpha: Annotated[float, Field(ge=0)] | None = None
    weights: Annotated[list[list[float] | dict[str, float]], Field(min_length=1)] | None = None
    floor: Annotated[float, Field(ge=0, lt=1)] = 0.05
    minimum: Positive = 20
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    validation_size: Positive | None = None
    test_size: Positive | None = None

    @property
    def validates(self) -> bool:
        """Whether clients have validation sets."""
        return self.validation_fraction > 0 or self.validation_size is not None

    @model_validator(mode="before")
    @classmethod
    def _sizes_replace_fractions(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        replaced = [part for part in ("validation", "test") if given.get(f"{part}_size") is not None]
        return {f"{part}_fraction": 0.0 for part in replaced} | dict(given)

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for part in ("validation", "test"):
            if getattr(self, f"{part}_size") is not None and getattr(self, f"{part}_fraction") > 0:
                raise ValueError(f"give {part}_size or {part}_fraction, not both; set the other to null or 0")
        if self.kind == "mixture" and (self.alpha is None) == (self.weights is None):
            raise ValueError("a mixture needs alpha, such as alpha: 0.5, or weights, and not both")
        return self

    @model_validator(mode="after")
    def _something_left(self) -> Self:
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"validation_fraction {self.validation_fraction:g} and test_fraction {self.test_fraction:g} leave "
                "nothing to train on; make their sum less than 1"
            )
        return self


class ServerDataSection(Section):
    """How many training examples are set aside for the server before the rest is shared out, the same whatever the
    method; None: none. public: with their classes, as the data set public/<task>, or of a mixture so many of each part,
    as public/<part>. unlabeled: without."""

    public: Positive | None = None
    unlabeled: Positive | None = None


class TrainSection(Section):
    """Local training: the fields of `coterie.training.asks.TrainSettings`. A round is `steps` mini-batches (8 unless
    `epochs` is given) or `epochs` passes."""

    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    batch_size: Positive = 16
    steps: Positive | None = None
    epochs: Positive | None = None
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear"] = "constant"
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    buckets: bool = True
    checkpointing: bool = False
    accumulation: Positive = 1

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give steps or epochs, not both; set the other to null")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 8)
        return self


class ServerOptimizerSection(Section):
    """The fields of `coterie.maths.server_optim.ServerOptimizer`."""

    name: Literal["sgd", "adagrad", "adam", "yogi"]
    lr: Annotated[float, Field(gt=0)]
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0)] = 1e-3


class FederationSection(Section):
    """sample: how many clients take part in a round (a number, or a fraction such as 0.5; None: all). weights: of the
    aggregation, `paper` for the method's own. head: the classification head is frozen, averaged, or each client's own.

    For methods that average factors, such as fedit: server_optimizer takes the mean of the clients' updates as a
    gradient (FedAvgM is sgd with momentum; FedAdagrad, FedAdam, FedYogi); proximal is the mu of FedProx, 0 for none."""

    sample: Positive | Fraction | None = None
    min_replies: Positive = 1
    weights: Literal["paper", "uniform", "examples", "processed"] = "paper"
    head: Literal["frozen", "averaged", "local"] = "averaged"
    server_optimizer: ServerOptimizerSection | None = None
    proximal: Annotated[float, Field(ge=0)] = 0.0


class EvaluateSection(Section):
    """The fields of `coterie.engines.setting.Measuring`; the last round is always measured in full."""

    every: Positive = 1
    clients_every: Positive = 1
    pooled_limit: Positive | None = None
    objective_examples: Annotated[int, Field(ge=0)] = 64
    mismatch: bool = True
    mismatch_layers: bool = False


class ExecutionSection(Section):
    """How it is computed. `auto` is settled by a short probe, written into the run, and reused on resume. strict sends
    every message through bytes."""

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    threads: Positive = 1
    clients_per_step: Literal["auto"] | Positive = "auto"
    device: str = "cpu"
    strict: bool = False


class CheckpointSection(Section):
    """every: a checkpoint after so many rounds, and after the last."""

    every: Positive = 1


class TrackingSection(Section):
    """Where else a run's curves go; see `coterie.experiments.tracking`. tensorboard: into the run's folder. mlflow: the
    address of a tracking server or a folder (credentials go into MLflow's own environment variables), under this
    experiment."""

    tensorboard: bool = False
    mlflow: Annotated[str, Field(min_length=1)] | None = None
    experiment: Annotated[str, Field(min_length=1)] = "coterie"


class FaultSection(Section):
    """A rehearsed failure: see `coterie.engines.setting.Fault`."""

    client: str
    round: Positive
    kind: Literal["exception", "nan", "shape", "late"]


class Config(Section):
    """A whole run. method: a name of `coterie list`, `path/to/file.py:Class` or `package.module:Class`; options: its
    parameters; per_method: sections that replace these ones when that method runs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = "run"
    method: str
    options: dict[str, Any] = {}
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Positive = 10
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    clients: ClientsSection = ClientsSection()
    task: TaskSection
    partition: PartitionSection = PartitionSection()
    server_data: ServerDataSection = ServerDataSection()
    train: TrainSection = TrainSection()
    federation: FederationSection = FederationSection()
    evaluate: EvaluateSection = EvaluateSection()
    execution: ExecutionSection = ExecutionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    faults: tuple[FaultSection, ...] = ()
    per_method: dict[str, dict[str, Any]] = {}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A configuration from a YAML file; `overrides` are `dotted.key=value`, values in YAML.

    What `per_method` says of the chosen method comes before the overrides. Paths are relative to the working folder.

    Raises:
        ConfigError: no such file, not YAML, or a setting that cannot be meant.
    """
    raw = read_mapping(path)
    raw.setdefault("name", Path(path).stem)
    return resolve(raw, [parse_override(text) for text in overrides])


def parse(mapping: Mapping[str, Any]) -> Config:
    """A configuration from a dict; raises ConfigError for a setting that cannot be meant."""
    return resolve(mapping, [])


def read_mapping(path: str | Path) -> dict[str, Any]:
    """A YAML file's mapping, less what a run recorded in it."""
    place = Path(path)
    try:
        content = yaml.safe_load(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8; save the file as UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{place}{line}: not YAML ({getattr(error, 'problem', None) or 'unreadable'})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: a mapping of settings is expected, such as method: fedit")
    return {key: value for key, value in content.items() if key != RECORDED}


def parse_override(text: str) -> tuple[list[str], Any]:
    """`train.lr=1e-3` as (["train", "lr"], value); raises ConfigError for anything else."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r} is no setting; write key=value, such as train.lr=1e-3")
    try:
        return key.strip().split("."), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {value!r} is not YAML; put it in quotation marks") from error


def resolve(raw: Mapping[str, Any], overrides: Sequence[tuple[list[str], Any]]) -> Config:
    """The configuration of `raw`, then of `per_method` for its method, then of the overrides."""
    chosen = with_overrides(raw, overrides)
    special = chosen.pop("per_method", None) or {}
    if not isinstance(special, dict) or not all(isinstance(part, dict) for part in special.values()):
        raise ConfigError("per_method: a mapping from method names to sections is expected")
    for method, part in special.items():  # a mistake in any of them is told at once
        _validated(merged({"method": method, "task": {"name": "file"}}, part), f"per_method.{method}: ")
    own = special.get(str(chosen.get("method")), {})
    return _validated(with_overrides(merged({**raw, "per_method": {}}, own), overrides), "")


def merged(base: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `part` in place of its own, mapping by mapping; other values are replaced whole."""
    made = copy.deepcopy(dict(base))
    for key, value in part.items():
        under = made.get(key)
        if isinstance(under, dict) and isinstance(value, Mapping):
            made[key] = merged(under, value)
        else:
            made[key] = copy.deepcopy(value)
    return made


def with_overrides(raw: Mapping[str, Any], overrides: Sequence[tuple[list[str], Any]]) -> dict[str, Any]:
    """`raw` with each value put at its dotted path."""
    made = dict(raw)
    for path, value in overrides:
        nested: Any = value
        for key in reversed(path[1:]):
            nested = {key: nested}
        made = merged(made, {path[0]: nested})
    return made


def dotted_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Every key that a configuration may have, dotted."""
    for name, field in section.model_fields.items():
        inner = next((kind for kind in _kinds(field.annotation) if issubclass(kind, Section)), None)
        yield prefix + name
        if inner is not None:
            yield from dotted_keys(inner, f"{prefix}{name}.")


def dump(config: Config) -> dict[str, Any]:
    """Plain values, ready for YAML."""
    return config.model_dump(mode="json")


def _kinds(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def _validated(raw: Mapping[str, Any], prefix: str) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        told = _findings(error.errors(include_url=False))
        more = f" (and {len(told) - 3} more)" if len(told) > 3 else ""
        raise ConfigError(prefix + "; ".join(told[:3]) + more) from None


def _findings(details: Sequence[ErrorDetails]) -> list[str]:
    """Pydantic's findings, one for each setting; of a value that may be one thing or a list, the deepest finding."""
    by_path: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_path.setdefault(_path(detail["loc"]), []).append(detail)
    return [
        _said(path, found)
        for path, found in by_path.items()
        if not any(other.startswith(f"{path}[") for other in by_path)
    ]


def _said(path: str, details: Sequence[ErrorDetails]) -> str:
    """What is wrong with one setting, in a line that names it and the way out."""
    first = details[0]
    given = first["input"]
    if first["type"] == "extra_forbidden":
        return f"there is no setting {path!r}{nearest_key(path)}"
    if first["type"] == "missing":
        examples = {"method": "; for example method: fedit", "task": "; for example task: {name: movie}"}
        return f"{path} is missing{examples.get(path, '')}"
    if first["type"] == "value_error":
        return f"{path}: {first['ctx']['error']}"
    if first["type"] == "model_type":
        return f"{path}: settings are expected, such as {{name: value}}, not {given!r}"
    allowed: list[str] = []
    wanted = []
    for detail in details:
        if detail["type"] == "literal_error":
            names = str(detail.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ")
            allowed += names.split(", ")
            wanted.append(names if len(allowed) == 1 else f"one of {names}")
        else:
            wanted.append(detail["msg"].removeprefix("Input should be ").partition(", ")[0])
    shown = repr(given) if len(repr(given)) <= 60 else f"{repr(given)[:57]}..."
    near = nearest(given, allowed) if isinstance(given, str) else ""
    return f"{path}: must be {' or '.join(wanted)}, not {shown}" + (near if "did you mean" in near else "")


def _path(location: tuple[int | str, ...]) -> str:
    """The dotted path, without the names that pydantic gives to the members of a union."""
    known = set(dotted_keys())
    parts: list[str] = []
    for part in location:
        if isinstance(part, int):
            parts[-1:] = [f"{parts[-1]}[{part}]"] if parts else [str(part)]
        elif part.isidentifier() or not parts or ".".join([*parts, part]) in known:
            parts.append(part)
    while len(parts) > 1 and ".".join(parts[:-1]) in known and parts[-1] in _UNION_NAMES:
        parts.pop()
    return ".".join(parts)


_UNION_NAMES = {"int", "float", "str", "list", "constrained", "literal"}


def nearest_key(path: str) -> str:
    """The tail of an error message about an unknown dotted key."""
    known = list(dotted_keys())
    parent, _, last = path.rpartition(".")
    elsewhere = [key for key in known if key.rpartition(".")[2] == last]
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}?"
    beside = nearest(path, [key for key in known if key.rpartition(".")[0] == parent])
    return beside if "did you mean" in beside else nearest(path, known) or beside
