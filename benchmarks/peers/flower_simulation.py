"""Flower's simulation with its message API, one core for each actor; `--rebuild` builds the model at every call.

Cached, an actor keeps one model for all the clients that it plays, which Flower leaves to the user. The rounds are a
plain loop in the server app that sends to a fixed cohort and averages, so that nothing of a strategy is timed.
"""

from __future__ import annotations

import os

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

import sys
import time
from pathlib import Path
from typing import Any

import flwr
import ray
import torch
from common import Weights, Work, finish, mark, mean, own_names, peft_names, prepared
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

client_app, server_app = ClientApp(), ServerApp()
_models: dict[str, Any] = {}
_works: dict[str, Work] = {}


def _held(folder: str, rebuild: bool) -> tuple[Work, Any]:
    """The workload, and a model: a new one, or the one that this process keeps."""
    torch.set_num_threads(1)
    work = _works.setdefault(folder, Work.read(folder))
    if rebuild:
        return work, work.peft_model()
    if folder not in _models:
        _models[folder] = work.peft_model()
    return work, _models[folder]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client's local training."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    asked = message.content["config"]
    work, model = _held(str(asked["folder"]), bool(asked["rebuild"]))
    set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
    work.train(model, int(asked["round"]), int(asked["place"]))
    arrays = ArrayRecord({name: value.detach() for name, value in get_peft_model_state_dict(model).items()})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """All rounds; the first one is played once before, to warm up."""
    work, out, options = prepared()
    rebuild = "--rebuild" in options
    nodes: list[int] = []
    while len(nodes) < work.settings["clients"]:  # they come up one after another
        nodes = sorted(grid.get_node_ids())
        time.sleep(0.05)

    def play(rounds: int) -> Weights:
        current = peft_names(work.start)
        for number in range(rounds):
            messages = []
            for place, client in enumerate(work.cohorts[number]):
                asked = {"folder": str(work.folder), "rebuild": rebuild, "round": number, "place": place}
                content = RecordDict({"arrays": ArrayRecord(current), "config": ConfigRecord(asked)})
                messages.append(Message(content, dst_node_id=nodes[client], message_type="train"))
            replies = list(grid.send_and_receive(messages))
            broken = [reply.error for reply in replies if reply.has_error()]
            if broken or len(replies) < len(messages):
                raise RuntimeError(f"{len(replies)} of {len(messages)} clients answered; {broken[:1]}")
            current = mean([dict(reply.content["arrays"].to_torch_state_dict()) for reply in replies])
        return own_names(current)

    play(1)
    mark("ready")
    found = play(len(work.cohorts))
    mark("done")
    finish(out, found, flwr=flwr.__version__, ray=ray.__version__)


if __name__ == "__main__":
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Actors find the client app by its module, which __main__ is not for them.
    sys.path.insert(0, here)
    import flower_simulation as module

    settings = Work.read(sys.argv[1]).settings
    run_simulation(
        server_app=module.server_app,
        client_app=module.client_app,
        num_supernodes=settings["clients"],
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": settings["cores"], "include_dashboard": False, "logging_level": "error"},
        },
    )
