"""The API reference lists only names that exist: Sphinx silently omits unknown members."""

import importlib
import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[3] / "docs" / "reference" / "api").glob("*.md"))
ENTRY = re.compile(r"^\.\. auto(?:class|function|data):: (\S+)\n((?:   :.*\n)*)", re.M)


def resolve(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return getattr(resolve(module), attribute)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_listed_names_and_members_exist(page):
    entries = ENTRY.findall(page.read_text())
    assert entries
    for name, options in entries:
        found = resolve(name)
        for members in re.findall(r":members: (.+)", options):
            missing = [
                m
                for m in members.split(", ")
                if not hasattr(found, m) and m not in found.__annotations__
            ]
            assert not missing, f"{name} has no {missing}"
