"""Several GPUs of one machine: a process for each, which runs a share of the turns as a single GPU would."""

from __future__ import annotations

import os
import selectors
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import cloudpickle
import torch

from sparsona.core.errors import SparsonaError
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Job, Outcome, Report
from sparsona.engine.profiler import WAIT
from sparsona.engine.tempdirs import claim, make_folder
from sparsona.executors.backlog import PackedJob
from sparsona.executors.worker import is_importable, pack
from sparsona.executors.workers import PREFIX, Worker, end_workers

MOST_TOGETHER = 64  # jobs in a group: their states and models travel together


class Devices:
    """The executor for several devices: another one on each of them.

    Args:
        name: the executor that each device has.
        context: the side of clients, with `devices`. Its own device is the first: there the server is.
        report: is called with what the start-up is doing.
    """

    encodes = False

    def __init__(self, name: str, context: ClientContext, report: Report = lambda text: None) -> None:
        self._clock, self._report, self._names = context.clock, report, context.devices
        report(f"starting a process on each of {', '.join(context.devices)}")
        plan = context.plan
        trained = len(context.clients) if plan.everyone_trains else plan.per_round
        self._size = max(1, min(MOST_TOGETHER, -(-trained // len(context.devices))))
        self._by_value = not is_importable(context.make_method)
        self._workers: list[Worker] = []
        self._folder: Path = make_folder(PREFIX)
        try:
            claim(self._folder)
            context.federation.to(torch.device("cpu")).save(self._folder)
            fields = {
                name: getattr(context, name)
                for name in ("task", "make_method", "plan", "capacities", "device", "precision")
            }
            recipe = cloudpickle.dumps((fields, str(self._folder), name))
            for device in context.devices:
                self._workers.append(Worker(recipe, self._clock, self._by_value, _environment(device)))
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        waiting, ready = iter(jobs), dict[int, list[Outcome]]()
        taken = given = 0
        while True:
            for worker in self._workers:
                if worker.job is not None or worker.opening or taken - given >= 2 * len(self._workers):
                    continue
                # What stays with the sender is for jobs that may lack a mask: here the masks are in the messages.
                if group := [replace(job, resend=None) for job in islice(waiting, self._size)]:
                    try:
                        worker.send(PackedJob(taken, group[0], pack(("jobs", group), self._by_value), False))
                    except OSError:
                        raise self._ended(worker) from None
                    taken += 1
            # Yielded after groups were sent: GPUs do not wait while the caller uses outcomes.
            while given in ready:
                yield from ready.pop(given)
                given += 1
            if given == taken and not any(worker.opening for worker in self._workers):
                return
            self._receive(ready)

    def _receive(self, ready: dict[int, list[Outcome]]) -> None:
        """Wait for a process, and keep what it answers."""
        with selectors.DefaultSelector() as selector:
            for place, worker in enumerate(self._workers):
                if worker.job is not None or worker.opening:
                    selector.register(worker.stdout, selectors.EVENT_READ, place)
            with self._clock.measure(WAIT):
                places = [key.data for key, _ in selector.select()]
        for place in places:
            worker = self._workers[place]
            try:
                answer = worker.receive()
            except EOFError:
                raise self._ended(worker) from None
            if worker.opening:
                worker.opening = False
                if not any(other.opening for other in self._workers):
                    self._report("")
            else:
                assert worker.job is not None
                ready[worker.job[0]], worker.job = answer, None

    def _ended(self, worker: Worker) -> SparsonaError:
        name = self._names[self._workers.index(worker)]
        return SparsonaError(
            f"the process on {name} ended (exit code {worker.process.wait()})",
            expected="a GPU with enough free memory",
            hint="resume the run; --device cuda uses one GPU alone",
        )

    def close(self) -> None:
        end_workers(self._workers)
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _environment(device: str) -> Mapping[str, str]:
    """The variables with which a process sees one GPU, whose number there is 0; none for a CPU."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return {}
    seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    return {"CUDA_VISIBLE_DEVICES": seen[int(number)] if seen else number}
