"""The parts of a configuration: what each setting means, its default, and which values can be meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A part of a configuration: immutable, and refusing keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """base: an asset (minilm, smollm2), a folder or a hub name. targets: layer names as PEFT reads them, "all-linear",
    or None for PEFT's default. max_length: tokens after which a text is cut. quantization: load the frozen weights in
    so many bits, which needs bitsandbytes; None: as they are. image_size: the side of the squares, in pixels, as which
    an image model is shown images; None: what its preprocessor says."""

    base: str = "minilm"
    targets: Literal["all-linear"] | list[str] | None = None
    max_length: Annotated[int, Field(ge=2)] = 128
    image_size: Positive | None = None
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
    by default, of a natural partition the one group that a client's examples are of, else "all".

    routed_experts, trained_experts: of how many experts a client routes among and trains (FedSEE's U_i and L_i), a
    number or a list dealt out in turn; by default what the method's options say for all.

    ratios: clients of unequal size, dealt out in turn: the share of the compressed layers' parameters that each keeps
    (see `CompressionSection`), such as [0.4, 0.6, full]; "full" is model.base itself. bases: base models of any kind,
    dealt out in turn, each named as in model.base, such as [minilm, my-folder]. Both leave model.base to the server."""

    count: Positive = 10
    ranks: Positive | Annotated[list[Positive], Field(min_length=1)] = 4
    reference_ranks: Positive | Annotated[list[Positive], Field(min_length=1)] | None = None
    routed_experts: Positive | Annotated[list[Positive], Field(min_length=1)] | None = None
    trained_experts: Positive | Annotated[list[Positive], Field(min_length=1)] | None = None
    groups: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    ids: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]] | None = None
    ratios: Annotated[list[Fraction | Literal["full"]], Field(min_length=1)] | None = None
    bases: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_kind_of_bases(self) -> Self:
        if self.ratios is not None and self.bases is not None:
            raise ValueError("give ratios or bases, not both; a compressed model's folder may stand among bases")
        return self

    @model_validator(mode="after")
    def _ids_fit(self) -> Self:
        if self.ids is not None and (len(self.ids) != self.count or len(set(self.ids)) != self.count):
            raise ValueError(f"ids must be {self.count} different names, one for each client")
        return self


class CompressionSection(Section):
    """How clients.ratios come about. One decomposition at the largest ratio is cut for all of them, and kept on disk.

    method: one of `coterie.compress.METHODS`, with its options. layers: those to compress, as in model.targets. The
    text to calibrate on is the training texts of a task or a .txt file; None: of the run's own task. samples windows of
    `length` tokens are drawn from it by `seed`."""

    method: str = "svd-llm"
    options: dict[str, Any] = {}
    layers: Literal["all-linear"] | list[str] = "all-linear"
    text: str | None = None
    samples: Positive = 32
    length: Annotated[int, Field(ge=2)] = 256
    seed: Annotated[int, Field(ge=0)] = 0


class Columns(Section):
    """The columns (JSON keys) of an own file or hub data set, where they are not called as here; `a.b` is what column a
    has under b.

    text, pair, label: of a classification task; `pair` is the second text where the task is on pairs. image, label: of
    images. question, choices (one column, or one for each choice), answer, context: of multiple choice. prompt, answer,
    or text alone: of instructions. image: also of questions and instructions that are about images. group: what an
    example naturally belongs to, such as a hospital, in all of them."""

    text: str | None = None
    pair: str | None = None
    image: str | None = None
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
    answers_from: Literal[0, 1] | None = None
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
    """name: see `coterie.data.LOADERS`, or hub:owner/name (likewise hub-choices, hub-instructions, hub-images), or
    choices:<task> for a classification task as multiple choice between its classes. The limits count examples.

    path is a benchmark's folder, or the file of the tasks file, choices-file and instructions-file, or the folder of
    image-folder. To these belong test_path, columns and test_fraction (the share split off where there is no
    test_path); hub data sets take columns and test_fraction too. answers_from: the number of a question's first choice,
    where answers are numbers (null: 0, and they may be texts). template: the prompt of a language model, with
    {question}, {prompt} or {text} for the example's own; score: whether a choice's score is the sum or the mean over
    its tokens.

    parts: of the task mixture, the tasks that it consists of, all classification or all multiple choice, each with
    limits of its own.

    zero_shot: other tasks of language models, on whose tests (on all they have, where there is no test) models are
    scored too, and on which nothing is trained; of the limits they have test_limit."""

    name: str
    train_limit: Positive | None = None
    test_limit: Positive | None = None
    path: str | None = None
    test_path: str | None = None
    columns: Columns | None = None
    answers_from: Literal[0, 1] | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    template: str | None = None
    score: Literal["sum", "mean"] | None = None
    parts: Annotated[list[PartSection], Field(min_length=1)] | None = None
    zero_shot: Annotated[list[PartSection], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _parts_of_a_mixture(self) -> Self:
        if (self.name == "mixture") != (self.parts is not None):
            raise ValueError("parts belong to the task mixture: write {name: mixture, parts: [sms, movie]}")
        own = [name for name in type(self).model_fields if name not in ("name", "parts", "zero_shot")]
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
    as public/<part>. unlabeled: without. pool: the part of each client's training examples that it gives away, to a
    pool that all parties hold and no client trains on by itself (FedMKT)."""

    public: Positive | None = None
    unlabeled: Positive | None = None
    pool: Annotated[float, Field(gt=0, lt=1)] | None = None


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
    only: `full` leaves out the clients whose base model is not the server's, and what they hold.

    For methods that average factors, such as fedit: server_optimizer takes the mean of the clients' updates as a
    gradient (FedAvgM is sgd with momentum; FedAdagrad, FedAdam, FedYogi); proximal is the mu of FedProx, 0 for none."""

    sample: Positive | Fraction | None = None
    min_replies: Positive = 1
    weights: Literal["paper", "uniform", "examples", "processed"] = "paper"
    head: Literal["frozen", "averaged", "local"] = "averaged"
    only: Literal["full"] | None = None
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
    untrained: bool = False


class ExecutionSection(Section):
    """How it is computed. `auto` is settled by a short probe, written into the run, and reused on resume. workers: how
    many processes train and evaluate, each with so many threads, and on how many layers the server works at a time; no
    result depends on it. strict sends every message through bytes. upload_memory: how many MiB of a round's uploads
    wait in memory for the others; the rest waits in the run's folder, and is read layer by layer. No result depends on
    it.

    lower: whether the activations below the lowest adapter are stored for each example (see docs/speed.md): stored,
    off, or auto for stored where it pays; in lower_memory MiB of memory, and lower_disk MiB of the user's cache, which
    other runs share."""

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    threads: Positive = 1
    clients_per_step: Literal["auto"] | Positive = "auto"
    workers: Positive = 1
    device: str = "cpu"
    strict: bool = False
    upload_memory: Annotated[int, Field(ge=0)] = 1024
    lower: Literal["auto", "stored", "off"] = "auto"
    lower_memory: Annotated[int, Field(ge=0)] = 512
    lower_disk: Annotated[int, Field(ge=0)] = 4096

    @model_validator(mode="after")
    def _room_for_lower(self) -> Self:
        if self.lower == "stored" and self.lower_memory + self.lower_disk == 0:
            raise ValueError("lower=stored needs room; give lower_memory or lower_disk, or take lower=off")
        return self


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
    compression: CompressionSection = CompressionSection()
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
