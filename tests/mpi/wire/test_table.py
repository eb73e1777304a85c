"""The wire against XLA's own collectives: all operations, types and axes, on 1 to 4 ranks."""

import json

import pytest


@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        (2, 239),
        pytest.param(3, 239, marks=pytest.mark.integration),
        *(pytest.param(n, rows, marks=pytest.mark.exhaustive) for n, rows in ((1, 239), (4, 455))),
    ],
)
def test_every_collective_equals_xla(mpirun, ranks, rows, quick_compiler):
    done = mpirun(ranks, "wire_table.py", timeout=900, env=quick_compiler).check()
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["wrong"] == []
    assert found["rows"] == rows
