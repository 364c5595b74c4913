"""Reads a data set by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import expand
from sparsona.data.card import SourceCard
from sparsona.data.catalog import OWN, SOURCES, parse_spec
from sparsona.data.pool import Pool
from sparsona.data.readers.files import Listen, Request, list_places

# Far beyond any practical use: a larger number is a mistake that would otherwise end in a lack of memory.
LIMITS = {"sequence_length": 10_000, "vocabulary_size": 10_000_000, "resize": 4_096}


def read(
    spec: str,
    folders: Sequence[Path] = (),
    *,
    sequence_length: int | None = None,
    vocabulary_size: int | None = None,
    resize: int | None = None,
    crop: int | None = None,
    augment: bool | None = None,
    listen: Listen | None = None,
    num_classes: int | None = None,
    task: str = "auto",
    class_names: tuple[str, ...] | None = None,
) -> Pool:
    """Read a data set.

    Args:
        spec: A name of `SOURCES`, or the user's own files: `arrays:PATH.npz` or `folder:PATH`.
        folders: Folders to search for its files, in each first a subfolder named like the set; then the cache.
        sequence_length: Tokens in a sequence of text (20).
        vocabulary_size: Number of words that are kept, the most frequent ones (10,000).
        resize: Side of the squares that pictures are resized to.
        crop: Side of the squares that training cuts out of images at random.
        augment: Whether training crops and flips images; None: whether the catalog says so.
        listen: Called with the work done and the total (0: unknown) while a set is decoded.
        num_classes: Of the user's own arrays, which may lack some; None: as many as there are labels.
        task: What targets are, as for `federate`.
        class_names: The classes by which the user's labels that are texts, or folders of pictures, are numbered; None:
            those of the file, or those that occur, sorted.

    Returns:
        The examples with their owners and the published split, as far as there are any.

    Raises:
        SparsonaError: If the set or its files are not found, a file is damaged, or an option does not apply.

    Example:
        >>> from sparsona.data.read import read
        >>> pool = read("digits")
        >>> pool.x.shape, pool.num_classes
        ((1797, 1, 8, 8), 10)
    """
    name, path = parse_spec(spec)
    entry = OWN[name] if path else SOURCES[name]
    numbers = {"sequence_length": sequence_length, "vocabulary_size": vocabulary_size, "resize": resize, "crop": crop}
    _check_options(spec, entry.options, numbers, augment)
    places = list_places(entry.folders, folders) if isinstance(entry, SourceCard) else ()
    own = expand(path) if path else None
    request = Request(
        name,
        places,
        own,
        sequence_length,
        vocabulary_size,
        resize,
        crop,
        augment,
        listen,
        num_classes,
        task,
        class_names,
    )
    for reader in entry.readers:
        module, _, function = reader.partition(":")
        # Imported here: a reader may need Pillow or h5py, and most are not needed.
        pool: Pool | None = getattr(import_module(f"sparsona.data.readers.{module}"), function)(request)
        if pool is not None:
            return pool if pool.task != "auto" else _with_task(pool, task)
    raise _not_found(SOURCES[name], places)


def _with_task(pool: Pool, task: str) -> Pool:
    """A data set whose labels are classes, to be predicted in another way: by one logit, or as numbers."""
    if task in ("auto", "classification"):
        return pool
    from sparsona.data import validate  # needs torch

    y = validate.check_targets(pool.y, f"'{pool.name}': ", task=task)
    return replace(pool, y=y.numpy(), num_classes=validate.count_outputs(y, None, None, task), task=task)


def _check_options(spec: str, known: Sequence[str], numbers: dict[str, int | None], augment: bool | None) -> None:
    given = [key for key, value in numbers.items() if value is not None] + ["augment"] * bool(augment)
    if useless := [key for key in given if key not in known]:
        raise SparsonaError(
            f"'{useless[0]}' with the data set '{spec}'",
            expected=f"options that apply to it: {', '.join(known) or 'it has none'}",
            hint=f"leave out '{useless[0]}'",
        )
    if wrong := [key for key, value in numbers.items() if value is not None and value < 1]:
        raise SparsonaError(f"{wrong[0]} is {numbers[wrong[0]]}", expected="1 or more")
    if wrong := [key for key, limit in LIMITS.items() if (numbers[key] or 0) > limit]:
        raise SparsonaError(f"{wrong[0]} is {numbers[wrong[0]]}", expected=f"at most {LIMITS[wrong[0]]:,}")


def _not_found(card: SourceCard, places: Sequence[Path]) -> SparsonaError:
    formats = "\n            or ".join(card.files)
    searched = "\n            ".join(f"'{place}'" for place in places)
    get = f"`sparsona data get {card.name}` downloads it" if card.mirrors else f"see {card.address}"
    return SparsonaError(
        f"the files of '{card.name}' were not found in\n            {searched}",
        expected=formats,
        hint=f"{get}; or name the folder where they are (--data-dir)",
    )
