"""Finds a source file's mutants, and writes the file with one of them applied or with probes.

A mutant replaces the text of a single node of the syntax tree, in place, by text with the same
number of line breaks. All other lines therefore keep their numbers, and comments and formatting
stay as they are. That matters here, because jaxcross quotes line numbers in error messages, labels
and stack traces.

A mutant's key is a hash of the function that contains the mutant and of the position within it. So
a mutant has the same key in another checkout unless that function differs there, and editing one
function doesn't affect the mutants of any other. For the same reason, `sample` draws mutants in the
order of hashes of their keys.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
NEGATIONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
}

# Calls that write messages for people. They don't change what the program does.
_MESSAGES = {
    "debug",
    "info",
    "warning",
    "error",
    "exception",
    "critical",
    "log",
    "warn",
    "print",
    "print_error",
}
# Fields of a node that hold types, patterns and decorators.
_NOT_CODE = {
    "annotation",
    "returns",
    "decorator_list",
    "type_params",
    "pattern",
    "bases",
    "keywords",
    "type_comment",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A mutant, i.e. one change to one file.

    The change replaces the range `at` of the file's bytes by `new`. `place` is the range of bytes
    of the node that a probe watches, in order to find the tests that evaluate the mutant.
    """

    key: str
    file: str
    function: str
    operator: str
    line: int
    at: tuple[int, int]
    new: str
    place: tuple[int, int]
    statement: bool
    on_import: bool

    def applied(self, source: bytes) -> bytes:
        return source[: self.at[0]] + self.new.encode() + source[self.at[1] :]

    def difference(self, source: bytes) -> tuple[str, str]:
        """Returns the line before and after. A node of several lines is shown as a single line."""
        start = source.rfind(b"\n", 0, self.at[0]) + 1
        end = source.find(b"\n", self.at[1])
        end = len(source) if end < 0 else end
        after = source[start : self.at[0]] + self.new.encode() + source[self.at[1] : end]
        return " ".join(source[start:end].decode().split()), " ".join(after.decode().split())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """Where a node is: its function's name, and the function or import-time statement that goes
    into its key.

    The field `watched` is only set for a node in the default value of a parameter. Python evaluates
    defaults on import, but they have no effect until the function is called. So the probe watches
    the first thing that this function evaluates.
    """

    name: str = ""
    anchor: ast.AST | None = None
    on_import: bool = True
    watched: ast.AST | None = None

    def inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> _Scope:
        name = f"{self.name}.{node.name}".lstrip(".")
        if isinstance(node, ast.ClassDef):
            return replace(self, name=name)
        return replace(
            self, name=name, anchor=node if self.on_import else self.anchor, on_import=False
        )


class _Finder:
    """Walks one file's syntax tree and collects the mutants."""

    def __init__(self, source: bytes, file: str) -> None:
        self._source = source
        self._file = file
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.found: dict[str, Mutant] = {}
        self.functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self.tree = ast.parse(source)
        self._block(self.tree.body, _Scope())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Returns the range of bytes of a node."""
        begin = self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return begin, self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _block(self, body: Iterable[ast.stmt], scope: _Scope) -> None:
        for node in body:
            self._walk(node, replace(scope, anchor=node) if scope.on_import else scope)

    def _walk(self, node: ast.AST, scope: _Scope) -> None:
        if _is_left_out(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = node.body if isinstance(node.body, list) else [node.body]
            inside = replace(scope, watched=_first(body) or scope.watched)
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self._walk(default, inside)
            if isinstance(node, ast.Lambda):
                self._walk(node.body, scope)
                return
            self.functions.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._block(node.body, scope.inside(node))
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            self._block(node.orelse, scope)
            return
        for operator, at, new in self._mutations(node):
            self._add(node, scope, operator, at, new)
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not (
                    field in _NOT_CODE and not isinstance(node, ast.Call)
                ):
                    self._walk(child, scope)

    def _add(
        self, node: ast.AST, scope: _Scope, operator: str, at: tuple[int, int], new: str
    ) -> None:
        first, last = self.span(scope.anchor)  # type: ignore[arg-type]
        parts = [
            self._file,
            scope.name,
            operator,
            str(at[0] - first),
            new,
            self._source[first:last].decode(),
        ]
        key = hashlib.sha1("\0".join(parts).encode()).hexdigest()[:12]
        watched = scope.watched or (node.test if isinstance(node, ast.If | ast.IfExp) else node)
        self.found[key] = Mutant(
            key=key,
            file=self._file,
            function=scope.name,
            operator=operator,
            line=self._source.count(b"\n", 0, at[0]) + 1,
            at=at,
            new=new,
            place=self.span(watched),
            statement=isinstance(watched, ast.stmt),
            on_import=scope.on_import and scope.watched is None,
        )

    def _mutations(self, node: ast.AST) -> Iterator[tuple[str, tuple[int, int], str]]:
        """Yields the operator, the range of bytes to replace, and the new text."""
        if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Constant):
            yield from (
                ("condition", self.span(node.test), self._padded(node.test, text))
                for text in ("True", "False")
            )
        elif isinstance(node, ast.Return) and not _is_none(node.value):
            yield "return none", self.span(node), f"return {self._padded(node, 'None')}"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "delete", self.span(node), self._padded(node, "pass", "None")
        elif isinstance(node, ast.AugAssign):
            yield "delete", self.span(node), self._padded(node, "pass", "None")
            if isinstance(node.op, ast.Add | ast.Sub):
                old, new = (b"+=", "-=") if isinstance(node.op, ast.Add) else (b"-=", "+=")
                begin = self._source.index(old, self.span(node.target)[1])
                yield "arithmetic", (begin, begin + 2), new
        elif isinstance(node, ast.Break | ast.Continue):
            yield "break", self.span(node), "continue" if isinstance(node, ast.Break) else "break"
        elif isinstance(node, ast.expr):
            for operator, changed in _changed(node):
                text = ast.unparse(changed)
                if not isinstance(node, ast.Constant) or text.startswith("-"):
                    text = f"({text})"
                yield operator, self.span(node), self._padded(node, text)

    def _padded(self, node: ast.AST, text: str, else_text: str | None = None) -> str:
        """Returns a replacement for the node with the same number of line breaks.

        If the node has line breaks, we put the text and the line breaks into brackets. `else_text`
        is used in place of a text around which brackets wouldn't be valid.
        """
        begin, end = self.span(node)
        breaks = self._source.count(b"\n", begin, end)
        return f"({else_text or text}{breaks * chr(10)})" if breaks else text


def _changed(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yields the operator and the new expression of each mutation."""
    if isinstance(node, ast.Compare):
        for operator, table in (("compare", SWAPS), ("negate", NEGATIONS)):
            for index, op in enumerate(node.ops):
                if type(op) in table:
                    new = copy.deepcopy(node)
                    new.ops[index] = table[type(op)]()
                    yield operator, new
    elif isinstance(node, ast.BoolOp):
        yield (
            "and or",
            ast.BoolOp(
                op=ast.Or() if isinstance(node.op, ast.And) else ast.And(), values=node.values
            ),
        )
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "arithmetic", ast.BinOp(left=node.left, op=op, right=node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "true false", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield from (("constant", ast.Constant(node.value + change)) for change in (1, -1))


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _is_left_out(node: ast.AST) -> bool:
    """Whether a node and everything in it has no mutants: texts, whatever logs or raises them, and
    checks of invariants.
    """
    if isinstance(
        node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.operator
    ):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of `zip`
        return True
    if isinstance(node, ast.Assign | ast.AugAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return ast.unparse(target) == "__all__"
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    *owner, name = ast.unparse(call.func).split(".")
    logs = name in _MESSAGES and (not owner or "log" in owner[-1] or owner[-1] == "warnings")
    return logs or name.endswith(("Error", "Warning"))


def find(source: bytes, file: str) -> dict[str, Mutant]:
    """Returns all mutants of a file, by key."""
    return _Finder(source, file).found


def in_tree(tree: Path, sources: Iterable[str]) -> dict[str, Mutant]:
    """Returns all mutants of these files and folders, by key. Paths are relative to `tree`."""
    found: dict[str, Mutant] = {}
    for name in sources:
        for path in (
            sorted((tree / name).rglob("*.py")) if (tree / name).is_dir() else [tree / name]
        ):
            if path.is_file():  # an older checkout may not have it
                found |= find(path.read_bytes(), path.relative_to(tree).as_posix())
    return found


def sample(tree: Path, mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Returns up to `count` mutants, at most one per line. Skips mutants that don't compile or that
    don't change the syntax tree.
    """
    chosen: list[Mutant] = []
    lines: set[tuple[str, int]] = set()
    for each in sorted(
        mutants, key=lambda mutant: hashlib.sha1(f"{seed} {mutant.key}".encode()).hexdigest()
    ):
        source = (tree / each.file).read_bytes()
        if len(chosen) == count:
            break
        if (each.file, each.line) not in lines and _is_valid(source, each.applied(source)):
            lines.add((each.file, each.line))
            chosen.append(each)
    return sorted(chosen, key=lambda mutant: (mutant.file, mutant.line))


def _is_valid(source: bytes, mutated: bytes) -> bool:
    try:
        return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)) and bool(
            compile(mutated, "mutated", "exec")
        )
    except SyntaxError:
        return False


def readers(tree: Path, file: str) -> set[str]:
    """Returns the file, and the files of its package that import it."""
    dotted = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, name = dotted.rpartition(".")
    found = {file}
    for path in (tree / file.partition("/")[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            from_here = isinstance(node, ast.ImportFrom) and (
                node.module == dotted
                or (node.module == parent and any(each.name == name for each in node.names))
            )
            if from_here or (
                isinstance(node, ast.Import) and any(each.name == dotted for each in node.names)
            ):
                found.add(path.relative_to(tree).as_posix())
    return found


def with_probes(source: bytes, file: str, mutants: Iterable[Mutant], *, functions: bool) -> bytes:
    """Returns the source with a probe at each mutant and, if `functions`, at the start of each
    function.

    Probes add no lines: `(_mutation_hit("key"), a < b)[1]` has the value of `a < b`, and a
    statement becomes `_mutation_hit("key"); return a`.
    """
    finder = _Finder(source, file)
    places = [(each.place, each.statement, each.key) for each in mutants if not each.on_import]
    firsts = filter(None, (_first(node.body) for node in finder.functions if functions))
    places += [(finder.span(first), isinstance(first, ast.stmt), entry(file)) for first in firsts]
    # The second item orders insertions at equal positions: closing brackets come first, then
    # statements, then opening brackets.
    inserted: list[tuple[int, int, int, str]] = []
    for (begin, end), statement, key in places:
        if statement:
            inserted.append((begin, 1, 0, f'_mutation_hit("{key}"); '))
        else:
            inserted.append((end, 0, -begin, ")[1]"))
            inserted.append((begin, 2, -end, f'(_mutation_hit("{key}"), '))
    inserted.append(_import(finder, file))
    for position, _, _, text in sorted(inserted, reverse=True):
        source = source[:position] + text.encode() + source[position:]
    return source


def entry(file: str) -> str:
    """Returns the key of the probes at the start of a file's functions."""
    return f"entry {file}"


def _import(finder: _Finder, file: str) -> tuple[int, int, int, str]:
    """Imports the probe on an existing line, after the docstring and any `__future__` import."""
    text = f"from {file.partition('/')[0]}._mutation_probe import hit as _mutation_hit"
    heads = [
        node
        for node in finder.tree.body
        if (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        or (node is finder.tree.body[0] and isinstance(node, ast.Expr))
    ]
    return (finder.span(heads[-1])[1], 0, 0, f"; {text}") if heads else (0, 0, 0, f"{text}; ")


def _first(body: Sequence[ast.AST]) -> ast.AST | None:
    """Returns what a function evaluates first: a simple statement, or the expression at the head of
    a compound one.
    """
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.If | ast.While):
            return node.test
        if isinstance(node, ast.For | ast.AsyncFor):
            return node.iter
        if isinstance(node, ast.With | ast.AsyncWith):
            return node.items[0].context_expr
        if isinstance(node, ast.Match):
            return node.subject
        if isinstance(node, ast.Try):
            return _first(node.body)
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Global | ast.Nonlocal
        ):
            return node
    return None
