"""Colors of pages and drawings, for light and for dark.

The hues follow Okabe and Ito (2008), whose palette can be told apart with any color vision. Each
hue has one value for light and one for dark, so that areas contrast with both grounds. A hatched
area belongs to the plain area of the same hue.
"""

from typing import Literal

Hue = Literal["blue", "amber", "green", "vermillion", "pink", "violet", "slate", "grey", "faint"]
HUES: dict[Hue, tuple[str, str]] = {
    "blue": ("#0072b2", "#3c9bdc"),
    "amber": ("#d08700", "#ecb04b"),
    "green": ("#008f6b", "#35b891"),
    "vermillion": ("#b93a0a", "#f0804a"),
    "pink": ("#b5568f", "#e08abf"),
    "violet": ("#6b4fa0", "#a58be0"),
    "slate": ("#4a5560", "#c3cbd4"),
    "grey": ("#7a8087", "#8b929a"),
    "faint": ("#dfe3e8", "#333a43"),
}
"""Name -> value on a light ground, value on a dark ground."""
HATCHED: tuple[Hue, ...] = ("blue", "amber", "grey")
"""Hues that have a hatched form, `blue-hatch` and so on."""
GROUNDS = ("#ffffff", "#14171c")
"""Color of the page: light, dark."""
INKS = ("#1b1f24", "#e8eaed")
"""Color of text: light page, dark page."""
MUTED_INKS = ("#565d66", "#a3abb5")
SERIES: tuple[Hue, ...] = ("blue", "vermillion", "green", "pink", "amber", "violet")
"""Hues of the lines of a chart, in order. Each has its own dashes too."""
MOST_LINES = 12
"""Lines of a chart at most. After all hues, they come again with other dashes."""


def luminance(color: str) -> float:
    """Return the relative luminance of a color, from 0 to 1.

    Source: WCAG 2.2, definition of relative luminance.
    """
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colors, from 1 to 21.

    Source: WCAG 2.2, definition of contrast ratio.
    """
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def ink_on(fill: str) -> str:
    """Return the color of text on an area: black or white, whichever can be read better."""
    return max(("#000000", "#ffffff"), key=lambda ink: contrast(fill, ink))
