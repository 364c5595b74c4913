"""A model card: what an exported model is, how it was trained and measured, and what is not known of it.

No figure is in it that was not measured, or counted in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsona.analysis.format import plural
from sparsona.analysis.measure import BY_EXAMPLES
from sparsona.analysis.numbers import escape_markdown
from sparsona.analysis.privacy import Spent
from sparsona.core.packing import Packing
from sparsona.core.targets import LOSSES, TITLES, given_name
from sparsona.data.names import name_of
from sparsona.robust import PLAIN, read_attack, read_mean
from sparsona.runs.facts import RunFacts
from sparsona.transforms.privacy import read_privacy

LICENCE = "not stated: fill this in before you pass the model on"

USE = {
    "safetensors": """```python
import json
from safetensors import safe_open

with safe_open({file}, "pt") as file:
    weights = {{name: file.get_tensor(name) for name in file.keys()}}
    about = file.metadata()
net.load_state_dict(weights)  # net: the network ({model})
```""",
    "sparse": """```python
import json, numpy as np, torch
from safetensors import safe_open

with safe_open({file}, "pt") as file:
    stored, about = {{name: file.get_tensor(name) for name in file.keys()}}, file.metadata()
shapes = json.loads(about["sparse"])
weights = {{name: value for name, value in stored.items() if not name.endswith((".values", ".bits"))}}
for name, shape in shapes.items():
    weights[name] = torch.zeros(shape)
    kept = np.unpackbits(stored[name + ".bits"].numpy(), count=weights[name].numel(), bitorder="little")
    weights[name].view(-1)[torch.from_numpy(kept).bool()] = stored[name + ".values"]
net.load_state_dict(weights)  # net: the network ({model})
```""",
    "torch": """```python
import torch

net = torch.export.load({file}).module()
outputs = net({how})  # {like}
```""",
    "onnx": """```python
import onnxruntime

session = onnxruntime.InferenceSession({file})
(outputs,) = session.run(None, {feed})  # {like}, as numpy arrays
```""",
}


@dataclass(frozen=True)
class Sizes:
    """How large a network is and what was written of it.

    Args:
        parameters_before: parameters of the run's network, which clients share.
        parameters: parameters in the file.
        nonzero: those of them that are not 0.
        bytes: the size of the file.
    """

    parameters_before: int
    parameters: int
    nonzero: int
    bytes: int

    @property
    def bytes_before(self) -> int:
        """The bytes of the network's parameters as float32."""
        return 4 * self.parameters_before


@dataclass(frozen=True)
class Measured:
    """What a run measured of a model: on `count` examples of its client, or the mean over `num_clients` clients."""

    count: int
    accuracy: float | None
    interval: tuple[float, float] | None
    loss: float | None
    num_clients: int | None = None
    is_weighted: bool = False  # the mean accuracy is weighted by clients' test examples
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """What a model card is written from.

    Args:
        file: the name of the exported file.
        about: what the file says about itself.
        format: its format.
        sizes: its sizes.
        largest: the largest difference to the run's own outputs, and the largest output.
        measured: what the run measured of this model; None: nothing.
        point: which model it is, in words.
        config: the options of the run.
        facts: the facts of the run.
        summary: its summary; None while it is unfinished.
        environment: where it was trained.
        infer_flops: the method's count of FLOPs for one prediction; None: not known.
        client: whose model it is; None: the shared one.
        is_finished: the run is over; None: where it has a summary.
    """

    file: str
    about: Mapping[str, str]
    format: str
    sizes: Sizes
    largest: tuple[float, float]
    measured: Measured | None
    point: str
    config: Mapping[str, Any]
    facts: RunFacts
    summary: Mapping[str, Any] | None
    environment: Mapping[str, Any]
    infer_flops: int | None
    client: int | None
    is_finished: bool | None = None


def write_card(card: Card) -> str:
    """The card as Markdown."""
    facts, config = card.facts, card.config
    about = {key: escape_markdown(value) for key, value in card.about.items()}
    title, method, partition = (
        escape_markdown(str(one)) for one in (facts.title, config["method"], config["partition"])
    )
    whose = _whose(card)
    lines = [
        f"# {title}: {whose}",
        "",
        f"A model of the run {about['run']}, exported by {about['tool']} as {card.format}.",
        "",
        "| | |",
        "|---|---|",
        f"| which model | {card.point} |",
        f"| method | {title} ({method}) |",
        f"| data | {about['data']}, {len(facts.sizes)} clients, partition {partition} |",
        f"| network | {about['model']} |",
        f"| rounds | {about['rounds']} of {config['rounds']} |",
        f"| seed | {config['seed']} |",
        "| licence | " + LICENCE + " |",
        "",
        "## How it was measured",
        "",
        *_measured(card),
        "",
        "## Size and cost",
        "",
        *_sizes(card),
        "",
        "## Inputs and outputs",
        "",
        f"Inputs: {_inputs(card)}. Preparation: {about['input_preparation']}.",
        "",
        _outputs(card),
        "",
        _use(card),
        "",
        "## Where it was trained",
        "",
        escape_markdown(", ".join(f"{key} {value}" for key, value in card.environment.items() if value is not None))
        + ".",
        "",
        "## Limits",
        "",
        *(f"- {limit}" for limit in _limits(card)),
    ]
    return "\n".join(lines) + "\n"


def _whose(card: Card) -> str:
    if card.client is None:
        return "the shared model"
    name = card.about.get("client_name")
    return f"the model of client {card.client}" + (f", {escape_markdown(name)}" if name else "")


def _measured(card: Card) -> list[str]:
    found = card.measured
    if found is None:
        return ["Not measured: the run did not evaluate this model."]
    unit = "tokens" if card.facts.predicts_tokens else "examples"
    after = f"after {card.about['rounds']} rounds, at the point `{card.about['point']}`"
    also = [f"{TITLES.get(name, escape_markdown(name))} {value:.4g}" for name, value in found.metrics.items()]
    others = ["", f"Also measured: {', '.join(also)}."] if also else []
    loss = f"{found.loss:.4g}{_loss_name(card.facts)}"
    if found.num_clients is not None:
        weighted = f" {BY_EXAMPLES}" if found.is_weighted else ""
        on = f"the mean over {found.num_clients} clients{weighted}, each on its own test data"
        on += f" ({found.count:,} {unit} together)"
        what = f"Loss {loss}" if found.accuracy is None else f"Accuracy {found.accuracy:.1%}"
        return [f"{what}: {on}, {after}. One seed.", *others]
    of = f"on {found.count:,} test {unit} of this client, {after}. One seed."
    if found.accuracy is None:
        return [f"Loss {loss} {of}", *others]
    assert found.interval is not None
    low, high = found.interval
    within = f"95% interval {low:.1%} to {high:.1%} (Wilson, over {unit})"
    lines = [f"Accuracy {found.accuracy:.1%}, {within}, loss {loss}, {of}", *others]
    sizes = card.facts.sizes[card.client]
    lines += ["", f"The client has {sizes[0]:,} training, {sizes[1]:,} validation and {sizes[2]:,} test examples."]
    return lines


def _loss_name(facts: RunFacts) -> str:
    """The loss of a run in brackets; runs of older versions, which do not name theirs, had the usual one."""
    name = facts.loss or (LOSSES["numbers"][0] if facts.is_regression else "")
    own = given_name(name)
    return f" ({escape_markdown(name if own is None else f'{own}, a function from Python')})" if name else ""


def _sizes(card: Card) -> list[str]:
    sizes, (difference, most) = card.sizes, card.largest
    density = sizes.nonzero / sizes.parameters_before
    lines = [
        "| | the run's network | this file |",
        "|---|---|---|",
        f"| parameters | {sizes.parameters_before:,} | {sizes.parameters:,} |",
        f"| that are not 0 | | {sizes.nonzero:,} ({density:.1%} of the network's) |",
        f"| bytes | {sizes.bytes_before:,} as float32 | {sizes.bytes:,} |",
        "",
        "The file was read back and compared with the run's own predictions on random inputs.",
        f"Outputs differ by at most {difference:.2g}; the largest is {most:.3g}.",
    ]
    if card.infer_flops is not None:
        lines += ["", f"Counted, not timed: {card.infer_flops:,} FLOPs for the prediction of one example."]
    if card.summary is not None:
        total, flops = card.summary["bytes"]["total"], card.summary["flops"]["train"]
        lines += [
            "",
            f"Training the whole run took {total:,} bytes of messages and {flops:.3g} FLOPs, all clients together.",
        ]
    return lines


def _packing(card: Card) -> Packing | None:
    return None if card.facts.examples is None else card.facts.examples.packing


def _inputs(card: Card) -> str:
    if (packing := _packing(card)) is not None:
        kinds = ", ".join(one.kind for one in packing.fields)
        return f"{escape_markdown(packing.describe())} of each example, in batches; in this order they are {kinds}"
    return _like(card)


def _like(card: Card) -> str:
    """What a batch of inputs is like."""
    if (packing := _packing(card)) is not None:
        return f"{packing.describe()}, in batches"
    shape = ", ".join(["batch", *map(str, json.loads(card.about["input_shape"]))])
    return f"{card.about['input_dtype']}, shape ({shape})"


def _outputs(card: Card) -> str:
    num, names = int(card.about["num_outputs"]), [escape_markdown(name) for name in card.facts.class_names]
    match card.about["targets"]:
        case "numbers":
            return f"Outputs: {'one number' if num == 1 else f'{num} numbers'} for each example."
        case "tokens":
            return f"Outputs: at each position a logit for each of {num} tokens."
        case "binary":
            one, other = names or ("class 0", "class 1")
            return f"Outputs: one logit for each example: above 0 it is {other}, otherwise {one}."
        case "labels":
            what = "labels"
        case _:
            what = "classes"
    return f"Outputs: a logit for each of {num} {what}" + (f", in order: {', '.join(names)}." if names else ".")


def _use(card: Card) -> str:
    packing = _packing(card)
    how = "inputs" if packing is None else "**inputs" if packing.has_names else "*inputs"
    form = "sparse" if "sparse" in card.about else card.format
    return USE[form].format(
        file=json.dumps(card.file, ensure_ascii=False),
        model="".join(one if one.isprintable() else " " for one in card.about["model"]),
        how=how,
        like=_like(card),
        feed=_feed(packing),
    )


def _feed(packing: Packing | None) -> str:
    """What an ONNX session is passed: its inputs by name."""
    if packing is None:
        return '{"inputs": inputs}'
    if packing.has_names:
        return "inputs"  # a dict already
    return "{" + ", ".join(f'"input_{place}": inputs[{place}]' for place in range(len(packing.fields))) + "}"


def _trust(card: Card) -> list[str]:
    """Who lied, what was done about it, and what privacy was spent, as the protocol of the run has them."""
    facts, config, sentences = card.facts, card.config, []
    if (attack := config.get("attack")) is not None:
        if card.client in facts.attackers:
            sentences.append("THIS CLIENT ATTACKED: its model is of no use but to study the attack.")
        sentences.append(f"{read_attack(attack).who(len(facts.attackers), len(facts.sizes) - config['novel'])}.")
    if (mean := read_mean(config.get("mean", PLAIN))) is not None:
        sentences.append(mean.describe(facts.peers).strip())
    if private := (card.summary or {}).get("privacy"):
        sentences.append(Spent.of_brief(private).sentence())
    elif text := config.get("privacy"):
        sentences.append(
            f"Differential privacy: {read_privacy(text).describe()}; `sparsona privacy` says what was spent."
        )
    return [escape_markdown(one) for one in sentences]


def _limits(card: Card) -> list[str]:
    facts, found, limits = card.facts, card.measured, []
    if found is None:
        limits.append("Its accuracy is not known.")
    elif found.num_clients is None:
        limits.append(
            f"Measured on {found.count:,} examples of this client only: nothing is known of other people's data."
        )
    else:
        limits.append("A mean over clients: single clients are served better or worse.")
    if card.client is None and facts.partial_global:
        limits.append("The server's model is no client's whole model: its personal part is as it was at the start.")
    if facts.label_counts is not None and card.client is not None:
        counts = facts.label_counts[card.client]
        absent = [escape_markdown(name_of(facts.class_names, label)) for label, num in enumerate(counts) if num == 0]
        if absent:
            some = ", ".join(absent[:20]) + (", ..." if len(absent) > 20 else "")
            what = plural(len(absent), "label" if facts.targets == "labels" else "class")
            limits.append(f"The client has no training examples of {what}: {some}.")
    limits += _trust(card)
    if not (card.summary is not None if card.is_finished is None else card.is_finished):
        limits.append("The run is not finished.")
    limits.append("It was not examined for fairness, robustness or what it tells of its training data.")
    return limits
