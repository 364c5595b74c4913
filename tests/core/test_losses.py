"""Losses and scores, against torch's own and by hand."""

import pytest
import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.losses import (
    argmax_score,
    check_losses,
    cross_entropy,
    make_losses,
    token_cross_entropy,
    token_score,
)
from sparsona.core.round import Batch
from sparsona.core.tokens import END, NUM_SPECIAL, PAD, UNKNOWN


def batch_of(targets, weight):
    targets = torch.tensor(targets)
    return Batch(targets, targets, torch.tensor(weight), torch.arange(len(targets)), torch.tensor(0))


def test_padding_counts_for_nothing_and_special_tokens_only_for_training():
    targets = [[4, 5, END, PAD], [UNKNOWN, 6, PAD, PAD], [4, 4, 4, 4]]
    batch = batch_of(targets, [1.0, 1.0, 0.0])
    outputs = torch.zeros(3, 4, 7)
    outputs[0, 0, 4] = outputs[0, 2, END] = outputs[1, 1, 6] = 9.0  # right; the 5 is missed
    outputs[0, 1, 4] = 9.0
    losses, weight = token_cross_entropy(outputs, batch)
    assert weight.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    by_hand = -torch.log_softmax(outputs, dim=-1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(losses, by_hand)
    right, count = token_score(outputs, batch)
    assert (int(right), int(count)) == (2, 3)  # the end and the unknown word are not asked
    assert NUM_SPECIAL == 4


def plain_batch(outputs, targets):
    num = len(targets)
    return Batch(outputs, targets, torch.ones(num), torch.arange(num), torch.tensor(0))


@pytest.fixture
def drawn():
    random = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, generator=random), random


def test_classes_are_weighted_and_smoothed_as_in_torch(drawn):
    outputs, _ = drawn
    targets, weights = torch.tensor([0, 1, 2, 2, 1, 0]), [0.5, 1.0, 4.0]
    batch = plain_batch(outputs, targets)
    losses, score = make_losses("classes", class_weights=weights, label_smoothing=0.2)
    own = torch.nn.CrossEntropyLoss(torch.tensor(weights), reduction="none", label_smoothing=0.2)
    torch.testing.assert_close(losses(outputs, batch)[0], own(outputs, targets))
    assert losses(outputs, batch)[1] is batch.weight
    assert score is argmax_score
    assert make_losses("classes") == (cross_entropy, argmax_score)  # the functions that runs without options have
    tokens = make_losses("tokens", label_smoothing=0.2)[0]
    sequences = plain_batch(outputs[None], torch.tensor([[PAD, 1, 2, 2, 1, 0]]))
    found, weight = tokens(outputs[None], sequences)
    assert weight.tolist() == [[0, 1, 1, 1, 1, 0]]
    smooth = torch.nn.functional.cross_entropy(outputs[1:5], targets[1:5], reduction="none", label_smoothing=0.2)
    torch.testing.assert_close(found[0, 1:5], smooth)


def test_logits_are_weighted_and_smoothed_as_in_torch(drawn):
    outputs, random = drawn
    targets = torch.tensor([0, 1, 1, 0, 1, 0])
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    batch, one = plain_batch(outputs, targets), outputs[:, :1]
    found, _ = make_losses("binary", class_weights=[2.0, 5.0], label_smoothing=0.2)[0](one, batch)
    smooth = targets * 0.8 + 0.1
    expected = bce(one[:, 0], smooth, weight=torch.tensor([2.0, 5.0])[targets], reduction="none")
    torch.testing.assert_close(found, expected)
    many = torch.randint(0, 2, (6, 3), generator=random).float()
    found, _ = make_losses("labels", class_weights=[2.0, 5.0, 1.0])[0](outputs, plain_batch(outputs, many))
    expected = bce(outputs, many, pos_weight=torch.tensor([2.0, 5.0, 1.0]), reduction="none").mean(1)
    torch.testing.assert_close(found, expected)


def test_one_logit_and_labels_are_right_by_their_sign():
    outputs = torch.tensor([[1.0], [-1.0], [2.0]])
    _, score = make_losses("binary")
    assert [int(n) for n in score(outputs, plain_batch(outputs, torch.tensor([1, 0, 0])))] == [2, 3]
    outputs, targets = torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert [int(n) for n in make_losses("labels")[1](outputs, plain_batch(outputs, targets))] == [1, 2]


@pytest.mark.parametrize(
    ("name", "torchs"),
    [("squared-error", "mse_loss"), ("absolute-error", "l1_loss"), ("huber", "huber_loss")],
)
def test_errors_are_added_over_outputs(drawn, name, torchs):
    outputs, random = drawn
    targets = 3 * torch.randn(6, 3, generator=random)
    found, _ = make_losses("numbers", name)[0](outputs, plain_batch(outputs, targets))
    torch.testing.assert_close(found, getattr(torch.nn.functional, torchs)(outputs, targets, reduction="none").sum(1))


@pytest.mark.parametrize(
    ("targets", "options", "words"),
    [
        ("classes", {"loss": "bce"}, 'task="binary"'),
        ("numbers", {"loss": "cross-entropy"}, "numbers are predicted"),
        ("numbers", {"class_weights": [1.0]}, "class_weights with the loss 'squared-error'"),
        ("tokens", {"class_weights": [1.0]}, "where tokens are predicted"),
        ("classes", {"loss": "own", "function": max, "label_smoothing": 0.1}, "label_smoothing with the loss 'own'"),
    ],
)
def test_what_does_not_go_together_is_refused(targets, options, words):
    with pytest.raises(SparsonaError, match=words):
        make_losses(targets, **options)


@pytest.mark.parametrize(
    "function",
    [
        torch.nn.functional.cross_entropy,
        lambda outputs, targets: 0.0,
        lambda outputs, targets: targets,
        lambda outputs, targets: outputs,
    ],
)
def test_a_function_that_does_not_return_a_loss_per_example_is_refused(function):
    losses, _ = make_losses("classes", "own", function=function)
    with pytest.raises(SparsonaError, match="one loss per example"):
        check_losses(losses, torch.zeros(2, 3), torch.tensor([0, 1]))
