"""Checkpoints on disk. The manifest is authoritative: what it does not name does not exist.

One file per owner (the server, the server's memory of a client, a client, a peer's last message, a tuned model),
written only if that owner changed since the last checkpoint, so that the cost follows change and not the number of
clients.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.files import drafted_name
from sparsona.core.method import Method
from sparsona.core.tree import Tree, parts
from sparsona.core.update import Part, Support, Update
from sparsona.engine.gossip import Gossip
from sparsona.engine.jobs import Message
from sparsona.engine.population import Population
from sparsona.engine.spill import SpillStore
from sparsona.engine.star import Star, memories
from sparsona.engine.stored import fill, read_tensors, to_bytes
from sparsona.runs.files import check_plain, explain_disk_errors, read_file, write_atomically
from sparsona.runs.folder import GLOBAL_FILE, SUMMARY_FILE, RunFolder
from sparsona.runs.manifest import FOLDER, Manifest, Seal, is_checkpoint_file, read_manifest
from sparsona.wire.codec import encode

_KINDS = ("server", "client", "message", "tuned")  # of owners, of which there is one for each client


@dataclass(frozen=True)
class Progress:
    """A checkpoint in memory."""

    completed: int
    seconds: float
    population: Population
    tuned: dict[int, Any]
    finished: bool = False


@dataclass(frozen=True)
class _LastMessage:
    """A peer's last message. What its state holds as well, such as a model, is written only once."""

    message: Message
    state: Any

    @property
    def marks(self) -> tuple[object, ...]:
        """As `_marks`: an old message must not be kept alive to compare with it."""
        if isinstance(self.message, bytes):
            return (hash(self.message),)
        found = [thing for part in self.message.parts.values() for thing in (part.whole, part.mask, part.arrived)]
        return tuple(thing.identity if isinstance(thing, Tree) else thing for thing in found)

    def as_file(self) -> bytes:
        return save(self._as_tensors())

    def _as_tensors(self) -> dict[str, Tensor]:
        if isinstance(self.message, bytes):
            return {"message": _bytes(self.message)}
        update, places = (
            self.message,
            {leaf.identity: path for path, leaf in parts(self.state) if isinstance(leaf, Tree)},
        )
        found = []
        for name, part in update.parts.items():
            whole, mask = (None if t is None else places.get(t.identity, "") for t in (part.whole, part.mask))
            if not whole or mask == "":
                return {"message": _bytes(encode(update))}
            found.append([name, part.support.name, part.seed.hex(), whole, mask])
        recipe = {"sender": update.sender, "round": update.round, "weight": update.weight, "parts": found}
        return {"recipe": _bytes(json.dumps(recipe).encode())}


def _read_message(stored: dict[str, Tensor], state: Any, what: str) -> Message:
    """Read what `_LastMessage` wrote."""
    if "message" in stored:
        return stored["message"].numpy().tobytes()
    leaves = {path: leaf for path, leaf in parts(state) if isinstance(leaf, Tree)}
    try:
        recipe = json.loads(stored["recipe"].numpy().tobytes())
        made = {
            name: Part(
                leaves[whole].layout,
                None,
                Support[support],
                None if mask is None else leaves[mask],
                seed=bytes.fromhex(seed),
                whole=leaves[whole],
            )
            for name, support, seed, whole, mask in recipe["parts"]
        }
    except (KeyError, ValueError) as error:
        raise SparsonaError(
            f"the checkpoint of {what} does not match that client's state: {error}",
            expected="both as they were written",
            hint="use the version of sparsona, the model and the data this run was started with",
        ) from None
    return Update(recipe["sender"], recipe["round"], recipe["weight"], made)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Checkpoints:
    """The checkpoint of one run folder."""

    def __init__(self, folder: Path, method: Method) -> None:
        self._run, self._folder, self._method = folder, folder / FOLDER, method
        self._files: dict[str, str] = {}
        self._saved: dict[str, tuple[object, ...]] = {}  # what is on disk, to be compared by identity
        self._number, self._completed = 0, 0

    def save(self, progress: Progress, initial: Population, seal: Seal | None = None) -> None:
        """Write what changed, then the manifest with `seal`, then remove what it names no more."""
        check_plain(self._folder, is_folder=True)
        with explain_disk_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
        self._number += 1
        names = dict(self._files)
        saved = dict(self._saved)
        for owner, value in _owners(self._method, progress.population, progress.tuned, initial, saved):
            marks = _marks(value)
            if _same(marks, saved.get(owner)):
                continue
            name = f"{owner.replace('/', '-')}.{self._number}.safetensors"
            data = value.as_file() if isinstance(value, _LastMessage) else to_bytes(value)
            write_atomically(self._folder / name, data)
            names[owner] = f"{name} {zlib.crc32(data):08x}"
            saved[owner] = marks
        losses = dict(progress.population.losses)
        made = Manifest(progress.completed, progress.finished, progress.seconds, self._number, names, losses, seal)
        made.write(self._run)
        self._files, self._saved, self._completed = names, saved, progress.completed
        keep = {entry.split()[0] for entry in names.values()}
        with explain_disk_errors(self._folder), os.scandir(self._folder) as entries:
            for entry in entries:
                # What is not ours stays: somebody put it there, or it is no plain file.
                ours = is_checkpoint_file(drafted_name(entry.name) or entry.name)
                if ours and entry.name not in keep and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)

    def load(self, engine: Star | Gossip, initial: Population) -> Progress | None:
        """What the manifest names, or None if the run has none yet."""
        context, clients = engine.context, engine.clients
        manifest = read_manifest(self._run)
        if manifest is None:
            return None
        num = len(context.clients)
        for client in {*manifest.losses, *(one for kind in _KINDS for one, _ in manifest.clients(kind))}:
            if not 0 <= client < num:
                raise SparsonaError(
                    f"'{self._folder}' is a checkpoint with a client {client}",
                    expected=f"one of this run, with clients 0 to {num - 1}",
                    hint="restore the checkpoint that belongs to this run",
                )
        self._number, self._files, self._completed = manifest.number, dict(manifest.files), manifest.completed
        server = None
        if initial.server is not None:
            server = self._fill_server(initial.server, context.spill_store, manifest)
        states: dict[int, Any] = {}
        for client, entry in manifest.clients("client"):
            states[client] = fill(clients.blank_state(client), self._read(entry), f"the checkpoint of client {client}")
            context.spill_store.store(states[client])
        messages = {
            client: _read_message(self._read(entry), states.get(client), f"client {client}'s message")
            for client, entry in manifest.clients("message")
        }
        population = Population(server, states, messages, dict(manifest.losses))
        tuned: dict[int, Any] = {}
        last, clients = context.plan.round_at(context.plan.last), clients.at(states)
        for client, entry in manifest.clients("tuned"):
            work = clients.blank_tuned(engine.evaluation_job(population, client, last))
            tuned[client] = fill(work, self._read(entry), f"the checkpoint of client {client}'s tuned model")
            context.spill_store.store(tuned[client])
        self._saved = {
            owner: _marks(value)
            for owner, value in _owners(self._method, population, tuned, initial, self._files)
            if owner in self._files
        }
        return Progress(manifest.completed, manifest.seconds, population, tuned, manifest.finished)

    def _fill_server(self, server: Any, spill_store: SpillStore, manifest: Manifest) -> Any:
        """The server as stored: its own fields from one file, its memory of each changed client from another."""
        memory = memories(self._method, server)
        bare = replace(server, **{name: {} for name in memory})
        if "server" in self._files:
            bare = fill(bare, self._read(self._files["server"]), "the checkpoint of the server")
        changed = {name: dict(values) for name, values in memory.items()}
        for client, entry in manifest.clients("server"):
            own = {name: values[client] for name, values in memory.items() if client in values}
            found = fill(own, self._read(entry), f"the checkpoint of the server's memory of client {client}")
            spill_store.store(found)
            for name, value in found.items():
                changed[name][client] = value
        return replace(bare, **changed)

    def _read(self, entry: str) -> dict[str, Tensor]:
        name, _, checksum = entry.partition(" ")
        path = self._folder / name
        try:
            data = read_file(path)
            if f"{zlib.crc32(data):08x}" != checksum:
                raise ValueError(f"its checksum does not match: it differs since round {self._completed}")
            return read_tensors(data)
        except (OSError, ValueError) as error:
            raise SparsonaError(
                f"checkpoint file '{path}' is missing or damaged: {error}",
                expected="the file as it was written",
                hint="restore it from a copy, or start the run again in another folder",
            ) from None


def reopen(folder: RunFolder, dropped: Sequence[int] = ()) -> None:
    """Make a finished run one that goes on: what final tuning left is made anew, and so is what was evaluated after the
    last round; what was evaluated after the rounds `dropped` goes."""
    manifest = read_manifest(folder.path)
    if manifest is None:  # killed before the first checkpoint
        return
    files = {owner: name for owner, name in manifest.files.items() if not owner.startswith("tuned/")}
    seal = folder.seal
    if seal is not None:
        rounds = {key: one for key, one in seal.records.rounds.items() if key < manifest.completed}
        evaluations = {key: one for key, one in seal.records.evaluations.items() if key <= manifest.completed}
        evaluations |= dict.fromkeys({*dropped, manifest.completed} & evaluations.keys())
        records = replace(seal.records, rounds=rounds, evaluations=evaluations, file=None)
        seal = replace(seal, records=records).with_file(SUMMARY_FILE).with_file(GLOBAL_FILE)
    replace(manifest, finished=False, files=files, seal=seal).write(folder.path)
    folder.seal = seal


def _owners(
    method: Method, population: Population, tuned: Mapping[int, Any], initial: Population, saved: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Everything to be stored, by owner. A server's dict by client is one owner per client.

    What was not saved before and equals the start is left out: most clients, if there are many.
    """
    server, first = population.server, initial.server
    if server is not None:
        memory, before = memories(method, server), memories(method, first)
        bare = replace(server, **{name: {} for name in memory})
        start = None if first is None else replace(first, **{name: {} for name in before})
        if "server" in saved or not _same(_marks(bare), _marks(start)):
            yield "server", bare
        known = {int(owner[len("server/") :]) for owner in saved if owner.startswith("server/")}
        changed = {
            client
            for name, values in memory.items()
            for client, value in values.items()
            if before.get(name, {}).get(client) is not value
        }
        for client in sorted(changed | known):
            yield f"server/{client}", {name: values[client] for name, values in memory.items() if client in values}
    yield from ((f"client/{client}", state) for client, state in sorted(population.states.items()))
    for client, message in sorted(population.messages.items()):
        yield f"message/{client}", _LastMessage(message, population.states.get(client))
    yield from ((f"tuned/{client}", work) for client, work in sorted(tuned.items()))


def _marks(value: Any) -> tuple[object, ...]:
    """Identifies a value without holding it: values are never edited in place."""
    if isinstance(value, _LastMessage):
        return (*value.marks, *_marks(value.state))
    return tuple(leaf.identity if isinstance(leaf, Tree) else leaf for _, leaf in parts(value))


def _same(now: tuple[object, ...], before: tuple[object, ...] | None) -> bool:
    """Whether nothing changed."""
    return (
        before is not None
        and len(now) == len(before)
        and all(a is b or (type(a) is type(b) is int and a == b) for a, b in zip(now, before, strict=True))
    )
