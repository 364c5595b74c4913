"""Picture files: class folders, Tiny-ImageNet, landmarks; and files that are damaged."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sample_pixels import random_bytes

from sparsona.core.errors import SparsonaError
from sparsona.data.augment import as_inputs
from sparsona.data.federate import share_out
from sparsona.data.pool import View
from sparsona.data.read import read
from sparsona.data.readers import files
from sparsona.data.split_plan import SplitPlan


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
    assert pool.class_names == ("ant", "cat", "dog")
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
    (tmp_path / "val" / "val_annotations.txt").write_bytes(b"\xff\xfe\t\xff\n")
    with pytest.raises(SparsonaError, match=r"val_annotations(.|\n)*UTF-8"):
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
    assert pool.view.test_resize
    plain = read("gldv2", [tmp_path], resize=None, augment=False)
    assert plain.x.shape == (8, 3, 224, 224)
    assert not plain.view.augments


def test_test_photographs_are_shrunk_and_not_cut(tmp_path):
    """The whole of it, as PIL shrinks it: with a black left half and a white right one, both corners are there."""
    write_landmarks(tmp_path)
    picture = np.zeros((32, 32, 3), np.uint8)
    picture[:, 16:] = 255
    picture[:2, :2] = 255  # a corner that a cut from the middle would lose
    for path in (tmp_path / "images").iterdir():
        save_picture(path, picture, quality=100)
    pool = read("gldv2", [tmp_path], resize=32, crop=24)
    seen = as_inputs(torch.from_numpy(np.array(pool.x)), replace(pool.view, mean=(), std=()))
    stored = Image.fromarray(pool.x[0].transpose(1, 2, 0))
    expected = np.asarray(stored.resize((24, 24), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert seen.shape == (8, 3, 24, 24)
    assert np.abs(255 * seen[0].numpy() - expected).max() <= 1.5
    assert seen[0, 0, 0, 0] > 0.5


def test_users_of_fifty_photographs_have_25_in_each_half(tmp_path):
    """Those of 49 have 25 to train on as well: `min_test` leaves them out."""
    rows = ["user_id,image_id,class"]
    for author, count in (("a", 49), ("b", 50), ("c", 51)):
        rows += [f"{author},{author}{number:03},0" for number in range(count)]
        for number in range(count):
            save_picture(tmp_path / "images" / f"{author}{number:03}.jpg", np.zeros((4, 4, 3), np.uint8))
    (tmp_path / "federated_train.csv").write_text("\n".join(rows) + "\n")
    pool = read("gldv2", [tmp_path], resize=4, crop=4)
    plan = SplitPlan(partition="natural", clients=None, validation_rate=0, min_train=25, min_test=25)
    assert sorted(share_out(pool, plan).sizes().tolist()) == [[25, 0, 25], [26, 0, 25]]


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


def test_a_short_id_of_a_photograph_is_missing_as_any_other(tmp_path):
    write_landmarks(tmp_path, flat=False)
    (tmp_path / "federated_train.csv").write_text("user_id,image_id,class\n1,ab,1\n")
    with pytest.raises(SparsonaError, match=r"1 of 1 photographs are missing(.|\n)*ab\.jpg"):
        read("gldv2", [tmp_path])


def test_decoding_is_told(tmp_path):
    save_picture(tmp_path / "a" / "1.png", random_bytes(5, 5))
    save_picture(tmp_path / "b" / "2.png", random_bytes(5, 5))
    heard = []
    for _ in range(2):  # the second time there is nothing to decode
        read(f"folder:{tmp_path}", listen=lambda *at: heard.append(at))
    assert heard == [(1, 2), (2, 2)]
