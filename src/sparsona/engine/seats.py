"""Jobs of several clients, taken together by executors that run more than one client at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from sparsona.core.errors import MaskMismatchError
from sparsona.core.method import Phase, Probe, Round, State, Update, Work
from sparsona.data.batches import Examples
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.jobs import Job, Outcome, Setting, at_points, look_further, opened, settle
from sparsona.engine.stacking import own_memory
from sparsona.engine.turn import ClientProbe, Tally, run_phase


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
    inbox = tuple(opened(message, setting.clock) for message in job.messages)
    try:
        with setting.clock.measure("evaluate" if job.do == "evaluate" else "receive"):
            work = setting.method.receive(state, inbox, probe, round_)
    except MaskMismatchError:
        again = settle(job, Outcome(job.client, lacks_mask=True))
        assert again is not None
        return take_seat(setting, replace(again, resend=None))
    return Seat(job, round_, state, inbox, train, probe, tally, work)


def phases_of(setting: Setting, job: Job) -> Sequence[Phase]:
    """What is trained in a job."""
    method = setting.method
    if job.do == "tune":
        assert method.tune is not None
        return (replace(method.tune, epochs=job.epochs),)
    round_ = job.round.on(setting.clients[job.client])
    return tuple(phase for phase in method.phases if job.do == "train" and phase.when(round_))


def must_be_alone(phase: Phase, setting: Setting) -> bool:
    """Whether a phase can be neither stacked nor captured, where batches are filled up and nothing new is drawn."""
    task = setting.task
    return phase.mixes_examples or not phase.traceable or task.draws_noise or task.moves_buffers


def can_be_traced(setting: Setting) -> bool:
    """Whether `predict` can be captured or run for several clients at once: it keeps the rules of the phases."""
    return all(phase.traceable for phase in setting.method.phases) and not setting.method.transductive


def train_alone(phase: Phase, seat: Seat, setting: Setting) -> None:
    """As `serial` does it."""
    with training(phase, [seat], setting):
        seat.work = run_phase(phase, seat.work, setting.task, seat.train, seat.probe, seat.round, seat.tally)


def training(phase: Phase, seats: Sequence[Seat], setting: Setting) -> AbstractContextManager[None]:
    """A block that is measured as training these clients."""
    name = "tune" if seats[0].job.do == "tune" else phase.name
    return setting.clock.training(name, [seat.tally for seat in seats])


def finish_seat(setting: Setting, seat: Seat, tested: Evaluation | None) -> Outcome:
    """End a client's turn; `tested` is what its own model did, if it was asked."""
    found = () if tested is None else at_points(seat.job, tested)
    found += look_further(setting, seat.job, seat.state, seat.work)
    done = Outcome(seat.job.client, tally=seat.tally, evaluations=found)
    if seat.job.do == "tune":
        return replace(done, work=own_memory(seat.work))
    if seat.job.do == "train":
        with setting.clock.measure("finish"):
            # A peer's message is kept as long as its state: both in memory of their own, and the same.
            work = seat.work if setting.method.peer is None else own_memory(seat.work)
            state, update = setting.method.finish(seat.state, work, seat.inbox, seat.probe, seat.round)
        return replace(done, state=own_memory(state), message=update)
    return done
