"""What may share a stack or a program."""

from __future__ import annotations

import torch

from sparsona.core.tree import Tree
from sparsona.gpu.stacking import kinds_of
from sparsona.learning.phases import Model


def test_two_networks_of_one_size_are_not_alike():
    none = Tree.of({})
    wide, tall = (Tree.of({"weight": torch.zeros(shape)}) for shape in ((2, 6), (6, 2)))
    assert wide.flat.shape == tall.flat.shape
    assert kinds_of(Model(wide, none)) != kinds_of(Model(tall, none))
    assert kinds_of(Model(wide, none)) == kinds_of(Model(Tree.of({"weight": torch.ones(2, 6)}), none))
