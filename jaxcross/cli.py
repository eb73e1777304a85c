"""`jaxcross doctor | demo | launch | sweep | estimate | contention | plan | top | data`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from jaxcross import __version__

COMMANDS = ("doctor", "demo", "launch", "sweep", "estimate", "contention", "plan", "top", "data")
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser.

    Each command's options are defined in a module of its own. All of these modules are imported
    even for `jaxcross --help`, so they mustn't import anything slow, such as JAX.
    """
    top = argparse.ArgumentParser(
        prog="jaxcross",
        description=(
            "Several distributed JAX training jobs share one accelerator; exchanges hide behind "
            "computation."
        ),
    )
    top.add_argument("--version", action="version", version=f"jaxcross {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"jaxcross.commands.{name}").add_parser(commands)
        commands.choices[name].set_defaults(parser=commands.choices[name])
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit status, which is 130 after Ctrl-C."""
    command = "jaxcross"
    try:
        options, unknown = parser().parse_known_args(arguments)
        command += f" {options.command}"
        if unknown:  # print the command's usage rather than that of `jaxcross`
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return import_module(f"jaxcross.commands.{options.command}").run(options)
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
