"""Several models as one: a mixture of what they predict, weighted by numbers that add up to one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mix_predictions(outputs: Sequence[Tensor], weights: Tensor, targets: str) -> Tensor:
    """The prediction of a mixture, in the form of a model's outputs.

    Args:
        outputs: what each model returns for the same inputs.
        weights: one for each model, together 1.
        targets: what is predicted, as Task.targets: "classes", "numbers" and so on.

    Returns:
        The logarithm of the weighted mean of the models' probabilities; where a logit is that of a yes, the logit of
        that mean; of a regression the weighted mean itself.

    Example:
        >>> sure, unsure = torch.tensor([[0.0, -100.0]]), torch.tensor([[0.0, 0.0]])
        >>> mix_predictions([sure, unsure], torch.tensor([0.5, 0.5]), "classes").exp().tolist()
        [[0.75, 0.25]]
    """
    if targets == "numbers":
        return (torch.stack(tuple(outputs), dim=-1) * weights).sum(-1)
    if targets in ("binary", "labels"):
        yes, no = (
            (torch.stack([F.logsigmoid(sign * found) for found in outputs], dim=-1) + weights.log()).logsumexp(-1)
            for sign in (1, -1)
        )
        return yes - no
    logs = torch.stack([found.log_softmax(-1) for found in outputs], dim=-1)
    return (logs + weights.log()).logsumexp(-1)


class Mixture(nn.Module):
    """A module that predicts as a mixture of others does.

    Args:
        modules: the models.
        weights: one for each, together 1.
        targets: what is predicted, as Task.targets.

    Example:
        >>> one = nn.Linear(2, 3)
        >>> Mixture([one, one], torch.tensor([0.5, 0.5]), "numbers")(torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """

    weights: Tensor

    def __init__(self, modules: Sequence[nn.Module], weights: Tensor, targets: str) -> None:
        super().__init__()
        self.components, self.targets = nn.ModuleList(modules), targets
        self.register_buffer("weights", weights.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """The prediction for a batch of inputs."""
        return mix_predictions([model(inputs) for model in self.components], self.weights, self.targets)
