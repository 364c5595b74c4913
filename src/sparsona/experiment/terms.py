"""What all sides of a run on several machines agree on: a federation file, as objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Method
from sparsona.core.round import Client
from sparsona.core.targets import given_name
from sparsona.core.task import Task
from sparsona.core.update import PartSize
from sparsona.data.client_index import ClientIndex
from sparsona.data.federation import Federation
from sparsona.data.names import clean_names
from sparsona.deploy.federation_file import FederationFile, Member
from sparsona.deploy.frames import MAX_HEAD
from sparsona.engine.availability import read_availability
from sparsona.engine.context import ClientContext
from sparsona.engine.gate import largest_message
from sparsona.engine.pace import check_clients
from sparsona.engine.plan import Plan
from sparsona.experiment.agreement import check_among_peers, check_not_simulated
from sparsona.experiment.build import (
    BY_CLIENT,
    GIVEN,
    ExampleKind,
    by_number,
    make_plan,
    make_task,
    method_maker,
    name_functions,
)
from sparsona.methods import MethodCard
from sparsona.runs.folder import NETWORK
from sparsona.runs.options import RunConfig
from sparsona.runs.validation import merge_errors, validate
from sparsona.transforms.privacy import CENTRAL, read_privacy

_OF_TASK = ("classes", "class_names", "input", "predicts")


@dataclass(frozen=True)
class Terms:
    """What all sides of a run agree on, as objects.

    Args:
        file: the federation file.
        config: the options of the run.
        row: the method's row.
        method_config: the method's own options.
        kind: what examples look like.
        class_names: what its classes are called; empty: the file does not say.
    """

    file: FederationFile
    config: RunConfig
    row: MethodCard
    method_config: BaseModel
    kind: ExampleKind
    class_names: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> Terms:
        """Read a federation file.

        Args:
            path: the file.

        Returns:
            Its terms; SparsonaError names what is wrong with them.
        """
        file = FederationFile.read(path)
        if not file.clients:
            raise SparsonaError(
                f"'{path}' has no clients yet",
                expected="a roster",
                hint=f"`sparsona keys new NAME` there, `sparsona federation admit {path} NAME.pub` here",
            )
        values = {key: value for key, value in file.run.items() if key not in _OF_TASK}
        check_not_simulated(values)
        num, names = len(file.clients), [one.name for one in file.clients]
        for key in BY_CLIENT:
            if isinstance(values.get(key), Mapping):
                values[key] = by_number(key, values[key], names, num)
                check_clients(key, values[key], num)
        values |= {"clients": num, "capacities": file.capacities, "executor": NETWORK, "device": "cpu"}
        config = validate(RunConfig, values | {"data": GIVEN, "partition": GIVEN, "test": GIVEN}, f"'{path}'")
        if found := config.conflicts():
            raise merge_errors(found)
        if config.privacy is not None and read_privacy(config.privacy).kind == CENTRAL:
            raise SparsonaError(
                f"'{path}' has central privacy",
                expected="local noise: the server's would be drawn from the run's seed, which every client has",
                hint="privacy = 'local:noise=1.0,clip=0.5'",
            )
        row = methods.card(config.method)
        if row.peers:
            check_among_peers(config, row.title)
        if config.availability is not None:
            read_availability(config.availability, num)  # of as many clients as there are
        own = validate(methods.factory(row)[1], config.options, config.method)
        try:
            shape, classes = tuple(int(side) for side in file.run["input"]), int(file.run["classes"])
            predicts = str(file.run.get("predicts", "classes"))
        except (KeyError, TypeError, ValueError) as error:
            raise SparsonaError(
                f"'{path}' does not say what examples look like: {error}", expected="input and classes in [run]"
            ) from None
        kind = ExampleKind(shape, classes, predicts, predicts == "tokens")
        named = file.run.get("class_names") or []
        # A class may be called 'none', which a federation file has for no value.
        named = ["none" if one is None else one for one in named] if isinstance(named, list) else named
        return cls(file, config, row, own, kind, clean_names(named, "classes", kind.num_labels if named else None))

    def with_sampler(self, sampler: Callable[..., Any] | None, by: str) -> Terms:
        """The same with the function that samples clients, on the server's side.

        Args:
            sampler: a function of the name that the file has; None: it names one of `SAMPLERS`.
            by: the function that takes it, for an error.

        Returns:
            The terms; SparsonaError if the file says otherwise.
        """
        named, functions = name_functions({"sampler": sampler})
        wanted, known = given_name(self.config.sampler), named["sampler"]
        if (known is None) == (wanted is None) and known in (None, self.config.sampler):
            return replace(self, config=self.config.with_functions(functions))
        if wanted is None:
            raise SparsonaError(
                f"the function '{given_name(known)}' as sampler, and '{self.file.path}' says sampler = "
                f"'{self.config.sampler}'",
                expected="the sampler that all sides agreed on",
                hint=f"leave it out, or make the file with --set sampler={known}",
            )
        raise SparsonaError(
            f"'{self.file.path}' has its clients sampled by the function '{wanted}'",
            expected="that function" + (f", not '{given_name(known)}'" if known is not None else ""),
            hint=f"from Python: {by}(..., sampler={wanted})",
        )

    @property
    def run(self) -> str:
        """The run's identity."""
        return self.file.digest

    @property
    def num_clients(self) -> int:
        return len(self.file.clients)

    def check_at_least(self, at_least: int | None) -> None:
        """Raise SparsonaError if a run cannot wait for so many clients; None: for all."""
        if at_least is not None and not 0 < at_least <= self.num_clients:
            raise SparsonaError(f"--at-least {at_least}", expected=f"1 to {self.num_clients}, the size of the roster")

    def vault_of(self, member: Member, given: str | Path | None) -> Path:
        """The folder of a client's vault: the given one, or one in ./vault."""
        return Path("vault") / f"{member.name}-{self.run[:8]}" if given is None else Path(given)

    def plan(self) -> Plan:
        return make_plan(self.config, self.num_clients, self.row.peers)

    def task(self) -> Task:
        """A new task of this run."""
        assert self.config.model is not None
        return make_task(self.config.model, self.kind, self.config)

    def make_method(self) -> Callable[[Task], Method]:
        return method_maker(self.config, self.row, self.method_config)

    def context(self, federation: Federation, cards: Sequence[Client], device: torch.device) -> ClientContext:
        """A context with the data that this process has, perhaps none."""
        config = self.config
        return ClientContext(
            self.task(),
            self.make_method(),
            federation,
            self.plan(),
            self.file.capacities,
            device,
            "fp32",
            cards=cards,
            sampler=config.functions.get(f"sampler/{given_name(config.sampler)}"),
        )

    def longest_frame(self) -> int:
        """The most bytes that a frame of this run may have: messages either way, a shared model, and heads."""
        task, plan = self.task(), self.plan()
        method = self.make_method()(task)
        model = largest_message((PartSize("shared", task.layout, task.layout.size),))
        longest = 0
        for one in self.file.clients:
            cost = method.cost(task.layout, Client(one.index, 1, one.capacity, 1, self.num_clients), plan.round_at(0))
            longest = max(longest, *(0 if parts is None else largest_message(parts) for parts in (cost.up, cost.down)))
        # A job may have every mask in it for a client that lost its state: a bit for each entry, and less than a model.
        return longest + 2 * model + 2 * MAX_HEAD

    def no_data(self) -> Federation:
        """A federation of these clients whose data is elsewhere."""
        x = torch.zeros((0, *self.kind.shape), dtype=torch.int32 if self.kind.has_tokens else torch.float32)
        has_columns = self.kind.targets in ("numbers", "labels")
        y = torch.zeros((0, self.kind.num_classes) if has_columns else 0, dtype=torch.float32)
        y = y if has_columns else y.long()
        empty = np.zeros((self.num_clients, 3), dtype=np.int64)
        index = ClientIndex(torch.zeros(0, dtype=torch.int64), empty)
        return Federation(x, y, index, self.kind.num_classes, task=self.kind.task)
