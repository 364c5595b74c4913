"""How a result was measured, in words: lines of a topic and a few short sentences. Free of torch.

A protocol is one text, stored in summary.json. Its lines are "topic: sentences". Those of older versions are one line
of prose without topics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparsona.analysis.privacy import said_epsilon

# In the order of a protocol. A line that begins otherwise has no topic.
TOPICS = (
    "warning",
    "model",
    "test data",
    "result",
    "loss",
    "options",
    "budget",
    "validation",
    "learning curve",
    "clients",
    "conditions",
    "machines",
    "divergence",
    "model size",
    "client state",
    "guard",
    "messages",
    "aggregation",
    "attackers",
    "privacy",
    "epsilon",
    "epsilon if draws are known",
    "not covered",
    "noise",
    "start",
    "augmentation",
)
_BOUNDS = ("epsilon", "epsilon if draws are known")  # of several runs, the largest is that of all
Lines = list[tuple[str, str]]  # topic ("": none) and sentences


@dataclass
class Protocol:
    """A protocol in the making.

    Example:
        >>> found = Protocol()
        >>> found.say("result", "The mean over 4 clients.")
        >>> found.say("model", "The shared model.")
        >>> print(found.text)
        model: The shared model.
        result: The mean over 4 clients.
    """

    topics: dict[str, list[str]] = field(default_factory=dict)

    def say(self, topic: str, sentences: str) -> None:
        """Add sentences about a topic; "" adds nothing."""
        assert topic in TOPICS
        if sentences.strip():
            self.topics.setdefault(topic, []).append(" ".join(sentences.split()))

    @property
    def text(self) -> str:
        """The lines that have been said, in the order of topics."""
        return "\n".join(f"{topic}: {' '.join(self.topics[topic])}" for topic in TOPICS if topic in self.topics)


def read_protocol(text: str) -> Lines:
    """The lines of a protocol, also of one without topics.

    Args:
        text: a protocol.

    Returns:
        Topic and sentences of each line; a topic of "" where there is none.

    Example:
        >>> read_protocol("model: The shared model.")
        [('model', 'The shared model.')]
    """
    found = []
    for line in text.split("\n"):
        topic, colon, rest = line.partition(": ")
        found.append((topic, rest) if colon and topic in TOPICS else ("", line))
    return found


def compare_protocols(protocols: Mapping[str, Sequence[str]]) -> tuple[Lines, list[tuple[str, Lines]]]:
    """What protocols of several methods have in common, and in what they differ.

    Args:
        protocols: those of each method's runs, by the method's label.

    Returns:
        The lines that all methods have; and, for each other topic, the sentences and the labels that they hold for.

    Example:
        >>> compare_protocols({"A": ["model: Own.\\nresult: A mean."], "B": ["model: Shared.\\nresult: A mean."]})
        ([('result', 'A mean.')], [('model', [('A', 'Own.'), ('B', 'Shared.')])])
    """
    users: dict[str, dict[str, list[str]]] = {topic: {} for topic in ("", *TOPICS)}
    for label, texts in protocols.items():
        for topic, found in users.items():
            said = [rest for text in texts for of, rest in read_protocol(text) if of == topic]
            for sentences in _largest(said) if topic in _BOUNDS else _merge(said):
                found.setdefault(sentences, []).append(label)
    shared, own = [], []
    for topic, found in users.items():
        same = [sentences for sentences, labels in found.items() if len(labels) == len(protocols)]
        shared += [(topic, sentences) for sentences in same]
        if others := [(join_labels(labels), text) for text, labels in found.items() if text not in same]:
            own.append((topic, others))
    return shared, own


def join_labels(labels: Sequence[str]) -> str:
    """Labels in a row; those that have commas themselves are kept apart by "and"."""
    return (" and " if any("," in label for label in labels) else ", ").join(labels)


def _largest(sentences: Sequence[str]) -> list[str]:
    """Of sentences with an epsilon, the one with the largest."""
    if len(set(sentences)) < 2:
        return list(sentences[:1])
    return [f"{max(sentences, key=said_epsilon)} That is the largest of {len(sentences)} runs."]


def _merge(sentences: Sequence[str]) -> list[str]:
    """Sentences that differ only in numbers (sizes of a seed's test sets) become one, with the numbers' ranges."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for sentence in sentences:
        pieces = re.split(r"(\d+(?:\.\d+)?)", sentence)  # words at even places, numbers at odd ones
        alike.setdefault(tuple(pieces[::2]), []).append(pieces)
    merged = []
    for versions in alike.values():
        ranges = [
            sorted(set(numbers), key=float) for numbers in zip(*(pieces[1::2] for pieces in versions), strict=True)
        ]
        shown = ["–".join(dict.fromkeys((numbers[0], numbers[-1]))) for numbers in ranges]
        words = versions[0][::2]
        merged.append("".join(word + number for word, number in zip(words, [*shown, ""], strict=True)))
    return merged
