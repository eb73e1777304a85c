"""Imports a package's public names on first use, so `jaxcross --help` needn't wait for JAX.

Type checkers and editors only find a package's public names if they're ordinary imports. So each
package imports them below `if TYPE_CHECKING:`, where the imports are never executed. To avoid a
second list of names, this module reads them from these imports by parsing the package's source
code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def homes_of(package: str) -> dict[str, str]:
    """Returns, for each lazily imported name of a package, the module that defines it.

    If the name is a submodule, that's the submodule itself.
    """
    spec = sys.modules[package].__spec__
    source: str = spec.loader.get_source(package)  # type: ignore[union-attr]
    homes = {}
    for block in ast.parse(source).body:
        if not isinstance(block, ast.If) or ast.unparse(block.test) != "TYPE_CHECKING":
            continue
        for line in block.body:
            assert isinstance(line, ast.ImportFrom), ast.unparse(line)
            for each in line.names:
                home = line.module
                homes[each.name] = f"{package}.{each.name}" if home == package else str(home)
    return homes


def on_first_use(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a package with lazily imported names.

    All public names of the package must be imported lazily.
    """
    homes = homes_of(package)
    names = sorted(homes)

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        module = import_module(homes[name])
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    return load, lambda: [*names], [*names]
