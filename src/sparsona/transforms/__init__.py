"""Transforms of messages by name. Free of torch: costs and lists need none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, get_args, get_type_hints

from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.transform import Transform


@dataclass(frozen=True)
class TransformCard:
    """One row: a name, its class, how it is written, what it does, and the class's module if it has another name."""

    name: str
    kind: str
    example: str
    summary: str
    module: str = ""


TRANSFORMS = {
    card.name: card
    for card in (
        TransformCard("half", "Half", "half", "half precision: two bytes a value", "short_floats"),
        TransformCard("bf16", "BFloat16", "bf16", "bfloat16: two bytes a value, the range of float32", "short_floats"),
        TransformCard("quantize", "Quantize", "quantize:4", "stochastic quantisation to 2 to 8 bits a value"),
        TransformCard("topk", "TopK", "topk:0.1", "the largest share of a change, with error feedback"),
        TransformCard("clip", "Clip", "clip:1.0", "changes no longer than a norm"),
        TransformCard("noise", "Noise", "noise:0.01", "Gaussian noise on changes"),
        TransformCard("compact", "Compact", "compact", "the same messages in fewer bytes, without loss"),
    )
}


def read_transforms(texts: Iterable[str]) -> tuple[Transform, ...]:
    """The chain that these texts name, in their order.

    Args:
        texts: Rows of the table, each with its options after a colon: `half`, `quantize:4`, `quantize:bits=4,way=both`.

    Returns:
        The transforms. A sender applies them in order, a receiver backwards.

    Example:
        >>> read_transforms(["clip:1.0", "quantize:4"])
        (Clip(norm=1.0), Quantize(bits=4, way='up'))
    """
    return tuple(_read(text) for text in texts)


def split_transforms(value: Any) -> Any:
    """Several transforms written as one text are joined by a plus: `clip:1.0+quantize:4`."""
    if isinstance(value, str):
        # Not the plus of an exponent: clip:1e+2.
        return tuple(part.strip() for part in re.split(r"\+(?=\s*[A-Za-z])", value) if part.strip())
    return value


def _read(text: str) -> Transform:
    found = spec.read("transform", text, TRANSFORMS)
    card = TRANSFORMS[found.name]
    kind = getattr(import_module(f"sparsona.transforms.{card.module or card.name}"), card.kind)
    known = [field.name for field in fields(kind)]
    if len(found.args) > len(known[:1]):  # the first option needs no name
        raise found.wrong(f"{card.name} with its options by name: {', '.join(known) or 'it has none'}", card.example)
    given = {**dict(zip(known, found.args, strict=False)), **found.options}
    for key in given:
        if key not in known:
            raise unknown_name(f"option of the transform '{card.name}'", key, known)
    made: Transform = kind(**{key: _value(kind, key, value, card) for key, value in given.items()})
    return made


def _value(kind: type, key: str, text: str, card: TransformCard) -> Any:
    wanted = get_type_hints(kind)[key]
    try:
        if choices := get_args(wanted):
            if text not in choices:
                raise ValueError(text)
            return text
        return wanted(text)
    except ValueError:
        expected = f"one of {', '.join(get_args(wanted))}" if get_args(wanted) else f"a value like {card.example}"
        raise SparsonaError(f"'{text}' for '{key}' of the transform '{card.name}'", expected=expected) from None
