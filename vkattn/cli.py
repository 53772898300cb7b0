"""The command line: `vkattn setup | info | check | bench | tune | demo` (also `python -m vkattn ...`).

Only the arguments are here. Each command imports its module when it is run, so that `vkattn setup` works before kp
is there and `vkattn --help` costs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .dtypes import FLOAT_DTYPES
from .errors import VkattnError


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="SELECT",
        help="index of a device or part of its name (default: $VKATTN_DEVICE, else the best one; see `vkattn info`)",
    )


def _positive(text: str) -> int:
    """Read a whole number from 1 up."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _seconds(text: str) -> float:
    """Read a number from 0 up."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return number


def _heads(text: str) -> tuple[int, int]:
    """Read "24/8": query heads and KV heads; "8" is as many of both."""
    query, _, kv = text.partition("/")
    return _positive(query), _positive(kv or query)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a few small problems: what software devices get anyway")
    parser.add_argument("--sets", nargs="+", metavar="SET",
                        help="sets of problems, in turn: quick, targets, scaling, full (default: targets scaling; "
                             "on a software device quick)")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME",
                        help="auto, all, or names such as split and fused (default: as the set says)")
    parser.add_argument("--peers", nargs="+", metavar="NAME",
                        help='other packages to time, such as numpy and "torch cpu", or none (default: all there are)')
    parser.add_argument("--budget", type=_seconds, default=300.0, metavar="SECONDS",
                        help="begin no problem after so long (default 300)")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON to a file as well")
    parser.add_argument("--plot", metavar="FILE", help="draw time against length (needs matplotlib)")
    parser.add_argument("--results", metavar="FILE", help="with --plot: draw these results, and measure nothing")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"),
                        help="compare two results of --out, and measure nothing")
    step = parser.add_argument_group("one decode step, dispatch by dispatch")
    step.add_argument("--graph", action="store_true",
                      help="time this instead: append to a KV cache, then attend; the options below are for it")
    step.add_argument("--heads", type=_heads, default=(24, 8), metavar="Q/KV", help="heads (default 24/8)")
    for name, default, meaning in (
        ("--head-dim", 128, "elements of a query, key or value row"), ("--capacity", 4096, "tokens the cache can hold"),
        ("--length", 250, "tokens that are live, the new ones too"), ("--q-len", 1, "new tokens"),
        ("--layers", 1, "layers, each one's output the next one's queries"), ("--repeat", 50, "runs that are timed"),
    ):  # fmt: skip
        step.add_argument(name, type=_positive, default=default, metavar="N", help=f"{meaning} (default {default})")
    step.add_argument("--dtype", choices=FLOAT_DTYPES, default="float16", help="of everything (default float16)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each command sets `module` to the one whose `main(args)` runs it."""
    parser = argparse.ArgumentParser(prog="vkattn", description="Attention on any GPU that has a Vulkan driver.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, summary: str, more: str, module: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {more}")
        command.set_defaults(module=module or name)
        return command

    setup = add("setup", "build and install kp 0.9.0 (Kompute), which vkattn dispatches through",
                "It takes a few minutes and a C++ compiler; the wheel is kept, so the next time takes seconds. "
                "What the machine lacks is named with the line that installs it.", "setup_kompute")
    setup.add_argument("--force", action="store_true", help="build and install it even if it is there")
    setup.add_argument("--verbose", action="store_true", help="show the output of pip and the compiler")
    setup.add_argument("--jobs", type=_positive, metavar="N", help="compile with N processes (default: one per core)")

    info = add("info", "list the Vulkan devices, their limits, and which kernels fit and why not", "It needs no kp.")
    check = add("check", "run every kernel variant that a device uses against the oracle",
                "The oracle is attention in float64 NumPy. The exit status is 1 if a variant is wrong, 2 without a "
                "device. On a GPU it takes about a minute.")
    bench = add("bench", "time a grid of problems, beside the device's limits and others",
                "Every result is checked before it is timed. Times are microseconds: medians, with quartiles.",
                "bench.command")
    tune = add("tune", "measure the numbers that kernels choose their sizes by, and keep them",
               "They are written to a file in your home (VKATTN_TUNING names another), which devices of this name are "
               "opened with from then on.", "bench.tune")
    demo = add("demo", "compute one small attention on a device and compare it with the oracle", "It takes a second.")
    for command in (info, check, bench, tune, demo):
        _add_device(command)
    _add_bench(bench)
    for command in (info, check, bench):
        command.add_argument("--json", action="store_true", help="print it as JSON")
    tune.add_argument("--dry-run", action="store_true", help="measure and print, but write nothing")
    tune.add_argument("--quick", action="store_true", help="shorter problems")
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
    except OSError as error:  # a file or folder that an argument or a variable names
        print(f"vkattn: {error}", file=sys.stderr)
        return 1
