"""Text as numbered tokens: vocabularies, sequences, and Shakespeare's plays by speaker."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from sparsona.core.tokens import BEGIN, END, NUM_SPECIAL, PAD, UNKNOWN
from sparsona.data.pool import Array, Pool
from sparsona.data.readers.files import Request, damaged, find

SEQUENCE_LENGTH = 20
VOCABULARY_SIZE = 10_000
# Words with their apostrophes and hyphens, and every other sign by itself; lines do not matter.
WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|[^\w\s]|\w")


def make_vocabulary(counts: Counter[str], size: int | None = None) -> dict[str, int]:
    """The most frequent tokens (all of them if no size is given), numbered after the special ones."""
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    return {token: number for number, token in enumerate(ranked, NUM_SPECIAL)}


def encode(tokens: Iterable[str], vocabulary: dict[str, int]) -> list[int]:
    return [vocabulary.get(token, UNKNOWN) for token in tokens]


def cut(tokens: Sequence[int], length: int) -> Iterator[list[int]]:
    """Sequences of `length` inputs and the targets one further on, padded: every token but the first is one."""
    for start in range(0, len(tokens) - 1, length):
        piece = list(tokens[start : start + length + 1])
        yield piece + [PAD] * (length + 1 - len(piece))


def read_shakespeare(request: Request) -> Pool | None:
    """Plays as a text file, by speaker.

    A turn is BEGIN, its characters (or words, in lower case), END. It is cut into sequences of `sequence_length`
    targets, which do not reach into the next turn. A speaker's turns are in the order of the plays. Names of speakers
    are not part of the text, and those without text are not counted.
    """
    paths = find(request.places, "input.txt")
    if paths is None:
        return None
    by_words = request.name == "shakespeare-words"
    turns = [(who, WORD.findall(text.lower()) if by_words else list(text)) for who, text in _read_turns(paths[0])]
    counts = Counter(token for _, tokens in turns for token in tokens)
    vocabulary = make_vocabulary(counts, (request.vocabulary_size or VOCABULARY_SIZE) if by_words else None)
    numbers = {who: number for number, who in enumerate(dict.fromkeys(who for who, _ in turns))}
    rows: list[list[int]] = []
    owners: list[int] = []
    for who, tokens in turns:
        pieces = list(cut([BEGIN, *encode(tokens, vocabulary), END], request.sequence_length or SEQUENCE_LENGTH))
        rows += pieces
        owners += [numbers[who]] * len(pieces)
    x, y = split_sequences(np.array(rows, dtype=np.int32))
    return Pool(request.name, x, y, len(vocabulary) + NUM_SPECIAL, None, np.array(owners, dtype=np.int64))


def split_sequences(rows: Array) -> tuple[Array, Array]:
    """Inputs and targets of sequences that are one token longer than both."""
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def _read_turns(path: Path) -> list[tuple[str, str]]:
    """Speaker and text of each turn: a line "NAME:", lines of text, an empty line."""
    try:
        blocks = re.split(r"\n{2,}", path.read_text(encoding="utf-8").replace("\r\n", "\n").strip())
    except ValueError as error:
        raise damaged(path, error, "text in UTF-8") from error
    turns = [block.partition("\n")[::2] for block in blocks]
    if bad := next((head for head, _ in turns if not head.endswith(":")), None):
        raise damaged(path, f"a turn begins with '{bad[:40]}'", "turns that begin with a line NAME: of their own")
    spoken = [(head[:-1], text) for head, text in turns if text.strip()]
    if not spoken:
        raise damaged(path, "it has no turn with text", "turns that begin with a line NAME: of their own")
    return spoken
