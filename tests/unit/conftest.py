"""What unit tests share: a folder of their own for the verdicts of self-tests."""

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
