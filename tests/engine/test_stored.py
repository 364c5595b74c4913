"""States as bytes: every bit comes back, and zeros take no room."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from sparsona.engine.stored import fill, read_tensors, to_bytes

SIZE = 100_000


def sparse(density: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SIZE, generator=generator).to(dtype)
    return values.where(torch.rand(SIZE, generator=generator) < density, torch.zeros((), dtype=dtype))


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("density", [0.0, 0.5, 0.99, 1.0])
def test_every_bit_comes_back(density, dtype):
    tensor = sparse(density, dtype).view(100, -1)
    tensor[0, 0], tensor[1, 1], tensor[2, 2] = -0.0, float("nan"), float("inf")
    tensor[3, 3] = torch.finfo(dtype).smallest_normal / 4
    found = fill({"w": torch.zeros_like(tensor)}, read_tensors(to_bytes({"w": tensor})), "it")["w"]
    assert bits_of(found) == bits_of(tensor)


def test_numbers_that_a_processor_flushes_come_back():
    tensor = sparse(0.5)
    tensor[:100] = 1e-40
    expected = bits_of(tensor)
    flushes = torch.set_flush_denormal(True)
    try:
        data = to_bytes({"w": tensor})
    finally:
        torch.set_flush_denormal(False)
    if not flushes:
        pytest.skip("this processor flushes nothing")
    assert bits_of(read_tensors(data)["[w]"]) == expected


def test_a_half_of_zeros_takes_half_the_room():
    dense, half = len(to_bytes({"w": sparse(1.0)})), len(to_bytes({"w": sparse(0.5)}))
    assert half < 0.54 * dense  # half of the values, and one bit for each entry


def test_what_a_mask_makes_of_negative_numbers_takes_a_bit():
    mask = sparse(0.5) != 0
    masked = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)) * mask
    assert int((masked.signbit() & ~mask).sum()) > SIZE // 5  # -0.0
    with_signs, without = to_bytes({"w": masked}), to_bytes({"w": masked.where(mask, 0.0)})
    assert SIZE // 8 <= len(with_signs) - len(without) < SIZE // 8 + 200
    assert bits_of(read_tensors(with_signs)["[w]"]) == bits_of(masked)


def test_a_transposed_tensor_comes_back():
    tensor = sparse(0.3).view(100, -1).t()
    found = fill({"w": torch.zeros(tensor.shape)}, read_tensors(to_bytes({"w": tensor})), "it")["w"]
    assert found.equal(tensor)


def test_integers_and_short_tensors_are_stored_as_they_are():
    stored = load(to_bytes({"count": torch.zeros(SIZE, dtype=torch.int64), "short": torch.zeros(8)}))
    assert set(stored) == {"[count]", "[short]"}  # and no marks


@pytest.mark.parametrize("change", ["fewer values", "no values", "more places"])
def test_values_that_do_not_fit_their_places_are_refused(change):
    stored = load(to_bytes({"w": sparse(0.5)}))
    values = next(key for key in stored if key.endswith("#values"))
    bits = next(key for key in stored if "#nonzero" in key)
    if change == "fewer values":
        stored[values] = stored[values][1:].clone()
    elif change == "no values":
        del stored[values]
    else:
        stored[bits] = torch.full_like(stored[bits], 255)
    with pytest.raises(ValueError, match="not as many values as it has places"):
        read_tensors(save(stored))


@pytest.mark.parametrize("mark", ["#nonzero", "#minus", "#bits"])
@pytest.mark.parametrize("change", ["short", "wide", "other"])
def test_bits_that_are_not_one_for_each_entry_are_refused(mark, change):
    stored = load(to_bytes({"w": sparse(0.5) * -1, "m": torch.ones(SIZE, dtype=torch.bool)}))
    key = next(key for key in stored if mark in key)
    bits = stored[key]
    stored[key] = {"short": bits[1:].clone(), "wide": bits[None].clone(), "other": bits.long()}[change]
    with pytest.raises(ValueError, match="has not one bit for each of 100000 entries"):
        read_tensors(save(stored))
