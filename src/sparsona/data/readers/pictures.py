"""Picture files: the user's class folders, and Tiny-ImageNet. Needs Pillow, the extra `images`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.data.names import clean_name, clean_names
from sparsona.data.pool import Array, Pool
from sparsona.data.readers.decoded import decode_once
from sparsona.data.readers.files import Request, damaged, require
from sparsona.data.readers.images import image_pool, make_view

ENDINGS = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
Labelled = list[tuple[Path, str]]


def open_picture(path: Path, mode: str = "RGB", side: int | None = None) -> Array:
    """A picture's bytes (height, width, 3), or (height, width) in mode "L"; resized to a square if `side` is given."""
    image = require("PIL.Image", "images", "reading picture files")
    try:
        with image.open(path) as picture:
            picture = picture.convert(mode)
            if side is not None and picture.size != (side, side):
                picture = picture.resize((side, side), image.Resampling.BILINEAR)
            return np.asarray(picture)
    except Exception as error:  # damaged pictures raise whatever their format's reader stumbles over
        raise damaged(path, error, "a picture that Pillow can read") from error


def decode_pictures(
    request: Request, root: Path, paths: Sequence[Path], shape: tuple[int, ...], side: int | None
) -> Array:
    """All pictures as bytes (N, channels, height, width), decoded once. Without `side` each must have `shape`."""
    mode = "RGB" if shape[0] == 3 else "L"

    def decode(new: Callable[..., Array]) -> None:
        x = new("x", np.uint8, (len(paths), *shape))
        for index, path in enumerate(paths):
            picture = open_picture(path, mode, side)
            picture = picture[None] if mode == "L" else picture.transpose(2, 0, 1)
            if picture.shape != shape:
                raise _wrong_size(path, picture.shape[2], picture.shape[1], f"{shape[2]} x {shape[1]}")
            x[index] = picture
            request.report(index + 1, len(paths))

    return decode_once(request.name, {"shape": shape, "side": side}, root, paths, decode)["x"]


def read_folder(request: Request) -> Pool:
    """Class folders of pictures; or the same below `train` and `test`, which is then the published split."""
    folder = request.path
    assert folder is not None
    if not folder.is_dir():
        raise SparsonaError(
            f"'{folder}' is not a folder",
            expected="a folder with one folder of pictures per class",
            hint=f"from here it would be '{folder.resolve()}'",
        )
    is_split = all((folder / part).is_dir() for part in ("train", "test"))
    train = _list_classes(folder / "train" if is_split else folder)
    test = _list_classes(folder / "test") if is_split else []
    classes = sorted({label for _, label in train})
    if unseen := sorted({label for _, label in test} - set(classes)):
        raise SparsonaError(
            f"'{folder / 'test'}' has a class '{unseen[0]}' that 'train' lacks",
            expected="the same class folders in both",
        )
    if request.class_names is not None:
        if others := [name for name in classes if clean_name(name) not in request.class_names]:
            raise unknown_name(f"class folder in '{folder}':", others[0], request.class_names)
        numbers = {name: request.class_names.index(clean_name(name)) for name in classes}
    else:
        numbers = {name: number for number, name in enumerate(classes)}
    paths = [path for path, _ in train + test]
    shape = _common_shape(paths, request.resize)
    x = decode_pictures(request, folder, paths, shape, request.resize)
    y = np.array([numbers[label] for _, label in train + test], dtype=np.int64)
    view = make_view(request, shape)
    names = request.class_names or clean_names(classes, "classes")
    num_train = len(train) if is_split else None
    return Pool(folder.resolve().name, x, y, len(names), num_train, None, view, class_names=names)


def read_tiny_imagenet(request: Request) -> Pool | None:
    """Tiny-ImageNet; its test pictures have no labels, so that the validation pictures are the test set."""
    root = next((p for p in request.places if (p / "train").is_dir() and (p / "val").is_dir()), None)
    if root is None:
        return None
    train = _list_classes(root / "train", deep=True)
    notes = root / "val" / "val_annotations.txt"
    test = _read_notes(notes) if notes.is_file() else _list_classes(root / "val", deep=True)
    numbers = {label: number for number, label in enumerate(sorted({label for _, label in train}))}
    if unseen := next((path for path, label in test if label not in numbers), None):
        raise damaged(unseen, "its class is not among those of 'train'")
    y = np.array([numbers[label] for _, label in train + test], dtype=np.int64)
    side = request.resize or 64
    x = decode_pictures(request, root, [path for path, _ in train + test], (3, side, side), request.resize)
    return image_pool(request, root, x, y, len(train))


def _list_classes(folder: Path, deep: bool = False) -> Labelled:
    """The pictures of each class folder and the folder's name; `deep`: or of a folder `images` in it."""
    found: Labelled = []
    for group in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        inner = group / "images"
        pictures = sorted((inner if deep and inner.is_dir() else group).iterdir())
        found += [(path, group.name) for path in pictures if path.suffix.lower() in ENDINGS and path.is_file()]
    if not found:
        raise SparsonaError(
            f"'{folder}' has no pictures",
            expected=f"one folder per class with pictures in it ({', '.join(sorted(ENDINGS))})",
        )
    return found


def _read_notes(path: Path) -> Labelled:
    """Lines of picture, class and a box, between tabs."""
    expected = "lines of picture, tab, class, in UTF-8"
    try:
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise damaged(path, error, expected) from error
    pictures = path.parent / "images"
    if not rows or any(len(row) < 2 or not (pictures / Path(row[0]).name).is_file() for row in rows):
        raise damaged(path, "it names pictures that are not in 'images' beside it", expected)
    return [(pictures / Path(row[0]).name, row[1]) for row in rows]


def _common_shape(paths: Sequence[Path], side: int | None) -> tuple[int, ...]:
    """The shape that all pictures have, or will have: in colour if any of them is."""
    image: Any = require("PIL.Image", "images", "reading picture files")
    sizes, is_grey = [], True
    for path in paths:
        try:
            with image.open(path) as picture:  # reads no more than the head of the file
                sizes.append(picture.size)
                is_grey &= picture.mode in ("1", "L")
        except Exception as error:
            raise damaged(path, error, "a picture that Pillow can read") from error
    for path, size in zip(paths, sizes, strict=True):
        if side is None and size != sizes[0]:
            raise _wrong_size(path, size[0], size[1], f"{sizes[0][0]} x {sizes[0][1]}, as '{paths[0].name}'")
    width, height = (side, side) if side else sizes[0]
    return (1 if is_grey else 3, height, width)


def _wrong_size(path: Path, width: int, height: int, expected: str) -> SparsonaError:
    return SparsonaError(
        f"'{path}' has {width} x {height} pixels",
        expected=expected,
        hint="give `resize`, say 64, to make all of them equal",
    )
