"""The data of one client of a run on several machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.printable import warn_once
from sparsona.data import SOURCES
from sparsona.data.client_index import ClientIndex
from sparsona.data.federation import Federation
from sparsona.data.names import listed
from sparsona.data.partition.by_owner import known_owners
from sparsona.data.pool import Pool
from sparsona.deploy.greeting import check_class_names
from sparsona.experiment.build import ExampleKind, read_pool, share
from sparsona.experiment.terms import Terms
from sparsona.runs.options import RunConfig, in_groups
from sparsona.runs.validation import validate


def own_data(terms: Terms, index: int, source: str, data_dir: str | None = None, **options: Any) -> Federation:
    """A client's data, as that of client `index` among clients without any.

    Args:
        terms: of the run.
        index: the client.
        source: "arrays:mine.npz" or "folder:pictures": all of it is this client's. The name of a data set: the share of
            it that this client has in a simulation of the run.
        data_dir: folder that is searched first for the data's files.
        options: how the data is read and split: validation_rate, test_rate, seed, and for a data set partition and so
            on.

    Returns:
        The federation.
    """
    return _share(terms, _read(terms, source, data_dir, options), index, source)


def everyones_data(
    terms: Terms, sources: Sequence[str], data_dir: str | None = None, **options: Any
) -> list[Federation]:
    """The data of all clients, each as `own_data` returns it.

    Args:
        terms: of the run.
        sources: the name of a data set, of which each client takes its share, or a source for each client of the
            roster.
        data_dir: as for `own_data`.
        options: as for `own_data`.

    Returns:
        A federation for each client.
    """
    num = terms.num_clients
    if len(sources) == 1 and not _is_own(sources[0]):
        shared = _read(terms, sources[0], data_dir, options)
        return [_share(terms, shared, index, sources[0]) for index in range(num)]
    if len(sources) != num:
        raise SparsonaError(
            f"data of {len(sources)} client{'s' * (len(sources) != 1)}",
            expected=f"a data set that is shared out, or one source for each of {num}",
            hint="repeat --data, once for each client in the order of the roster",
        )
    return [own_data(terms, index, source, data_dir, **options) for index, source in enumerate(sources)]


def options_for(is_own: bool) -> list[str]:
    """The options that say how a client's data is read and split; of its own data, not how it is shared out."""
    found = [name for name in (*in_groups("reading"), *in_groups("sharing")) if name not in ("clients", "novel")]
    return ["seed", *(name for name in found if not (is_own and name in ("partition", "partition_seed")))]


def _is_own(source: str) -> bool:
    """Whether all of a source is one client's."""
    return spec.parse("data set", source).name not in SOURCES or source.partition(":")[0] in ("arrays", "folder")


def _read(terms: Terms, source: str, data_dir: str | None, options: Mapping[str, Any]) -> Federation:
    for name in options:
        if name not in (known := options_for(is_own := _is_own(source))):
            what = "a client's own data" if is_own else "a client's share of a data set"
            raise unknown_name(f"option of {what}", name, known)
    given = {"seed": terms.config.seed, "data": source, "data_dir": data_dir, **options}
    is_own = _is_own(source)
    own: dict[str, Any] = {"partition": "iid", "clients": 1} if is_own else {"clients": terms.num_clients}
    if terms.kind.targets not in ("classes", "tokens"):  # a client's targets need not tell, such as whole numbers
        own["task"] = terms.kind.task
    config = validate(RunConfig, {"method": terms.config.method, **own, **given}, "the client's data")
    # A client need not have every class: how many there are, the file says.
    is_classes = is_own and terms.kind.targets == "classes"
    names = terms.class_names if is_own and terms.kind.targets in ("classes", "binary") else ()
    num_classes = terms.kind.num_classes if is_classes else None
    pool = read_pool(config, num_classes=num_classes, class_names=names or None)
    if is_own and pool.owners is not None:
        _warn_of_owners(pool, source)
    return share(pool, config)


def _warn_of_owners(pool: Pool, source: str) -> None:
    """Say so where the data of several owners becomes that of one client: the patients of a hospital may be meant, or
    not."""
    assert pool.owners is not None
    owners = known_owners(pool.owners)
    if len(owners) < 2:
        return
    numbers = owners if pool.owner_numbers is None else pool.owner_numbers
    names = pool.owner_names or tuple(map(str, numbers.tolist()))
    warn_once(
        f"'{source}' has examples of {len(names):,} owners, all of whom are one client here: {listed(names)}; if each "
        "is to be a client, save a file for each"
    )


def _share(terms: Terms, shared: Federation, index: int, source: str) -> Federation:
    """What a client has of the data that was read, checked against the terms."""
    found = alone(shared, 0 if _is_own(source) else index, index, terms.num_clients)
    kind = ExampleKind.of(found)
    if kind.packing is not None:
        raise SparsonaError(
            f"examples of several inputs: {kind.packing.describe()}",
            expected=f"one array of inputs, which '{terms.file.path}' describes",
            hint="concatenate them, and split them in the model; or simulate the run in one process",
        )
    if kind != terms.kind and (kind.shape, kind.targets) != (terms.kind.shape, terms.kind.targets):
        raise SparsonaError(
            f"examples of shape {kind.shape} that have {kind.targets}",
            expected=f"shape {terms.kind.shape} and {terms.kind.targets}, as '{terms.file.path}' says",
            hint="reshape the arrays; or, if all clients have such examples, make the file anew with `sparsona "
            f"federation new --input {'x'.join(map(str, kind.shape))}`"
            if kind.shape != terms.kind.shape
            else "use the data that the federation is about",
        )
    if kind.num_classes > terms.kind.num_classes:
        raise SparsonaError(
            f"labels of {kind.num_classes} classes",
            expected=f"at most {terms.kind.num_classes}, as '{terms.file.path}' says",
            hint="labels are whole numbers from 0",
        )
    if _is_own(source) and found.class_names and kind.num_classes < terms.kind.num_classes:
        raise SparsonaError(
            f"'{source}' has {len(found.class_names)} of {terms.kind.num_classes} classes, and '{terms.file.path}' "
            "does not say which they are",
            expected="all classes, or their names in the federation file",
            hint="`sparsona federation new --class-names` names them; or save arrays with class_names",
        )
    check_class_names(found.class_names, terms.class_names, f"'{source}'", f"'{terms.file.path}'")
    names = found.class_names if found.num_classes == terms.kind.num_classes else None
    return replace(found, num_classes=terms.kind.num_classes, class_names=names)


def alone(federation: Federation, client: int, index: int, num_clients: int) -> Federation:
    """The data of one client of a federation, as client `index` of so many; the others have none here."""
    split = federation.splits[client]
    entries = torch.cat([split.train, split.validation, split.test])
    sizes = np.zeros((num_clients, 3), dtype=np.int64)
    sizes[index] = [len(split.train), len(split.validation), len(split.test)]
    x, y = federation.x[entries].clone(), federation.y[entries].clone()
    # The others' names are not known here.
    splits = ClientIndex(torch.arange(len(entries)), sizes)
    return replace(federation, x=x, y=y, splits=splits, client_names=None, client_owners=None)
