"""Draws pieces of work that are thinner than a pixel, as a tint.

Each pixel column is as dark as the share of its time that is work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

PIXELS = 1700
"""Width of the picture's axes, in pixels."""

PALEST = 0.15
"""Least tint of a column with any work, so that the work is visible."""


class Tint:
    """The thin pieces of work of one lane, by colour."""

    def __init__(self, shown_s: float) -> None:
        self._shown_s = shown_s
        self.pixel_s = shown_s / PIXELS
        self._pieces: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def keep_wide(
        self, bars: Sequence[tuple[float, float]], colour: str
    ) -> list[tuple[float, float]]:
        """Keeps the bars (begin, length) that are thinner than a pixel for `draw`, and returns the
        others. Drops bars outside the picture.
        """
        shown = [bar for bar in bars if bar[0] + bar[1] > 0 and bar[0] < self._shown_s]
        self._pieces[colour] += [bar for bar in shown if bar[1] < self.pixel_s]
        return [bar for bar in shown if bar[1] >= self.pixel_s]

    def draw(self, axis: Any, y: float) -> None:
        """Draws the thin bars into the row at height `y`."""
        taken = {colour: pieces for colour, pieces in self._pieces.items() if pieces}
        if not taken:
            return
        strip = np.ones((PIXELS, 3))
        free = np.ones(PIXELS)
        for colour, pieces in taken.items():
            part = self._coverage(pieces)
            part = np.minimum(np.where(part > 0, np.maximum(part, PALEST), 0), free)
            free -= part
            rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
            strip -= part[:, None] * (1 - rgb)
        image = np.concatenate([strip, (free < 1)[:, None]], axis=1)[None]
        limits = axis.get_xlim(), axis.get_ylim()
        axis.imshow(
            image,
            extent=(0, self._shown_s, y - 0.4, y + 0.4),
            aspect="auto",
            interpolation="nearest",
            zorder=1,
        )
        axis.set_xlim(limits[0])
        axis.set_ylim(limits[1])

    def _coverage(self, pieces: Sequence[tuple[float, float]]) -> np.ndarray:
        """Returns the share of each pixel column that the pieces fill. A piece is thinner than a
        pixel, so it ends in the column where it began, or in the next one.
        """
        begin, length = np.array(pieces).T / self.pixel_s
        end = np.clip(begin + length, 0, PIXELS)
        begin = np.clip(begin, 0, PIXELS)
        column = np.minimum(begin.astype(int), PIXELS - 1)
        inside = np.minimum(end, column + 1) - begin
        share = np.bincount(column, inside, PIXELS + 1)
        share += np.bincount(np.minimum(column + 1, PIXELS), end - begin - inside, PIXELS + 1)
        return np.clip(share[:PIXELS], 0, 1)
