"""Numbers as text. Every table, page and picture writes bytes, durations and differences with these functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

UNKNOWN = "–"


def human_bytes(value: float, digits: int = 3) -> str:
    """Bytes in decimal units.

    Args:
        value: a number of bytes.
        digits: significant digits from 1 kB on.

    Returns:
        Such as "980 B", "14.2 kB" or "1.30 MB".

    Example:
        >>> human_bytes(1_300_000), human_bytes(1_300_000, digits=4)
        ('1.30 MB', '1.300 MB')
    """
    return _scale(value, ("B", "kB", "MB", "GB", "TB", "PB"), digits)


def human_flops(value: float) -> str:
    """A number of floating-point operations with three digits: 0 FLOP, 14.2 GFLOP."""
    return _scale(value, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"), 3)


def human_seconds(value: float) -> str:
    """A duration: 0.25 s, 12.3 s, 2 min 05 s, 1 h 02 min, 12 days."""
    if round(value, 1) < 60:
        return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
    seconds = round(value)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if value >= 100 * 3600:
        return f"{round(value / 86400):,} days"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(value: float) -> str:
    """A fraction as the number before a percent sign, with the two decimals that papers print."""
    return f"{100 * value:.2f}"


def signed(value: float, decimals: int = 2) -> str:
    """A number with its sign, in type: +1.20, −0.30, 0.00."""
    shown = f"{value:+.{decimals}f}".replace("-", "−")
    return shown[1:] if not float(shown[1:]) else shown


def number(value: float | None) -> str:
    """A number of any size with three digits, in type: 0.00123, 4.56e+03; a dash where it is not known."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return f"{value:.3g}".replace("-", "−") if math.isfinite(value) else "infinite"


def alike(values: Iterable[float], digits: int = 4) -> Callable[[float], str]:
    """How figures of one column are written: with as many decimals as the largest has in so many digits.

    Args:
        values: those of the column.
        digits: significant digits of the largest.

    Returns:
        What writes a figure. Where sizes differ by more than a thousand, each has so many digits of its own.

    Example:
        >>> [alike([10.2, 10.88, 8.922])(value) for value in (10.2, 10.88, 8.922)]
        ['10.20', '10.88', '8.92']
    """
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    if not sizes or max(sizes) > 1000 * min(sizes):
        return f"{{:.{digits}g}}".format
    decimals = digits - 1 - math.floor(math.log10(max(sizes)))
    return f"{{:.{max(0, decimals)}f}}".format if decimals <= 6 else f"{{:.{digits}g}}".format


def plural(count: int, noun: str) -> str:
    """A count and its noun: 1 client, 2 clients, 3 classes."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def between(low: int, high: int, noun: str) -> str:
    """A range of counts and its noun: 3 to 12 clients; 3 clients where both are the same."""
    return plural(low, noun) if low == high else f"{low:,} to {plural(high, noun)}"


def cut(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _scale(value: float, units: Sequence[str], digits: int) -> str:
    if round(value) < 1000:
        return f"{round(value)} {units[0]}"
    for unit in units[1:]:
        value /= 1000
        for whole in (1, 2, 3):
            if round(value, digits - whole) < 10**whole:
                return f"{value:.{digits - whole}f} {unit}"
    return f"{value:.0f} {units[-1]}"
