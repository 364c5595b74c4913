"""Executors by name. Imported without torch, for lists."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.round import client_kinds

if TYPE_CHECKING:
    import torch

    from sparsona.engine.context import ClientContext
    from sparsona.engine.jobs import Executor, Report

EXECUTORS = {
    "auto": "what suits the device and the model; the choice is recorded in the run",
    "serial": "one client after another in this process, on one thread",
    "workers": "one process per core, one thread each; the same bits as serial",
    "ray": "as workers, one per core or GPU of a Ray cluster (extra cluster); ray:ADDRESS uses one that is running",
    "stacked": "many small models at once; as serial within rounding",
    "graphed": "large models on a GPU, each step compiled and captured; as serial within rounding",
}
# The seconds of a training step whatever its size, and the FLOPs of a core; starting workers takes about 3 seconds.
STEP_SECONDS, FLOPS_PER_SECOND, WORTH_WORKERS = 1e-3, 1e10, 10.0
# FLOPs of a training step up to which most of it is Python and the start of kernels, which stacked clients share; and
# parameters up to which a stack of models stays in the caches from one operation to the next, as a single model does.
# Within both, stacks take less CPU time than single models, beyond one of them often more (docs/performance.md).
SMALL_STEP, SMALL_IN_CACHE = 40_000_000, 50_000
SMALL_MODEL = 2_000_000  # parameters up to which one client does not use a whole GPU


def several_devices(name: str) -> tuple[str, ...]:
    """The devices in a list such as cuda:0,cuda:1; none if `name` is no list."""
    return tuple(name.split(",")) if "," in name else ()


def choose_device(name: str, precision: str) -> torch.device:
    """The device of this name, or the first of a list; raises SparsonaError if it is not here, or lacks the
    precision."""
    import torch

    has_gpu = torch.cuda.is_available()
    if name.startswith("cuda") and not has_gpu:
        raise SparsonaError(
            f"device {name}: torch sees no GPU here",
            expected="a GPU and a CUDA build of torch",
            hint="use --device cpu",
        )
    numbers = [int(one.partition(":")[2]) for one in several_devices(name)]
    if numbers and max(numbers) >= (count := torch.cuda.device_count()):
        raise SparsonaError(
            f"device {name}: torch sees {count} GPU{'s' * (count > 1)} here",
            expected=",".join(f"cuda:{number}" for number in range(count)),
            hint="CUDA_VISIBLE_DEVICES hides GPUs from a process",
        )
    device = torch.device("cuda" if has_gpu and name != "cpu" else "cpu")
    if precision != "fp32" and device.type == "cpu":
        raise SparsonaError(
            f"precision {precision} on a CPU",
            expected="fp32, or a GPU",
            hint="leave precision out: lower ones are slower on a CPU",
        )
    return device


def choose(name: str, context: ClientContext) -> str:
    """The executor to use: `auto` resolved, any other name checked against the device and the model."""
    wanted = spec.parse("executor", name)
    if wanted.name not in EXECUTORS:
        raise unknown_name("executor", name, EXECUTORS)
    if wanted.argument == "" or (wanted.argument is not None and wanted.name != "ray"):
        raise wanted.wrong(
            "a name, or ray:ADDRESS with the address of a cluster", "--executor ray:10.0.0.1:6379 or --executor ray"
        )
    if wanted.name == "ray":
        from sparsona.executors.ray_cluster import check_extra

        check_extra()
    from sparsona.executors.stacked import stacks_well, why_not_stacked
    from sparsona.executors.workers import num_cores

    is_gpu = context.device.type == "cuda"
    if wanted.name == "ray" and context.devices:
        raise SparsonaError(
            f"executor ray on {','.join(context.devices)}: it has a process on every GPU of the cluster by itself",
            expected="device cuda",
            hint="--device cuda",
        )
    if name == "workers" and is_gpu:
        raise SparsonaError(
            "executor workers on a GPU",
            expected="stacked, graphed or serial",
            hint="leave --executor out, or --device cpu",
        )
    if name == "graphed" and not is_gpu:
        raise SparsonaError("executor graphed without a GPU", expected="serial or workers", hint="leave --executor out")
    if name == "stacked" and (why := why_not_stacked(context)):
        raise SparsonaError(
            f"executor stacked with this model and loss: torch cannot run them for several clients at once ({why})",
            expected="a model whose every layer has a batching rule (torch.func.vmap), which nn.LSTM and nn.GRU lack, "
            "and without branches on the values of examples",
            hint="leave --executor out",
        )
    needs_whole_batches = _needs_whole_batches(context)
    if name in ("stacked", "graphed") and needs_whole_batches:
        raise SparsonaError(
            f"executor {name}, which fills up batches, with this loss: that of an example changes with those beside it",
            expected="a function that returns for each example a loss that depends on that one alone",
            hint="leave --executor out",
        )
    if context.plan.turn_seconds is not None and (is_gpu or name not in ("auto", "workers")):
        raise SparsonaError(
            f"turn_seconds={context.plan.turn_seconds:g} {'on a GPU' if is_gpu else f'with executor {name}'}: a turn "
            "cannot be ended there before it is done",
            expected="executor workers, on a CPU",
            hint="leave turn_seconds out, or --executor workers --device cpu",
        )
    if name != "auto":
        return name
    if context.plan.turn_seconds is not None:
        return "workers"
    if is_gpu and needs_whole_batches:
        return "serial"
    if is_gpu:
        is_small = context.task.layout.size <= SMALL_MODEL
        return "stacked" if is_small and not why_not_stacked(context) else "graphed"
    # A rule of the network and the batch, never of the machine: `stacked` agrees with the others within rounding only.
    step = context.plan.batch_size * context.task.layout.train_flops()
    is_small = step <= SMALL_STEP and context.task.layout.size <= SMALL_IN_CACHE
    if is_small and not needs_whole_batches and stacks_well(context):
        return "stacked"
    # A run that has others beside it, in processes of their own, starts no more of them.
    is_alone = multiprocessing.parent_process() is None
    return "workers" if is_alone and num_cores() > 1 and _expected_seconds(context) > WORTH_WORKERS else "serial"


def _needs_whole_batches(context: ClientContext) -> bool:
    """Whether a loss that was given as a function cannot do with a batch that is filled up."""
    from sparsona.core.losses import GivenLoss
    from sparsona.data.batches import as_targets

    task, data = context.task, context.federation
    if not isinstance(task.losses, GivenLoss) or task.mixes_examples or not data.has_examples:
        return False
    some = data.y[:: max(1, len(data.y) // 32)][:32]
    return task.losses.mixes_examples(as_targets(some), task.num_classes)


@contextmanager
def numeric_mode(context: ClientContext) -> Iterator[None]:
    """Set the precision of products on a GPU, and one thread on a CPU: sums that are split among threads differ in
    their last bits, and workers use all cores. These settings belong to the process, so they are restored."""
    import torch

    if context.device.type != "cuda":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    matmul.allow_tf32 = cudnn.allow_tf32 = context.precision != "fp32"
    # The fastest algorithm by trial depends on what else the GPU does, and some add in no fixed order: bits would vary.
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def _expected_seconds(context: ClientContext) -> float:
    """A rough estimate of the time on one core, good enough to choose an executor."""
    plan, clients = context.plan, context.clients
    epochs = sum(phase.epochs for phase in context.method.phases)
    seconds = 0.0
    for client, count in client_kinds(clients):
        flops = context.method.cost(context.task.layout, client, plan.round_at(0)).train_flops
        each = epochs * -(-client.num_examples // plan.batch_size) * STEP_SECONDS + flops / FLOPS_PER_SECOND
        seconds += count * each
    return plan.rounds * plan.per_round * seconds / len(clients)


def open_executor(name: str, context: ClientContext, report: Report = lambda text: None) -> Executor:
    """Start the named executor; it calls `report` with what its start-up is doing, and with "" when that is over."""
    if context.devices:
        from sparsona.engine.profiler import START
        from sparsona.executors.devices import Devices

        with context.clock.measure(f"{START}workers"):
            return Devices(name, context, report=report)
    if name == "workers":
        from sparsona.engine.profiler import START
        from sparsona.executors.workers import Workers

        with context.clock.measure(f"{START}workers"):
            return Workers(context, report=report)
    if (wanted := spec.parse("executor", name)).name == "ray":
        from sparsona.engine.profiler import START
        from sparsona.executors.ray_cluster import RayCluster

        with context.clock.measure(f"{START}workers"):
            return RayCluster(context, wanted.argument, report=report)
    report("")  # the other executors start immediately
    if name == "graphed":
        from sparsona.executors.graphed import Graphed  # here, since it imports a compiler

        return Graphed(context, report=report)
    if name == "stacked":
        from sparsona.executors.stacked import Stacked

        return Stacked(context, report=report)
    from sparsona.executors.serial import Serial

    return Serial(context)
