"""Where kernels and programs are kept for later runs."""

import os
from pathlib import Path

import pytest

from sparsona.core.kernels import FOLDERS, keep_compiled


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in FOLDERS:
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_kernels_and_programs_are_kept_in_one_place(home: Path) -> None:
    keep_compiled()
    kept = home / ".cache" / "sparsona" / "compiled"
    assert kept.is_dir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(kept)
    assert os.environ["TRITON_CACHE_DIR"] == str(kept / "triton")


def test_a_folder_that_the_user_named_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    keep_compiled()
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"


def test_a_home_folder_that_cannot_be_written_leaves_the_defaults(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("HOME", str(home / "file"))
    keep_compiled()
    assert not any(variable in os.environ for variable in FOLDERS)
