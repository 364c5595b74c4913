"""One client after another in this process, on one thread. The reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from sparsona.core.errors import MaskMismatchError
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Job, Outcome
from sparsona.engine.turn import perform


class Serial:
    """The reference executor, which every other one must agree with."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self.encodes = context.encodes

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        for job in jobs:
            # Sums are split among threads, so their number changes the last bits. The caller's setting is restored.
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                outcome = perform(self._context, job)
            finally:
                torch.set_num_threads(threads)
            yield outcome

    def close(self) -> None:
        pass


def take_turn(context: ClientContext, job: Job) -> Outcome:
    """Run a job that came from another process. If the client lacks a mask, the sender sends the job again."""
    try:
        return perform(context, job)
    except MaskMismatchError:
        return Outcome(job.client, lacks_mask=True)
