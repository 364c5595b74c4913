"""Examples as people have them: arrays, torch Datasets and DataLoaders, Hugging Face datasets, data frames.

The last two are known by their attributes: neither package is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isclose
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.data.client_index import PARTS
from sparsona.data.names import Names, clean_name, clean_names
from sparsona.data.pool import Array
from sparsona.data.readers.images import channels_first
from sparsona.data.validate import Owners, as_array, describe_rows, what_is_in

TARGETS = ("label", "labels", "target", "y")  # columns that are taken for the target where none is named
NAMED = 5  # columns that a hint names
ALL = "all"  # in place of a part: everything of a client, still to be split
_SPACE = re.compile(r"^(?:\s|\\[tnr]|\\xa0)+|(?:\s|\\[tnr]|\\xa0)+$")  # around a name, as clean_name writes it
MAX_OWNER = 2**63 - 1  # as a number: owners are stored as int64
AS_NAMES = (  # a hint
    'owners=[str(one) for one in owners], or frame["COLUMN"].astype(str), makes names of them; write "" where one is '
    "missing"
)
# Texts that str() makes of missing and truth values, and what an input column has in their place.
_AS_NUMBER = {"": "nan", "None": "nan", "<NA>": "nan", "True": "1", "False": "0"}
MAX_EXAMPLES = 100_000_000  # of an iterable dataset, which may have no end


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are what: names as the user gave them.

    `owners`: those of the examples, where they were given apart from the table.
    """

    target: str | None = None
    inputs: str | Sequence[str] | None = None
    owner: str | None = None
    owners: Any = None


@dataclass(frozen=True, eq=False)
class Given:
    """Examples taken out of what the user passed: still to be checked.

    `class_names` where the source has them; `columns`: the names of those of `x`, of a table. `is_image`: pictures as
    bytes, channels first. `num_train`: the first so many are for training and the others for testing.
    """

    x: Any
    y: Any
    owners: Any = None
    class_names: Names = None
    is_image: bool = False
    num_train: int | None = None
    columns: Names = None


def read_client(client: Any, where: str, columns: Columns, seed: int) -> dict[str, Given]:
    """The parts of a client's data by name; under `ALL` what is still to be split.

    Args:
        client: (x, y); four or six arrays; a Dataset, DataLoader or table; several of these, for training, perhaps
            validation, and testing; or a dict of them by part.
        where: who it is, for messages.
        columns: which columns of tables are what.
        seed: of random transforms.

    Returns:
        By part, or by `ALL`, what was given.
    """
    if isinstance(client, Mapping) and (set(client) & set(PARTS)):
        for part in client:
            if part not in PARTS:
                raise unknown_name(f"part of {where}", str(part), PARTS)
        return {
            part: read_examples(client[part], f"{where}, {part}", columns, seed) for part in PARTS if part in client
        }
    if isinstance(client, list | tuple) and len(client) in (2, 3) and all(is_table(part) for part in client):
        parts = ("train", "test") if len(client) == 2 else PARTS
        return {
            part: read_examples(one, f"{where}, {part}", columns, seed) for part, one in zip(parts, client, strict=True)
        }
    if isinstance(client, list | tuple) and len(client) in (4, 6):
        parts = ("train", "test") if len(client) == 4 else PARTS
        return {
            part: _pair(x, y, f"{where}, {part}", columns)
            for part, x, y in zip(parts, client[::2], client[1::2], strict=True)
        }
    if isinstance(client, list | tuple) and len(client) != 2:
        raise SparsonaError(
            f"{where} has {len(client)} arrays",
            expected="2: x, y; 4: x_train, y_train, x_test, y_test; 6: with x_validation, y_validation in the middle",
        )
    return {ALL: read_examples(client, where, columns, seed)}


def is_clients(source: Any) -> bool:
    """Whether a value is a dict of clients by name: neither of parts, nor of columns."""
    if not isinstance(source, Mapping) or not source or set(source) & set(PARTS):
        return False
    return all(isinstance(one, Mapping | tuple) or is_table(one) for one in source.values())


def read_pool(x: Any, y: Any, columns: Columns, seed: int) -> Given:
    """Examples of all owners together: arrays, a table, or a dict of tables for training and testing."""
    if y is not None:
        if _is_frame(x):
            return _from_frame(x, "the data", columns, y)
        if is_table(x):
            raise SparsonaError(
                f"a {type(x).__name__} together with y",
                expected="one of the two: such data has its targets with it",
                hint="leave y out; target='label' names the column of a table",
            )
        if named := [name for name in ("target", "inputs", "owner") if getattr(columns, name) is not None]:
            raise SparsonaError(
                f"{named[0]}= names a column, and x is a {type(x).__name__}",
                expected="a table, such as a data frame",
                hint="owners= takes whose each row is" if named[0] == "owner" else f"leave {named[0]} out",
            )
        return Given(x, y)
    if not (is_table(x) or isinstance(x, Mapping)):
        raise SparsonaError("x without y", expected="the targets of the examples", hint="federate(x, y, clients=20)")
    if not (isinstance(x, Mapping) and set(x) & set(PARTS)):
        return read_examples(x, "the data", columns, seed)
    if set(x) - set(PARTS) or not {"train", "test"} <= set(x) or "validation" in x:
        raise SparsonaError(
            f"a dict of {', '.join(map(str, x))}",
            expected='"train" and "test": the published split',
            hint="validation examples are taken out of each client's training examples, see validation_rate",
        )
    # Owners are those of all rows, training first: whether a column has them is seen in the training rows.
    of_part = {"train": columns, "test": replace(columns, owners=None)}
    parts = {part: read_examples(x[part], f"the data, {part}", mine, seed) for part, mine in of_part.items()}
    first = parts["train"]

    def joined(name: str) -> Any:
        found = [getattr(part, name) for part in parts.values()]
        if any(one is None for one in found):
            return None
        try:
            return np.concatenate([np.asarray(one) for one in found])
        except ValueError:
            shapes = ", ".join(str(np.shape(one)) for one in found)
            raise SparsonaError(
                f"train and test have {name} of shapes {shapes}", expected="rows of one shape"
            ) from None

    is_image = all(part.is_image for part in parts.values())
    return Given(joined("x"), joined("y"), joined("owners"), first.class_names, is_image, len(first.y), first.columns)


def read_examples(source: Any, where: str, columns: Columns, seed: int) -> Given:
    """The inputs and targets of (x, y), a Dataset, a DataLoader or a table."""
    if isinstance(source, list | tuple) and len(source) == 2 and not is_table(source[1]):
        return _pair(source[0], source[1], where, columns)
    if isinstance(source, DataLoader):
        return _from_items(_loader_items(source, where), where, columns, seed)
    if _is_frame(source):
        return _from_frame(source, where, columns)
    if isinstance(source, Mapping):
        return _from_columns({str(name): values for name, values in source.items()}, where, columns)
    if _is_hugging_face(source):
        found = (
            _from_columns({name: source[name] for name in source.column_names}, where, columns)
            if hasattr(source, "__len__")
            else _from_items(iter(source), where, columns, seed)
        )
        return _with_label_names(found, source.features, columns)
    if is_table(source):
        return _from_items(_items(source), where, columns, seed)
    raise SparsonaError(
        f"{where}: a {type(source).__name__} in place of examples",
        expected="(x, y), a torch Dataset or DataLoader, a Hugging Face dataset, a data frame, or a dict "
        '{"train": ..., "test": ...} of these',
    )


def is_table(value: Any) -> bool:
    """Whether a value holds inputs and targets together, as no array does."""
    if isinstance(value, DataLoader | Dataset) or _is_frame(value) or _is_hugging_face(value):
        return True
    is_plain = isinstance(value, Tensor | np.ndarray | list | tuple | str | bytes | Mapping) or hasattr(
        value, "__array__"
    )
    return not is_plain and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def name_classes(
    targets: Sequence[Any], wheres: Sequence[str], given: Names, owners: Owners = None
) -> tuple[list[Any], Names]:
    """Labels that are texts as numbers, and the names of the classes.

    Args:
        targets: labels, of several clients or parts.
        wheres: what each is, for messages.
        given: the names of the classes, if they are known; None: the labels that occur, sorted.
        owners: of the examples, as `owner_names` returns them, for messages.

    Returns:
        The targets, those that are texts numbered; and the names, None where there are none.
    """
    arrays = [_texts(y) for y in targets]
    if all(array is None for array in arrays):
        return list(targets), given
    for array, where in zip(arrays, wheres, strict=True):
        if array is not None and len(missing := np.flatnonzero(array == "")):
            raise SparsonaError(
                f"{where}y has no label in {describe_rows(missing, len(array), owners)}",
                expected="a label for each example",
                hint="drop these examples",
            )
    names = given
    if names is None:
        names = clean_names(
            sorted({text for array in arrays if array is not None for text in array.tolist()}), "classes"
        )
        _refuse_twins(names, f"{wheres[0] if len(wheres) == 1 else ''}labels", "y")
    number = {name: place for place, name in enumerate(names)}
    numbered: list[Any] = []
    for y, array, where in zip(targets, arrays, wheres, strict=True):
        if array is None:
            if len(y):
                raise SparsonaError(
                    f"{where}labels are numbers, and texts elsewhere", expected="one kind of labels everywhere"
                )
            numbered.append(np.zeros(0, np.int64))
            continue
        for text in dict.fromkeys(array.tolist()):
            if text not in number:
                raise unknown_name(f"label in {where.rstrip(': ') or 'y'}:", text, names)
        numbered.append(np.array([number[text] for text in array.tolist()], dtype=np.int64))
    return numbered, names


def owner_names(owners: Any, where: str = "") -> tuple[Array, Names]:
    """Owners as int64, and their names where they are texts; missing ones are below 0.

    Names are in their sorted order, which is that of `number_owners`. Whole numbers with gaps, of which frames make
    floats or objects, are whole numbers again.
    """
    texts = _texts(owners)
    if texts is None:
        return _whole_numbers(_exact(owners), where), None
    found, numbers = np.unique(texts, return_inverse=True)
    has_unknown = len(found) > 0 and found[0] == ""
    names = clean_names(found[int(has_unknown) :].tolist(), "owners")
    _refuse_twins(names, "owners", "owners")
    return numbers.reshape(-1) - int(has_unknown), names


def _refuse_twins(names: Sequence[str], what: str, argument: str) -> None:
    """Refuse names that differ in white space around them alone: one class, or one person, would be two."""
    first: dict[str, str] = {}
    for name in names:
        if (twin := first.setdefault(_SPACE.sub("", name), name)) != name:
            raise SparsonaError(
                f"{what} that differ in white space alone: {twin!r} and {name!r}",
                expected="one text for each",
                hint=f"{argument} = [text.strip() for text in {argument}]",
            )


def _exact(values: Any) -> Array:
    """Values as an array. Where some are missing, numpy rounds the whole numbers of a list or column to floats."""
    array = np.asarray(values) if isinstance(values, Tensor) else as_array("owners", values, "")
    if array.dtype != np.float64 or isinstance(getattr(values, "dtype", None), np.dtype):
        return array
    plain = values.to_list() if hasattr(values, "to_list") else values
    is_rounded = isinstance(plain, list | tuple) and any(isinstance(one, int | np.integer) for one in plain)
    return np.array(plain, dtype=object) if is_rounded else array


def _whole_numbers(owners: Array, where: str) -> Array:
    """Owners that are whole numbers as int64, below 0 where one is missing.

    Floats too large to be exact are refused: they may be several owners, rounded to one.
    """
    if owners.ndim != 1 or owners.dtype.kind not in "iufO":
        raise _no_owners(owners, where, what_is_in(owners))
    numbers = owners
    if owners.dtype.kind in "fO":
        given = [None if _is_missing(one) else one for one in owners]
        found = [-1 if one is None else _whole(one) for one in given]
        floats: list[Any] = [one for one in given if isinstance(one, float | np.floating)]
        if odd := [one for one, number in zip(given, found, strict=True) if number is None]:
            are_floats = all(isinstance(one, float | np.floating) for one in odd)
            raise _no_owners(owners, where, what_is_in(np.array(floats) if are_floats else owners))
        if num_rounded := sum(abs(one) >= 2 / np.finfo(type(one)).eps for one in floats):  # float64: 2**53
            raise SparsonaError(
                f"{where}owners are {owners.dtype}, and {num_rounded:,} of {len(owners):,} are floats so large that "
                "they are rounded: different owners may be one number already",
                expected="whole numbers as integers, or names",
                hint='read them as such from the start: pandas.read_csv(..., dtype={"COLUMN": "Int64"})',
            )
        numbers = np.array([max(number, -1) for number in found if number is not None], dtype=object)
    if num_large := np.count_nonzero(numbers > MAX_OWNER):
        raise SparsonaError(
            f"{where}owners are {owners.dtype}, and {num_large:,} of {len(owners):,} are 2**63 or more",
            expected="whole numbers below 2**63, or names",
            hint=AS_NAMES,
        )
    return numbers.astype(np.int64)


def _no_owners(owners: Array, where: str, kinds: str) -> SparsonaError:
    return SparsonaError(
        f"{where}owners are {owners.dtype} of shape {owners.shape}{kinds}",
        expected="one for each example: a name, or a whole number from 0 (below 0: unknown)",
        hint=AS_NAMES,
    )


def _whole(value: Any) -> int | None:
    """A number of any type as an integer. None: it is no number, or not whole."""
    if not isinstance(value, Number) or isinstance(value, bool):
        return None
    try:
        whole = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):  # complex, NaN of Decimal, infinity
        return None
    return whole if whole == value else None


def _texts(values: Any) -> Array | None:
    """Texts that can be printed; "" where one is missing. None: they are not texts."""
    if isinstance(values, Tensor):
        return None
    if isinstance(values, list | tuple):  # numpy would make a text of NaN: "nan"
        values = [None if isinstance(value, float) and value != value else value for value in values]
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    if array.ndim != 1 or array.dtype.kind not in "USOT" or not len(array):
        return None
    plain = [None if _is_missing(value) else value for value in array.tolist()]
    if not any(isinstance(value, str | bytes) for value in plain):
        return None
    if not all(value is None or isinstance(value, str | bytes) for value in plain):
        return None
    return np.array(["" if value is None else clean_name(value) for value in plain], dtype=object).astype(str)


def _is_missing(value: Any) -> bool:
    if isinstance(value, str | bytes):
        return not value
    return value is None or (isinstance(value, float | np.floating) and value != value) or repr(value) == "<NA>"


def _is_frame(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("columns", "dtypes", "to_numpy"))


def _is_hugging_face(value: Any) -> bool:
    return hasattr(value, "column_names") and hasattr(value, "features") and not isinstance(value, Mapping)


def _loader_items(loader: DataLoader[Any], where: str) -> Iterator[Any]:
    """The items of a DataLoader's dataset, each once and in order, whatever batches the loader would make."""
    dataset, collate = loader.dataset, loader.collate_fn
    items: Iterable[Any]
    if isinstance(dataset, IterableDataset):
        items = _items(dataset)
    elif isinstance(loader.sampler, SubsetRandomSampler):
        items = (dataset[index] for index in sorted(set(map(int, loader.sampler.indices))))
    elif isinstance(loader.sampler, SequentialSampler) or (
        isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement
    ):
        items = _items(dataset)
    else:
        raise SparsonaError(
            f"{where}: a DataLoader with a {type(loader.sampler).__name__}",
            expected="one that visits each example once: which examples a client has must be certain",
            hint="pass its dataset, or torch.utils.data.Subset(dataset, indices)",
        )
    for item in items:
        # A collate function of the user's may make the inputs: then it is applied to each example by itself.
        yield item if collate is default_collate or loader.batch_size is None else _first_row(collate([item]))


def _first_row(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: values[0] for name, values in batch.items()}
    return tuple(values[0] for values in batch)


def _items(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return iter(dataset)
    return (dataset[index] for index in range(len(dataset)))


def _from_items(items: Iterator[Any], where: str, columns: Columns, seed: int) -> Given:
    """Items one by one, under a fixed seed: a random transform is applied once, and the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = list(islice(items, MAX_EXAMPLES + 1))
    if len(found) > MAX_EXAMPLES:
        raise SparsonaError(f"{where}: more than {MAX_EXAMPLES:,} examples", expected="a dataset that ends")
    if not found:
        return Given(np.zeros((0, 0), np.float32), np.zeros(0, np.int64))
    first = found[0]
    if isinstance(first, Mapping) and all(isinstance(one, Mapping) and set(one) == set(first) for one in found):
        return _from_columns({str(name): [one[name] for one in found] for name in first}, where, columns)
    if not all(isinstance(one, list | tuple) and len(one) == 2 for one in found):
        odd = next(one for one in found if not (isinstance(one, list | tuple) and len(one) == 2))
        what = f"{type(odd).__name__}s of {len(odd)}" if isinstance(odd, list | tuple) else f"a {type(odd).__name__}"
        raise SparsonaError(
            f"{where}: items of the dataset are {what}",
            expected="(x, y), or dicts with the same names in each",
            hint="wrap it in a Dataset whose __getitem__ returns (x, y)",
        )
    x, is_image = _stack_inputs([x for x, _ in found], f"{where}: x")
    return Given(x, _stack([y for _, y in found], f"{where}: y")[0], None, None, is_image)


def _from_frame(frame: Any, where: str, columns: Columns, y: Any = None) -> Given:
    """The columns of a frame; with `y`, its targets are given apart from it."""
    names = [str(name) for name in frame.columns]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SparsonaError(f"{where}: two columns are called '{twice[0]}'", expected="a name of its own for each")
    by_name = dict(zip(names, frame.columns, strict=True))
    target, inputs, owner = _choose(names, where, columns, y is None)
    table = {name: frame[by_name[name]] for name in (*inputs, *filter(None, (target, owner)))}
    _refuse_owners_among({name: table[name] for name in inputs}, where, columns)
    x = _frame_inputs({name: table[name] for name in inputs}, where)
    return Given(
        x,
        y if target is None else np.asarray(table[target]),
        None if owner is None else _exact(table[owner]),
        columns=tuple(inputs),
    )


def _pair(x: Any, y: Any, where: str, columns: Columns) -> Given:
    """Inputs that are given apart from their targets."""
    if _is_frame(x):
        return _from_frame(x, where, columns, y)
    if is_table(x):
        raise SparsonaError(
            f"{where}: a {type(x).__name__} together with y", expected="one of the two: it has its targets with it"
        )
    return Given(x, y)


def _refuse_owners_among(inputs: Mapping[str, Any], where: str, columns: Columns) -> None:
    """Refuse a column among the inputs that says whose each example is, unless it was named as an input."""
    if columns.owners is None or columns.inputs is not None:
        return
    given = columns.owners  # numpy would make a text of NaN in a list
    owners = np.array(given, dtype=object) if isinstance(given, list | tuple) else _exact(given)
    for name, column in inputs.items():
        if _are_same(_exact(column), owners):
            raise SparsonaError(
                f"{where}: the column '{clean_name(name)}' has the owners, and is among the inputs",
                expected="inputs that do not say whose an example is",
                hint=f"owner={name!r} in place of owners= takes it out of them; inputs=[...] that name it keep it",
            )


def _are_same(values: Array, others: Array) -> bool:
    """Whether values are the first of others, or all, as a model would see them."""
    if values.ndim != 1 or others.ndim != 1 or not 0 < len(values) <= len(others):
        return False
    for value, other in zip(values.tolist(), others.tolist(), strict=False):
        one, two = _as_number(value), _as_number(other)
        if isinstance(one, float) and isinstance(two, float):
            if not isclose(one, two, rel_tol=2**-24):  # inputs become float32
                return False
        elif one != two:
            return False
    return True


def _as_number(value: Any) -> float | str | None:
    """The number that a value is or is written as: 5, 5.0 and '5' are one owner. None: it is missing; else a text."""
    text = (value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)).strip()
    try:
        number = float(_AS_NUMBER.get(text, text))
    except ValueError:
        return text
    return number if number >= 0 else None


def _frame_inputs(columns: Mapping[str, Any], where: str) -> Array:
    """Columns of a frame side by side."""
    found = {name: _numbers(column) for name, column in columns.items()}
    if text := [name for name, array in found.items() if array is None]:
        kinds = ", ".join(f"'{clean_name(name)}' ({columns[name].dtype})" for name in text[:NAMED])
        raise SparsonaError(
            f"{where}: columns that are no numbers: {kinds}",
            expected="numbers in every input column",
            hint=_hint_numbers({name: columns[name] for name in text}),
        )
    return np.stack([np.asarray(array, np.float32) for array in found.values()], axis=1)


def _hint_numbers(columns: Mapping[str, Any]) -> str:
    """What to do with columns of a frame that are no numbers."""
    left = [name for name, column in columns.items() if _is_no_category(column)]
    categories = [name for name in columns if name not in left]
    hints = []
    if left:
        hints.append(
            f"leave out {', '.join(repr(clean_name(name)) for name in left[:NAMED])}, times or texts that "
            "nearly every row has its own of: inputs=[...] names the columns to use"
        )
    if categories:
        hints.append(f"frame = pandas.get_dummies(frame, columns={categories[:NAMED]!r}) makes numbers of categories")
    return "; ".join(hints) if left else f"{hints[0]}; or choose columns with inputs=[...]"


def _is_no_category(column: Any) -> bool:
    """Whether a column of no numbers has times, or a value of its own in more than half of the rows."""
    array = np.asarray(column)
    if array.dtype.kind in "mM" or any(hasattr(value, "isoformat") for value in array[:1].tolist()):
        return True
    return len({repr(value) for value in array.tolist()}) > max(2, len(array) / 2)


def _numbers(column: Any) -> Array | None:
    """A column of numbers or truth values; missing ones are NaN. None: it holds something else."""
    array = np.asarray(column)
    if array.dtype.kind in "fiub":
        return array
    if getattr(column.dtype, "kind", "O") not in "fiub":  # pandas' own numbers with <NA> come as objects
        return None
    return np.array([np.nan if _is_missing(value) else value for value in array.tolist()], dtype=np.float64)


def _from_columns(table: Mapping[str, Any], where: str, columns: Columns) -> Given:
    target, inputs, owner = _choose(list(table), where, columns)
    y, owners = (None if name is None else _stack(table[name], f"{where}: '{name}'")[0] for name in (target, owner))
    if len(inputs) == 1:
        x, is_image = _stack(table[inputs[0]], f"{where}: '{inputs[0]}'")
        return Given(x, y, owners, None, is_image)
    found = {name: np.asarray(_stack(table[name], f"{where}: '{name}'")[0]) for name in inputs}
    _refuse_owners_among(found, where, columns)
    if text := [name for name, array in found.items() if array.dtype.kind not in "fiub"]:
        raise SparsonaError(
            f"{where}: columns that are no numbers: {', '.join(map(repr, text[:5]))}",
            expected="numbers in every input column",
            hint="turn them into numbers first, or choose columns with inputs=[...]",
        )
    if any(array.ndim != 1 for array in found.values()):
        return Given(found, y, owners)  # several inputs, by name
    x = np.stack([np.asarray(array, np.float32) for array in found.values()], axis=1)
    return Given(x, y, owners, columns=tuple(found))


def _choose(
    names: Sequence[str], where: str, columns: Columns, has_target: bool = True
) -> tuple[str | None, list[str], str | None]:
    """The columns for the target, the inputs and the owner; no target unless the table has it."""
    inputs = [columns.inputs] if isinstance(columns.inputs, str) else columns.inputs
    for name in filter(None, (columns.target, columns.owner, *(inputs or ()))):
        if name not in names:
            raise unknown_name(f"column of {where}:", name, names)
    target = columns.target
    if target is not None and not has_target:
        raise SparsonaError(
            f"{where}: target={target!r} together with y", expected="one of the two", hint="leave y out"
        )
    if target is None and has_target:
        likely = [name for name in names if name in TARGETS and name != columns.owner]
        if len(likely) != 1:
            others = [name for name in likely or names if name != columns.owner]
            raise SparsonaError(
                f"{where}: "
                + (f"targets may be in {' or '.join(likely)}" if likely else "no column is named as the target"),
                expected=f"target= one of {', '.join(names[:20])}" + ", ..." * (len(names) > 20),
                hint=f"target={others[-1]!r}, if that is what is to be predicted" if others else "",
            )
        target = likely[0]
    chosen = [name for name in names if name not in (target, columns.owner)] if inputs is None else list(inputs)
    if not chosen:
        raise SparsonaError(f"{where}: no column is left for inputs", expected="at least one beside the target")
    return target, chosen, columns.owner


def _with_label_names(found: Given, features: Any, columns: Columns) -> Given:
    """With the names of the classes, where a Hugging Face dataset's features have them."""
    likely = [columns.target] if columns.target else [name for name in TARGETS if name in (features or {})]
    names = getattr(features[likely[0]], "names", None) if features and likely else None
    return replace(found, class_names=clean_names(names, "classes")) if names else found


def _stack_inputs(items: list[Any], where: str) -> tuple[Any, bool]:
    """Inputs of all items; an item of several inputs, a dict or a tuple of arrays, becomes several arrays."""
    first = items[0]
    if isinstance(first, Mapping) and all(isinstance(one, Mapping) and set(one) == set(first) for one in items):
        return {name: _stack([one[name] for one in items], f"{where}['{name}']")[0] for name in first}, False
    is_tuple = isinstance(first, tuple) and all(hasattr(part, "shape") for part in first)
    if is_tuple and all(isinstance(one, tuple) and len(one) == len(first) for one in items):
        return tuple(_stack(list(each), f"{where}[{k}]")[0] for k, each in enumerate(zip(*items, strict=True))), False
    return _stack(items, where)


def _stack(values: Any, where: str) -> tuple[Any, bool]:
    """Inputs or targets as one array, and whether they are pictures."""
    if isinstance(values, Tensor | np.ndarray):
        return values, False
    rows = list(values)
    is_image = bool(rows) and all(hasattr(row, "getbands") and hasattr(row, "convert") for row in rows)
    if rows and all(isinstance(row, Tensor) for row in rows) and len({row.shape for row in rows}) == 1:
        return torch.stack(rows), False
    arrays = [np.asarray(row.detach().cpu() if isinstance(row, Tensor) else row) for row in rows]
    shapes = list(dict.fromkeys(array.shape for array in arrays))
    if len(shapes) > 1:
        raise SparsonaError(
            f"{where} has examples of several shapes: {', '.join(map(str, shapes[:3]))}{', ...' * (len(shapes) > 3)}",
            expected="one shape for all examples",
            hint="pad, crop or resize them first",
        )
    array = np.stack(arrays) if arrays else np.zeros((0, 0), np.float32)
    return (channels_first(array) if is_image and array.dtype == np.uint8 else array), is_image
