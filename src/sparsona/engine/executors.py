"""Executors by name."""

from __future__ import annotations

from sparsona.core.errors import unknown_name
from sparsona.engine.jobs import Executor, Setting
from sparsona.engine.serial import Serial
from sparsona.engine.workers import Workers, num_cores

EXECUTORS = {
    "auto": "workers where the work outweighs starting them, else serial; the choice is written into the run",
    "serial": "one client after another in this process, on one thread",
    "workers": "one process per core, one thread each; the same bits as serial",
}
# What a training step costs whatever its size, and what a core does in a second; starting workers costs about three.
STEP_SECONDS, FLOPS_PER_SECOND, WORTH_WORKERS = 1e-3, 1e10, 10.0


def choose(name: str, setting: Setting) -> str:
    """What `auto` means here and now."""
    if name not in EXECUTORS:
        raise unknown_name("executor", name, EXECUTORS)
    if name != "auto":
        return name
    return "workers" if num_cores() > 1 and _expected_seconds(setting) > WORTH_WORKERS else "serial"


def _expected_seconds(setting: Setting) -> float:
    """A rough guess of what one core would need: only good enough to choose by."""
    plan, clients = setting.plan, setting.clients
    epochs = sum(phase.epochs for phase in setting.method.phases)
    seconds = 0.0
    for client in clients:
        flops = setting.method.cost(setting.task.layout, client, plan.round_at(0)).train_flops
        seconds += epochs * -(-client.num_examples // plan.batch_size) * STEP_SECONDS + flops / FLOPS_PER_SECOND
    return plan.rounds * plan.per_round * seconds / len(clients)


def open_executor(name: str, setting: Setting) -> Executor:
    """Start the named executor."""
    return Workers(setting) if name == "workers" else Serial(setting)
