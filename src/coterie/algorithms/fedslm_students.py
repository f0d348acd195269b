"""FedSLM's step 4: students of the full model, taught on unlabeled examples by the fused model's distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from coterie.algorithms.base import Program
from coterie.algorithms.factors import initial_adapter
from coterie.maths.keys import Key
from coterie.protocol import Dense, Fit, Fitted, Layer, Model, Predict, WeakToStrong

Form = Literal["entropy", "confidence"]
UNLABELED = "unlabeled"


@dataclass(frozen=True)
class Students:
    """How students learn, and which there are.

    form, alpha: the loss of the one that is deployed (see `WeakToStrong`). beside: more students, each a form and an
    alpha, measured beside it. epochs: passes over the unlabeled examples. student: what they train, LoRA or `full`, all
    weights of the adapted layers (L11), as W + D with D = 0 at first, which weight decay draws back to. student_rank,
    student_alpha: of their LoRA; student_lr: times the experiment's learning rate.
    """

    form: Form = "entropy"
    alpha: float = 0.5
    beside: tuple[tuple[Form, float], ...] = ()
    epochs: int = 5
    student: Literal["lora", "full"] = "lora"
    student_rank: int = 16
    student_alpha: float = 32.0
    student_lr: float = 1.0

    def __post_init__(self) -> None:
        for form, alpha in self.all_students().values():
            if not 0 <= alpha <= 1:
                raise ValueError(f"alpha of {form} must lie between 0 and 1, not {alpha:g}")
        given = {(self.form, self.alpha), *self.beside}
        if len(self.all_students()) < len(given):
            raise ValueError(f"alphas of students must differ in six digits, not as in {sorted(given)}")
        numbers = (self.epochs, self.student_rank, self.student_alpha, self.student_lr)
        if not all(0 < number < math.inf for number in numbers):
            raise ValueError("epochs, student_rank, student_alpha and student_lr must be positive and finite")

    def all_students(self) -> dict[str, tuple[Form, float]]:
        """Form and alpha of every student by its name, the one that is deployed first."""
        return {f"{form}-{alpha:g}": (form, alpha) for form, alpha in ((self.form, self.alpha), *self.beside)}

    def taught(self, teacher: Model, layers: Mapping[str, Layer], key: Key) -> Program:
        """=> {name: Fitted} of every student, a program of the server (lines 23-27, Eq. 10).

        All students start from one draw of `key`, so that what tells them apart is their loss and their mini-batches.
        """
        said = yield Predict(teacher, UNLABELED)
        f_w = said.logits.double().softmax(dim=-1).float()  # (n, C): of an example's options or classes (L9)
        start = self.untaught(layers, key)
        trained = tuple(f"{term}.*" for term in start.terms)
        made: dict[str, Fitted] = {}
        for name, (form, alpha) in self.all_students().items():
            made[name] = yield Fit(
                start,
                train=trained,
                head=False,
                loss=WeakToStrong(f_w, alpha, form),
                data=UNLABELED,
                epochs=self.epochs,
                lr_scale=dict.fromkeys(trained, self.student_lr),
            )
        return made

    def untaught(self, layers: Mapping[str, Layer], key: Key) -> Model:
        """The full model with what a student trains, which adds nothing yet."""
        if self.student == "full":
            return Model(delta={name: Dense(torch.zeros(layer.d_out, layer.d_in)) for name, layer in layers.items()})
        return Model(lora=initial_adapter(layers, self.student_rank, self.student_alpha / self.student_rank, key))
