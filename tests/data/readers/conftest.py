"""Every test of a reader has a cache of its own."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"
