"""Local training of a stack of clients in one pass; one client is a stack of one.

At each step, clients whose batches have equal shape share a forward and a backward pass. The loss is the sum over
clients of their own mean loss and penalties, so every gradient is one client's own. Group size, position and
company change no bit of a client's result as long as the padding rank is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.adapters.places import computed
from coterie.data.batches import Batch
from coterie.data.branches import Branches
from coterie.data.sequences import DataSet
from coterie.data.text import TextSet, joint_batch
from coterie.errors import CoterieError, RunError
from coterie.models.loading import Base, moved
from coterie.protocol import (
    Distillation,
    FeaturePenalty,
    Fitted,
    Imitation,
    Model,
    Penalty,
    RoutingPenalty,
    WeakToStrong,
)
from coterie.protocol.messages import leaves, map_tensors
from coterie.protocol.requests import AnyPenalty
from coterie.training.asks import Ask, Done, Head, Plan, TrainSettings
from coterie.training.distilling import distilled_losses
from coterie.training.evaluation import on_base
from coterie.training.features import classes_of, collected, example_features, feature_losses
from coterie.training.flat import Flat, arrange, view
from coterie.training.imitating import imitation_losses, teacher_of
from coterie.training.objectives import label_count, labelled, row_count, row_losses
from coterie.training.optimizers import OptimizerState, clip_gradients, gradient_norms, learning_rate, step
from coterie.training.recompute import recomputed
from coterie.training.routing import drawn_again, noting, of_clients, routing_loss, whole_usage
from coterie.training.teaching import Held, example_scores, hardened_whole, needs_whole, teaching_losses
from coterie.training.trainee import HEAD, Dropout, Trainee, attempted

# Rows of a batch from which on the CPU's matrix products give a row the same bits whatever the number of rows.
SMALLEST = {torch.float32: 4, torch.bfloat16: 8}


def fit(
    base: Base, asks: Sequence[Ask], settings: TrainSettings, plan: Plan, bases: Mapping[str, Base] | None = None
) -> list[Done | Exception]:
    """Train the clients of Fit requests that stack, all at once; bases: by spec, where a Fit's teacher has one.

    Answers `Fitted` with the model in its own rank and dtype, on the CPU, and the trained head; what no pattern
    names comes back bit for bit. A client that cannot be trained, or whose loss, gradient or parameters stop being
    finite, is answered by an exception, and the others do not notice.
    """
    prepared = [attempted(base, ask, settings) for ask in asks]
    ready = [trainee for trainee in prepared if isinstance(trainee, Trainee)]
    done = iter(_Stack(base, ready, settings, plan, bases or {}).run() if ready else ())
    return [next(done) if isinstance(trainee, Trainee) else trainee for trainee in prepared]


@dataclass
class _Room:
    """Where some clients of the stack run: leaves, the model and head made of them, the model's other tensors."""

    flat: Flat
    model: Model
    head: dict[str, Tensor]
    data: list[Tensor]


class _Stack:
    """The state of one stacked training; lives for one `fit`."""

    def __init__(
        self,
        base: Base,
        trainees: Sequence[Trainee],
        settings: TrainSettings,
        plan: Plan,
        bases: Mapping[str, Base],
    ) -> None:
        self.base, self.trainees, self.settings, self.threads = base, trainees, settings, plan.threads
        alone, loss = trainees[0], trainees[0].fit.loss
        self.teacher = None
        if isinstance(loss, Imitation):  # which stacks with no other
            self.teacher = teacher_of(loss, bases, base, alone.ask.head, f"client {alone.ask.party}")
        self.clients = len(trainees)
        stacked = Model.stack([trainee.model for trainee in trainees], plan.padding_rank)
        heads = {name: torch.stack([trainee.head[name] for trainee in trainees]) for name in trainees[0].head}
        tensors = stacked.parameters | heads
        self.places = arrange(tensors)
        self.anyone = frozenset().union(*(trainee.trained for trainee in trainees))
        self.like = next(iter(tensors.values()))
        self.stacked = stacked
        self.rooms: dict[int, _Room] = {}
        self.main = self._room(self.clients)
        self.varying = [place for place, value in enumerate(self.main.data) if _differs(value)]
        for name, value in tensors.items():
            view(self.main.flat.values, self.places, name).copy_(value)
        self.mask = self._mask()
        self.rate_scale = self._rate_scale()
        self.state = OptimizerState.fresh(self.main.flat.values, settings)
        penalties = _stacked_penalties(base, trainees, plan.padding_rank)
        self.penalties = [penalty for penalty in penalties if isinstance(penalty, Penalty)]
        self.on_routing = [penalty for penalty in penalties if isinstance(penalty, RoutingPenalty)]
        self.on_features = [penalty for penalty in penalties if isinstance(penalty, FeaturePenalty)]
        self.noted: list[list[tuple[Tensor, Tensor]]] = [[] for _ in trainees]
        totals = [len(trainee.batches) for trainee in trainees]
        self.steps = max(totals)
        self.losses = torch.zeros(self.steps, self.clients, dtype=self.like.dtype, device=self.like.device)
        self.norms = torch.zeros_like(self.losses)
        self.rates = [[learning_rate(settings, number, total) for total in totals] for number in range(self.steps)]

    def run(self) -> list[Done | Exception]:
        before = self._penalty_values()
        flat = self.main.flat
        for number in range(self.steps):
            alive = [i for i, trainee in enumerate(self.trainees) if number < len(trainee.batches)]
            flat.grads.zero_()
            for rows in self._groups(number, alive):
                self._forward_backward(number, rows)
            self._penalty_backward(alive)
            if self.mask is not None:
                flat.grads.copy_(torch.where(self.mask, flat.grads, 0.0))
            norms = gradient_norms(flat.grads)
            self.norms[number] = norms
            if self.settings.clip is not None:
                clip_gradients(flat.grads, norms, self.settings.clip)
            step(
                flat.values,
                flat.grads,
                self.state,
                self.rates[number],
                self.settings,
                rows=alive,
                trained=self.mask,
                rate_scale=self.rate_scale,
            )
        return self._answers(before, self._penalty_values())

    def _groups(self, number: int, alive: list[int]) -> list[list[int]]:
        """The clients alive, grouped by the shape of their batch, and by how much of it is computed.

        Matrix products of few rows (in float64, and in float32 on several threads: of rows left over by tiles of four)
        sum in another order than those of many, so a client with such a batch runs alone, lest its bits depend on who
        else is there.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        in_tiles = self.like.dtype == torch.float64 or (self.base.dtype == torch.float32 and self.threads > 1)
        fewest = 0 if in_tiles else SMALLEST[self.base.dtype]
        for i in alive:
            batch = self.trainees[i].batches[number]
            parts = [row_count(self.trainees[i].rows, part) for part in self._parts(batch.indices)]
            whole = all(part % 4 == 0 for part in parts) if in_tiles else min(parts) >= fewest
            shape = (*parts, batch.pad_to, *self._computed(self.trainees[i], batch))
            groups.setdefault(shape if whole else (*shape, i), []).append(i)
        return list(groups.values())

    def _computed(self, trainee: Trainee, batch: Batch) -> list[int]:
        """How many positions each part of a mini-batch costs, where padding costs none."""
        if not self.base.packs:
            return []
        lengths = trainee.rows.lengths
        parts = self._parts(batch.indices)
        return [computed(int(lengths[part].sum()), len(part), batch.pad_to) for part in parts]

    def _parts(self, indices: np.ndarray) -> list[np.ndarray]:
        """A mini-batch in the parts that are computed one after another, as equal as possible."""
        parts = min(self.settings.accumulation, len(indices))
        return [indices] if parts == 1 else np.array_split(indices, parts)

    def _forward_backward(self, number: int, rows: list[int]) -> None:
        """Add the gradients of the task losses of `rows`, whose batches have one shape, and note the losses.

        A client's loss is the mean over all labels (where a teacher is learnt from, all examples) of its mini-batch,
        in however many parts that is computed.
        """
        chosen = [self.trainees[i] for i in rows]
        batches = [trainee.batches[number] for trainee in chosen]
        room = self._room(len(rows))
        index = moved(torch.tensor(rows), self.like.device)
        if room is not self.main:
            room.flat.values.copy_(self.main.flat.values[index])
            for place in self.varying:
                room.data[place].copy_(self.main.data[place][index])
        counted = [
            len(batch.indices) if self.teacher is not None else label_count(trainee.data, batch.indices)
            for trainee, batch in zip(chosen, batches, strict=True)
        ]
        counts = moved(torch.tensor(counted, dtype=self.losses.dtype), self.like.device)
        dropout = self._dropout(rows) if self.settings.dropout > 0 else None
        generators = [] if dropout is None else dropout.generators
        keeping = recomputed(self.base.network, generators) if self.settings.checkpointing else nullcontext()
        total = torch.zeros_like(counts)
        on_routing, on_features = of_clients(self.on_routing, index), of_clients(self.on_features, index)
        # How experts are used is a mean over tokens of every block, so all passes of the step see them all.
        whole_blocks = self.base.slots.everywhere() if on_routing else nullcontext()
        with self.base.slots.bound(len(rows), room.model, room.head, dropout) as binding, keeping, whole_blocks:
            hard = self._hardened(chosen, number, generators)
            whole = None
            if on_routing and self.settings.accumulation > 1:
                with drawn_again(generators):
                    whole = whole_usage(
                        binding,
                        (batch for _, batch in self._parted(chosen, number)),
                        lambda batch: row_losses(self.base, batch, len(rows)),
                        len(rows),
                        self.like.device,
                    )
            for place, (held, batch) in enumerate(self._parted(chosen, number)):
                used = noting(binding, batch, len(rows), self.like.device) if on_routing else None
                losses = self._losses(chosen, number, held, batch, None if hard is None else hard[place]) / counts
                loss = losses.sum()
                if used is not None:
                    loss = loss + routing_loss(on_routing, used, whole or used)
                if self.on_features or any(trainee.fit.collect for trainee in chosen):
                    features = example_features(self.base, binding.seen, batch, len(rows))
                    classes = classes_of(batch, len(rows), features)
                    self._note(number, rows, features, classes)
                    if on_features:
                        loss = loss + feature_losses(on_features, features, classes).sum() / len(batches[0].indices)
                room.flat.add_gradients(loss, fresh=place == 0)
                total += losses.detach()
        self.losses[number, index] = total
        if room is not self.main:
            self.main.flat.grads[index] = room.flat.grads

    def _note(self, number: int, rows: list[int], features: Tensor, classes: Tensor) -> None:
        """Keep the features of those clients that collect them and are in their last epoch."""
        for place, row in enumerate(rows):
            trainee = self.trainees[row]
            epoch = -(-len(trainee.data) // self.settings.batch_size)
            if trainee.fit.collect and number >= len(trainee.batches) - epoch:
                self.noted[row].append((features[place].detach().cpu(), classes[place].cpu()))

    def _parted(self, chosen: Sequence[Trainee], number: int) -> Iterator[tuple[Held, dict[str, Tensor]]]:
        """The mini-batches of these clients, of one shape, side by side; part by part, and whose examples these are."""
        batches = [trainee.batches[number] for trainee in chosen]
        for parts in zip(*(self._parts(batch.indices) for batch in batches), strict=True):
            held = [(one.data, part) for one, part in zip(chosen, parts, strict=True)]
            laid_out = [(one.rows, part) for one, part in zip(chosen, parts, strict=True)]
            yield held, _batch_of_all(laid_out, batches[0].pad_to)

    def _losses(
        self,
        chosen: Sequence[Trainee],
        number: int,
        held: Held,
        batch: Mapping[str, Tensor],
        hard: Sequence[Tensor] | None,
    ) -> Tensor:
        """The loss of each client, (S,), summed over what it is a mean of."""
        losses = [trainee.fit.loss for trainee in chosen]
        taught = [loss for loss in losses if isinstance(loss, WeakToStrong)]
        distilled = [loss for loss in losses if isinstance(loss, Distillation)]
        if self.teacher is not None:
            return imitation_losses(self.base, self.teacher, batch)
        if distilled:
            return distilled_losses(labelled(self.base, batch, len(chosen)), held, distilled)
        if not taught:
            return row_losses(self.base, batch, len(chosen)).view(len(chosen), -1).sum(dim=1)
        progress = [number / len(trainee.batches) for trainee in chosen]
        return teaching_losses(example_scores(self.base, batch, held), held, taught, progress, hard)

    def _hardened(
        self, chosen: Sequence[Trainee], number: int, generators: Sequence[torch.Generator]
    ) -> list[list[Tensor]] | None:
        """Of each part and client, what thresholds of a whole mini-batch decide; None where the part does."""
        taught = [trainee.fit.loss for trainee in chosen if isinstance(trainee.fit.loss, WeakToStrong)]
        alone = not any(needs_whole(loss, trainee.data) for loss, trainee in zip(taught, chosen, strict=False))
        if self.settings.accumulation == 1 or alone:
            return None
        with drawn_again(generators):
            return hardened_whole(
                self._parted(chosen, number), taught, lambda held, batch: example_scores(self.base, batch, held)
            )

    def _dropout(self, rows: list[int]) -> Dropout:
        chosen = [self.trainees[i] for i in rows]
        return Dropout(
            self.settings.dropout, [trainee.generator for trainee in chosen], [trainee.dropped for trainee in chosen]
        )

    def _room(self, clients: int) -> _Room:
        """Leaves for so many clients; made once per number."""
        if clients not in self.rooms:
            flat = Flat.empty(clients, self.places, set(self.anyone), self.like)
            part = map_tensors(self.stacked, lambda tensor: tensor[:clients].clone())
            head = {name.removeprefix(HEAD): leaf for name, leaf in flat.leaves.items() if name.startswith(HEAD)}
            model = part.with_parameters(flat.leaves)
            self.rooms[clients] = _Room(flat, model, head, _non_parameters(model))
        return self.rooms[clients]

    def _mask(self) -> Tensor | None:
        """bool (S, P): what each client trains; None when all train all."""
        if all(trainee.trained == set(self.places) for trainee in self.trainees):
            return None
        mask = torch.zeros_like(self.main.flat.values, dtype=torch.bool)
        for row, trainee in enumerate(self.trainees):
            for name in trainee.trained:
                view(mask, self.places, name)[row] = True
        return mask

    def _rate_scale(self) -> Tensor | None:
        if not any(trainee.rate_scale for trainee in self.trainees):
            return None
        factors = torch.ones_like(self.main.flat.values)
        for row, trainee in enumerate(self.trainees):
            for name, factor in trainee.rate_scale.items():
                view(factors, self.places, name)[row] = factor
        return factors

    def _penalty_backward(self, alive: list[int]) -> None:
        if not self.penalties:
            return
        living = torch.zeros(self.clients, dtype=torch.bool)
        living[alive] = True
        values = torch.stack([penalty.value(self.main.model) for penalty in self.penalties]).sum(dim=0)
        if values.requires_grad:
            counting = torch.where(moved(living, self.like.device), values, 0.0)
            self.main.flat.add_gradients(counting.sum(), fresh=False)

    @torch.no_grad()
    def _penalty_values(self) -> list[float]:
        if not self.penalties:
            return [0.0] * self.clients
        values = [penalty.value(self.main.model).double() for penalty in self.penalties]
        return [float(value) for value in torch.stack(values).sum(dim=0)]

    def _answers(self, before: list[float], after: list[float]) -> list[Done | Exception]:
        losses, norms = self.losses.double().cpu(), self.norms.double().cpu()
        finite = torch.isfinite(losses) & torch.isfinite(norms)
        sound = torch.isfinite(self.main.flat.values).all(dim=1).cpu()
        values = {name: leaf.detach() for name, leaf in self.main.flat.leaves.items()}
        trained = self.stacked.with_parameters(values)
        answers: list[Done | Exception] = []
        for row, trainee in enumerate(self.trainees):
            taken = len(trainee.batches)
            bad = [number for number in range(taken) if not finite[number, row]]
            if bad or not sound[row]:
                answers.append(_diverged(trainee, bad[0] + 1 if bad else taken, self.settings))
                continue
            fitted = Fitted(
                model=self._own_model(trainee, trained, row),
                mean_loss=math.fsum(losses[:taken, row].tolist()) / taken,
                examples_seen=sum(len(batch.indices) for batch in trainee.batches),
                steps_taken=taken,
                penalty_before=before[row],
                penalty_after=after[row],
                collected=collected(self.noted[row]),
            )
            answers.append(Done(fitted, self._own_head(trainee, values, row)))
        return answers

    def _own_model(self, trainee: Trainee, trained: Model, row: int) -> Model:
        """The client's model in its own rank and dtype; what it did not train is its own tensor again."""
        initial = trainee.fit.initial
        cut = trained.unstack(row, trainee.model).parameters
        return initial.with_parameters(
            {
                name: cut[name].to(value.device, value.dtype) if name in trainee.trained else value.detach().clone()
                for name, value in initial.parameters.items()
            }
        )

    def _own_head(self, trainee: Trainee, values: Mapping[str, Tensor], row: int) -> Head | None:
        given = trainee.ask.head
        if given is None:
            return None
        return {
            name: (
                values[HEAD + name][row].to(value.device, value.dtype, copy=True)
                if HEAD + name in trainee.trained
                else value.detach().clone()
            )
            for name, value in given.items()
        }


def _batch_of_all(parts: Sequence[tuple[DataSet | Branches, np.ndarray]], pad_to: int) -> dict[str, Tensor]:
    """Several clients' batches of equal shape one after another."""
    texts = [(data, indices) for data, indices in parts if isinstance(data, TextSet)]
    joint = joint_batch(texts, pad_to) if len(texts) == len(parts) else None
    if joint is not None:
        return joint
    pieces = [data.batch(indices, pad_to) for data, indices in parts]
    return pieces[0] if len(pieces) == 1 else {name: torch.cat([one[name] for one in pieces]) for name in pieces[0]}


def _stacked_penalties(base: Base, trainees: Sequence[Trainee], rank: int) -> list[AnyPenalty]:
    own = [list(trainee.fit.penalties) for trainee in trainees]
    stacks = [type(same[0]).stack(same, rank) for same in zip(*own, strict=True)]
    return [on_base(base, penalty) for penalty in stacks]


def _non_parameters(model: Model) -> list[Tensor]:
    """The tensors of a stacked model that are data, in a fixed order."""
    parameters = {id(value) for value in model.parameters.values()}
    return [value for _, value in leaves(model) if isinstance(value, Tensor) and id(value) not in parameters]


def _differs(stacked: Tensor) -> bool:
    return bool((stacked != stacked[:1]).any())


def _diverged(trainee: Trainee, number: int, settings: TrainSettings) -> CoterieError:
    return RunError(
        f"client {trainee.ask.party}: loss or parameters are no longer finite at step {number} "
        f"of {len(trainee.batches)}; lower lr ({settings.lr:g}) or set clip"
    )
