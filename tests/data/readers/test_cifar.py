"""CIFAR in every published form, as tiny files written here; and files that are damaged or hostile."""

import pickle
import struct

import numpy as np
import pytest
from PIL import Image
from sample_pixels import random_bytes

from sparsona.core.errors import SparsonaError
from sparsona.data.read import read
from sparsona.data.readers import cifar


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def cifar_parts(name):
    counts = [2, 2, 2, 2, 2, 3] if name == "cifar10" else [10, 3]
    x, y = random_bytes(13, 3, 32, 32), np.arange(13) % 10
    ends = np.cumsum(counts)[:-1]
    return x, y, list(zip(np.split(x.reshape(13, -1), ends), np.split(y, ends), strict=True))


def batch_names(name):
    return [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if name == "cifar10" else ["train", "test"]


def check_cifar(pool, x, y):
    assert np.array_equal(pool.x, x)
    assert np.array_equal(pool.y, y)
    assert pool.x.dtype == np.uint8
    assert pool.num_train == 10
    assert (pool.view.pad, pool.view.flip, pool.view.crop) == (4, True, None)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_binary(tmp_path, monkeypatch, name):
    x, y, parts = cifar_parts(name)
    monkeypatch.setitem(cifar.RECORDS, name, tuple(len(labels) for _, labels in parts))
    for file, (pixels, labels) in zip(batch_names(name), parts, strict=True):
        columns = [labels[:, None]] if name == "cifar10" else [labels[:, None] * 0 + 9, labels[:, None]]
        (tmp_path / f"{file}.bin").write_bytes(np.hstack([*columns, pixels]).astype(np.uint8).tobytes())
    check_cifar(read(name, [tmp_path]), x, y)
    last = tmp_path / f"{batch_names(name)[-1]}.bin"
    whole = last.read_bytes()
    for cut in (1, len(whole) // 3, len(whole)):  # also where a picture ends
        last.write_bytes(whole[:-cut])
        with pytest.raises(SparsonaError, match=rf"{last.name}(.|\n)*3 images as published"):
            read(name, [tmp_path])


def python2_pickle(pixels, labels, key):
    """What cPickle of Python 2 wrote: text as byte strings, numpy.core, and 0 for False in the dtype."""

    def text(value):
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    shape = number(pixels.shape[0]) + number(pixels.shape[1]) + b"\x86"
    array += b"(" + number(1) + shape + dtype + b"\x89" + text(pixels.tobytes()) + b"tb"
    entries = text(b"data") + array + text(key) + b"](" + b"".join(map(number, labels.tolist())) + b"e"
    return b"\x80\x02}(" + entries + b"u."


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("form", ["published", "text keys", "byte keys", "array labels", "newest"])
def test_cifar_pickles(tmp_path, name, form):
    x, y, parts = cifar_parts(name)
    key = "labels" if name == "cifar10" else "fine_labels"
    for file, (pixels, labels) in zip(batch_names(name), parts, strict=True):
        if form == "published":
            content = python2_pickle(pixels, labels, key.encode())
        elif form == "byte keys":
            content = pickle.dumps({b"data": pixels, key.encode(): labels.tolist()}, protocol=2)
        elif form == "newest":
            content = pickle.dumps({"data": pixels, key: labels}, protocol=5)
        else:
            content = pickle.dumps(
                {"data": pixels, key: labels if form == "array labels" else labels.tolist()}, protocol=4
            )
        write(tmp_path / ("cifar-10-batches-py" if name == "cifar10" else "cifar-100-python") / file, content)
    check_cifar(read(name, [tmp_path]), x, y)


class Attack:
    def __reduce__(self):
        import os

        return os.system, ("touch hacked",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"data": Attack(), "fine_labels": [1]}),
        pickle.dumps(Attack(), protocol=0),
        b"cnumpy.testing\nrundocs\n(tR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c_codecs\nencode\n(Vx\nVrot13\ntR.",
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}),
        pickle.dumps({"data": np.zeros((2, 3071), np.uint8), "fine_labels": [1, 2]}),
        pickle.dumps({"data": np.zeros((2, 3072)), "fine_labels": [1, 2]}),
        pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "fine_labels": ["cat"]}),
        pickle.dumps([1, 2]),
        b"",
        b"\x80\x04garbage",
        pickle.dumps({"data": np.array([[{}]], dtype=object), "fine_labels": [1]}, protocol=5),
    ],
)
def test_hostile_pickles_run_nothing_and_are_named(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SparsonaError, match="train' cannot be read"):
        read("cifar100", [tmp_path])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test", "train"]


def test_a_pickle_cannot_claim_more_images_than_fit_into_it(tmp_path):
    empty = np.empty(0).__reduce__()[0]

    class Claim:
        def __reduce__(self):
            return empty, (np.ndarray, (10_000, 3072), "B")

    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps({"data": Claim(), "fine_labels": [1] * 10_000}, protocol=2))
    with pytest.raises(SparsonaError, match="as many as fit into the file"):
        read("cifar100", [tmp_path])


def write_sheets(folder, x, y, per_sheet=50):
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "labels.npy", y.astype(np.uint8))
    np.save(folder / "shape.npy", np.array([len(x), 32, 32, 3]))
    for number, start in enumerate(range(0, len(x), per_sheet)):
        block = x[start : start + per_sheet].transpose(0, 2, 3, 1)
        canvas = np.zeros((-(-len(block) // 25) * 25, 32, 32, 3), np.uint8)
        canvas[: len(block)] = block
        sheet = canvas.reshape(-1, 25, 32, 32, 3).swapaxes(1, 2).reshape(-1, 800, 3)
        Image.fromarray(sheet).save(folder / f"sheet-{number:04d}.webp", lossless=True)


def test_sheets_are_decoded_once(tmp_path, cache, monkeypatch):
    x, y = random_bytes(72, 3, 32, 32), np.arange(72) % 100
    write_sheets(tmp_path / "cifar100", x, y)
    heard = []
    pool = read("cifar100", [tmp_path], listen=lambda done, total: heard.append((done, total)))
    assert heard == [(50, 72), (72, 72)]
    assert np.array_equal(pool.x, x)
    assert np.array_equal(pool.y, y)
    assert pool.num_train == 60
    assert isinstance(pool.x, np.memmap)
    pool.x[0] = 0  # copy-on-write: a writer spoils nothing
    again = read("cifar100", [tmp_path], listen=lambda done, total: heard.append((done, total)))
    assert len(heard) == 2
    assert np.array_equal(again.x, x)
    assert len(list((cache / "decoded").iterdir())) == 1
    write_sheets(tmp_path / "cifar100", x[:60], y[:60])
    (tmp_path / "cifar100" / "sheet-0001.webp").write_bytes(b"RIFF")
    with pytest.raises(SparsonaError, match=r"sheet-0001\.webp' cannot be read"):
        read("cifar100", [tmp_path])
    (tmp_path / "cifar100" / "sheet-0001.webp").unlink()
    with pytest.raises(SparsonaError, match="sheets of 50 pictures"):
        read("cifar100", [tmp_path])
    assert len(list((cache / "decoded").iterdir())) == 1  # nothing half done stays


@pytest.mark.parametrize(
    ("shape", "labels"),
    [
        (b"junk", None),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }", None),
        (np.float64(3), None),
        (np.array([25, 32, 32]), None),
        (np.array([0, 32, 32, 3]), np.zeros(0, int)),
        (np.array([10**12, 32, 32, 3]), None),
        (None, np.zeros(25)),
        (None, b""),
    ],
)
def test_damaged_arrays_beside_sheets_are_named(tmp_path, shape, labels):
    write_sheets(tmp_path, random_bytes(25, 3, 32, 32), np.arange(25))
    for name, content in (("shape", shape), ("labels", labels)):
        if isinstance(content, bytes):
            (tmp_path / f"{name}.npy").write_bytes(content)
        elif content is not None:
            np.save(tmp_path / f"{name}.npy", content)
    with pytest.raises(SparsonaError, match=r"(shape|labels)\.npy' cannot be read"):
        read("cifar100", [tmp_path])


@pytest.mark.parametrize("channels_last", [False, True])
def test_cifar_npz(tmp_path, channels_last):
    x, y, _ = cifar_parts("cifar10")
    kept = x.transpose(0, 2, 3, 1) if channels_last else x
    np.savez(tmp_path / "cifar10.npz", x_train=kept[:10], y_train=y[:10], x_test=kept[10:], y_test=y[10:])
    check_cifar(read("cifar10", [tmp_path]), x, y)
    np.savez(tmp_path / "cifar10.npz", x=kept, y=y + 3)
    with pytest.raises(SparsonaError, match="labels go from 3 to 12"):
        read("cifar10", [tmp_path])


def test_views_follow_the_options(tmp_path):
    x, y, _ = cifar_parts("cifar10")
    np.savez(tmp_path / "cifar10.npz", x=x, y=y)
    assert not read("cifar10", [tmp_path], augment=False).view.augments
    view = read("cifar10", [tmp_path], crop=24).view
    assert (view.crop, view.pad, view.flip) == (24, 0, True)
    with pytest.raises(SparsonaError, match="crop 33 of images of 32 x 32"):
        read("cifar10", [tmp_path], crop=33)
    with pytest.raises(SparsonaError, match="without augmentation"):
        read("cifar10", [tmp_path], crop=24, augment=False)
