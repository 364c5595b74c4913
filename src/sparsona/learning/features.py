"""The features of a network: what enters its output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsona.core.errors import SparsonaError

if TYPE_CHECKING:
    from sparsona.core.task import Task


def output_layer(task: Task) -> tuple[str, int]:
    """The linear layer that makes the outputs of a network out of its features.

    Args:
        task: a Task or an Outline that predicts classes.

    Returns:
        The layer's name, for `Task.forward_with_features`, and the number of features.

    Raises:
        SparsonaError: examples have no class, or the outputs are not made by one linear layer.

    Example:
        >>> from torch import nn
        >>> from sparsona.core.task import Task
        >>> output_layer(Task(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), (4,), 3))
        ('2', 5)
    """
    if task.takes_tokens or task.targets != "classes":
        raise SparsonaError(
            "features of each class where examples are "
            + ("texts" if task.takes_tokens else "of no class, or told apart by one logit"),
            expected="data whose examples each belong to one class",
        )
    weights = [slot for slot in task.layout.slots if slot.name in task.roles.output and len(slot.shape) > 1]
    if len(weights) != 1 or len(weights[0].shape) != 2 or weights[0].shape[0] != task.num_classes:
        shapes = ", ".join(f"{slot.name} {list(slot.shape)}" for slot in weights)
        raise SparsonaError(
            f"the output layer of this model has the weights {shapes or 'of no layer'}",
            expected=f"one linear layer with {task.num_classes} outputs, whose inputs are the features",
            hint="name its parameters in an attribute `roles` of the module: sparsona.core.outline.Roles(output=...)",
        )
    return weights[0].name.rpartition(".")[0], weights[0].shape[1]
