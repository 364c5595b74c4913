"""Images in every published form, as tiny files written here; and files that are damaged or hostile."""

import gzip
import pickle
import struct

import numpy as np
import pytest
from PIL import Image

from sparsona.core.errors import SparsonaError
from sparsona.data.pool import View
from sparsona.data.readers import decoded, files
from sparsona.data.sources import read


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def random_bytes(*shape, seed=0):
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, shape, dtype=np.uint8)


def idx(array, kind=0x08):
    head = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape)
    return head + array.astype({0x08: ">u1", 0x0C: ">i4"}[kind]).tobytes()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder, end="", train="train", test="t10k", first=0):
    images = random_bytes(7, 28, 28)
    labels = np.arange(7) % 5 + first
    for part, rows in ((train, slice(0, 4)), (test, slice(4, 7))):
        write(folder / f"{part}-images-idx3-ubyte{end}", idx(images[rows]))
        write(folder / f"{part}-labels-idx1-ubyte{end}", idx(labels[rows]))
    return images[:, None], labels - first


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("sub", ["", "mnist", "MNIST/raw"])
def test_mnist(tmp_path, end, sub):
    x, y = write_mnist(tmp_path / sub, end)
    pool = read("mnist", [tmp_path])
    assert np.array_equal(pool.x, x)
    assert np.array_equal(pool.y, y)
    assert (pool.name, pool.num_train, pool.num_classes, pool.owners) == ("mnist", 4, 10, None)
    assert pool.view == View((0.1307,), (0.3081,))


def test_a_subfolder_of_the_sets_name_comes_first(tmp_path):
    """MNIST and Fashion-MNIST have files of the same names."""
    write_mnist(tmp_path)
    x, _ = write_mnist(tmp_path / "fashion-mnist")
    write(tmp_path / "train-images-idx3-ubyte", idx(np.zeros((4, 28, 28))))
    assert np.array_equal(read("fashion-mnist", [tmp_path]).x, x)


def write_writers(folder, y, writers, end=".gz"):
    table = np.zeros((len(y) + 2, 8), dtype=np.int64)  # QMNIST's test part is longer than MNIST's
    table[: len(y), 0], table[: len(y), 2] = y, writers
    for part, rows in (("train", slice(0, 4)), ("test", slice(4, None))):
        write(folder / f"qmnist-{part}-labels-idx2-int{end}", idx(table[rows], 0x0C))


@pytest.mark.parametrize("sub", ["mnist", "qmnist"])
def test_mnist_by_writer(tmp_path, sub):
    _, y = write_mnist(tmp_path / "mnist")
    write_writers(tmp_path / sub, y, [300, 7, 300, 9, 2000, 2001, 2000])
    assert read("mnist", [tmp_path]).owners.tolist() == [2, 0, 2, 1, 3, 4, 3]


def test_writers_of_other_digits_are_refused(tmp_path):
    _, y = write_mnist(tmp_path)
    write_writers(tmp_path, y[::-1], range(7))
    with pytest.raises(SparsonaError, match="qmnist-train-labels-idx2-int"):
        read("mnist", [tmp_path])


@pytest.mark.parametrize(("name", "first"), [("emnist-letters", 1), ("emnist-byclass", 0)])
def test_emnist_is_turned_and_letters_are_counted_from_zero(tmp_path, name, first):
    x, y = write_mnist(tmp_path, ".gz", f"{name}-train", f"{name}-test", first)
    pool = read(name, [tmp_path])
    assert np.array_equal(pool.x, x.swapaxes(2, 3))
    assert np.array_equal(pool.y, y)
    assert pool.num_train == 4
    assert isinstance(pool.x, np.memmap)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not begin|not enough"),
        (idx(np.zeros((4, 28, 28)))[:-1], "3,135 bytes of values instead of 3,136"),
        (idx(np.zeros((4, 28, 28))) + b"x", "instead of 3,136"),
        (b"\x00\x01" + idx(np.zeros((4, 28, 28)))[2:], "does not begin as an idx file"),
        (idx(np.zeros(4)), "does not begin as an idx file"),
        (struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "0 bytes of values"),
        (idx(np.zeros((5, 28, 28))), "4 labels for 5 images"),
        (idx(np.zeros((4, 9, 9))), "images of"),
    ],
)
@pytest.mark.parametrize("end", ["", ".gz"])
def test_damaged_idx_files_are_named(tmp_path, content, said, end):
    write_mnist(tmp_path, end)
    write(tmp_path / f"train-images-idx3-ubyte{end}", content)
    with pytest.raises(SparsonaError, match=said) as caught:
        read("mnist", [tmp_path])
    assert "idx" in str(caught.value)


def test_a_gz_file_cut_short_is_named(tmp_path):
    write_mnist(tmp_path, ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SparsonaError, match=r"train-images-idx3-ubyte\.gz' cannot be read"):
        read("mnist", [tmp_path])


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
def test_cifar_binary(tmp_path, name):
    x, y, parts = cifar_parts(name)
    for file, (pixels, labels) in zip(batch_names(name), parts, strict=True):
        columns = [labels[:, None]] if name == "cifar10" else [labels[:, None] * 0 + 9, labels[:, None]]
        (tmp_path / f"{file}.bin").write_bytes(np.hstack([*columns, pixels]).astype(np.uint8).tobytes())
    check_cifar(read(name, [tmp_path]), x, y)
    last = tmp_path / f"{batch_names(name)[-1]}.bin"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(SparsonaError, match=last.name):
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
@pytest.mark.parametrize("form", ["published", "text keys", "byte keys", "array labels"])
def test_cifar_pickles(tmp_path, name, form):
    x, y, parts = cifar_parts(name)
    key = "labels" if name == "cifar10" else "fine_labels"
    for file, (pixels, labels) in zip(batch_names(name), parts, strict=True):
        if form == "published":
            content = python2_pickle(pixels, labels, key.encode())
        elif form == "byte keys":
            content = pickle.dumps({b"data": pixels, key.encode(): labels.tolist()}, protocol=2)
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
    ],
)
def test_hostile_pickles_run_nothing_and_are_named(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SparsonaError, match="train' cannot be read"):
        read("cifar100", [tmp_path])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test", "train"]


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


def test_decoding_that_is_stopped_leaves_nothing(tmp_path, cache):
    write_sheets(tmp_path / "cifar100", random_bytes(72, 3, 32, 32), np.arange(72))

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read("cifar100", [tmp_path], listen=stop)
    assert not list((cache / "decoded").iterdir())


def test_abandoned_work_is_swept_and_a_quicker_process_wins(tmp_path, cache, monkeypatch):
    (tmp_path / "file").write_bytes(b"x")
    old, young = cache / "decoded" / "a.part-1", cache / "decoded" / "b.part-2"
    for path in (old, young):
        path.mkdir(parents=True)
    import os

    os.utime(old, (0, 0))
    calls = []

    def decode(new):
        if not calls:  # another process decodes the same meanwhile
            calls.append(1)
            decoded.decode_once("set", {}, tmp_path, [tmp_path / "file"], decode)
        new("x", np.uint8, (1,))[:] = 3

    assert decoded.decode_once("set", {}, tmp_path, [tmp_path / "file"], decode)["x"].tolist() == [3]
    names = sorted(path.name.partition("-")[0] for path in (cache / "decoded").iterdir())
    assert names == ["b.part", "set"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "occupied"))
    write_sheets(tmp_path / "cifar100", random_bytes(25, 3, 32, 32), np.arange(25))
    with pytest.raises(SparsonaError, match="SPARSONA_DATA"):
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


def save_picture(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


def test_folder(tmp_path):
    x = random_bytes(4, 6, 5, 3)
    for index, name in enumerate(["cat/b.png", "cat/a.PNG", "ant/z.bmp", "dog/q.png"]):
        save_picture(tmp_path / "pets" / name, x[index])
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / "pets" / ".hidden").mkdir()
    pool = read(f"folder:{tmp_path / 'pets'}")
    assert np.array_equal(pool.x, x[[2, 1, 0, 3]].transpose(0, 3, 1, 2))
    assert pool.y.tolist() == [0, 1, 1, 2]
    assert (pool.name, pool.num_classes, pool.num_train, pool.view) == ("pets", 3, None, View())
    assert read(f"folder:{tmp_path / 'pets'}", resize=4).x.shape == (4, 3, 4, 4)
    assert read(f"folder:{tmp_path / 'pets'}", augment=True).view == View(pad=4, flip=True)
    assert read(f"folder:{tmp_path / 'pets'}", crop=3).view == View(crop=3)


def test_folder_with_a_split_and_grey_pictures(tmp_path):
    x = random_bytes(3, 5, 5)
    for index, name in enumerate(["train/a/1.png", "train/b/1.png", "test/b/2.png"]):
        save_picture(tmp_path / name, x[index])
    pool = read(f"folder:{tmp_path}")
    assert np.array_equal(pool.x, x[:, None])
    assert (pool.y.tolist(), pool.num_train) == ([0, 1, 1], 2)
    save_picture(tmp_path / "test" / "b" / "3.png", random_bytes(5, 5, 3))
    assert read(f"folder:{tmp_path}").x.shape == (4, 3, 5, 5)  # one in colour: all in colour
    save_picture(tmp_path / "test" / "c" / "3.png", x[0])
    with pytest.raises(SparsonaError, match="class 'c' that 'train' lacks"):
        read(f"folder:{tmp_path}")


def test_folders_that_will_not_do(tmp_path):
    with pytest.raises(SparsonaError, match="is not a folder"):
        read(f"folder:{tmp_path / 'absent'}")
    with pytest.raises(SparsonaError, match="has no pictures"):
        read(f"folder:{tmp_path}")
    save_picture(tmp_path / "a" / "1.png", random_bytes(5, 5))
    save_picture(tmp_path / "a" / "2.png", random_bytes(5, 6))
    with pytest.raises(SparsonaError, match=r"2\.png' has 6 x 5 pixels(.|\n)*resize"):
        read(f"folder:{tmp_path}")
    (tmp_path / "a" / "2.png").write_bytes((tmp_path / "a" / "1.png").read_bytes()[:40])
    with pytest.raises(SparsonaError, match=r"2\.png' cannot be read"):
        read(f"folder:{tmp_path}")


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    save_picture(tmp_path / "a" / "1.png", random_bytes(5, 5))

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(files.importlib, "import_module", missing)
    with pytest.raises(SparsonaError, match=r"'PIL'(.|\n)*sparsona\[images\]"):
        read(f"folder:{tmp_path}")


def write_tiny(root, validation):
    x = random_bytes(6, 64, 64, 3) // 32 * 0 + np.arange(6, dtype=np.uint8)[:, None, None, None] * 40
    for index, name in enumerate(["n02/images/n02_0", "n02/images/n02_1", "n01/images/n01_0", "n01/images/n01_1"]):
        save_picture(root / "train" / f"{name}.JPEG", x[index], quality=95)
    if validation == "published":
        for index, name in enumerate(["val_0", "val_1"]):
            save_picture(root / "val" / "images" / f"{name}.JPEG", x[4 + index], quality=95)
        lines = "val_0.JPEG\tn02\t0\t32\t44\t62\nval_1.JPEG\tn01\t1\t2\t3\t4\n"
        (root / "val" / "val_annotations.txt").write_text(lines)
    else:
        save_picture(root / "val" / "n02" / "val_0.JPEG", x[4])
        save_picture(root / "val" / "n01" / "val_1.JPEG", x[5])


@pytest.mark.parametrize("validation", ["published", "sorted"])
def test_tiny_imagenet(tmp_path, validation):
    write_tiny(tmp_path / "tiny-imagenet-200", validation)
    pool = read("tiny-imagenet", [tmp_path])
    assert pool.y.tolist() == ([0, 0, 1, 1, 1, 0] if validation == "published" else [0, 0, 1, 1, 0, 1])
    assert pool.x[:, 0, 0, 0].tolist() == [80, 120, 0, 40, *([160, 200] if validation == "published" else [200, 160])]
    assert (pool.num_train, pool.num_classes, pool.view.pad) == (4, 200, 4)
    assert read("tiny-imagenet", [tmp_path], resize=32).x.shape == (6, 3, 32, 32)


def test_tiny_imagenet_damaged(tmp_path):
    write_tiny(tmp_path, "published")
    (tmp_path / "val" / "val_annotations.txt").write_text("val_7.JPEG\tn02\n")
    with pytest.raises(SparsonaError, match="val_annotations"):
        read("tiny-imagenet", [tmp_path])
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\n")
    with pytest.raises(SparsonaError, match="not among those of 'train'"):
        read("tiny-imagenet", [tmp_path])
    write_tiny(tmp_path, "published")
    save_picture(tmp_path / "train" / "n01" / "images" / "n01_0.JPEG", random_bytes(32, 32, 3))
    with pytest.raises(SparsonaError, match=r"n01_0\.JPEG' has 32 x 32 pixels"):
        read("tiny-imagenet", [tmp_path])


def write_landmarks(root, flat=True):
    rows = ["user_id,image_id,class"]
    for author, count in (("17", 5), ("4", 2), ("99", 1)):
        for number in range(count):
            image = f"{author.zfill(3)}{number}"
            rows.append(f"{author},{image},{2000 + number}")
            place = root / "images" if flat else root / "train" / image[0] / image[1] / image[2]
            save_picture(place / f"{image}.jpg", np.full((9, 7, 3), number * 40, np.uint8), quality=95)
    (root / "federated_train.csv").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("flat", [True, False])
def test_landmarks_by_author(tmp_path, flat):
    root = tmp_path / "landmarks-user-160k"
    write_landmarks(root, flat)
    pool = read("gldv2", [tmp_path])
    assert pool.x.shape == (8, 3, 256, 256)
    assert pool.view.shape(pool.x.shape[1:]) == (3, 224, 224)
    assert (pool.view.flip, pool.view.pad, pool.num_classes, pool.num_train) == (True, 0, 2028, 5)
    assert pool.owners.tolist() == [0, 0, 0, 1, 2, 0, 0, 1]  # authors in the order of their ids, training first
    assert sorted(pool.y[pool.owners == 0].tolist()) == [2000, 2001, 2002, 2003, 2004]
    assert np.abs(pool.x[:, 0, 0, 0].astype(int) - (pool.y - 2000) * 40).max() <= 2  # each picture with its own class
    assert np.array_equal(read("gldv2", [tmp_path]).y, pool.y)
    plain = read("gldv2", [tmp_path], resize=None, augment=False)
    assert plain.x.shape == (8, 3, 224, 224)
    assert not plain.view.augments


def test_an_authors_half_depends_on_the_author_alone(tmp_path):
    write_landmarks(tmp_path)
    before = read("gldv2", [tmp_path], resize=8, crop=4)
    table = tmp_path / "federated_train.csv"
    table.write_text("\n".join(line for line in table.read_text().splitlines() if not line.startswith("4,")) + "\n")
    after = read("gldv2", [tmp_path], resize=8, crop=4)
    assert np.array_equal(before.y[:3], after.y[:3])
    assert before.owners.max() == after.owners.max() + 1


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("", "no rows"),
        ("user_id,image_id\n1,2\n", "lacks the column 'class'"),
        ("user_id,image_id,class\n1,2,x\n", "invalid literal"),
        ("user_id,image_id,class\n1,../../etc/x,3\n", "image id"),
        ("user_id,image_id,class\n1,abcdef,3\n", "1 of 1 photographs are missing"),
        ("user_id,image_id,class\n17,0170,9999\n", "labels go from 9999"),
    ],
)
def test_landmarks_damaged(tmp_path, table, said):
    write_landmarks(tmp_path)
    (tmp_path / "federated_train.csv").write_text(table)
    with pytest.raises(SparsonaError, match=said):
        read("gldv2", [tmp_path], resize=8, crop=4)


def test_arrays(tmp_path):
    path = tmp_path / "mine.npz"
    x, y = random_bytes(6, 5, 4), np.array([0, 1, 2, 0, 1, 2])
    np.savez(path, x=x, y=y, owners=np.array(["b", "a", "b", "c", "a", "c"]))
    pool = read(f"arrays:{path}")
    assert np.array_equal(pool.x, x[:, None])
    assert (pool.name, pool.num_classes, pool.num_train) == ("mine", 3, None)
    assert pool.owners.tolist() == [1, 0, 1, 2, 0, 2]
    assert read(f"arrays:{path}", augment=True).view == View(pad=4, flip=True)
    np.savez(
        path,
        x_train=x[:4] / 2,
        y_train=y[:4],
        x_test=x[4:] / 2,
        y_test=y[4:],
        owners_train=[7, -1, 7, 9],
        owners_test=[9, 7],
    )
    pool = read(f"arrays:{path}")
    assert pool.x.dtype == np.float32
    assert (pool.x.shape, pool.num_train, pool.owners.tolist()) == ((6, 5, 4), 4, [0, -1, 0, 1, 1, 0])
    with pytest.raises(SparsonaError, match="cannot be cropped or augmented"):
        read(f"arrays:{path}", augment=True)


def test_arrays_of_tokens(tmp_path):
    path = tmp_path / "text.npz"
    np.savez(path, x=np.arange(6).reshape(2, 3), y=np.arange(1, 7).reshape(2, 3))
    pool = read(f"arrays:{path}")
    assert pool.has_tokens
    assert (pool.y.dtype, pool.num_classes) == (np.int32, 7)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": [1]}, "lacks 'y'"),
        ({"x_train": [1], "y_train": [0]}, "lacks 'x_test'"),
        ({"x": [[1], [2]], "y": [0]}, "x has shape"),
        ({"x": [], "y": []}, "as many labels"),
        ({"x": [[1.0]], "y": [0.5]}, "whole numbers"),
        ({"x": [[1.0]], "y": [-1]}, "whole numbers"),
        ({"x": [["a"]], "y": [0]}, "x is"),
        ({"x": [[1.0]], "y": [0], "owners": [[1]]}, "owners"),
        ({"x": np.array([{}], dtype=object), "y": [0]}, "cannot be read"),
    ],
)
def test_arrays_that_will_not_do(tmp_path, arrays, said):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(SparsonaError, match=said):
        read(f"arrays:{tmp_path / 'bad.npz'}")


def test_arrays_absent_or_no_npz(tmp_path):
    with pytest.raises(SparsonaError, match="does not exist"):
        read(f"arrays:{tmp_path / 'absent.npz'}")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(SparsonaError, match="cannot be read"):
        read(f"arrays:{tmp_path / 'bad.npz'}")
