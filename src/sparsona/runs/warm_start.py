"""A run that begins where another ended: the model that a run leaves behind, and the one that a run starts from."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout
from sparsona.core.tree import Tree
from sparsona.runs.facts import RunFacts, WarmStartFacts, same_data
from sparsona.runs.folder import GLOBAL_FILE, INITIAL_FILE, START_FILE, RunFolder, reached


@dataclass(frozen=True, eq=False)
class WarmStart:
    """Weights to begin with, and what is known about where they come from."""

    weights: Mapping[str, Tensor]
    facts: WarmStartFacts

    @property
    def file(self) -> bytes:
        return _as_file(self.weights)

    def describe(self, layout: Layout, run: RunFacts) -> WarmStartFacts:
        """The facts that a run with this start records, by those that it has so far."""
        taken = sum(slot.name in self.weights for slot in layout.slots)
        return replace(self.facts, taken=taken, of=len(layout.slots), same_data=same_data(self.facts, run))


def save_global_model(
    folder: RunFolder, model: Tree | None, frozen: Mapping[str, Tensor], *, again: bool = False
) -> None:
    """Write the shared model beside the checkpoint, for other runs to start from: the frozen parameters as well, since
    the trained ones were trained for them. One that is there stays, unless it is to be written `again`."""
    if model is not None and (again or not folder.has(GLOBAL_FILE)):
        folder.write(GLOBAL_FILE, _as_file({name: model[name] for name in model} | dict(frozen)))


def warm_start_from(path: str | Path) -> WarmStart:
    """The final global model of a run."""
    folder = RunFolder.open(Path(path))
    facts, found = folder.facts, reached(folder.path)
    if not found.finished:
        raise SparsonaError(
            f"a warm start from '{folder.path}', which reached round {found.completed} of {folder.config['rounds']}",
            expected="a finished run",
            hint=f"`sparsona resume {folder.path}` continues it",
        )
    if not folder.has(GLOBAL_FILE):
        raise SparsonaError(
            f"a warm start from '{folder.path}': {facts.title} has no global model",
            expected="a run of a method with a global model, such as fedavg",
            hint="a run of an older version, or one that was killed at its end, gets its model when it is resumed"
            if not facts.alone
            else "start from a run of another method",
        )
    weights = read_weights(folder, GLOBAL_FILE)
    known = WarmStartFacts(
        str(folder.path),
        facts.method,
        found.completed,
        _digest(weights),
        facts.federation,
        data=facts.data,
        client_digest=facts.client_digest,
    )
    return WarmStart(weights, known)


def initial_file(model: nn.Module) -> bytes:
    """The weights and buffers of a module that was passed from Python: another process cannot build it as it was."""
    return _as_file({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})


def with_initial_weights(folder: RunFolder, model: Any) -> Any:
    """A module with the weights that the run was started with, where the folder has them; any other model as it is."""
    path = folder.path / INITIAL_FILE
    if not isinstance(model, nn.Module) or not path.exists():
        return model
    stored, made = read_weights(folder, INITIAL_FILE), copy.deepcopy(model)
    shapes = {name: value.shape for name, value in made.state_dict().items() if isinstance(value, Tensor)}
    if shapes != {name: value.shape for name, value in stored.items()}:
        raise other_model(folder, made)
    made.load_state_dict(stored, strict=False)
    return made


def other_model(folder: RunFolder, made: nn.Module) -> SparsonaError:
    """The error for a model that is not that of a run: what differs first, by the weights that the folder has."""
    file = next((name for name in (INITIAL_FILE, GLOBAL_FILE) if folder.has(name)), None)
    stored = {} if file is None else {name: list(value.shape) for name, value in read_weights(folder, file).items()}
    values = made.state_dict() if file == INITIAL_FILE else dict(made.named_parameters())
    shapes = {name: list(value.shape) for name, value in values.items() if isinstance(value, Tensor)}
    count, needed = sum(one.numel() for one in made.parameters()), folder.facts.num_parameters + folder.facts.num_frozen
    what = f": it has {count:,} parameters" if count != needed else ""
    expected = f"the {needed:,} parameters of the run, by name, shape and order"
    for name in [*shapes, *stored] if stored else []:
        if (mine := shapes.get(name)) != (theirs := stored.get(name)):
            what = f": its '{name}' has shape {mine}" if mine is not None else f": it has no '{name}'"
            expected = "no parameter of that name" if theirs is None else f"one of shape {theirs}, as in the run"
            break
    return SparsonaError(
        f"the model is not that of '{folder.path}'{what}",
        expected=expected,
        hint="build it with the options that it had",
    )


def stored_start(folder: RunFolder) -> WarmStart:
    """What a run began with, from its own folder: the run it came from may be gone."""
    weights, known = read_weights(folder, START_FILE), folder.facts.warm_start
    if known is None or _digest(weights) != known.weights:
        raise SparsonaError(
            f"'{folder.path / START_FILE}' is not what this run began with",
            expected="the file as it was written",
            hint="restore it from a copy, or start the run again in another folder",
        )
    return WarmStart(weights, known)


def check_layout(
    weights: Mapping[str, Tensor], layout: Layout, where: str, frozen: Mapping[str, Tensor] | None = None
) -> None:
    """Refuse weights of another network. One with more parameters (adapters, say) may begin with those of fewer; some
    of them may be frozen in this one."""
    shapes = {slot.name: tuple(slot.shape) for slot in layout.slots}
    shapes |= {name: tuple(value.shape) for name, value in (frozen or {}).items()}
    hint = "train both runs with the same --model, or one that only adds parameters"
    if not any(name in shapes for name in weights):
        raise SparsonaError(
            f"a warm start from {where}: no parameter has a name of this model's",
            expected=f"parameters such as '{next(iter(shapes))}', not '{min(weights)}'",
            hint=hint,
        )
    for name in [*(name for name in shapes if name in weights), *sorted(weights)]:
        if name not in shapes:
            raise SparsonaError(
                f"a warm start from {where}: this model has no '{name}'", expected="all its parameters here", hint=hint
            )
        if shapes[name] != (found := tuple(weights[name].shape)):
            raise SparsonaError(
                f"a warm start from {where}: its '{name}' has shape {list(found)}",
                expected=f"{list(shapes[name])}, as in this model",
                hint=hint,
            )


def _as_file(weights: Mapping[str, Tensor]) -> bytes:
    return save({name: value.detach().cpu().contiguous().clone() for name, value in weights.items()})


def _digest(weights: Mapping[str, Tensor]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        state.update(name.encode() + b"\0" + weights[name].cpu().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def read_weights(folder: RunFolder, name: str) -> dict[str, Tensor]:
    """The weights in a file of a run, by the names of parameters; SparsonaError if it is damaged, or another run's."""
    try:
        # Copied, in memory aligned as torch does it: where a buffer starts may decide how a product is summed.
        return {name: value.clone() for name, value in load(folder.read(name)).items()}
    except SafetensorError as error:
        raise SparsonaError(
            f"'{folder.path / name}' is damaged: {error}",
            expected="the file as sparsona wrote it",
            hint="restore it from a copy, or start the run again in another folder",
        ) from None
