"""The models of a run, from its folder. The run's data is not needed, unless a method makes a model with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsona.analysis.outcomes import keeps_the_shared_model
from sparsona.core.errors import DataNeededError, SparsonaError
from sparsona.core.method import Tree, Work
from sparsona.core.points import GUARDED, NOVEL, NOVEL_TUNED, RECEIVED, TUNED
from sparsona.data.names import find_client
from sparsona.engine.context import ClientContext
from sparsona.engine.rounds import received_work, shared_model, simulate
from sparsona.runs.checkpoint import Checkpoints, Progress
from sparsona.runs.folder import GLOBAL_FILE, NETWORK, RunFolder
from sparsona.runs.warm_start import read_weights

MakeContext = Callable[[], ClientContext]


@dataclass(frozen=True)
class StoredModel:
    """A model of a run: a client's own, or the shared one.

    Args:
        client: whose it is; None: the shared one.
        point: the evaluation point at which a run evaluates this model.
        completed: the rounds that it was trained for.
        predict: what the run itself predicts with.
        module: makes it as a plain module; raises SparsonaError where plain weights cannot express it.
    """

    client: int | None
    point: str
    completed: int
    predict: Callable[[Tensor], Tensor]
    module: Callable[[], nn.Module]


class StoredModels:
    """The models in a run's checkpoint.

    Args:
        folder: the run.
        context: makes its context without data.
        with_data: makes it with data, for a method that reads a client's data to make its model.
    """

    def __init__(self, folder: RunFolder, context: MakeContext, with_data: MakeContext) -> None:
        self._folder, self._with_data = folder, with_data
        self._progress: Progress | None = None
        self.context = context()

    def personal(self, client: int | str, guarded: bool = False) -> StoredModel:
        """A client's own model.

        Args:
            client: its number or its name.
            guarded: the shared model instead, if the client keeps that one.

        Returns:
            The model.
        """
        if self._folder.config.get("executor") == NETWORK:
            raise models_elsewhere(self._folder.path)
        number = self.number(client)
        if guarded and not self.context.plan.guard:
            raise SparsonaError(
                f"'{self._folder.path}' was run without a guard",
                expected="a run with guard=True",
                hint="run it again with --guard, or leave guarded out",
            )
        try:
            return self._personal(number, guarded)
        except DataNeededError as error:
            if self.context.federation.has_examples:
                raise
            self._reopen_with_data(error)
            return self._personal(number, guarded)

    def _personal(self, client: int, guarded: bool) -> StoredModel:
        progress, context = self.progress, self.context
        if guarded and keeps_the_shared_model(self._folder, client):
            warm = context.plan.starts_warm
            shared = context.params if warm else shared_model(context.server_side, progress.population)
            assert shared is not None
            state = progress.population.states.get(client)
            return self._plain(client, GUARDED, shared, context.buffers if state is None else state.buffers)
        work, is_tuned = progress.tuned.get(client), True
        if work is None:
            work, is_tuned = received_work(context, progress.population, client, progress.completed), False
        if client in self._folder.facts.novel:
            point = NOVEL_TUNED if is_tuned else NOVEL
        else:
            point = TUNED if is_tuned else RECEIVED
        predict = partial(context.method.predict, work)
        return StoredModel(
            client, GUARDED if guarded else point, progress.completed, predict, partial(self._deployed, work)
        )

    def shared(self) -> StoredModel:
        """The model that clients share: the server's, or the mean of the peers'.

        Returns:
            The model. Where buffers such as BatchNorm statistics belong to clients, it raises SparsonaError.
        """
        context, title = self.context, self._folder.facts.title
        point = context.method.shared_point
        if point is None:
            raise SparsonaError(
                f"{title} has no shared model",
                expected="a method with one, such as fedavg",
                hint="personal models are there: name a client",
            )
        if context.task.moves_buffers:
            raise SparsonaError(
                "the shared model has no BatchNorm statistics: they stay on the clients",
                expected="a client's model, or a network with GroupNorm",
                hint="name a client: its model has its own statistics",
            )
        if self._folder.has(GLOBAL_FILE):
            params, completed = _read_tree(self._folder, context), context.plan.last
        else:
            found = shared_model(context.server_side, self.progress.population)
            assert found is not None
            params, completed = found, self.progress.completed
        return self._plain(None, point, params, context.buffers, completed)

    def number(self, client: int | str) -> int:
        """The number of a client, given that or its name."""
        names = self._folder.facts.client_names
        if isinstance(client, str) and client not in names and client.isdecimal() and len(client) < 10:
            client = int(client)  # as it was written on the command line
        return find_client(client, names or None, len(self.context.clients))

    @property
    def progress(self) -> Progress:
        """The checkpoint, read once."""
        if self._progress is None:
            try:
                self._progress = self._load()
            except DataNeededError as error:
                if self.context.federation.has_examples:
                    raise
                self._reopen_with_data(error)
                self._progress = self._load()
        return self._progress

    def _load(self) -> Progress:
        return load_progress(self._folder, self.context)

    def _reopen_with_data(self, needed: DataNeededError) -> None:
        title = self._folder.facts.title
        try:
            self.context = self._with_data()
        except SparsonaError as error:
            raise DataNeededError(
                f"{title} makes a client's model with that client's data: {needed.what} ({error.what})",
                expected="the federation that the run was started with",
                hint="sparsona.load(run, federation), or of a data set its files",
            ) from error
        self._progress = None

    def _plain(
        self, client: int | None, point: str, params: Tree, buffers: Tree, completed: int | None = None
    ) -> StoredModel:
        task = self.context.task

        def predict(inputs: Tensor) -> Tensor:
            return task.forward(params, buffers, inputs, train=False)[0]

        reached = self.progress.completed if completed is None else completed
        return StoredModel(client, point, reached, predict, lambda: task.module(params, buffers))

    def _deployed(self, work: Work) -> nn.Module:
        method = self.context.method
        if method.deploy is None:
            raise SparsonaError(
                f"{method.name} deploys no plain model: its prediction takes more than weights",
                expected="a method, or options, whose personal model is a network of its own",
                hint="run.evaluate and `sparsona evaluate` work without one; docs/export.md lists these methods",
            )
        made: Any = method.deploy(work)
        return self.context.task.module(*made) if isinstance(made, tuple) else made.eval()


def models_elsewhere(path: Path) -> SparsonaError:
    """The error for what needs clients' models, masks or data where they are on other machines."""
    return SparsonaError(
        f"the models, masks and data of '{path}' are with its clients, on several machines",
        expected="a simulated run",
        hint="`sparsona vault export FILE` on a client's machine, or `sparsona replay`, whose run has them",
    )


def load_progress(folder: RunFolder, context: ClientContext) -> Progress:
    """A run's checkpoint."""
    engine = simulate(context)
    progress = Checkpoints(folder.path, context.method).load(engine, engine.start())
    if progress is None:
        raise SparsonaError(f"'{folder.path}' has no checkpoint yet", hint="resume the run first")
    return progress


def _read_tree(folder: RunFolder, context: ClientContext) -> Tree:
    named, slots = read_weights(folder, GLOBAL_FILE), context.params.layout.slots
    if any(slot.name not in named or named[slot.name].shape != torch.Size(slot.shape) for slot in slots):
        raise SparsonaError(
            f"'{folder.path / GLOBAL_FILE}' holds other tensors than the run's network",
            expected="the file as sparsona wrote it",
            hint="restore it from a copy, or start the run again in another folder",
        )
    return Tree.of(named, context.params.layout)
