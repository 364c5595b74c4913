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
# Starting workers costs about as long as this many FLOPs of training.
WORTH_WORKERS = 4e11


def choose(name: str, setting: Setting) -> str:
    """What `auto` means here and now."""
    if name not in EXECUTORS:
        raise unknown_name("executor", name, EXECUTORS)
    if name != "auto":
        return name
    plan = setting.plan
    round_ = plan.round_at(0)
    costs = [setting.method.cost(setting.task.layout, client, round_).train_flops for client in setting.clients]
    flops = plan.rounds * (plan.per_round + plan.tune_epochs) * sum(costs) / len(costs)
    return "workers" if num_cores() > 1 and flops > WORTH_WORKERS else "serial"


def open_executor(name: str, setting: Setting) -> Executor:
    """Start the named executor."""
    return Workers(setting) if name == "workers" else Serial(setting)
