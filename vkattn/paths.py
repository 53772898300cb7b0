"""Where vkattn keeps files between runs. Used by the setup and by the self-tests of kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .errors import OptionError


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it finds the old text or the new one; make its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for what vkattn keeps between runs: $VKATTN_CACHE, or vkattn/ in the user's cache folder.

    Raises
    ------
    OptionError
        No variable names one, and the user has no home. Whether the folder can be written is for the caller to see.
    """
    if environ.get("VKATTN_CACHE"):
        return Path(environ["VKATTN_CACHE"])
    base = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "vkattn"
    except RuntimeError as error:
        raise OptionError("there is no folder to keep files in: the user has no home. Hint: let the environment "
                          "variable VKATTN_CACHE name one.") from error
