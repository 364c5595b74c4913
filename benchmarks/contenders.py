"""One contender of benchmarks/compare.py on one piece of work, in this process: each as its user would write it.

Imports torch and what the contender needs, nothing else, so that it runs where Sparsona is not installed.

    python benchmarks/contenders.py naive lenet5 [--rounds 3] [--threads 1] [--tiny]

The last line it prints is JSON: seconds of each round after the first, steps a round, and the global model's loss on
everybody's training data before and after.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import importlib.metadata
import json
import os
import sys
import time
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLIENTS, BATCH, CLASSES = 10, 50, 10
LR, DECAY, CLIP = 0.1, 5e-4, 10.0


@dataclass(frozen=True)
class Work:
    """A network and images to train it on: one epoch of every client a round, FedAvg."""

    model: str  # its name in Sparsona
    shape: tuple[int, int, int]
    channels: tuple[int, int]
    hidden: tuple[int, ...]
    parameters: int

    def network(self) -> nn.Module:
        """Two 5x5 convolutions with ReLU and pooling, then linear layers, as they are usually written."""
        torch.manual_seed(0)
        inputs, height, width = self.shape
        layers: list[nn.Module] = []
        for outputs in self.channels:
            layers += [nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2)]
            inputs, height, width = outputs, (height - 4) // 2, (width - 4) // 2
        layers.append(nn.Flatten())
        inputs *= height * width
        for outputs in self.hidden:
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
            inputs = outputs
        net = nn.Sequential(*layers, nn.Linear(inputs, CLASSES))
        assert sum(value.numel() for value in net.parameters()) == self.parameters
        return net

    def clients(self, examples: int) -> list[tuple[Tensor, Tensor]]:
        """The same images everywhere; each looks like its class under noise, so that there is something to learn."""
        random = torch.Generator().manual_seed(0)
        looks = torch.rand((CLASSES, *self.shape), generator=random)
        found = []
        for _ in range(CLIENTS):
            y = torch.randint(CLASSES, (examples,), generator=random)
            found.append(((looks[y] + torch.rand((examples, *self.shape), generator=random)) / 2, y))
        return found


WORKS = {
    "cnn": Work("pfedgate-cifar10", (3, 32, 32), (32, 64), (120, 84), 256_830),
    "lenet5": Work("lenet5", (1, 28, 28), (20, 50), (500,), 431_080),
}
Data = list[tuple[Tensor, Tensor]]


@dataclass
class Found:
    """What a contender hands back: when each round ended (and the first began), steps a round, and the last model."""

    marks: list[float]
    steps: int
    model: Callable[[Tensor], Tensor]
    note: str = ""
    flops: int = 0  # of a round, where the contender counts them


def train_locally(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """One client's epoch with a DataLoader, as tutorials have it; the number of steps."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY)
    model.train()
    steps = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        steps += 1
    return steps


def run_naive(work: Work, data: Data, rounds: int) -> Found:
    """A copy of the model and a DataLoader for each client; state_dicts are averaged."""
    model, steps, marks = work.network(), 0, [time.perf_counter()]
    for _ in range(rounds):
        states, steps = [], 0
        for x, y in data:
            local = copy.deepcopy(model)
            steps += train_locally(local, x, y)
            states.append(local.state_dict())
        model.load_state_dict({name: sum(s[name] for s in states) / len(states) for name in states[0]})
        marks.append(time.perf_counter())
    return Found(marks, steps, model)


def run_sparsona(work: Work, data: Data, rounds: int) -> Found:
    """Rounds of Star with the executor that `auto` means here."""
    import sparsona as sp
    from sparsona.engine.rounds import simulate
    from sparsona.executors import choose, numeric_mode, open_executor
    from sparsona.experiment.build import make_config, make_context

    federation = sp.Federation.from_clients(
        [(x, y, x[:1], y[:1]) for x, y in data], validation_rate=0.0, num_classes=CLASSES
    )
    options = {"rounds": 1000, "per_round": CLIENTS, "epochs": 1, "batch_size": BATCH, "eval_every": 1000}
    options |= {"lr": LR, "weight_decay": DECAY, "clip_norm": CLIP, "lr_decay": 1.0, "device": "cpu"}
    context = make_context(make_config("fedavg", options, federation, work.model), federation, work.model)
    assert context.task.layout.size == work.parameters
    name = choose("auto", context)
    executor = open_executor(name, context)
    try:
        star = simulate(context, executor)
        with numeric_mode(context):
            population, marks = star.start(), [time.perf_counter()]
            for index in range(rounds):
                population, record = star.play(population, index)
                marks.append(time.perf_counter())
    finally:
        executor.close()
    params = context.method.server.global_model(population.server)
    steps, flops = (sum(getattr(turn.tally, count) for turn in record.turns) for count in ("steps", "train_flops"))

    def model(x: Tensor) -> Tensor:
        return context.task.forward(params, context.buffers, x, train=False)[0]

    return Found(marks, steps, model, name, flops)


def run_pfl(work: Work, data: Data, rounds: int) -> Found:
    """pfl-research: FederatedAveraging on a SimulatedBackend, in this process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.steps = work.network(), 0

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            self.train()
            self.steps += 1
            return F.cross_entropy(self(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            self.eval()
            return {"loss": Weighted(float(F.cross_entropy(self(x), y, reduction="sum")), len(y))}

    class Clock(TrainingProcessCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []
            self.steps = [0]

        def on_train_begin(self, *, model: Any) -> Any:
            self.marks.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            self.marks.append(time.perf_counter())
            self.steps.append(net.steps)
            return False, Metrics()

    net, clock = Network(), Clock()
    users = list(range(len(data)))
    dataset = FederatedDataset(lambda user: Dataset(data[user]), get_user_sampler("minimize_reuse", users))
    local = functools.partial(torch.optim.SGD, weight_decay=DECAY)
    model = PyTorchModel(net, local, torch.optim.SGD(net.parameters(), 1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=len(data), val_cohort_size=None
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR, local_max_grad_norm=CLIP
        ),
        callbacks=[clock],
    )
    return Found(clock.marks, clock.steps[-1] - clock.steps[-2], net)


def run_fedlab(work: Work, data: Data, rounds: int) -> Found:
    """FedLab: a SerialClientTrainer and a synchronous server in this process."""
    # It imports torchvision for its data sets alone, which are not used here, and a torchvision must fit torch's build.
    for name in ("", ".transforms", ".datasets", ".datasets.utils", ".models", ".transforms.functional"):
        sys.modules[f"torchvision{name}"] = unittest.mock.MagicMock()
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler

    counted = [0]

    class Trainer(SGDSerialClientTrainer):
        """Theirs, with clipping and decay, which its own loop has not."""

        def train(self, model_parameters: Tensor, train_loader: Any) -> list[Tensor]:
            self.set_model(model_parameters)
            counted[0] += train_locally(self._model, *train_loader)
            return [self.model_parameters]

    class Dataset:
        def get_dataloader(self, client: int, batch_size: int | None = None) -> tuple[Tensor, Tensor]:
            return data[client]  # the trainer above makes a loader of it, as everybody here does

    model = work.network()
    handler = SyncServerHandler(model, rounds, 1.0)
    handler.num_clients = len(data)
    trainer = Trainer(copy.deepcopy(model), len(data), cuda=False)
    trainer.setup_dataset(Dataset())
    trainer.setup_optim(1, BATCH, LR)
    steps, marks = 0, [time.perf_counter()]
    while not handler.if_stop:
        counted[0] = 0
        trainer.local_process(handler.downlink_package, handler.sample_clients())
        for package in trainer.uplink_package:
            handler.load(package)
        steps = counted[0]
        marks.append(time.perf_counter())
    return Found(marks, steps, handler.model)


def run_flower(work: Work, data: Data, rounds: int) -> Found:
    """Flower's simulation: FedAvg, one actor a core with one thread each; a round ends where the next is configured."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    import flwr
    from flwr.client import ClientApp, NumPyClient
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    examples = len(data[0][1])

    class Client(NumPyClient):
        def __init__(self, place: int) -> None:
            self.place = place

        def fit(self, parameters: Any, config: Any) -> Any:
            torch.set_num_threads(1)
            x, y = kept_clients(work, examples)[self.place]
            net = work.network()
            fill(net, parameters)
            steps = train_locally(net, x, y)
            return [value.numpy() for value in net.state_dict().values()], len(y), {"steps": steps}

    marks: list[float] = []
    last: dict[str, Any] = {}

    class Timed(FedAvg):
        def configure_fit(self, *args: Any, **more: Any) -> Any:
            if not marks:
                marks.append(time.perf_counter())
            return super().configure_fit(*args, **more)

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            if failures:
                raise RuntimeError(f"Flower: {failures[0]}")
            found = super().aggregate_fit(server_round, results, failures)
            marks.append(time.perf_counter())
            last.update(parameters=found[0], steps=sum(result.metrics["steps"] for _, result in results))
            return found

    def server_fn(context: Any) -> Any:
        start = flwr.common.ndarrays_to_parameters([value.numpy() for value in work.network().state_dict().values()])
        everybody = {"min_fit_clients": len(data), "min_available_clients": len(data)}
        strategy = Timed(fraction_fit=1.0, fraction_evaluate=0.0, initial_parameters=start, **everybody)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))

    def client_fn(context: Any) -> Any:
        return Client(int(context.node_config["partition-id"])).to_client()

    run_simulation(
        server_app=ServerApp(server_fn=server_fn),
        client_app=ClientApp(client_fn=client_fn),
        num_supernodes=len(data),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores(), "include_dashboard": False, "logging_level": "error"},
        },
    )
    net = work.network()
    fill(net, flwr.common.parameters_to_ndarrays(last["parameters"]))
    return Found(marks, last["steps"], net, f"{cores()} actors")


_KEPT: dict[tuple[str, int], Data] = {}


def kept_clients(work: Work, examples: int) -> Data:
    """Data that an actor makes once and keeps: nothing of it travels."""
    return _KEPT.setdefault((work.model, examples), _KEPT.get((work.model, examples)) or work.clients(examples))


def fill(net: nn.Module, values: Any) -> None:
    net.load_state_dict({n: torch.tensor(value) for n, value in zip(net.state_dict(), values, strict=True)})


CONTENDERS = {
    "sparsona": run_sparsona,
    "naive": run_naive,
    "pfl": run_pfl,
    "flower": run_flower,
    "fedlab": run_fedlab,
}
PACKAGES = {"sparsona": "sparsona", "pfl": "pfl", "flower": "flwr", "fedlab": "fedlab"}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loss_of(model: Callable[[Tensor], Tensor], data: Data) -> float:
    if isinstance(model, nn.Module):
        model.eval()
    with torch.no_grad():
        return sum(float(F.cross_entropy(model(x), y)) for x, y in data) / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--rounds", type=int, default=3, help="timed ones; one more comes before them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="few images, to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = WORKS[args.work]
    data = work.clients(BATCH if args.tiny else 10 * BATCH)
    try:
        found = CONTENDERS[args.contender](work, data, 1 + args.rounds)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != PACKAGES.get(args.contender):
            raise
        sys.exit(3)  # what it needs is not installed
    seconds = [after - before for before, after in zip(found.marks[1:], found.marks[2:], strict=False)]
    versions = {"torch": torch.__version__}
    if args.contender in PACKAGES:
        versions[PACKAGES[args.contender]] = version_of(PACKAGES[args.contender])
    told = {"seconds": seconds, "steps": found.steps, "flops": found.flops, "note": found.note, "versions": versions}
    told |= {"loss_before": loss_of(work.network(), data), "loss_after": loss_of(found.model, data)}
    print(json.dumps(told), flush=True)


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return str(importlib.import_module(package).__version__)


if __name__ == "__main__":
    # As a module that others can import: what Flower sends to its actors is then a name, and what they keep stays.
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    importlib.import_module("contenders").main()
