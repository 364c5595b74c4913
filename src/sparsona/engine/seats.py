"""Jobs of several clients, taken together by executors that run more than one client at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sparsona.core.errors import MaskMismatchError
from sparsona.core.method import Phase, Probe, Round, State, Update, Work
from sparsona.data.batches import Examples
from sparsona.engine.evaluate import Evaluation, evaluate
from sparsona.engine.jobs import Job, Outcome, Setting, opened, settle
from sparsona.engine.turn import ClientProbe, Tally


@dataclass
class Seat:
    """One client among several: its job, and what came of it so far."""

    job: Job
    round: Round
    state: State
    inbox: tuple[Update, ...]
    train: Examples
    probe: Probe
    tally: Tally
    work: Work


def take_seat(setting: Setting, job: Job) -> Seat:
    """A client with what it received; a mask it lacks is sent along."""
    round_ = job.round.on(setting.clients[job.client])
    state = setting.fresh_state(job.client) if job.state is None else job.state
    train, validation = (setting.federation.examples(job.client, part) for part in ("train", "validation"))
    tally = Tally()
    probe = ClientProbe(setting.task, train, validation, round_, tally)
    inbox = tuple(opened(message) for message in job.messages)
    try:
        work = setting.method.receive(state, inbox, probe, round_)
    except MaskMismatchError:
        again = settle(job, Outcome(job.client, lacks_mask=True))
        assert again is not None
        return take_seat(setting, replace(again, resend=None))
    return Seat(job, round_, state, inbox, train, probe, tally, work)


def finish_seats(
    setting: Setting,
    seats: Sequence[Seat],
    train: Callable[[Phase, Sequence[Seat]], None],
    test: Callable[[Sequence[Seat], str], list[Evaluation]],
) -> list[Outcome]:
    """Do the jobs, which are all of one kind: `train` runs a phase for all, `test` evaluates all at a point."""
    method, do = setting.method, seats[0].job.do
    if do == "tune":
        assert method.tune is not None
        train(replace(method.tune, epochs=setting.plan.tune_epochs), seats)
    elif do == "train":
        for phase in method.phases:
            if phase.when(seats[0].job.round):
                train(phase, seats)
    found: list[list[Evaluation]] = [[] for _ in seats]
    for point in dict.fromkeys(point for seat in seats for point in seat.job.points if point != "global"):
        asked = [place for place, seat in enumerate(seats) if point in seat.job.points]
        for place, result in zip(asked, test([seats[place] for place in asked], point), strict=True):
            found[place].append(result)
    outcomes = []
    for seat, evaluations in zip(seats, found, strict=True):
        if seat.job.global_model is not None:
            evaluations.append(_test_global(setting, seat))
        done = Outcome(seat.job.client, tally=seat.tally, evaluations=tuple(evaluations))
        if do == "tune":
            done = replace(done, work=seat.work)
        elif do == "train":
            state, update = method.finish(seat.state, seat.work, seat.inbox, seat.probe, seat.round)
            done = replace(done, state=state, message=update)
        outcomes.append(done)
    return outcomes


def _test_global(setting: Setting, seat: Seat) -> Evaluation:
    model, buffers = seat.job.global_model, getattr(seat.state, "buffers", setting.buffers)
    assert model is not None
    test = setting.federation.examples(seat.job.client, "test")
    task = setting.task
    return evaluate(seat.job.client, "global", lambda x: task.forward(model, buffers, x, False)[0], task, test)
