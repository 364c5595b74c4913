"""Data sets in their published formats, but tiny and without meaning: recipes are run on them as they are."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def idx(array: np.ndarray, kind: int = 0x08) -> bytes:
    head = bytes((0, 0, kind, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8 if kind == 0x08 else ">i4").tobytes()


def write_cifar(folder: Path, classes: int, train: int, test: int, rng: np.random.Generator) -> None:
    """The version for Python."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    counts = [*[train // (len(names) - 1)] * (len(names) - 1), test]
    for name, count in zip(names, counts, strict=True):
        pixels, labels = rng.integers(0, 256, (count, 3072), np.uint8), (np.arange(count) % classes).tolist()
        key = b"labels" if classes == 10 else b"fine_labels"
        write(folder / name, pickle.dumps({b"data": pixels, key: labels}, protocol=2))


def write_idx(folder: Path, train: int, test: int, writers: int, rng: np.random.Generator) -> None:
    """Images of 28 x 28 pixels; with `writers`, MNIST's."""
    for part, name, count in (("train", "train", train), ("t10k", "test", test)):
        labels = np.arange(count) % 10
        write(folder / f"{part}-images-idx3-ubyte", idx(rng.integers(0, 256, (count, 28, 28))))
        write(folder / f"{part}-labels-idx1-ubyte", idx(labels))
        if writers:
            table = np.zeros((count, 8), dtype=np.int64)
            table[:, 0] = labels
            table[:, 2] = np.arange(count) * writers // count + (writers if name == "test" else 0)
            write(folder / f"qmnist-{name}-labels-idx2-int", idx(table, 0x0C))


def write_plays(folder: Path, speakers: int, turns: int, rng: np.random.Generator) -> None:
    words = np.array([f"w{i}" for i in range(40)])
    said = [
        f"SPEAKER {speaker}:\n{' '.join(rng.choice(words, 9))}.\n" for _ in range(turns) for speaker in range(speakers)
    ]
    write(folder / "input.txt", "\n".join(said).encode())


@pytest.fixture(scope="session")
def tiny_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10, CIFAR-100, Fashion-MNIST, MNIST by writer, and plays."""
    folder, rng = tmp_path_factory.mktemp("sets"), np.random.Generator(np.random.PCG64(0))
    write_cifar(folder / "cifar10", 10, 500, 100, rng)
    write_cifar(folder / "cifar100", 100, 500, 100, rng)
    write_idx(folder / "fashion-mnist", 500, 100, 0, rng)
    write_idx(folder / "mnist", 1_200, 200, 60, rng)
    write_plays(folder / "shakespeare", 8, 12, rng)
    return folder


@pytest.fixture
def sets(tiny_sets: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only data sets on this machine."""
    monkeypatch.setenv("SPARSONA_DATA", str(tiny_sets))
    return tiny_sets
