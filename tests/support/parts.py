"""Random tests in parts: the usual run makes one, and a release all of them."""

import pytest


def in_parts(number: int) -> pytest.MarkDecorator:
    """Runs a test so often, as its argument `part`. Each part draws its own examples; all but one
    are `exhaustive`.
    """
    exhaustive = (pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, number))
    return pytest.mark.parametrize("part", [0, *exhaustive])
