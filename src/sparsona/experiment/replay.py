"""Replays of runs on several machines: the simulator, with the failures that were observed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsona.core import spec
from sparsona.core.errors import SparsonaError
from sparsona.core.points import select
from sparsona.core.torch_state import usual_torch
from sparsona.data.client_index import ClientIndex
from sparsona.data.federation import Federation
from sparsona.deploy.jobs import reported_points
from sparsona.engine.clients import Clients, LocalClients
from sparsona.engine.failures import ABSENT, BARRED, DIVERGED, REFUSED, STARTED_ANEW, TOO_FEW, WITHHELD
from sparsona.engine.jobs import Executor, Job, Outcome, Report
from sparsona.engine.plan import Plan
from sparsona.engine.population import num_bytes
from sparsona.executors import numeric_mode
from sparsona.executors.serial import Serial
from sparsona.experiment.client_data import everyones_data
from sparsona.experiment.guests import Cards, guests_at_start, joint_digest
from sparsona.experiment.run import Run
from sparsona.experiment.terms import Terms
from sparsona.experiment.train import describe_run, free_path, play
from sparsona.runs.folder import FEDERATION_FILE, GLOBAL_FILE, GUESTS_FILE, NETWORK, RunFolder, reached
from sparsona.runs.observers import ObserverList
from sparsona.runs.options import dump
from sparsona.runs.records import EvaluationRow, Records, TurnRow
from sparsona.runs.session import Listen, Session
from sparsona.runs.traits import TraitRecord

SERIAL = "serial"


@dataclass(frozen=True)
class Replay:
    """A run on several machines, played again in one process.

    Args:
        run: the simulated run.
        of: the folder of the run that was replayed.
        same_data: whether the data is what the clients reported.
        difference: where the two differ first; "" if they do not.
    """

    run: Run
    of: Path
    same_data: bool
    difference: str

    @property
    def is_same(self) -> bool:
        """Whether the two have the same turns, evaluations and shared model, to the bit."""
        return not self.difference

    def __str__(self) -> str:
        if self.is_same:
            return f"same: turns, evaluations and shared model of '{self.of}' are those of the replay, to the bit"
        data = "" if self.same_data else " (the data is not what the clients reported)"
        return f"differs: {self.difference}{data}"


@usual_torch()
def replay(
    path: str | Path,
    data: str | Sequence[str],
    *,
    out: str | Path | None = None,
    data_dir: str | None = None,
    sampler: Callable[..., Any] | None = None,
    observers: Sequence[object] = (),
    **options: Any,
) -> Replay:
    """Play a finished run on several machines again in the simulator, with the failures that were observed.

    A client that did not answer, was refused, barred or not there yet does nothing in that round; one whose state was
    lost starts anew in it. Everything else is computed again, and compared with the run.

    Args:
        path: the run's folder.
        data: the name of a data set, of which each client takes its share, or one source, such as "arrays:mine.npz",
            for each client of the roster.
        out: the folder of the replay, which must not exist yet. None: a new one in ./runs.
        data_dir: folder that is searched first for the data's files.
        sampler: the function that samples clients, again, if the run's server had one.
        observers: as for `train`.
        options: how the data is split, as the clients were given it.

    Returns:
        The simulated run, and whether it is the same.
    """
    folder = RunFolder.open(Path(path))
    terms = _terms(folder).with_sampler(sampler, "sp.replay")
    found = everyones_data(terms, [data] if isinstance(data, str) else list(data), data_dir, **options)
    has_guests = (folder.path / GUESTS_FILE).exists()  # peers have no server that would note them
    there = guests_at_start(folder.path) if has_guests else np.flatnonzero(folder.facts.sizes[:, 0]).tolist()
    digest = joint_digest([one.digest() if client in there else "" for client, one in enumerate(found)])
    side = _Side(terms, found, there, _Observed(folder.records, terms.plan()))
    session = Session(side, ObserverList(observers))
    config, facts = describe_run(terms.config, side.client_context, terms.row, executor=SERIAL)
    place = Path(out) if out else free_path(f"{folder.path.name}-replay")
    with RunFolder.create(place, dump(config), facts, None) as made:
        run = play(made, session, config, lambda: side.client_context, side.client_context.task.frozen)
    return Replay(run, folder.path, digest == folder.facts.federation, first_difference(folder, made))


def _terms(folder: RunFolder) -> Terms:
    """The terms of a run that can be replayed."""
    if folder.config.get("executor") != NETWORK or not (folder.path / FEDERATION_FILE).exists():
        raise SparsonaError(
            f"'{folder.path}' was simulated",
            expected="a run on several machines",
            hint="a simulation is repeated by running it with the same options",
        )
    found = reached(folder.path)
    if not found.finished:
        raise SparsonaError(
            f"'{folder.path}' reached round {found.completed} of {folder.config['rounds']}",
            expected="a finished run",
            hint="start its server again with the same --out: it goes on",
        )
    terms = Terms.read(folder.path / FEDERATION_FILE)
    config = terms.config
    if config.privacy is not None or any(spec.parse("transform", text).name == "noise" for text in config.transform):
        raise SparsonaError(
            f"'{folder.path}' has noise that each client draws from a secret of its own",
            expected="a run without --transform noise or --privacy",
            hint="that nobody can repeat it is what the noise is for",
        )
    if terms.row.peers and (folder.records.failures() or folder.records.evaluation_failures()):
        raise SparsonaError(
            f"'{folder.path}' is a run of peers that did not all hear each other",
            expected="a run with a server, or one of peers without failures",
            hint="the records do not say which messages a peer received",
        )
    return terms


class _Observed:
    """What was observed of a run's jobs, by the records."""

    def __init__(self, records: Records, plan: Plan) -> None:
        self._after_rounds = select(plan.points, "round")
        self._turns = {(row.round, row.client): row.reason for row in records.failures()}
        self._tests = {(row.completed, row.is_final, row.client): row.reason for row in records.evaluation_failures()}
        self._bytes = {(row.round, row.client): row.bytes_down for row in records.turns()}

    def reason(self, job: Job) -> str:
        """What was recorded of a job besides its result."""
        index, client = job.round.index, job.client
        if job.do != "evaluate":
            found = self._turns.get((index, client), "")
            if found.startswith(DIVERGED):
                return ""  # so it does again
            return "" if found.endswith(TOO_FEW) and not found.startswith(REFUSED) else found
        found = self._tests.get((index, job.points != self._after_rounds, client), "")
        return found.removesuffix(WITHHELD).removesuffix("; ")

    def was_sent_twice(self, job: Job) -> bool:
        """Whether a job that failed was sent with all masks in it, after it had been sent without."""
        first = sum(num_bytes(message) for message in job.messages)
        return job.do != "evaluate" and self._bytes.get((job.round.index, job.client), 0) > first


class _Side:
    """The side of a session that replays a run. Clients are admitted when the server admitted them.

    Args:
        terms: of the run.
        data: of each client.
        there: the clients that were there at the start.
        observed: what was observed.
    """

    def __init__(self, terms: Terms, data: Sequence[Federation], there: Sequence[int], observed: _Observed) -> None:
        self._sizes = [tuple(one.sizes()[index].tolist()) for index, one in enumerate(data)]
        self._cards = Cards(terms.file.clients, terms.plan())  # filled in as by the server
        self._admit(there)
        self.client_context = terms.context(_together(data), self._cards, torch.device("cpu"))
        self.context = self.client_context.server_side
        self._executor = _Observing(Serial(self.client_context), observed, self._meet, self._sizes)
        self.clients: Clients = LocalClients(self.client_context, self._executor)

    def numeric_mode(self) -> AbstractContextManager[None]:
        return numeric_mode(self.client_context)

    @contextmanager
    def open(self, executor: str, report: Report, listen: Listen) -> Iterator[None]:
        self._executor.listen = listen
        report("")
        yield

    def traits(self) -> TraitRecord | None:
        return None

    def _meet(self, client: int) -> None:
        if not self._cards[client].num_examples:
            self._admit([client])

    def _admit(self, clients: Iterable[int]) -> None:
        known = {card.index for card in self._cards if card.num_examples} | set(clients)
        self._cards.fill({client: self._sizes[client] for client in known})


class _Observing:
    """An executor that gives jobs the outcome that was observed, where they failed.

    It stands where the network was, so that it also does what a server does there: it meets late clients with their
    first job, and sends jobs again.
    """

    def __init__(self, executor: Executor, observed: _Observed, meet: Any, sizes: Sequence[tuple[int, ...]]) -> None:
        self._executor, self._observed, self._meet, self._sizes = executor, observed, meet, sizes
        self.encodes = executor.encodes
        self.listen: Listen = lambda kind, done: None

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        waiting: deque[Outcome] = deque()  # what is known of outcomes before they are there, in the order of jobs
        kind, done = "", 0

        def asked() -> Iterator[Job]:
            nonlocal kind
            for job in jobs:
                kind, client, reason = job.do, job.client, self._observed.reason(job)
                if reason in (ABSENT, BARRED):
                    waiting.append(Outcome(client, failure=reason, sent=False))
                    continue
                self._meet(client)
                if reason == STARTED_ANEW:
                    job = replace(job.again() if job.resend is not None else job, state=None)
                elif reason:
                    if job.resend is not None and self._observed.was_sent_twice(job):
                        job.again()  # which charges it
                    waiting.append(Outcome(client, failure=reason))
                    continue
                reported, withheld = reported_points(job.points, self._sizes[client])
                waiting.append(Outcome(client, note=reason, withheld=withheld))
                yield replace(job, points=reported)

        def failed() -> Iterator[Outcome]:
            nonlocal done
            while waiting and waiting[0].failure:
                done += 1
                self.listen(kind, done)
                yield waiting.popleft()

        for outcome in self._executor.run(asked()):
            yield from failed()
            known = waiting.popleft()
            done += 1
            self.listen(kind, done)
            yield replace(outcome, note=known.note, withheld=known.withheld)
        yield from failed()

    def close(self) -> None:
        self._executor.close()


def _together(data: Sequence[Federation]) -> Federation:
    """One federation of the clients' own ones."""
    first = data[0]
    if any((one.view, one.x.dtype) != (first.view, first.x.dtype) for one in data):
        raise SparsonaError(
            "clients whose examples are stored and normalised in different ways",
            expected="data of one kind",
            hint="replay it with arrays of the same type",
        )
    sizes = np.stack([one.sizes()[index].numpy() for index, one in enumerate(data)])
    entries = torch.arange(int(sizes.sum()))
    x, y = (torch.cat([getattr(one, name) for one in data]) for name in ("x", "y"))
    return replace(first, x=x, y=y, splits=ClientIndex(entries, sizes))


def first_difference(run: RunFolder, other: RunFolder) -> str:
    """Where two runs of the same plan differ first: in a client's turn, an evaluation, or only in the shared model.

    Args:
        run: the run that was replayed.
        other: the replay.

    Returns:
        A sentence; "" if they are the same to the bit.
    """
    of_run, of_other = run.records, other.records
    last, also = (reached(one.path).completed for one in (run, other))
    if last != also:
        return f"it ended after round {last}, the replay after {also}"
    rounds = [sorted({row.round for row in records.rounds()}) for records in (of_run, of_other)]
    for index in range(max((*rounds[0], *rounds[1], 0)) + 1):
        where = f"round {index + 1}" if index < last else "final tuning"
        if found := _rows_differ(of_run.turns(index), of_other.turns(index), where):
            return found
        if found := _rows_differ(of_run.evaluations(index), of_other.evaluations(index), f"evaluated after {index}"):
            return found
    if found := _rows_differ(of_run.evaluations(last), of_other.evaluations(last), f"evaluated after {last}"):
        return found
    for name in ("failures", "evaluation_failures"):
        # Reasons in older runs count rounds from 0; the round of a failure is a column of its own.
        one, also_one = (re.sub(r"\bround \d+", "round", str(getattr(each, name)())) for each in (of_run, of_other))
        if one != also_one:
            return "other failures were recorded"
    if run.facts.peers and not run.has(GLOBAL_FILE):
        return ""  # gathered from peers, which do not make their mean
    models = [one.read(GLOBAL_FILE) if one.has(GLOBAL_FILE) else b"" for one in (run, other)]
    return "" if models[0] == models[1] else "the shared model has other bits, though all turns are the same"


def _rows_differ(
    rows: Sequence[TurnRow] | Sequence[EvaluationRow],
    others: Sequence[TurnRow] | Sequence[EvaluationRow],
    where: str,
) -> str:
    one, other = ({(row.client, getattr(row, "point", "")): row for row in found} for found in (rows, others))
    for key in sorted({*one, *other}):
        place = f"{where}, client {key[0]}" + (f", at '{key[1]}'" if key[1] else "")
        if key not in one or key not in other:
            return f"{place}: only {'the replay' if key in other else 'the run'} has it"
        for field in fields(one[key]):
            a, b = (repr(getattr(found[key], field.name)) for found in (one, other))  # repr: NaN is like NaN
            if a != b:
                return f"{place}: {field.name} is {a}, in the replay {b}"
    return ""
