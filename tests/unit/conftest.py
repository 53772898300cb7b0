"""What unit tests share: a folder of their own for the verdicts of self-tests, and a user without a home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vkattn.kernels import verdicts


@pytest.fixture
def no_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Begin without verdicts, all tiers allowed; give the file where new ones are kept."""
    monkeypatch.setenv("VKATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VKATTN_TIERS", raising=False)
    verdicts.forget()
    yield tmp_path / "cache" / "self_tests.json"
    verdicts.forget()


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user without a home, for whom no variable names a folder or a file either."""
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("VKATTN_CACHE", "XDG_CACHE_HOME", "VKATTN_TUNING", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
