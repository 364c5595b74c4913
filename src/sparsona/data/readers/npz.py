"""Arrays saved with numpy: the user's own, or a published set in that form."""

from __future__ import annotations

import difflib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.packing import Packing
from sparsona.core.printable import warn_once
from sparsona.data.catalog import how_to_save
from sparsona.data.names import Names, clean_name, clean_names
from sparsona.data.partition.by_owner import known_owners, number_owners
from sparsona.data.pool import Array, Pool, View
from sparsona.data.readers.files import Request, damaged, find
from sparsona.data.readers.images import channels_first, image_pool, make_view

MAX_TOKENS = 10_000_000  # each has a vector in the model
NOT_SAVED = (ValueError, OSError, EOFError, AttributeError, TypeError, MemoryError, zipfile.BadZipFile, zlib.error)
LARGE, MOST_SHRUNK = 64 << 20, 300  # bytes of an array; how many times smaller it may be compressed
EXPECTED = (
    "x and y; or x_train, y_train, x_test and y_test; and perhaps owners, or owners_train and owners_test, and "
    "class_names; for several inputs x_NAME in place of x, and x_NAME_train in place of x_train"
)
OWNERS = ("owners", "owner")
# What others call them: a file whose owners are not read would give a plausible and wrong experiment.
PEOPLE = (
    "subject",
    "subjects",
    "user",
    "users",
    "person",
    "persons",
    "patient",
    "patients",
    "client",
    "clients",
    "writer",
)


def read_npy(path: Path) -> Array:
    """The one array of a file."""
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError) as error:
        raise damaged(path, error, "an array saved with numpy.save") from error


def read_arrays(request: Request) -> Pool:
    """The user's own examples: images as bytes with channels first or last, tokens, or any numbers.

    Whole numbers (N, length) whose labels have the same shape are tokens; anything else becomes float32 unchanged. They
    are checked as `federate` checks arrays from Python.
    """
    from sparsona.data import validate  # needs torch
    from sparsona.data.given import name_classes

    path = request.path
    assert path is not None
    found = _read(path)
    x, num_train = found.x, found.num_train
    whose = None if found.owners is None else (found.owners, found.owner_names)
    where = f"'{path}': "
    classes = None if found.class_names is None else clean_names(found.class_names.tolist(), "classes")
    if classes is None and found.y.dtype.kind in "US":  # numbers say by themselves which class is meant
        classes = request.class_names
    num_named = 0 if classes is None else len(classes)
    (y,), classes = name_classes([found.y], [where], classes, whose)
    if not x.size:
        raise SparsonaError(f"{where}x has shape {x.shape}", expected="at least one number in each example")
    has_tokens = (
        request.task in ("auto", "classification")
        and x.dtype.kind in "iu"
        and y.dtype.kind in "iu"
        and y.ndim == 2
        and x.shape == y.shape
    )
    if has_tokens and (highest := max(int(x.max()), int(y.max()))) >= MAX_TOKENS:
        raise SparsonaError(f"{where}a token {highest}", expected=f"token numbers below {MAX_TOKENS:,}")
    is_image = x.dtype == np.uint8 and x.ndim in (3, 4) and not has_tokens
    x = channels_first(x) if is_image else x
    inputs = validate.check_inputs(x, where, as_bytes=is_image, as_tokens=has_tokens, owners=whose)
    task = validate.find_task([y], request.task)
    labels = validate.check_targets(y, where, as_tokens=has_tokens, task=request.task, owners=whose)
    # One client of several machines: what class a text is, each must know without the others.
    if classes is not None and request.num_classes not in (None, num_named):
        raise SparsonaError(
            f"{where}labels with {len(classes)} names, for a run of {request.num_classes} classes"
            if num_named
            else f"{where}the labels are texts, and the file has no class_names: which class is which is not known",
            expected="class_names in the file: all classes of the run, in the same order for every client",
            hint=f"numpy.savez(..., class_names=[...]) with {request.num_classes} names",
        )
    if labels.dim() != 1:  # tokens, or numbers
        classes = None
    num_classes = validate.count_outputs(
        labels, None if classes else request.num_classes, inputs, task, classes, request.task
    )
    if is_image:
        view = make_view(request, tuple(inputs.shape[1:]))
    else:
        view = View()
        _refuse_views(request, path)
    y = labels.numpy()
    if y.dtype != np.float32:
        y = y.astype(np.int32 if has_tokens else np.int64)
    return Pool(
        path.stem,
        inputs.numpy(),
        y,
        num_classes,
        num_train,
        None if found.owners is None else number_owners(found.owners),
        view,
        task=task,
        packing=found.packing,
        owner_names=found.owner_names,
        class_names=classes,
        owner_numbers=known_owners(found.owners) if found.owners is not None and not found.owner_names else None,
    )


def read_new(path: Path) -> tuple[Any, Array, Array | None]:
    """Examples to evaluate a model on, and their owners if the file names them: x, y and owners, or x_test, y_test and
    owners_test where it has these; several inputs as a dict."""
    import torch

    read = _read(path)
    x, y, owners = (None if part is None else part[read.num_train or 0 :] for part in (read.x, read.y, read.owners))
    assert x is not None
    assert y is not None
    if owners is not None and read.owner_names:
        owners = np.array([*read.owner_names, ""])[owners]  # -1, unknown, is the last
    if read.packing is None:
        return x, y, owners
    found = read.packing.unpack(torch.from_numpy(x))
    assert isinstance(found, dict), "inputs in a file have names"
    return {name: value.numpy() for name, value in found.items()}, y, owners


def has_owners(path: Path) -> bool:
    """Whether a file names the owners of its examples; False where it cannot be read, which its reader reports."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.removesuffix("_train.npy").removesuffix(".npy") in OWNERS for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def read_published(request: Request) -> Pool | None:
    """A published set of images that was saved as NAME.npz; it has the published size."""
    paths = None if request.resize else find(request.places, f"{request.name}.npz")
    if paths is None:
        return None
    path = paths[0]
    found = _read(path)
    x, y, num_train = found.x, found.y, found.num_train
    owners = None if found.owners is None else number_owners(found.owners)
    if x.dtype != np.uint8 or y.ndim != 1 or y.dtype.kind not in "iu":
        raise damaged(
            path, f"x is {x.dtype} and y is {y.dtype} of shape {y.shape}", "images as bytes, and their classes"
        )
    return image_pool(request, path, channels_first(x), y, num_train, owners)


@dataclass(frozen=True, eq=False)
class Saved:
    """What a file holds, training examples first. Owners are numbers: those of the file, or of names in their order."""

    x: Array
    y: Array
    num_train: int | None
    owners: Array | None
    owner_names: Names
    class_names: Array | None
    packing: Packing | None


def _read(path: Path) -> Saved:
    if not path.is_file():
        raise SparsonaError(
            f"'{path}' does not exist",
            expected=f"a file saved with numpy.savez that has {EXPECTED}",
            hint=_nearest(path),
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            unknown = [name for name in saved.files if name not in _KNOWN]
            # Those that begin with x_ may be several inputs.
            read = [name for name in saved.files if name in _KNOWN or name.startswith("x_")]
            _refuse_bombs(path, saved)
            saved_arrays = {name: _array(saved, name, path) for name in read}
        if junk := [name for name, array in saved_arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"'{junk[0]}' is not an array")
    except NOT_SAVED as error:
        expected = "a file saved with numpy.savez, without objects in it"
        if _begins_as_zip(path):
            raise damaged(path, error, expected) from error
        raise damaged(path, "it is no npz file, whatever it is called", expected, how_to_save(path)) from error
    packing = _pack_inputs(saved_arrays, path)
    if packing is not None:
        unknown = [name for name in unknown if not name.startswith("x_")]
    known = {name: array for name, array in saved_arrays.items() if name in _KNOWN}
    arrays = {name.replace("owner_", "owners_") if name != "owner" else "owners": one for name, one in known.items()}
    if len(arrays) < len(known):
        raise damaged(path, "it has both 'owner' and 'owners'", EXPECTED)
    _tell_unknown(path, unknown)
    train = "" if "x" in arrays else "_train"
    parts = [train, "_test"] if train or "x_test" in arrays else [""]
    if absent := [name for part in parts for name in (f"x{part}", f"y{part}") if name not in arrays]:
        raise damaged(path, f"it lacks '{absent[0]}'", EXPECTED)
    if both := [name for name in arrays if name != "class_names" and not _belongs(name, parts)]:
        raise damaged(path, f"'{both[0]}' beside '{f'x{train}'}'", EXPECTED)
    for part in parts:
        x, y = arrays[f"x{part}"], arrays[f"y{part}"]
        if x.ndim and y.ndim and not len(x) and not len(y):
            raise damaged(path, f"x{part} and y{part} have no examples", "one or more")
        if not x.ndim or not y.ndim or len(x) != len(y):
            raise damaged(path, f"x{part} has shape {x.shape} and y{part} {y.shape}", "as many labels as examples")
        for key, array in (("x", x), ("y", y)):
            if array.shape[1:] != arrays[f"{key}{parts[0]}"].shape[1:]:
                raise damaged(path, f"{key}{part} has rows of shape {array.shape[1:]}", f"those of {key}{parts[0]}")
    x, y = (np.concatenate([arrays[f"{key}{part}"] for part in parts]) for key in "xy")
    owners, names = None, None
    if each := [array for part in parts if (array := arrays.get(f"owners{part}")) is not None]:
        needed = [(len(arrays[f"x{part}"]),) for part in parts]
        if (shapes := [array.shape for array in each]) != needed:
            raise damaged(
                path,
                f"owners of shape {' and '.join(map(str, shapes))}",
                f"a number or name for each example, shape {' and '.join(map(str, needed))}",
            )
        from sparsona.data.given import owner_names  # needs torch

        owners, names = owner_names(np.concatenate(each), f"'{path}': ")
    num_train = len(arrays[f"x{train}"]) if len(parts) == 2 else None
    classes = arrays.get("class_names")
    if classes is not None and (classes.ndim != 1 or classes.dtype.kind not in "US"):
        raise damaged(path, f"class_names is {classes.dtype} of shape {classes.shape}", "a name for each class")
    return Saved(x, y, num_train, owners, names, classes, packing)


_KNOWN = frozenset(
    [f"{name}{part}" for name in ("x", "y", *OWNERS) for part in ("", "_train", "_test")] + ["class_names"]
)


def _belongs(name: str, parts: list[str]) -> bool:
    return any(name in (f"x{part}", f"y{part}", f"owners{part}") for part in parts)


def _tell_unknown(path: Path, unknown: list[str]) -> None:
    """Refuse an array that is named almost like one that is read, and warn of others: they are not used."""
    for name in unknown:
        plain = name.lower().replace("-", "_").replace(" ", "_")
        near = [plain] if plain in _KNOWN else difflib.get_close_matches(plain, sorted(_KNOWN), n=1, cutoff=0.75)
        if near:
            raise SparsonaError(
                f"'{path}' has an array '{clean_name(name)}', which is not read",
                expected=EXPECTED,
                hint=f"did you mean '{near[0]}'? Rename it, or leave it out of the file",
            )
    if who := [name for name in unknown if name.lower() in PEOPLE]:
        raise SparsonaError(
            f"'{path}' has an array '{who[0]}', which is not read: clients would be drawn at random",
            expected=EXPECTED,
            hint=f"call it 'owners', and every {who[0]} is a client; or leave it out of the file",
        )
    if unknown:
        names = ", ".join(f"'{clean_name(name)}'" for name in unknown)
        warn_once(f"'{path}': arrays that are not used: {names}; read are {EXPECTED}")


def _begins_as_zip(path: Path) -> bool:
    """Whether a file that cannot be read is an npz file that was damaged, and no other kind of file."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"PK"
    except OSError:
        return True


def _refuse_bombs(path: Path, saved: Any) -> None:
    """A few bytes that unpack to more than memory holds are no data: measurements shrink to a tenth, not to nothing."""
    for entry in saved.zip.infolist() if getattr(saved, "zip", None) is not None else []:
        if entry.file_size > LARGE and entry.file_size > MOST_SHRUNK * max(entry.compress_size, 1):
            raise SparsonaError(
                f"'{path}': '{clean_name(entry.filename)}' has {entry.compress_size:,} bytes that unpack to "
                f"{entry.file_size:,}",
                expected=f"at most {MOST_SHRUNK} times as many",
                hint="if the data is mostly zeros, save it with numpy.savez instead of savez_compressed",
            )


def _array(saved: Any, name: str, path: Path) -> Any:
    try:
        return saved[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        hint = f"save {name}.astype(str) for texts, or {name}.astype(float) for numbers: data frames give objects"
        if name.startswith(OWNERS):  # a client would be called "None"
            hint += '; first write "" in place of None or NaN for examples without an owner'
        elif name[0] == "y":
            hint += "; first drop the examples without a label"
        raise SparsonaError(
            f"'{path}': the array '{name}' holds Python objects",
            expected="numbers or texts of a numpy type",
            hint=hint,
        ) from error


def _nearest(path: Path) -> str:
    """A file of nearly that name, or where it was looked for."""
    folder = path.resolve().parent
    names = [one.name for one in folder.glob("*.npz")] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean '{path.with_name(near[0])}'?" if near else f"it was looked for in '{folder}'"


def _pack_inputs(arrays: dict[str, Array], path: Path) -> Packing | None:
    """Several inputs in a file, x_NAME or x_NAME_train and x_NAME_test, packed into x or x_train and x_test; None where
    there is one."""
    if "x" in arrays or "x_train" in arrays or "x_test" in arrays:
        return None
    packing = None
    for part in [""] if "y" in arrays else ["_train", "_test"]:
        names = [
            name for name in arrays if name.startswith("x_") and name.endswith(part) and name not in ("x_", "x" + part)
        ]
        inputs = {name[2 : len(name) - len(part)]: arrays[name] for name in names}
        if inputs:
            from sparsona.data.packing import pack  # needs torch

            rows, packing = pack(inputs, f"'{path}', " + (f"{part[1:]}, " if part else ""), packing)
            arrays[f"x{part}"] = rows.numpy()
    return packing


def _refuse_views(request: Request, path: Path) -> None:
    if request.crop is not None or request.augment:
        raise SparsonaError(
            f"'{path}' cannot be cropped or augmented", expected="images as bytes, (N, channels, height, width)"
        )
