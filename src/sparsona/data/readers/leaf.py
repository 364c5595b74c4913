"""LEAF's JSON files: FEMNIST by writer, Shakespeare by role, each with its own training and test examples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.tokens import NUM_SPECIAL, PAD, UNKNOWN
from sparsona.data.pool import Array, Pool
from sparsona.data.readers.decoded import decode_once
from sparsona.data.readers.files import Request, damaged
from sparsona.data.readers.images import image_pool
from sparsona.data.readers.text import make_vocabulary

SIDE = 28
User = tuple[str, list[Any], list[Any]]


def read_femnist(request: Request) -> Pool | None:
    """FEMNIST as LEAF writes it: black (0.0) on white (1.0), 62 classes. Writers are owners."""
    if (files := _find(request)) is None:
        return None

    def decode(new: Callable[..., Array]) -> None:
        sizes, numbers = _survey(files, request)
        x, y = new("x", np.uint8, (sum(sizes), 1, SIDE, SIDE)), new("y", np.int64, (sum(sizes),))
        owners = new("owners", np.int64, (sum(sizes),))
        new("num_train", np.int64, (1,))[:] = sizes[0]
        start = 0
        for path, (user, inputs, labels) in _each_user(files.both, request):
            stop = start + len(labels)
            try:
                images = np.array(inputs).reshape(len(labels), 1, SIDE, SIDE)
                classes = np.array(labels)
                if images.dtype.kind not in "iuf" or classes.dtype.kind not in "iu":
                    raise ValueError(f"images of {images.dtype} and classes of {classes.dtype}")
                y[start:stop] = classes
            except (ValueError, TypeError, OverflowError) as error:
                raise damaged(
                    path, f"user '{user}': {error}", "784 numbers and a class, a whole number, for each image"
                ) from error
            if not ((images >= 0) & (images <= 1)).all():
                raise damaged(path, f"user '{user}' has pixels outside 0 to 1", "pixels from 0.0 to 1.0")
            x[start:stop] = np.rint(images * 255)
            owners[start:stop] = numbers[user]
            start = stop

    arrays = decode_once(request.name, {}, files.root, files.both, decode)
    return image_pool(
        request, files.root, arrays["x"], arrays["y"], int(arrays["num_train"][0]), np.asarray(arrays["owners"])
    )


def read_shakespeare(request: Request) -> Pool | None:
    """Shakespeare as LEAF writes it: 80 characters, and the one that follows, predicted at the last position alone.

    With `sequence_length`, the last so many of the characters. The vocabulary is that of the training examples.
    """
    if (files := _find(request)) is None:
        return None

    def decode(new: Callable[..., Array]) -> None:
        sizes, numbers = _survey(files, request)
        counts: Counter[str] = Counter()
        width = 0
        for path, (user, inputs, targets) in _each_user(files.train, request):
            _check_texts(path, user, inputs, targets, width := width or len(inputs[0]))
            counts.update("".join(inputs) + "".join(targets))
        length = request.sequence_length or width
        if length > width:
            raise SparsonaError(f"sequence_length {length}", expected=f"at most {width}, which these files have")
        table = np.full(0x110000, UNKNOWN, dtype=np.int32)  # by code point
        vocabulary = make_vocabulary(counts)
        for character, number in vocabulary.items():
            table[ord(character)] = number
        x, y = (new(name, np.int32, (sum(sizes), length)) for name in ("x", "y"))
        owners = new("owners", np.int64, (sum(sizes),))
        new("counts", np.int64, (2,))[:] = sizes[0], len(vocabulary) + NUM_SPECIAL
        y[:] = PAD
        start = 0
        for path, (user, inputs, targets) in _each_user(files.both, request):
            _check_texts(path, user, inputs, targets, width)
            stop = start + len(inputs)
            x[start:stop] = table[_code_points(inputs)].reshape(-1, width)[:, -length:]
            y[start:stop, -1] = table[_code_points(targets)]
            owners[start:stop] = numbers[user]
            start = stop

    options = {"sequence_length": request.sequence_length}
    arrays = decode_once(request.name, options, files.root, files.both, decode)
    num_train, num_classes = map(int, arrays["counts"])
    owners, length = np.asarray(arrays["owners"]), arrays["x"].shape[1]
    # LEAF's windows slide by one character: two have none in common only if they are further apart than they are long.
    return Pool(request.name, arrays["x"], arrays["y"], num_classes, num_train, owners, overlap=length)


class _Files(NamedTuple):
    root: Path
    train: list[Path]
    test: list[Path]

    @property
    def both(self) -> list[Path]:
        return self.train + self.test


def _find(request: Request) -> _Files | None:
    """LEAF's `train` and `test`, in the place itself or in `data` as LEAF has it."""
    for place in request.places:
        for root in (place, place / "data"):
            train, test = (sorted((root / part).glob("*.json")) for part in ("train", "test"))
            if train and test:
                return _Files(root, train, test)
    return None


def _survey(files: _Files, request: Request) -> tuple[list[int], dict[str, int]]:
    """How many examples both parts have, and a number for each user."""
    sizes, users = [0, 0], set()
    for index, paths in enumerate((files.train, files.test)):
        for _, (user, inputs, _) in _each_user(paths, request):
            sizes[index] += len(inputs)
            users.add(user)
    if not all(sizes):
        raise damaged((files.train if not sizes[0] else files.test)[0], "there are no examples")
    return sizes, {user: number for number, user in enumerate(sorted(users))}


def _each_user(paths: list[Path], request: Request) -> Iterator[tuple[Path, User]]:
    expected = '{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}'
    for number, path in enumerate(paths):
        try:
            content = json.loads(path.read_bytes())
            users = [
                (user, content["user_data"][user]["x"], content["user_data"][user]["y"]) for user in content["users"]
            ]
            if not all(isinstance(x, list) and isinstance(y, list) and len(x) == len(y) for _, x, y in users):
                raise ValueError("x and y of a user are not lists of equal length")
            if len({user for user, _, _ in users}) < len(users):
                raise ValueError("a user is listed twice")
        except KeyError as error:
            raise damaged(path, f"it lacks the key {error}", expected) from error
        except (ValueError, TypeError, RecursionError) as error:
            raise damaged(path, error, expected) from error
        yield from ((path, user) for user in users if user[1])
        request.report(number + 1, len(paths))


def _check_texts(path: Path, user: str, inputs: list[Any], targets: list[Any], width: int) -> None:
    if not all(isinstance(text, str) for text in inputs + targets) or {*map(len, inputs)} != {width}:
        raise damaged(path, f"user '{user}' has texts of other lengths than {width}", "characters, all of one length")
    if {*map(len, targets)} != {1}:
        raise damaged(path, f"user '{user}' has targets that are not single characters")


def _code_points(texts: list[str]) -> Array:
    return np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
