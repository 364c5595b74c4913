"""The journals of peers as one run, as a simulation of it would have been recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sparsona.analysis import summary as summaries
from sparsona.core.errors import SparsonaError
from sparsona.core.points import FEW, select
from sparsona.core.round import Client
from sparsona.deploy.greeting import read_environment
from sparsona.deploy.journal import Entry, Journal, Opening
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.jobs import Tally
from sparsona.engine.plan import Plan, participation, tested_clients
from sparsona.engine.population import EvaluationLog, Population, RoundRecord, Turn
from sparsona.experiment.guests import Guest, with_guests
from sparsona.experiment.run import Run
from sparsona.experiment.terms import Terms
from sparsona.experiment.train import describe_run, load
from sparsona.runs.checkpoint import Checkpoints, Progress
from sparsona.runs.folder import FEDERATION_FILE, NETWORK, RunFolder
from sparsona.runs.options import dump
from sparsona.runs.recorder import Recorder
from sparsona.runs.records import FailureRow
from sparsona.runs.session import earlier_result, evaluation_result, round_result
from sparsona.wire.ledger import Traffic

ENDED = "its journal ends before this round"
MISSING = "its journal was not gathered"


@dataclass(frozen=True)
class _Told:
    """The journal of one peer, by rounds."""

    opening: Opening
    turns: Mapping[int, Entry]
    evaluations: Mapping[int, Entry]
    end: Entry | None

    @classmethod
    def of(cls, opening: Opening, entries: Sequence[Entry]) -> _Told:
        by_kind: dict[str, dict[int, Entry]] = {"turn": {}, "evaluation": {}, "end": {}}
        for entry in entries:
            by_kind[entry.kind][entry.round] = entry
        return cls(opening, by_kind["turn"], by_kind["evaluation"], next(iter(by_kind["end"].values()), None))


def gather(out: str | Path, folders: Iterable[str | Path], partial: bool = False) -> Run:
    """Make one run of the journals of its peers, as a simulation of it would have been recorded.

    Args:
        out: the folder of the run to make.
        folders: of the peers: each has a journal.jsonl and a federation.toml, and may have nothing else.
        partial: accept that journals of some peers are missing.

    Returns:
        The run. The peers' models are not in it.
    """
    if (Path(out) / "config.json").exists():
        raise SparsonaError(
            f"'{out}' is a run already",
            expected="a new folder for the gathered run",
            hint=f"gather into another one: `sparsona gather {out}-2 PEER...`; or remove it first",
        )
    terms, reported = _read_journals([Path(folder) for folder in folders], partial)
    plan = terms.plan()
    guests = [_guest(reported[one.index].opening) if one.index in reported else Guest() for one in terms.file.clients]
    most, num = max(guest.sizes[0] for guest in guests), terms.num_clients
    cards = tuple(
        Client(one.index, guest.sizes[0], one.capacity, guest.sizes[1], num, most)
        for one, guest in zip(terms.file.clients, guests, strict=True)
    )
    context = terms.context(terms.no_data(), cards, torch.device("cpu"))
    is_finished = any(one.end for one in reported.values())
    completed = plan.rounds if is_finished else min(len(one.turns) for one in reported.values())
    if not is_finished and not completed:
        raise SparsonaError("no round is in all of these journals yet", expected="peers that have played a round")
    config, facts = describe_run(terms.config, context, terms.row, executor=NETWORK)
    facts = with_guests(facts, terms, guests)
    seconds = 0.0
    with RunFolder.create(Path(out), dump(config), facts, None) as folder:
        terms.file.write(folder.path / FEDERATION_FILE)
        with folder.records.writing():
            for index in range(completed + is_finished):
                seconds += _record(folder, _Round(plan, cards, reported, index, is_end=index == completed))
        folder.records.flush()
        nobody = Population(None, {})
        seal, progress = folder.next_seal(completed, None), Progress(completed, seconds, nobody, {}, is_finished)
        Checkpoints(folder.path, context.method).save(progress, nobody, seal)
        folder.sealed(seal, None)
        folder.write_summary(summaries.summarize(folder, seconds))
    return load(out)


def _record(folder: RunFolder, found: _Round) -> float:
    """Write the rows of a round, or of the end; returns its seconds."""
    recorder, facts, record = Recorder(folder.records), folder.facts, found.record()
    if not found.is_end or record.turns or record.evaluations:
        recorder.on_round(replace(round_result(record, found.seconds), is_tuning=found.is_end))
    after = found.index if found.is_end else found.index + 1
    results = [evaluation_result(facts, after, record.evaluations, record.log, is_final=found.is_end)]
    results.append(earlier_result(facts, record))
    if found.is_end and not found.index:  # of a run without rounds, before the end
        results.append(evaluation_result(facts, 0, *found.evaluations(0)))
    for result in filter(None, results):
        recorder.on_evaluation(result)
    lost = found.lost()
    for turn in record.turns:
        if turn.failure:
            lost[turn.client] = "; ".join(filter(None, (turn.failure, lost.get(turn.client))))
    folder.records.add(FailureRow(found.index, client, why) for client, why in sorted(lost.items()))
    return found.seconds


@dataclass(frozen=True)
class _Round:
    """What peers reported of one round, or of the end."""

    plan: Plan
    cards: tuple[Client, ...]
    reported: Mapping[int, _Told]
    index: int
    is_end: bool

    @property
    def entries(self) -> dict[int, Entry]:
        found = {
            client: one.end if self.is_end else one.turns.get(self.index)
            for client, one in sorted(self.reported.items())
        }
        return {client: entry for client, entry in found.items() if entry is not None}

    @property
    def seconds(self) -> float:
        return max((entry.seconds for entry in self.entries.values()), default=0.0)

    def record(self) -> RoundRecord:
        """As the simulator would have made it of these."""
        round_ = self.plan.tuning_round if self.is_end else self.plan.round_at(self.index)
        awake = None if self.is_end else participation(self.plan, self.cards, self.index).num_awake
        made = RoundRecord(self.index, round_.lr_scale, self._turns(), num_awake=awake)
        for client, entry in self.entries.items():
            if self.is_end:
                made.evaluations.extend(entry.outcome.evaluations)
                _add(made.log, client, entry)
            else:
                made.add_evaluations(entry.outcome)
        if not self.is_end and self.plan.tests_everyone_after(self.index + 1):
            found, log = self.evaluations(self.index + 1)
            made.evaluations.extend(found)
            made.log = replace(log, failures={**made.log.failures, **log.failures})
        return made

    def evaluations(self, completed: int) -> tuple[list[Evaluation], EvaluationLog]:
        """What was evaluated after so many rounds, on messages that were fetched for that."""
        found: list[Evaluation] = []
        log = EvaluationLog()
        for client in tested_clients(self.plan, self.cards):
            entry = self.reported[client].evaluations.get(completed) if client in self.reported else None
            if entry is not None:
                found.extend(entry.outcome.evaluations)
                _add(log, client, entry)
            elif select(self.plan.points, "round"):
                log.failures[client] = self._why(client)
        return found, log

    def _why(self, client: int) -> str:
        return ENDED if client in self.reported else MISSING

    def _turns(self) -> list[Turn]:
        """The turns of a round: a message is charged to who sent it and to who received it, by who received it."""
        entries = self.entries
        traffic: dict[int, Traffic] = defaultdict(Traffic)
        for entry in entries.values():
            for client, sent in entry.traffic.items():
                traffic[client] += sent
        trained = {client for client, entry in entries.items() if entry.trained}
        trains = () if self.is_end else participation(self.plan, self.cards, self.index).trains
        found = []
        for client in sorted({*trains, *trained}):
            sent = traffic.pop(client, Traffic())
            if client in entries:
                own = entries[client]
                was_heard, failure = not own.dropped and not self.is_end, own.outcome.failure
                turn = Turn(client, own.outcome.tally, sent, was_heard, own.dropped, not failure, failure or own.note)
                found.append(turn)
            else:
                found.append(Turn(client, Tally(), sent, False, True, trained=False, failure=self._why(client)))
        found += (Turn(client, Tally(), sent, False, False, trained=False) for client, sent in sorted(traffic.items()))
        return found

    def lost(self) -> dict[int, str]:
        """Who was not heard, why, and by whom."""
        reasons: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for receiver, one in sorted(self.reported.items()):
            # What was fetched for a round was also evaluated before it.
            fetched = (one.end if self.is_end else one.turns.get(self.index), one.evaluations.get(self.index))
            for peer, why in {peer: why for entry in fetched if entry for peer, why in entry.lost.items()}.items():
                reasons[peer][why].append(receiver)
        return {
            peer: "; ".join(f"{why} (not heard by {', '.join(map(str, by))})" for why, by in found.items())
            for peer, found in reasons.items()
        }


def _add(log: EvaluationLog, client: int, entry: Entry) -> None:
    log.jobs += entry.jobs
    log.down += entry.down
    log.note(replace(entry.outcome, client=client))


def _read_journals(folders: Sequence[Path], partial: bool) -> tuple[Terms, dict[int, _Told]]:
    reported: dict[int, _Told] = {}
    terms: Terms | None = None
    for folder in folders:
        opening, entries = Journal(folder).read()
        if opening is None:
            raise SparsonaError(
                f"'{folder}' has no journal",
                expected="the folder of a peer, with its journal.jsonl and federation.toml",
                hint="copy them from `sparsona peer --vault`",
            )
        terms = terms or Terms.read(folder / FEDERATION_FILE)
        if opening.run != terms.run or opening.client >= terms.num_clients:
            raise SparsonaError(
                f"'{folder}' is of another run than '{folders[0]}'",
                expected=f"journals of the run {terms.run}",
                hint="gather the peers of one federation file",
            )
        if opening.client in reported:
            name = terms.file.clients[opening.client].name
            raise SparsonaError(f"'{folder}' is a second journal of {name}", expected="one of each peer")
        reported[opening.client] = _Told.of(opening, entries)
    if terms is None:
        raise SparsonaError("no folders of peers", expected="sparsona gather RUN PEER...", hint="peers/*")
    missing = [one.name for one in terms.file.clients if one.index not in reported]
    if missing and not partial:
        raise SparsonaError(
            f"the journal{'s' * (len(missing) > 1)} of {', '.join(missing[:8])}"
            + (f" and {len(missing) - 8} others" * (len(missing) > 8))
            + f" {'are' if len(missing) > 1 else 'is'} missing",
            expected=f"those of all {terms.num_clients}",
            hint="--partial makes a run without them",
        )
    return terms, reported


def _guest(opening: Opening) -> Guest:
    greeting = opening.greeting
    counts = greeting.label_counts
    reported = None if counts is None else tuple(FEW if count is None else count for count in counts)
    return Guest(greeting.sizes, greeting.data, reported, read_environment(greeting.environment), greeting.class_names)
