"""The command ``vkattn bench``: a grid of problems, a decode step dispatch by dispatch, or two runs compared."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .. import __version__
from ..dispatch import ALGORITHMS
from ..errors import DeviceError, OptionError
from ..paths import write_whole
from ..runtime.device import Device
from . import step
from .grid import PEERS, Grid
from .plot import plot
from .problems import choose, read_grid
from .results import Row, compare, document, read, table


def main(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if the device computes wrongly, 2 for wrong usage or no device."""
    if mistake := _mistake(args):
        print(f"vkattn bench: {mistake}", file=sys.stderr)
        return 2
    if args.graph:
        return step.main(args)
    try:
        if args.compare:
            before, after = (read(Path(path))[1] for path in args.compare)
            print(compare(before, after))
            return 0
        if args.plot and args.results:
            header, rows = read(Path(args.results))
            plot(rows, f"{header.get('device')} ({header.get('driver')})", Path(args.plot))
            return 0
        device = Device(args.device)
    except (OptionError, DeviceError) as error:
        print(f"vkattn bench: {error}", file=sys.stderr)
        return 2
    with device:
        try:
            grid = _grid(device, args)
        except OptionError as error:
            print(f"vkattn bench: {error}", file=sys.stderr)
            return 2

        def keep(rows: list[Row]) -> dict[str, Any]:
            result = document({"vkattn": __version__} | grid.header(), rows)
            if args.out:
                write_whole(Path(args.out), json.dumps(result, indent=1) + "\n")
            return result

        rows = grid.run(keep)
        result = keep(rows)
    roofline = grid.roofline
    matrix = f"{roofline.matrix / 1e3:.0f} TFLOP/s" if roofline.matrix else roofline.matrix_source
    print(json.dumps(result, indent=1) if args.json else "\n".join([
        f'"{result["device"]}" ({result["driver"]}); microseconds, medians with quartiles',
        f"measured limits: copy {roofline.copy:.4g} GB/s, float32 {roofline.fma / 1e3:.3g} TFLOP/s, matrix {matrix}",
        table(rows)]))
    if args.plot:
        plot(rows, f"{result['device']} ({result['driver']})", Path(args.plot))
    return 0 if grid.is_right else 1


def _mistake(args: argparse.Namespace) -> str:
    """Return what is wrong with options that would be ignored, or an empty text."""
    if args.results and not args.plot:
        return "--results without --plot draws nothing. Hint: --plot FILE"
    ignored = [name for name in ("quick", "sets", "algorithms", "peers", "out", "plot", "results", "compare")
               if getattr(args, name)]
    if args.graph and ignored:
        return f"--graph times one decode step; --{ignored[0]} is of the grid of problems."
    return ""


def _grid(device: Device, args: argparse.Namespace) -> Grid:
    """Return the grid that the arguments describe; software devices get the quick set unless sets are named."""
    is_quick = args.quick or (not args.sets and device.info.device_type == "cpu")
    sets = args.sets or (["quick"] if is_quick else ["targets", "scaling"])
    wanted = tuple(PEERS) if args.peers is None else tuple(name for name in args.peers if name != "none")
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise OptionError(f"there is no peer {', '.join(unknown)}; there are: {', '.join(PEERS)}, none.")
    algorithms = tuple(args.algorithms or ())
    if strange := [name for name in algorithms if name not in (*ALGORITHMS, "auto", "all")]:
        raise OptionError(f"there is no algorithm {', '.join(strange)}; there are: {', '.join(ALGORITHMS)}, auto, all.")
    return Grid(device, choose(sets, read_grid()), algorithms, wanted, args.budget)
