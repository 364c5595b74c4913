"""Actors of a Ray cluster, on one machine or several. Same bits as `serial` on machines of one type.

An actor runs one turn at a time, on one thread of a CPU or on a GPU of its own. Neither its place nor its death changes
a bit: a turn is a function of its job and of the data, which every node receives once, and another actor repeats it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.version import VERSION
from sparsona.data.client_index import ClientIndex
from sparsona.data.federation import Federation
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Job, Outcome, Report
from sparsona.engine.profiler import IDLE, START, WAIT, Clock
from sparsona.engine.tempdirs import claim, make_folder
from sparsona.executors import numeric_mode
from sparsona.executors.backlog import TRIES, Backlog, PackedJob, not_started
from sparsona.executors.serial import take_turn
from sparsona.executors.worker import answer, is_importable, open_answer
from sparsona.executors.workers import MEMORY, THREADS, num_cores

PATIENCE = 120.0  # seconds without a single actor, after which the run fails: no node has room
ANSWER_TIME = 5.0  # seconds that an address, or an actor that is to report what it measured, has to answer
PREFIX = "sparsona-ray-"  # of folders that hold the sockets and logs of a cluster that was started here
LONGEST_FOLDER = 24  # characters of TMPDIR: the path of a socket has at most 107


def check_extra() -> None:
    """Raise SparsonaError if Ray is not installed. It is not imported, which takes a second."""
    if importlib.util.find_spec("ray") is None:
        raise SparsonaError(
            "executor ray without Ray, which is not installed",
            expected="the extra 'cluster'",
            hint="pip install 'sparsona[cluster]', on every machine of the cluster",
        )


@cache
def _token() -> str:
    """The secret of clusters that this process starts. One: Ray remembers the first."""
    return secrets.token_hex(32)


def versions() -> dict[str, str]:
    """What decides the bits of a turn, besides the machine."""
    return {"sparsona": VERSION, "torch": str(torch.__version__), "numpy": np.__version__}


class TurnTaker:
    """What an actor is: the clients' side in a process of its own. Ray runs its methods one after another."""

    def __init__(self, path: list[str], is_profiled: bool, by_value: bool) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)  # where a user's own modules are
        self._clock, self._by_value = Clock(is_on=is_profiled), by_value
        self._context: ClientContext | None = None
        self._idle = self._clock.measure(IDLE)
        self._idle.__enter__()

    def open(self, recipe: bytes, data: tuple[Any, ...]) -> bytes:
        """Build the context; the answer is what decides the bits here."""

        def act() -> dict[str, str]:
            with self._clock.measure(f"{START}build"):
                fields = pickle.loads(recipe)
                self._context = ClientContext(federation=_from_arrays(*data), clock=self._clock, **fields)
            return versions()

        return self._answer(act)

    def take(self, body: bytes) -> bytes:
        """Run a packed job."""

        def act() -> Outcome:
            assert self._context is not None
            with self._clock.measure("pipe"):
                _, job = pickle.loads(body)  # only the driver that made this actor can call it
            with numeric_mode(self._context):
                return take_turn(self._context, job)

        return self._answer(act)

    def report(self) -> bytes:
        """What was measured since the last answer."""
        return self._answer(lambda: None)

    def ping(self) -> None:
        """Return at once: the actor was alive when it began what was requested next."""

    def _answer(self, act: Any) -> bytes:
        self._idle.__exit__(None, None, None)
        body = answer(act, self._clock, self._by_value)
        self._idle = self._clock.measure(IDLE)
        self._idle.__enter__()
        return body


class _Actor:
    """The driver's side of an actor: what it was asked last."""

    def __init__(self, cluster: RayCluster, failed_starts: int = 0) -> None:
        self._clock, self._number = cluster._clock, cluster._clock.add_worker()
        self.failed_starts = failed_starts
        self.handle = cluster._actor_class.remote(sys.path, self._clock.is_on, cluster._by_value)
        self.job: tuple[int, Job] | None = None
        self.opening = True
        self.request: Any = self.handle.open.remote(cluster._recipe, cluster._data)
        self.ping: Any = None

    @property
    def is_idle(self) -> bool:
        return self.request is None

    def send(self, packed: PackedJob) -> None:
        self.job = (packed.number, packed.job)
        with self._clock.measure("pipe"):
            self.ping = self.handle.ping.remote() if packed.is_repeated else None
            self.request = self.handle.take.remote(packed.body)

    def receive(self, ray: Any) -> Any:
        """The answer to the last request, which has arrived; raises RayError if the actor was lost."""
        with self._clock.measure("pipe"):
            message = pickle.loads(ray.get(self.request))
        self.request = None
        value, report = open_answer(message)
        self._clock.record_worker(self._number, report)
        return value

    def began(self, ray: Any) -> bool:
        """Whether this actor, now lost, had begun its job. A first try counts as begun: it is not known."""
        if self.ping is None:
            return True
        try:
            ray.get(self.ping, timeout=0)
        except ray.exceptions.RayError:  # it was dead before: a lost node has many such
            return False
        return True

    def end(self, ray: Any) -> None:
        if self._clock.is_on and self.is_idle:
            with contextlib.suppress(ray.exceptions.RayError):
                body = ray.get(self.handle.report.remote(), timeout=ANSWER_TIME)
                self._clock.record_worker(self._number, open_answer(pickle.loads(body))[1])
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.handle)
        self._clock.end_worker(self._number)


class RayCluster:
    """The executor for several machines, or several GPUs.

    Args:
        context: the clients' side. With a GPU as its device, every actor has one.
        address: that of a running cluster, as `ray start` prints it, or "auto" for the one on this machine. None: the
            one in RAY_ADDRESS; without that, or with "local", a cluster of this machine alone is started.
        num_actors: the number of actors; None: one for each core or GPU of the cluster.
        report: is called with what the start-up is doing.
    """

    def __init__(
        self,
        context: ClientContext,
        address: str | None = None,
        num_actors: int | None = None,
        report: Report = lambda text: None,
    ) -> None:
        check_extra()
        self._clock, self._report, self._num_actors = context.clock, report, num_actors
        self._device, self.encodes = context.device, context.encodes
        self._by_value = not is_importable(context.make_method)
        self._actors: list[_Actor] = []
        self._folder: Path | None = None
        self._variables: set[str] = set()  # of the environment, which `close` removes
        self._is_ours = False
        report("starting Ray")
        before = set(os.environ)
        import ray

        self._ray = ray
        try:
            self._connect(address or os.environ.get("RAY_ADDRESS") or "local", before)
            fields = ("task", "make_method", "plan", "capacities", "device", "precision")
            # In the cluster's object store: whichever node needs them copies them once, for all its actors.
            self._recipe = ray.put(cloudpickle.dumps({name: getattr(context, name) for name in fields}))
            self._data = ray.put(_to_arrays(context.federation))
            is_gpu = self._device.type == "cuda"
            # Lost actors are replaced here, where their jobs are, and not by Ray.
            self._actor_class = ray.remote(
                num_cpus=0 if is_gpu else 1,
                num_gpus=1 if is_gpu else 0,
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": {**MEMORY, **THREADS}},
            )(TurnTaker)
            if not self._add_actors():
                raise SparsonaError(
                    f"no {self._resource} in the Ray cluster",
                    expected=f"nodes that have a {self._resource}",
                    hint="see `ray status`, or use --device cpu" if is_gpu else "see `ray status`",
                )
        except ray.exceptions.RayError as error:
            self.close()
            raise SparsonaError(
                f"the Ray cluster does not take the data: {_cause(error)}",
                expected="room for it in every node's object store",
                hint="ray start --object-store-memory BYTES",
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def _resource(self) -> str:
        return "GPU" if self._device.type == "cuda" else "CPU"

    def _connect(self, address: str, before: set[str]) -> None:
        """Connect to a cluster, or start one; `before`: the environment's variables, which `close` restores."""
        ray = self._ray
        if ray.is_initialized():  # by the user's program, which also ends it
            connected = ray.get_runtime_context().gcs_address
            if address not in ("local", "auto", connected):
                raise SparsonaError(
                    f"executor ray at '{address}': this process is connected to the Ray cluster at {connected}",
                    expected="that address, or none",
                    hint="call ray.shutdown() first",
                )
            return
        _check_address(address)
        options: dict[str, Any] = {"address": address}
        environment = {"RAY_USAGE_STATS_ENABLED": "0"}
        if address == "local":
            self._folder = _make_short_folder()
            options |= {
                "num_cpus": self._num_actors or num_cores(),
                "num_gpus": torch.cuda.device_count() if self._device.type == "cuda" else 0,
                "include_dashboard": False,
                "_temp_dir": None if self._folder is None else str(self._folder),
            }
            if "RAY_AUTH_TOKEN_PATH" not in os.environ:
                # Otherwise Ray writes a secret to ~/.ray/auth_token, which all users of the machine may read.
                environment["RAY_AUTH_TOKEN"] = _token()
        os.environ.update({name: value for name, value in environment.items() if name not in os.environ})
        handler = signal.getsignal(signal.SIGTERM)
        try:
            with _loopback_only() if address == "local" else contextlib.nullcontext():
                ray.init(**options, log_to_driver=False, logging_level="ERROR")
            self._is_ours = True
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise SparsonaError(
                f"executor ray: no connection to '{address}': {_cause(error)}",
                expected="a running Ray cluster with the same versions of Ray and Python",
                hint="start one with `ray start --head`, or leave the address out",
            ) from error
        finally:
            self._variables = set(os.environ) - before  # also those that Ray sets
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray sets its own

    def _add_actors(self) -> int:
        """Add actors for all cores or GPUs, also of nodes that joined since; returns how many actors there are."""
        capacity = self._num_actors or int(self._ray.cluster_resources().get(self._resource, 0))
        new = capacity - len(self._actors)
        if new > 0:
            self._report(f"starting {new} actor{'s' * (new > 1)}")
            self._actors += [_Actor(self) for _ in range(new)]
        return len(self._actors)

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        self._add_actors()
        backlog = Backlog(jobs, self._by_value, self.encodes)
        packed: PackedJob | None = None
        while True:
            for actor in self._actors:
                if not actor.is_idle:
                    continue
                if (packed := packed or backlog.take(len(self._actors))) is None:
                    break
                actor.send(packed)
                packed = None
            # Yielded after jobs were sent: actors do not wait while the caller uses outcomes or makes the next job.
            yield from backlog.outcomes()
            packed = packed or backlog.take(len(self._actors))
            if packed is None and not any(actor.job for actor in self._actors):
                backlog.end()
                return
            if packed is not None and any(actor.is_idle for actor in self._actors):
                continue
            for place in self._answered():
                self._receive(place, backlog)

    def _answered(self) -> list[int]:
        """The places of the actors that have answered, or were lost; waits for one."""
        requests = {actor.request: place for place, actor in enumerate(self._actors) if actor.request is not None}
        starting = all(actor.opening for actor in self._actors)
        with self._clock.measure(f"{START}workers" if starting else WAIT):
            done, rest = self._ray.wait(list(requests), timeout=PATIENCE if starting else None)
            if rest:
                done += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        if not done:
            raise SparsonaError(
                f"no actor of the Ray cluster started within {PATIENCE:.0f} s",
                expected=f"a node with a free {self._resource}",
                hint="see `ray status`: other programs may use the cluster, or its nodes may be lost",
            )
        return [requests[request] for request in done]

    def _receive(self, place: int, backlog: Backlog) -> None:
        actor = self._actors[place]
        try:
            value = actor.receive(self._ray)
        except self._ray.exceptions.RayError as error:
            self._replace(place, backlog, _cause(error))
            return
        if actor.opening:
            _check_versions(value)
            actor.opening, actor.failed_starts = False, 0
            self._report("")
            return
        assert actor.job is not None
        number, job = actor.job
        actor.job = None
        backlog.done(number, job, value)

    def _replace(self, place: int, backlog: Backlog, cause: str) -> None:
        """Give a lost actor's job to others, and start an actor for it where there is room, as soon as there is."""
        lost = self._actors[place]
        lost.end(self._ray)
        failed_starts = lost.failed_starts + lost.opening
        if failed_starts >= TRIES:
            raise not_started(cause)
        if lost.job is not None:
            number, job = lost.job
            if lost.began(self._ray):
                backlog.died(number, job, cause)
            else:
                backlog.lost(number, job)
        self._actors[place] = _Actor(self, failed_starts)

    def close(self) -> None:
        for actor in self._actors:
            actor.end(self._ray)
        self._actors.clear()
        self._recipe = self._data = None  # what no reference names, the object stores drop
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()
        for name in self._variables:
            os.environ.pop(name, None)
        self._variables.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _check_address(address: str) -> None:
    """Refuse an address that is none, or that nobody listens at: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if address in ("auto", "local"):
        return
    if not host or "/" in host or not port.isdecimal():
        raise SparsonaError(
            f"executor ray at '{address}'",
            expected="the address of a cluster that this machine is a node of, such as 10.0.0.1:6379; auto; or local",
            hint="`ray start --address=...` makes this machine a node of a cluster",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_TIME).close()
    except (OSError, OverflowError) as error:
        raise SparsonaError(
            f"executor ray: nobody listens at {address} ({error})",
            expected="the address of a running Ray cluster",
            hint="start one with `ray start --head`, which prints its address, or leave the address out",
        ) from error


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """A cluster started inside listens on 127.0.0.1 alone, as Ray has it on macOS and Windows and, since no public
    option says so, nowhere else: `_node_ip_address` replaces that address by one that other machines can reach."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _make_short_folder() -> Path | None:
    """A folder for a cluster's sockets and logs; None where its path would be too long: Ray then has its own."""
    if len(tempfile.gettempdir()) > LONGEST_FOLDER:
        return None
    folder = make_folder(PREFIX)
    claim(folder)
    return folder


def _to_arrays(federation: Federation) -> tuple[Any, ...]:
    """A federation whose data is in arrays, which the actors of a node share in its object store."""
    splits = federation.splits
    assert isinstance(splits, ClientIndex)
    nothing = torch.zeros(0)
    rest = replace(federation, x=nothing, y=nothing, splits=ClientIndex.of([]))
    arrays = (federation.x, federation.y, splits.on_host)
    return (rest, *(tensor.cpu().numpy() for tensor in arrays), splits.sizes)


def _from_arrays(rest: Federation, x: Any, y: Any, index: Any, sizes: Any) -> Federation:
    with warnings.catch_warnings():
        # The arrays cannot be written to, of which torch warns; nothing writes to a federation's examples.
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        x, y, index = (torch.from_numpy(array) for array in (x, y, index))
    return replace(rest, x=x, y=y, splits=ClientIndex(index, sizes))


def _check_versions(found: dict[str, str]) -> None:
    own = versions()
    different = [name for name in own if found[name] != own[name]]
    if different:
        raise SparsonaError(
            "a node of the Ray cluster has " + ", ".join(f"{name} {found[name]}" for name in different),
            expected=", ".join(f"{name} {own[name]}" for name in different)
            + ", as here: results would depend on nodes",
            hint="install the same versions on every node",
        )


def _cause(error: BaseException) -> str:
    """The line of a Ray error that says why, without its many others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
