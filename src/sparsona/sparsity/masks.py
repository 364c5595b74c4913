"""Bool trees that say which entries of a model exist."""

from __future__ import annotations

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout
from sparsona.core.seeds import generator
from sparsona.core.tree import Tree


def random_mask(layout: Layout, kept: tuple[int, ...], seed: int) -> Tree:
    """A mask with exactly `kept[l]` entries of tensor l, every choice of positions equally likely.

    It depends on its arguments alone, so that two sides with the same seed need not send the mask. Of two masks with
    one seed, the one with more entries in every tensor contains the other.

    Args:
        layout: names and shapes of the tensors.
        kept: the number of entries to keep of each tensor.
        seed: the seed of the draw.

    Returns:
        A bool tree.

    Example:
        >>> from sparsona.core.layout import Slot
        >>> int(random_mask(Layout((Slot("weight", (10, 10)),)), (29,), seed=0).flat.sum())
        29
    """
    import torch

    if len(kept) != len(layout.slots):
        raise SparsonaError(
            f"{len(kept)} counts for {len(layout.slots)} tensors",
            expected="one count for each tensor of the layout",
            hint="compute them from the same layout with kept_counts",
        )
    random = generator(seed)
    flat = torch.zeros(layout.size, dtype=torch.bool)
    start = 0
    for slot, count in zip(layout.slots, kept, strict=True):
        if not 0 <= count <= slot.size:
            raise SparsonaError(
                f"cannot keep {count} entries of tensor '{slot.name}'", expected=f"a count from 0 to {slot.size}"
            )
        # Drawn for dense and empty tensors too: the draws of later tensors must not depend on the density.
        flat[start + torch.randperm(slot.size, generator=random)[:count]] = True
        start += slot.size
    mask = Tree(layout, flat)
    mask.store()  # a server draws one for each of its clients before any of them is used
    return mask
