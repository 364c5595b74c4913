"""A file that is replaced is the old one or the new one, and nothing else."""

import pytest

from sparsona.core.files import replace_file


@pytest.mark.parametrize("is_durable", [False, True])
def test_the_new_content_appears_at_the_end(tmp_path, is_durable):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replace_file(path, is_durable=is_durable) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_error_the_old_file_is_there_and_no_draft(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half():
        with replace_file(path) as file:
            file.write(b"ne")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
