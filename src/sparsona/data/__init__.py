"""Data sets, how they are shared out among clients, and batches. Importing it imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceCard:
    """What there is to say about a data set before it is read."""

    name: str
    title: str
    summary: str
    num_examples: int
    num_classes: int
    input_shape: tuple[int, ...]
    origin: str
    licence: str
    default_model: str = "digits-cnn"


@dataclass(frozen=True)
class PartitionCard:
    """A way to share out a data set: how it is written, and what it does."""

    form: str
    summary: str


SOURCES: dict[str, SourceCard] = {
    "digits": SourceCard(
        name="digits",
        title="Optical Recognition of Handwritten Digits",
        summary="Handwritten digits of 8 x 8 grey pixels; comes with the package, nothing is downloaded.",
        num_examples=1797,
        num_classes=10,
        input_shape=(1, 8, 8),
        origin="E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998 (test part, as in scikit-learn)",
        licence="CC BY 4.0",
    ),
}

PARTITIONS: dict[str, PartitionCard] = {
    "iid": PartitionCard("iid", "Shuffled and dealt out evenly: every client's data looks like everybody else's."),
    "dirichlet": PartitionCard(
        "dirichlet:A",
        "Each class is shared out by a Dirichlet(A) draw: classes and sizes differ by client, more so for small A.",
    ),
    "dirichlet-equal": PartitionCard(
        "dirichlet-equal:A",
        "Every client has the same number of examples, its classes mixed by a Dirichlet(A) draw of its own.",
    ),
    "shards": PartitionCard(
        "shards:C", "Sorted by label and cut into equal shards, C to each client: about C classes per client."
    ),
    "file": PartitionCard(
        "file:PATH",
        "Read from a file: .npy, one client number per example (-1: unused), or .json, the examples of each client.",
    ),
}
