"""How a model is split into a shared and a personal part, and the additive model: a second, small personal one.

A part is named by its role (`input`, `output`, `norm`, `adapter`, `split`), by patterns of parameter names
(`layer4.*`), or is `additive`: a personal model whose predictions are mixed with those of the shared one. `all-norms`
are also the norms that no role has (those of a ResNet's shortcuts), `adapter+norms` are the two roles together, and
`last:2` are the last two layers. `!` before a name means all of the model except that part (`!output`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from sparsona.core import tree
from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.method import Grads, PartSize, Phase, Work
from sparsona.core.round import Tick
from sparsona.core.seeds import generator
from sparsona.core.spec import as_count
from sparsona.core.tree import Tree
from sparsona.learning.optimizer import FLAG, Positive, clip_share, make_optimizer
from sparsona.learning.phases import Training, training_phase
from sparsona.learning.server_optimizer import ServerStep

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task

ROLES = ("input", "output", "norm", "adapter", "split")
ADDITIVE = "additive"
ALL_NORMS, LAST = "all-norms", "last:"
WITH_THEIR_NORMS = "adapter+norms"
NAMES = (*ROLES, WITH_THEIR_NORMS, ADDITIVE, ALL_NORMS, f"{LAST}N")
WITH_NORMS = "a model with norms: --model digits-cnn:norm=group, cnn28:norm=group, resnet18, or vgg11 (from 32x32 on)"
WITH_ADAPTERS = "--model resnet18:adapters=true (also digits-cnn, cnn28, pfedgate-cifar10), or transformer:adapters=16"
WITH_SPLIT = "--model digits-cnn:split=true, cnn28:split=true, or resnet18:split=true"


def split_names(value: Any) -> Any:
    """The same tuple for 'input,norm' and ['input', 'norm']."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return value
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


PartNames = Annotated[tuple[str, ...], BeforeValidator(split_names)]


class PartialConfig(ServerStep):
    """Options of a method that keeps a part of the model on the client."""

    personal: PartNames = Field(
        ("output",),
        description="input, output, norm, adapter, adapter+norms, split, additive, all-norms, last:N (layers), or "
        "patterns of names; !output: all but output",
        json_schema_extra=FLAG,
    )
    personal_lr: Positive | None = Field(None, description="learning rate of the personal part; none: lr")
    personal_epochs: int | None = Field(
        None,
        ge=1,
        description="passes that train the personal part where it has its own, besides epochs; none: as many as epochs",
    )
    max_personal_steps: int | None = Field(None, ge=1, description="most steps of the personal part in a round")
    start_pull: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of the squared distance of the personal part to how it began, without a half",
    )
    additive_hidden: int = Field(0, ge=0, description="width of the additive model's hidden layer; 0: it is linear")

    @model_validator(mode="before")
    @classmethod
    def _read_former_name(cls, values: Any) -> Any:
        """The configs of runs that were made while `start_pull` was called `pull`."""
        if not isinstance(values, dict) or "pull" not in values:
            return values
        return {("start_pull" if key == "pull" else key): value for key, value in values.items()}


@dataclass(frozen=True)
class ModelSplit:
    """The layouts of a model's two parts. The personal one has some of the model's tensors (`own`), followed by those
    of the additive model if there is one."""

    whole: Layout
    shared: Layout
    own: Layout
    additive: Layout

    def join(self, shared: Tree, personal: Tree) -> Tree:
        """The parameters of the model itself, from both parts."""
        return tree.join(self.whole, shared, personal)

    @cached_property
    def personal(self) -> Layout:
        return Layout(self.own.slots + self.additive.slots)

    @cached_property
    def all_slots(self) -> Layout:
        """Both parts, one after the other."""
        return Layout(self.shared.slots + self.personal.slots)

    def begin(self, params: Tree, seed: int) -> Tree:
        """The personal part of these parameters, with a newly drawn additive model."""
        return tree.join(self.personal, params, _first_additive(self.additive, seed, params))


def split_model(task: Task, personal: tuple[str, ...], hidden: int) -> ModelSplit:
    """The parts of a task's model, or of its outline.

    Args:
        task: a Task or an Outline.
        personal: the names of the personal parts.
        hidden: the width of the additive model's hidden layer; 0: it is linear.

    Returns:
        The split.

    Raises:
        SparsonaError: a part does not exist, or nothing would be personal or shared.

    Example:
        >>> from torch import nn
        >>> from sparsona.core.task import Task
        >>> task = Task(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), (4,), 3)
        >>> split_model(task, ("output",), hidden=0).shared.names
        ('0.weight', '0.bias')
    """
    names = {name for part in personal if part != ADDITIVE for name in _names(task, part)}
    if not names and ADDITIVE not in personal:
        which = f" ({', '.join(personal)})" if personal else ""
        raise SparsonaError(
            f"no part of the model is personal{which}",
            expected=f"one or more of {', '.join(NAMES)}, or patterns of parameter names",
            hint="for example --personal output; with nothing personal, this is fedavg",
        )
    layout = task.layout
    shared = layout.select(name for name in layout.names if name not in names)
    if not shared.slots:
        raise SparsonaError(
            f"all of the model is personal ({', '.join(personal)}): nothing would be sent",
            expected="a part that the clients share",
            hint="leave some of --personal out; with everything personal, this is local",
        )
    additive = _additive_layout(task, hidden) if ADDITIVE in personal else Layout(())
    return ModelSplit(layout, shared, layout.select(names), additive)


def _names(task: Task, part: str) -> Iterable[str]:
    """The parameters that one name refers to."""
    roles, layout = task.roles, task.layout
    if part.startswith("!"):
        others = set(_names(task, part[1:]))
        return [name for name in layout.names if name not in others]
    if part.startswith(LAST):
        return _last_layers(layout, part)
    if part == ALL_NORMS:
        found = _all_norms(task)
        if not found:
            raise _missing(task, "norm")
        return found
    if part == WITH_THEIR_NORMS:
        return [*_names(task, "adapter"), *roles.norm]
    if part not in ROLES:
        if found := [name for name in layout.names if fnmatchcase(name, part)]:
            return found
        if any(fnmatchcase(name, part) for name in task.frozen):
            raise _is_frozen(f"'{part}'")
        raise SparsonaError(
            f"no parameter is called '{part}'",
            expected=f"one of {', '.join(NAMES)}, or a pattern of {', '.join(layout.names)}",
            hint="'*' matches anything: 'layer4.*'",
        )
    found = list(getattr(roles, part))
    if not found:
        raise _missing(task, part)
    return found


def _is_frozen(what: str) -> SparsonaError:
    return SparsonaError(
        f"{what} is frozen in this model",
        expected="a personal part that is trained",
        hint="call requires_grad_(True) on it, or name another part",
    )


def _missing(task: Task, part: str) -> SparsonaError:
    if task.frozen and part in ("input", "output", "norm"):
        return _is_frozen(f"'{part}', if there is one,")
    have = [role for role in ROLES if getattr(task.roles, role)]
    known = {"adapter": WITH_ADAPTERS, "split": WITH_SPLIT, "norm": WITH_NORMS}
    return SparsonaError(
        f"this model has no {part} parameters",
        expected=f"a model that has them, or a part that this one has: {', '.join(have) or 'patterns of names'}",
        hint=known.get(part, "for example --personal output"),
    )


def _owners(layout: Layout) -> dict[str, list[Slot]]:
    """The parameters of each layer, in the layout's order."""
    found: dict[str, list[Slot]] = {}
    for slot in layout.slots:
        found.setdefault(slot.name.rpartition(".")[0], []).append(slot)
    return found


def _all_norms(task: Task) -> list[str]:
    """Those that the roles name, and every other layer that is a scale and a shift."""
    names = set(task.roles.norm)
    for slots in _owners(task.layout).values():
        if _is_scale_and_shift(slots):
            names.update(slot.name for slot in slots)
    return [name for name in task.layout.names if name in names]


def _is_scale_and_shift(slots: list[Slot]) -> bool:
    """Whether a layer's parameters are a weight and a bias of one shape."""
    kinds = {slot.name.rpartition(".")[2] for slot in slots}
    return kinds == {"weight", "bias"} and slots[0].shape == slots[1].shape


def _last_layers(layout: Layout, part: str) -> list[str]:
    """The last N layers that have a weight matrix, with the norms after each of them."""
    count = as_count(part.removeprefix(LAST))
    owners = _owners(layout)
    layers = [
        owner
        for owner, slots in owners.items()
        if any(len(slot.shape) > 1 for slot in slots) and not _is_scale_and_shift(slots)
    ]
    if count is None or count > len(layers):
        raise SparsonaError(
            f"'{part}' of a model with {len(layers)} layers",
            expected=f"a number of layers from 1 to {len(layers)}",
            hint="for example --personal last:1, or !last:2: all but the last two",
        )
    order = list(owners)
    first = order.index(layers[-count])
    return [slot.name for owner in order[first:] for slot in owners[owner]]


def _additive_layout(task: Task, hidden: int) -> Layout:
    """A linear model of the flattened input, or one with a hidden layer, and the weight of its mixture."""
    if task.takes_tokens:
        raise SparsonaError(
            "an additive model of tokens",
            expected="numeric inputs: a linear layer cannot read token ids",
            hint="--personal adapter, or output",
        )
    inputs, slots = math.prod(task.input_shape), []
    if hidden:
        slots += [Slot("additive/hidden.weight", (hidden, inputs), 2), Slot("additive/hidden.bias", (hidden,), 1)]
    outputs = task.num_classes
    slots += [Slot("additive/weight", (outputs, hidden or inputs), 2), Slot("additive/bias", (outputs,), 1)]
    return Layout(tuple(slots if adds(task) else [*slots, Slot("additive/theta", ())]))


def adds(task: Task) -> bool:
    """Whether the outputs of the two models are added (regression), not mixed as probabilities."""
    return task.is_regression


def _first_additive(layout: Layout, seed: int, like: Tree) -> Tree:
    """A hidden layer drawn as torch does, the rest zero: uniform predictions, and an even mixture."""
    import torch

    flat, random = torch.zeros(layout.size), generator(seed)
    found = Tree(layout, flat)
    for name in ("additive/hidden.weight", "additive/hidden.bias"):
        if name in layout.place:
            bound = found["additive/hidden.weight"].shape[1] ** -0.5
            found[name].uniform_(-bound, bound, generator=random)
    return Tree(layout, flat.to(like.device))


def mix_outputs(task: Task, outputs: Tensor, personal: Tree, inputs: Tensor) -> Tensor:
    """The outputs of the shared and the additive model together: their sum in a regression, otherwise the logarithm of
    theta * softmax(shared) + (1 - theta) * softmax(personal), where theta is the sigmoid of a learned number. Where a
    logit is that of a yes, it is that of the mixture of both probabilities."""
    x = inputs.flatten(1)
    if "additive/hidden.weight" in personal.layout.place:
        x = (x @ personal["additive/hidden.weight"].T + personal["additive/hidden.bias"]).relu()
    own = x @ personal["additive/weight"].T + personal["additive/bias"]
    if adds(task):
        return outputs + own
    theta = personal["additive/theta"]
    zero = theta.new_zeros(())
    log_theta, log_rest = -zero.logaddexp(-theta), -zero.logaddexp(theta)
    if task.targets in ("binary", "labels"):
        import torch.nn.functional as F

        yes, no = (
            (F.logsigmoid(sign * outputs) + log_theta).logaddexp(F.logsigmoid(sign * own) + log_rest)
            for sign in (1, -1)
        )
        return yes - no
    return (outputs.log_softmax(-1) + log_theta).logaddexp(own.log_softmax(-1) + log_rest)


def whole(name: str, layout: Layout) -> tuple[PartSize, ...]:
    """The size of a part that covers all of a layout."""
    return (PartSize(name, layout, layout.size),)


def part_phase(task: Task, config: Training, personal: tuple[str, ...]) -> Phase:
    """A phase that trains a part of `work.params` and leaves the rest unchanged."""
    if ADDITIVE in personal:
        raise SparsonaError(
            "an additive model that is only tuned: it is not trained in the rounds",
            expected="parts of the model itself",
            hint="use fedalt or fedsim",
        )
    parts, optimizer = split_model(task, personal, 0), make_optimizer(config)
    own, rest = parts.own.names, parts.shared.names

    def update(work: Work, grads: Grads, tick: Tick) -> Work:
        share = clip_share(config.clip_norm, grads["params"].select(own))  # by the norm of the trained part
        new, memory = optimizer.step(work.params, grads["params"], work.memory, tick, share=share)
        params = parts.join(work.params.select(rest), new.select(own))  # elsewhere the step is not taken
        return replace(work, params=params, memory=memory)

    return replace(training_phase(task, config), name="personal", update=update)
