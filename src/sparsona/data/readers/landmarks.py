"""Google Landmarks v2 by author of the photographs, as TensorFlow Federated shares it out."""

from __future__ import annotations

import csv
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.data.pool import Pool
from sparsona.data.readers.files import Request, damaged, find
from sparsona.data.readers.images import image_pool
from sparsona.data.readers.pictures import decode_pictures

RESIZE, CROP = 256, 224
COLUMNS = ("user_id", "image_id", "class")


def read_landmarks(request: Request) -> Pool | None:
    """The photographs of federated_train.csv; half of each author's, drawn by the author's id, are the test set.

    They are made squares of side `resize`: in training a square of side `crop` is cut out at random, in testing all of
    it is resized to that side. Without augmentation they are squares of side `crop` outright. An odd photograph is for
    training.
    """
    paths = find(request.places, "federated_train.csv")
    if paths is None:
        return None
    rows = _read_rows(paths[0])
    root = paths[0].parent
    by_author: dict[str, list[tuple[str, int]]] = {}
    for author, image, label in rows:
        by_author.setdefault(author, []).append((image, label))
    train, test = [], []
    for number, (author, images) in enumerate(sorted(by_author.items())):
        seed = int.from_bytes(hashlib.blake2b(author.encode(), digest_size=8).digest())
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(images))
        half = (len(images) + 1) // 2
        train += [(*images[index], number) for index in order[:half]]
        test += [(*images[index], number) for index in order[half:]]
    files = _find_pictures(root, [image for image, _, _ in train + test])
    crop = request.crop or CROP
    if request.augment is False:
        request = replace(request, resize=request.resize or crop)
    else:
        request = replace(request, resize=request.resize or RESIZE, crop=crop)
    side = request.resize or RESIZE
    x = decode_pictures(request, root, files, (3, side, side), side)
    y, owners = (np.array([row[column] for row in train + test], dtype=np.int64) for column in (1, 2))
    pool = image_pool(request, paths[0], x, y, len(train), owners)
    return replace(pool, view=replace(pool.view, test_resize=pool.view.crop is not None))


def _read_rows(path: Path) -> list[tuple[str, str, int]]:
    expected = f"comma-separated, with the columns {', '.join(COLUMNS)}"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [tuple(row[column] for column in COLUMNS) for row in csv.DictReader(file)]
        found = [(author, image, int(label)) for author, image, label in rows]
    except KeyError as error:
        raise damaged(path, f"it lacks the column {error}", expected) from error
    except (ValueError, TypeError, csv.Error) as error:
        raise damaged(path, error, expected) from error
    if not found:
        raise damaged(path, "it has no rows", expected)
    if odd := next((image for _, image, _ in found if not re.fullmatch(r"[\w-]+", image)), None):
        raise damaged(path, f"the image id '{odd}'", "letters and digits")
    return found


def _find_pictures(root: Path, images: list[str]) -> list[Path]:
    """Each photograph's file: all in `images`, or in train/a/b/c as Google publishes them."""
    flat = root / "images"
    files = [
        flat / f"{image}.jpg" if flat.is_dir() else root.joinpath("train", *image[:3], f"{image}.jpg")
        for image in images
    ]
    if missing := [path for path in files if not path.is_file()]:
        raise SparsonaError(
            f"{len(missing):,} of {len(files):,} photographs are missing, the first is '{missing[0]}'",
            expected="images/ID.jpg, or train/0/1/2/ID.jpg as published, beside federated_train.csv",
            hint="complete them, or remove their rows from federated_train.csv",
        )
    return files
