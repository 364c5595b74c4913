"""Crops, mirrors and scales, against the plain loops they stand for."""

import pytest
import torch

from sparsona.core.seeds import generator
from sparsona.data.augment import as_inputs, augment, draw, scale
from sparsona.data.batches import Examples, in_order, shuffled
from sparsona.data.pool import View

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def images(count=40, height=8, width=8, channels=3):
    return torch.randint(256, (count, channels, height, width), generator=generator(3), dtype=torch.uint8)


def expected(image, view, top, left, mirrored):
    """One image, pixel by pixel."""
    channels, height, width = image.shape
    side_h, side_w = (view.crop or height), (view.crop or width)
    out = torch.zeros(channels, side_h, side_w)
    for row in range(side_h):
        for column in range(side_w):
            y, x = top + row - view.pad, left + (side_w - 1 - column if mirrored else column) - view.pad
            if 0 <= y < height and 0 <= x < width:
                out[:, row, column] = image[:, y, x].float()
    return (out / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


@pytest.mark.parametrize("view", [View(MEAN, STD, pad=2, flip=True), View(MEAN, STD, crop=5), View(MEAN, STD, 1, 6)])
def test_a_batch_is_what_a_loop_over_pixels_makes(view):
    x = images(12)
    draws = draw(x, view, generator(0))
    for image, seen, *how in zip(x, augment(x, view, draws), *draws, strict=True):
        torch.testing.assert_close(seen, expected(image, view, *(int(value) for value in how)))


def test_every_place_and_both_sides_occur_equally_often():
    x = images(1).expand(9000, 3, 8, 8)
    draws = draw(x, View(pad=4, flip=True), generator(1))
    for places in (draws.top, draws.left):
        counts = places.bincount(minlength=9)
        assert len(counts) == 9
        assert abs(counts - 1000).max() < 5 * 1000**0.5
    assert abs(int(draws.mirrored.sum()) - 4500) < 5 * 2250**0.5
    assert not draw(x, View(pad=4), generator(1)).mirrored.any()


def test_testing_sees_the_middle_and_no_chance():
    x = images(4)
    whole, middle = as_inputs(x, View(MEAN, STD, pad=4, flip=True)), as_inputs(x, View(MEAN, STD, crop=4, flip=True))
    torch.testing.assert_close(middle, whole[..., 2:6, 2:6])
    assert View(crop=4).shape((3, 8, 8)) == (3, 4, 4)
    assert View(pad=4).shape((3, 8, 8)) == (3, 8, 8)


def test_numbers_keep_their_meaning():
    assert torch.equal(scale(torch.tensor([[3, 7]], dtype=torch.int32), View()), torch.tensor([[3, 7]]))
    floats = torch.rand(2, 3, 4, 4, generator=generator(0))
    assert scale(floats, View()) is floats
    torch.testing.assert_close(
        scale(torch.tensor([[0, 51, 255]], dtype=torch.uint8), View()), torch.tensor([[0, 0.2, 1]])
    )
    before = floats.clone()
    torch.testing.assert_close(scale(floats, View((0.5,) * 3, (0.25,) * 3)), (floats - 0.5) / 0.25)
    assert torch.equal(floats, before)


def test_training_batches_are_augmented_anew_each_time_and_testing_batches_never():
    view = View(MEAN, STD, pad=4, flip=True)
    examples = Examples(images(), torch.arange(40), view)
    first, again, other = (torch.cat([batch.inputs for batch in shuffled(examples, 16, seed)]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    order = {seed: torch.cat([batch.targets for batch in shuffled(examples, 16, seed)]) for seed in (1, 2)}
    inverse = {seed: value.argsort() for seed, value in order.items()}
    assert not torch.equal(first[inverse[1]], other[inverse[2]])  # the same images, seen differently
    plain = torch.cat([batch.inputs for batch in in_order(examples, 16)])
    torch.testing.assert_close(plain, as_inputs(examples.inputs, view))
