"""The one parser of `name:value,key=value`: how methods, models, partitions, tests, graphs, schedules, transforms and
data sets are written. Free of torch."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import parse_toml

_COMMA = re.compile(r",(?![^\[]*\])")  # not inside [...]


@dataclass(frozen=True)
class Spec:
    """A text of the form `name`, `name:value:value`, `name:value,value` or `name:key=value,key=value`.

    Args:
        kind: what it names, for messages.
        text: the whole text.
        name: the part before the colon.
        argument: everything after the first colon, unchanged (a path may contain any character); None: no colon.
        args: the values before the first key.
        options: the values by key, as text.
    """

    kind: str
    text: str
    name: str
    argument: str | None = None
    args: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def wrong(self, expected: str, example: str) -> SparsonaError:
        """The error for a text that is not what was expected.

        Args:
            expected: the accepted forms.
            example: a valid text.

        Returns:
            An error to raise.
        """
        return SparsonaError(f"{self.kind} '{shorten(self.text)}'", expected=expected, hint=f"for example {example}")


def parse(kind: str, text: str) -> Spec:
    """Read a spec, whatever its name.

    A comma begins a new option where a key and an equals sign follow, and belongs to the value otherwise. Keys may be
    written with hyphens.

    Args:
        kind: what is named, for messages: "graph".
        text: what the user wrote.

    Returns:
        The parts of the text.

    Example:
        >>> parse("method", "fedalt:personal=norm,output,epochs=2").options
        {'personal': 'norm,output', 'epochs': '2'}
        >>> parse("graph", "random:10:bounded").args
        ('10', 'bounded')
    """
    name, colon, argument = (part.strip() for part in text.strip().partition(":"))
    args: list[str] = []
    options: dict[str, str] = {}
    last = None
    for piece in _COMMA.split(argument) if argument else []:
        key, equals, value = piece.partition("=")
        if equals:
            last = key.strip().replace("-", "_")
            if not last:
                raise _no_option(piece)
            if last in options:
                raise SparsonaError(
                    f"'{last}' twice in {kind} '{shorten(text)}'", expected="each option once", hint="leave one out"
                )
            options[last] = value.strip()
        elif last is not None:
            options[last] += f",{piece}"
        else:
            args += [part.strip() for part in piece.split(":")]
    return Spec(kind, text, name, argument if colon else None, tuple(args), options)


def read(kind: str, text: str, forms: Iterable[str]) -> Spec:
    """Read a spec whose name must be one of those in `forms`.

    Args:
        kind: what is named, for messages.
        text: what the user wrote.
        forms: how each is written, such as "random:N".

    Returns:
        The parts of the text; the caller checks the number of values.

    Example:
        >>> read("graph", "ring", ("ring", "random:N")).name
        'ring'
    """
    found = parse(kind, text)
    written: dict[str, str] = {}
    forms = sorted(forms)
    for form in forms:
        written.setdefault(form.partition(":")[0], form)
    if found.name in written:
        return found
    near = difflib.get_close_matches(found.name, written, n=1, cutoff=0.5)
    raise SparsonaError(
        f"unknown {kind} '{shorten(found.text)}'",
        expected="one of " + ", ".join(forms),
        hint=f"did you mean '{written[near[0]]}'?" if near else "",
    )


def named_options(spec: Spec) -> dict[str, Any]:
    """The options of a spec that has nothing else, as values: numbers, truth values, lists or text.

    Args:
        spec: a spec without positional values.

    Returns:
        The values by key.

    Example:
        >>> named_options(parse("method", "fedspa:density=0.2,regrowth=random"))
        {'density': 0.2, 'regrowth': 'random'}
    """
    if spec.args:
        raise _no_option(spec.args[0])
    return {key: parse_value(value) for key, value in spec.options.items()}


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Values from key=value texts, one option each.

    Args:
        pairs: the texts.

    Returns:
        The values by key.

    Example:
        >>> parse_pairs(["density=0.2", "clip-norm=none"])
        {'density': 0.2, 'clip_norm': None}
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise _no_option(pair)
        found[key.strip().replace("-", "_")] = parse_value(value.strip())
    return found


def parse_value(text: str) -> Any:
    """The value in `key=value` as TOML would read it; anything else is a string, `none` is None.

    Args:
        text: the text after the equals sign.

    Returns:
        The value.

    Example:
        >>> parse_value("1e-3"), parse_value("[1, 2]"), parse_value("{3 = 1}"), parse_value("erk"), parse_value("none")
        (0.001, [1, 2], {'3': 1}, 'erk', None)
    """
    if text.lower() == "none":
        return None
    if text in ("true", "false") or text[:1] in "[{0123456789+-.'\"":
        try:
            return parse_toml(f"v = {text if text[:1] != '.' else '0' + text}")["v"]
        except ValueError:  # not what TOML has, or larger than it may be
            try:
                return float(text)
            except ValueError:
                return text
    return text


def as_count(text: str) -> int | None:
    """A text as a whole number.

    Args:
        text: any text.

    Returns:
        The number, from 1 to 999999999; None: the text is something else.

    Example:
        >>> as_count("10"), as_count("0"), as_count("ten")
        (10, None, None)
    """
    return int(text) if re.fullmatch("[0-9]{1,9}", text) and int(text) > 0 else None


def as_number(text: str) -> float | None:
    """A text as a finite number.

    Args:
        text: any text.

    Returns:
        The number; None: the text is something else.

    Example:
        >>> as_number("0.5"), as_number("inf")
        (0.5, None)
    """
    try:
        number = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def shorten(text: str) -> str:
    """A text cut to at most 60 characters, for a message."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def _no_option(piece: str) -> SparsonaError:
    return SparsonaError(f"'{piece}' is not an option", expected="key=value", hint="for example density=0.5")
