"""The user's own data as a cost needs it: what an example is, and how many there are.

Reading it checks it, which needs torch; the data sets of the catalog are known without being read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparsona import models
from sparsona.core.targets import TASKS
from sparsona.runs.options import RunConfig, in_groups


@dataclass(frozen=True)
class OwnSource:
    """Data of the user's, with what a cost reads of a `SourceCard`; `num_owners` None: its owners are not known."""

    name: str
    num_examples: int
    num_train: int | None
    num_classes: int
    input_shape: tuple[int, ...]
    has_tokens: bool
    num_owners: int | None
    default_model: str | None
    is_natural: bool = False  # examples by owner are counted


def read_own(run: RunConfig) -> OwnSource:
    """Read the files that `data` names, as a run reads them.

    Args:
        run: the options, whose `data` is `arrays:PATH` or `folder:PATH`.

    Returns:
        What is in them.
    """
    from sparsona.data.read import read  # here: most costs read nothing

    options = {key: value for key in in_groups("reading") if (value := getattr(run, key)) is not None}
    folders = [Path(run.data_dir).expanduser()] if run.data_dir else []
    pool = read(run.data, folders, **options)
    shape = pool.view.shape(tuple(pool.x.shape[1:]))
    is_next_token = pool.y.ndim == 2 and pool.y.dtype.kind == "i"
    targets = "tokens" if is_next_token else TASKS.get(pool.task, "classes")
    found = None
    if pool.packing is None:
        found = models.suggest(shape, pool.num_classes, targets, pool.has_tokens)
    owners = None
    if pool.owners is not None:
        trained = pool.owners[: pool.num_train]
        owners = len(set(trained[trained >= 0].tolist()))
    return OwnSource(pool.name, len(pool.y), pool.num_train, pool.num_classes, shape, pool.has_tokens, owners, found)
