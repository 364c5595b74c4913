"""Twelve methods can be told apart by their colours: on white and on dark pages, also by the colour-blind."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from sparsona.report.palette import COLOURS, DARK, ON_DARK, PAGE

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as seen by the colour-blind.
SEEN = {
    "by all cones": np.eye(3),
    "without red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "without green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "without blue cones": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = XYZ.sum(1)


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> tuple[float, float, float]:
    """CIELAB of linear RGB, white at D65."""
    ratio = XYZ @ rgb.clip(0, 1) / WHITE
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return float(116 * y - 16), float(500 * (x - y)), float(200 * (y - z))


def ciede2000(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """Sharma, Wu and Dalal 2005; about 1 is the least difference that is seen side by side."""
    mean_chroma = (math.hypot(*one[1:]) + math.hypot(*other[1:])) / 2
    stretch = 1.5 - 0.5 * math.sqrt(mean_chroma**7 / (mean_chroma**7 + 25**7))
    (l1, c1, h1), (l2, c2, h2) = (
        (light, math.hypot(stretch * a, b), math.degrees(math.atan2(b, stretch * a)) % 360)
        for light, a, b in (one, other)
    )
    apart = h2 - h1 - 360 * round((h2 - h1) / 360) if c1 * c2 else 0.0
    hue = (h1 + apart / 2) % 360 if c1 * c2 else h1 + h2
    light, chroma = (l1 + l2) / 2 - 50, (c1 + c2) / 2
    terms = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    weight = 1 + sum(share * math.cos(math.radians(times * hue + shift)) for share, times, shift in terms)
    by_light = (l2 - l1) / (1 + 0.015 * light**2 / math.sqrt(20 + light**2))
    by_chroma = (c2 - c1) / (1 + 0.045 * chroma)
    by_hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(apart / 2)) / (1 + 0.015 * chroma * weight)
    turn = (
        -2
        * math.sqrt(chroma**7 / (chroma**7 + 25**7))
        * math.sin(math.radians(60 * math.exp(-(((hue - 275) / 25) ** 2))))
    )
    return math.sqrt(by_light**2 + by_chroma**2 + by_hue**2 + turn * by_chroma * by_hue)


def contrast(one: str, other: str) -> float:
    """That of WCAG, from 1 to 21."""
    light, dark = sorted((float(XYZ[1] @ linear(colour)) for colour in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1, 2), (50, 0, 0), 2.3669),
        ((50, 2.49, -0.001), (50, -2.49, 0.0011), 7.2195),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_differences_are_those_of_the_published_pairs(one, other, expected):
    assert ciede2000(one, other) == pytest.approx(expected, abs=1e-4)


# The least differences of any two of the twelve, and the least contrast with the page. On white that of Okabe and Ito's
# orange and sky blue is low, as it was; all others have 3 or more.
LEAST = {"white": (19.9, 10.0, 2.2), "dark": (18.8, 10.0, 3.5)}


@pytest.mark.parametrize("page", LEAST)
def test_any_two_of_twelve_differ(page):
    colours, ground = (COLOURS, PAGE) if page == "white" else (ON_DARK, DARK[PAGE])
    assert len(set(colours)) == 12
    normal, colour_blind, least_contrast = LEAST[page]
    for how, matrix in SEEN.items():
        least = normal if how == "by all cones" else colour_blind
        seen = {colour: lab(matrix @ linear(colour)) for colour in colours}
        found = {pair: ciede2000(*(seen[colour] for colour in pair)) for pair in combinations(colours, 2)}
        nearest = min(found, key=found.__getitem__)
        assert found[nearest] >= least, (how, nearest)
    assert min(contrast(colour, ground) for colour in colours) >= least_contrast


def test_a_dark_page_shows_these():
    assert [DARK.get(colour, colour) for colour in COLOURS] == list(ON_DARK)
