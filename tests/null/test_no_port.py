"""`jaxcross` opens no port: messages between ranks are MPI's. Only a lab, whose hosts are its own, has sockets."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "jaxcross"
NETWORK = {
    "asyncio",
    "ftplib",
    "http",
    "multiprocessing",
    "smtplib",
    "socket",
    "socketserver",
    "ssl",
    "urllib.request",
    "xmlrpc",
}


def imported(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_no_module_knows_a_network():
    found = [
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in imported(path.read_text())
        if any(f"{name}.".startswith(f"{network}.") for network in NETWORK)
    ]
    assert {path.split("/")[0] for path, _ in found} == {"lab"}


def test_the_reader_sees_imports_inside_functions():
    assert set(imported("def f():\n    from http.server import HTTPServer\n    import socket as s")) == {
        "http.server",
        "socket",
    }
