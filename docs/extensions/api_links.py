"""A Sphinx extension that links inline code to the API reference.

Our pages write names as plain code, such as `runner.add` or `jaxcross.sweep`, which also reads well
on GitHub. In the HTML pages, the first such name of every section or table row becomes a link to
its entry. If a name looks like ours but doesn't exist (any more), there's a warning, which
`sphinx-build -W` turns into an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import reduce
from importlib import import_module
from inspect import getdoc

# What pages call an instance of a class.
INSTANCES = {
    "job": ("jaxcross.JobContext", "jaxcross.Job", "jaxcross.report.JobSummary"),
    "runner": ("jaxcross.Runner",),
    "report": ("jaxcross.report.Report",),
    "comparison": ("jaxcross.report.Comparison",),
    "world": ("jaxcross.World",),
}
# Folders whose functions pages write without a module, or with only the last part of it.
MODULES = ("jaxcross", "jaxcross.exchange", "jaxcross.data", "jaxcross.tensor", "jaxcross.plan")
BARE = MODULES[:3]
# Words that also mean something else: a method, a subcommand, an argument.
AMBIGUOUS = {"run", "sweep", "fuse", "select", "finish"}
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?", re.DOTALL)


def target(code: str, entries: Collection[str]) -> str | None:
    """Returns the entry of the API reference that a piece of inline code names, or None.

    Args:
        code: The inline code, with or without arguments in parentheses.
        entries: The full names of all entries of the API reference.

    Raises:
        LookupError: The code names something of ours that doesn't exist.
    """
    match = NAME.fullmatch(code)
    if match is None:
        return None
    name = match[1]
    first, _, rest = name.partition(".")
    if first in INSTANCES and rest:
        return _member(INSTANCES[first], rest, entries)
    if first[0].isupper():
        found = [entry for entry in entries if entry.endswith(f".{first}")]
        if len(found) != 1:
            return None
        return _member((found[0],), rest, entries) if rest else found[0]
    if name in entries:
        return name
    if first == "jaxcross":
        if not _exists(name):
            raise LookupError(f"`{code}` doesn't exist. If it isn't code, put it in quotes")
        return None
    if name in AMBIGUOUS:
        return None
    modules = MODULES if rest else BARE
    return next((f"{m}.{name}" for m in modules if f"{m}.{name}" in entries), None)


def _member(classes: tuple[str, ...], path: str, entries: Collection[str]) -> str:
    """Returns the entry of a member, or that of the class if it describes the member itself."""
    member = path.split(".")[0]
    for name in classes:
        if f"{name}.{member}" in entries:
            return f"{name}.{member}"
    for name in classes:
        cls = _object(name)
        if hasattr(cls, member) or re.search(rf"^ *{member}:", getdoc(cls) or "", re.MULTILINE):
            return name
    raise LookupError(f"none of {', '.join(classes)} has a member `{member}`")


def _object(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def _exists(name: str) -> bool:
    first, *rest = name.split(".")
    try:
        reduce(getattr, rest, import_module(first))
    except AttributeError:
        try:
            import_module(name)
        except ImportError:
            return False
    return True


def setup(app) -> dict[str, bool]:
    from docutils import nodes
    from sphinx import addnodes
    from sphinx.transforms.post_transforms import SphinxPostTransform
    from sphinx.util import logging

    logger = logging.getLogger(__name__)

    class LinkNames(SphinxPostTransform):
        default_priority = 5
        formats = ("html",)

        def run(self, **kwargs: object) -> None:
            objects = self.env.domains["py"].data["objects"]
            seen: set[tuple[int, str]] = set()
            for literal in list(self.document.findall(nodes.literal)):
                if _ancestor(literal, (nodes.reference, nodes.title, addnodes.pending_xref)):
                    continue
                try:
                    entry = target(literal.astext(), objects)
                except LookupError as error:
                    logger.warning(str(error), location=literal, type="api_links")
                    continue
                section = _ancestor(literal, (nodes.section, nodes.row))
                if entry is None or (id(section), entry) in seen:
                    continue
                seen.add((id(section), entry))
                found = objects[entry]
                own = _ancestor(literal, addnodes.desc)
                if own is not None and found.node_id in own[0]["ids"]:
                    continue
                uri = self.app.builder.get_relative_uri(self.env.docname, found.docname)
                link = nodes.reference("", "", internal=True, refuri=f"{uri}#{found.node_id}")
                literal.replace_self(link)
                link += literal

    app.add_post_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _ancestor(node, kinds):
    while node is not None and not isinstance(node, kinds):
        node = node.parent
    return node
