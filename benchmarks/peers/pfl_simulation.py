"""pfl (pfl-research): its federated averaging on its simulated backend, one process."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch
from common import Weights, Work, finish, mark, own_names, peft_names, prepared
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel


class Planned(Dataset):
    """A client's data of one round, in the mini-batches that the workload fixes."""

    def __init__(self, work: Work, number: int, place: int) -> None:
        self.batches = work.batches[number][place]
        self.work = work
        super().__init__(raw_data=[torch.zeros(len(self))], user_id=str(work.cohorts[number][place]))

    def __len__(self) -> int:
        return sum(len(indices) for indices, _ in self.batches)

    def iter(self, batch_size: int | None) -> Iterable[dict[str, torch.Tensor]]:
        """The mini-batches as they are, whatever size is asked for."""
        return (self.work.batch(indices, length) for indices, length in self.batches)


def played(work: Work, model: Any, rounds: int) -> Weights:
    """The first rounds of the federation."""
    set_peft_model_state_dict(model, peft_names(work.start))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    pfl_model = PyTorchModel(
        model=model,
        local_optimizer_create=lambda _, lr: work.optimizer(model),
        central_optimizer=torch.optim.SGD(trained, lr=1.0),
    )
    users = iter([(number, place) for number in range(rounds) for place in range(len(work.cohorts[number]))])
    data = FederatedDataset(lambda user: Planned(work, *user), lambda: next(users))
    algorithm = FederatedAveraging()
    algorithm.run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=len(work.cohorts[0]),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=None),
        model=pfl_model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=work.settings["optimizer"]["lr"],
            local_batch_size=work.settings["batch"],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=64),
    )
    return own_names({name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()})


def with_loss(model: Any) -> Any:
    """pfl asks a module for a loss and for metrics."""
    model.loss = lambda **batch: model(**batch).loss
    model.metrics = lambda **batch: {"loss": Weighted(float(model(**batch).loss), 1)}
    return model


if __name__ == "__main__":
    work, out, _ = prepared()
    model = with_loss(work.peft_model())
    played(work, model, 1)
    mark("ready")
    found = played(work, model, len(work.cohorts))
    mark("done")
    finish(out, found, pfl=version("pfl"))
