"""Tries whether a phase's loss leaves out the examples of weight 0 with which batches are filled up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Phase, Tick, Work
from sparsona.core.printable import warn
from sparsona.core.round import Batch
from sparsona.core.tree import leaves, map_leaves
from sparsona.data.batches import in_order
from sparsona.engine.context import ClientContext
from sparsona.engine.turn import OpenTurn, take_step
from sparsona.gpu.lanes import must_be_alone

EXAMPLES = 32  # of one client, that are tried: half of them as examples, the others as padding
NOISES = (0.0, 0.3, 1.0)  # relative to the entries that are trained: a loss may count some examples only
SAME = 1e-3  # relative difference; what is added for an example of weight 0 is zero, so that rounding has no part in it


class PaddingCheck:
    """Tries each phase of a method from outside this package, before its first step; the run is the same as without.

    A plain mean over a batch counts padding. Nothing would show it but slightly worse models than `serial` gives.
    Losses of this package are tried in its tests and not in every run: on a GPU such steps would delay the first round.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._tried: set[Hashable] = set()

    def __call__(self, phase: Phase, turn: OpenTurn) -> None:
        """Raise SparsonaError if the loss of a phase counts examples of weight 0; warn if the run is resumed.

        Final tuning is tried with the first phase: its error would otherwise come when all rounds were played.

        Args:
            phase: one that is about to run.
            turn: a client's, before it enters that phase.
        """
        self._check(phase, turn)
        plan, tune = self._context.plan, self._context.method.tune
        if tune is not None and any(plan.tuning_epochs(is_novel) for is_novel in (False, plan.num_novel > 0)):
            self._check(tune, turn)

    def _check(self, phase: Phase, turn: OpenTurn) -> None:
        what = (phase.loss, phase.trains, phase.batches_per_step)
        size = min(EXAMPLES, turn.train.num_examples, self._context.largest_batch)
        if _is_ours(phase) or must_be_alone(phase, self._context) or what in self._tried or size < 2:
            return
        work, whole = turn.work, next(in_order(turn.train, size))
        try:
            if phase.enter is not None:
                work = phase.enter(work, turn.probe.uncharged(), turn.round)
            is_counted = any(_counts_padding(phase, _with_noise(phase, work, noise), whole) for noise in NOISES)
        except Exception:  # on few examples, or before its round; if it is wrong, the training that follows says how
            return
        self._tried.add(what)
        if not is_counted:
            return
        wrong = (
            f"the loss of {self._context.method.name or 'a method'}'s phase '{phase.name}' counts the examples of "
            "weight 0 that fill up batches"
        )
        if self._context.plan.is_resumed:  # perhaps from a version that did not try: it ends as it began
            warn(f"{wrong}: results are not those of executor='serial'")
            return
        raise SparsonaError(
            wrong,
            expected="a mean weighted by batch.weight: task.mean_loss(outputs, batch), or (losses * "
            "batch.weight).sum() / batch.weight.sum() in place of losses.mean()",
            hint="mixes_examples=True in the Phase if its loss cannot do without whole batches; "
            "executor='serial' pads none",
        )


def _is_ours(phase: Phase) -> bool:
    return (getattr(phase.loss, "__module__", None) or "").startswith("sparsona.")


def _with_noise(phase: Phase, work: Work, noise: float) -> Work:
    """The same with noise on what is trained."""
    draw = torch.Generator().manual_seed(0)

    def moved(_path: str, value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=draw).to(value)
        return value + noise * value.square().mean().sqrt() * drawn

    return replace(work, **{name: map_leaves(moved, getattr(work, name)) for name in phase.trains}) if noise else work


def _counts_padding(phase: Phase, work: Work, whole: Batch) -> bool:
    size = len(whole.targets)
    half = size // 2
    others, again = [*range(size)], [place % half for place in range(size)]
    alone = _try(phase, work, _padded(whole, others[:half], half))
    filled, otherwise = (_try(phase, work, _padded(whole, places, half)) for places in (others, again))
    # Not `alone` against `filled`: a gate whose scores tie may choose otherwise by rounding alone.
    by_content = any(_distance(one, other) > SAME for one, other in zip(filled, otherwise, strict=True))
    by_number = _distance(filled[1] * size, alone[1] * half) < SAME and bool(alone[1].any())
    return by_content or by_number


def _padded(batch: Batch, places: Sequence[int], count: int) -> Batch:
    """The examples at these places of a batch, of which all but the first `count` are padding."""
    at = torch.tensor(places, device=batch.targets.device)
    weight = (torch.arange(len(places), device=at.device) < count).to(batch.weight.dtype)
    inputs, targets, index = (one.index_select(0, at) for one in (batch.inputs, batch.targets, batch.index))
    return replace(batch, inputs=inputs, targets=targets, index=index, weight=weight)


def _try(phase: Phase, work: Work, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss on a batch, and its gradient end to end."""
    device = batch.targets.device
    tick = Tick(torch.ones((), device=device), torch.zeros((), dtype=torch.int64, device=device))
    batches: Any = batch if phase.batches_per_step == 1 else (batch,) * phase.batches_per_step
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        grads, loss = take_step(replace(phase, update=lambda _work, grads, _tick: grads), work, batches, tick)
    flat = torch.cat([tensor.reshape(-1) for _, tensor in leaves(grads)])
    return loss.double().reshape(1), flat.double()


def _distance(one: Tensor, other: Tensor) -> float:
    """The difference of two vectors relative to the longer one; NaN if one of them is not finite, or both are zero."""
    return float((one - other).norm() / torch.maximum(one.norm(), other.norm()))
