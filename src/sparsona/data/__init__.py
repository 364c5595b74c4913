"""Data sets, how they are shared out among clients, and batches. Importing it imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass

from sparsona.data.catalog import SOURCES as SOURCES
from sparsona.data.catalog import SourceCard as SourceCard


@dataclass(frozen=True)
class PartitionCard:
    """A way to share out a data set: how it is written, and what it does."""

    form: str
    summary: str


# How a client's test examples are chosen.
TESTS: dict[str, PartitionCard] = {
    "auto": PartitionCard("auto", "What suits the data: shares or natural where there is a published test set."),
    "split": PartitionCard("split", "All examples are shared out, and every client's own are split by test_rate."),
    "split-train": PartitionCard("split-train", "The same with the published training set alone."),
    "shares": PartitionCard(
        "shares:N",
        "About N examples (none given: an even share) of the published test set, in the client's own label shares; "
        "clients may be tested on the same ones.",
    ),
    "natural": PartitionCard("natural", "The published test examples of the same writer, user or speaker."),
}

PARTITIONS: dict[str, PartitionCard] = {
    "iid": PartitionCard("iid", "Shuffled and dealt out evenly: every client's data looks like everybody else's."),
    "dirichlet": PartitionCard(
        "dirichlet:A",
        "Each class is shared out by a Dirichlet(A) draw: classes and sizes differ by client, more so for small A.",
    ),
    "dirichlet-uncapped": PartitionCard(
        "dirichlet-uncapped:A",
        "The same, where a client may go on receiving after it has its even share: sizes differ more.",
    ),
    "dirichlet-equal": PartitionCard(
        "dirichlet-equal:A",
        "Every client has the same number of examples, its classes mixed by a Dirichlet(A) draw of its own.",
    ),
    "groups": PartitionCard(
        "groups:G:A",
        "Every client has the same number of examples, its classes mixed by a Dirichlet(A) draw that it shares with "
        "its group, one of G.",
    ),
    "shards": PartitionCard(
        "shards:C", "Sorted by label and cut into equal shards, C to each client: about C classes per client."
    ),
    "pathological": PartitionCard(
        "pathological:C",
        "Exactly C classes to each client, every class to equally many; its examples dealt evenly among them.",
    ),
    "pathological-refill": PartitionCard(
        "pathological-refill:C",
        "C random classes and equally many examples to each client. A class that runs out is given out again: clients "
        "share examples, and others go unused.",
    ),
    "natural": PartitionCard(
        "natural", "Every writer, user or speaker is a client and has its own examples; for data that says whose it is."
    ),
    "file": PartitionCard(
        "file:PATH",
        "Read from a file: .npy, one client number per example (-1: unused), or .json, the examples of each client.",
    ),
}
