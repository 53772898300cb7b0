"""The command line: `vkattn setup | info | check | demo` (also `python -m vkattn ...`).

Only the arguments are here. Each command imports its module when it is run, so that `vkattn setup` works before kp
is there and `vkattn --help` costs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .errors import VkattnError


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="SELECT",
        help="index of a device or part of its name (default: $VKATTN_DEVICE, else the best one; see `vkattn info`)",
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each command sets `module` to the one whose `main(args)` runs it."""
    parser = argparse.ArgumentParser(prog="vkattn", description="Attention on any GPU that has a Vulkan driver.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    setup = commands.add_parser("setup", help="build and install kp 0.9.0 (Kompute), which vkattn dispatches through")
    setup.add_argument("--force", action="store_true", help="build and install it even if it is there")
    setup.add_argument("--verbose", action="store_true", help="show the output of pip and the compiler")
    setup.add_argument("--jobs", type=int, metavar="N", help="compile with N processes (default: one per core)")
    setup.set_defaults(module="setup_kompute")

    info = commands.add_parser("info", help="list the Vulkan devices, their limits, and which kernels fit and why not")
    _add_device(info)
    info.add_argument("--json", action="store_true", help="print it as JSON")
    info.set_defaults(module="info")

    check = commands.add_parser("check", help="run every kernel variant against the oracle on a device")
    _add_device(check)
    check.add_argument("--json", action="store_true", help="print it as JSON")
    check.set_defaults(module="check")

    demo = commands.add_parser("demo", help="compute one small attention on a device and compare it with the oracle")
    _add_device(demo)
    demo.set_defaults(module="demo")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (0 good, 1 failed, 2 wrong usage)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        from . import __version__

        print(f"vkattn {__version__}")
        return 0
    if not hasattr(args, "module"):
        parser.print_help()
        return 2
    command = importlib.import_module(f".{args.module}", __package__)
    try:
        return int(command.main(args))
    except VkattnError as error:
        print(f"vkattn: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stderr.close()
        return 1
