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
        """The lines that were added, in the order of topics."""
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


def compare_protocols(protocols: Mapping[str, Mapping[int, str]]) -> tuple[Lines, list[tuple[str, Lines]]]:
    """What protocols of several methods have in common, and in what they differ.

    Args:
        protocols: those of each method's runs by their seeds, by the method's label.

    Returns:
        The lines that all methods have; and, for each other topic, the sentences and the labels that they hold for,
        with the seeds where these differ.

    Example:
        >>> texts = "model: Own.\\nresult: A mean.", "model: Shared.\\nresult: A mean."
        >>> compare_protocols({"A": {1: texts[0]}, "B": {1: texts[1]}})
        ([('result', 'A mean.')], [('model', [('A', 'Own.'), ('B', 'Shared.')])])
    """
    users: dict[str, dict[str, list[str]]] = {topic: {} for topic in ("", *TOPICS)}
    whole: dict[str, dict[str, int]] = {topic: {} for topic in users}  # how many methods say it with all seeds
    for label, texts in protocols.items():
        for topic, found in users.items():
            stated = [(rest, seed) for seed, text in texts.items() for of, rest in read_protocol(text) if of == topic]
            for sentences, seeds in _largest(stated) if topic in _BOUNDS else _merge(stated):
                is_whole = len(seeds) == len(texts)
                whole[topic][sentences] = whole[topic].get(sentences, 0) + is_whole
                found.setdefault(sentences, []).append(label if is_whole else f"{label}, {_seeds(seeds)}")
    shared, own = [], []
    for topic, found in users.items():
        same = [sentences for sentences in found if whole[topic][sentences] == len(protocols)]
        shared += [(topic, sentences) for sentences in same]
        if others := [(join_labels(labels), text) for text, labels in found.items() if text not in same]:
            own.append((topic, others))
    return shared, own


def join_labels(labels: Sequence[str]) -> str:
    """Labels in a row; those that have commas themselves are kept apart by semicolons."""
    return ("; " if any("," in label for label in labels) else ", ").join(labels)


def _largest(stated: Sequence[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    """Of sentences with an epsilon, the one with the largest: it holds for all seeds that have one."""
    sentences, seeds = [sentence for sentence, _ in stated], [seed for _, seed in stated]
    if len(set(sentences)) < 2:
        return [(sentences[0], seeds)] if stated else []
    return [(f"{max(sentences, key=said_epsilon)} That is the largest of {len(sentences)} runs.", seeds)]


# A whole number with its separators and exponent, which is no part of a word: "hospital-2", "conv2", "1/2".
_NUMBER = re.compile(
    r"(?<![\w.,/–-])((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w/–-]|[.,]\d)", re.IGNORECASE
)
# What is in quotes, and "client 3" or "seeds 1, 2 and 5".
_NAME = re.compile(
    r"""((?<!\w)(?:'[^']*'|"[^"]*"|`[^`]*`|(?:client|seed)s? \d+(?:(?:, | and | or | to )\d+)*)(?!\w))""", re.IGNORECASE
)


def _split(sentence: str) -> list[str]:
    """Words at even places, numbers at odd ones. Names are words."""
    pieces = [""]
    for place, part in enumerate(_NAME.split(sentence)):
        first, *rest = [part] if place % 2 else _NUMBER.split(part)
        pieces[-1] += first
        pieces += rest
    return pieces


def _merge(stated: Sequence[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    """Sentences that differ only in numbers (sizes of a seed's test sets) become one, with the numbers' ranges.

    Sentences and seeds are in pairs; so are sentences and all seeds that they hold for.
    """
    alike: dict[tuple[str, ...], list[tuple[list[str], int]]] = {}
    for sentence, seed in stated:
        pieces = _split(sentence)
        alike.setdefault(tuple(pieces[::2]), []).append((pieces[1::2], seed))
    merged = []
    for words, versions in alike.items():
        ranges = [
            sorted(set(numbers), key=lambda number: float(number.replace(",", "")))
            for numbers in zip(*(numbers for numbers, _ in versions), strict=True)
        ]
        shown = ["–".join(dict.fromkeys((numbers[0], numbers[-1]))) for numbers in ranges]
        text = "".join(word + number for word, number in zip(words, [*shown, ""], strict=True))
        merged.append((text, list(dict.fromkeys(seed for _, seed in versions))))
    return merged


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
