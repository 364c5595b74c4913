"""The last answer in a vault: given again to the same job, and only if it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsona.deploy.vault import ANSWER, Vault


def test_the_last_answer_and_no_other(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    assert vault.answer("one") is None
    vault.remember("one", b"an\nanswer")
    assert Vault(tmp_path).answer("one") == b"an\nanswer"
    assert vault.answer("two") is None
    vault.remember("two", b"another")
    assert vault.answer("one") is None


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-3] + bytes(3), lambda data: b""])
def test_an_incomplete_answer_is_none(tmp_path: Path, damage) -> None:
    vault = Vault(tmp_path)
    vault.remember("one", b"answer" * 100)
    path = tmp_path / ANSWER
    path.write_bytes(damage(path.read_bytes()))
    assert vault.answer("one") is None
