"""Splits random tests into parts: the usual run makes one part, a release makes all of them."""

import pytest


def in_parts(number: int) -> pytest.MarkDecorator:
    """Runs a test `number` times, passing `part`, and marks all parts but the first `exhaustive`.

    Each part draws its own examples.
    """
    exhaustive = (pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, number))
    return pytest.mark.parametrize("part", [0, *exhaustive])
