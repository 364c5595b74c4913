"""Losses and scores where the next token is asked for."""

import torch

from sparsona.core.losses import token_cross_entropy, token_score
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
