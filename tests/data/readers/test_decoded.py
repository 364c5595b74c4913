"""The cache of what is slow to decode: found again, never mistaken, whole or not there."""

import errno
import os
import time

import numpy as np
import pytest

from sparsona.core.errors import SparsonaError
from sparsona.data.cache import MARK
from sparsona.data.readers import decoded


@pytest.fixture
def decoded_folder(cache):
    return cache / "decoded"


@pytest.fixture
def source(tmp_path):
    """A folder of one file, and how it is decoded: its bytes, told on the way."""

    class Source:
        root = tmp_path / "source"
        times = 0

        def decode(self, new):
            self.times += 1
            content = np.frombuffer((self.root / "file").read_bytes(), np.uint8)
            new("x", np.uint8, content.shape)[:] = content
            new("count", np.int64, (1,))[:] = len(content)

        def read(self):
            arrays = decoded.decode_once("set", {}, self.root, [self.root / "file"], self.decode)
            assert arrays["count"].tolist() == [len(arrays["x"])]
            return bytes(arrays["x"])

    Source.root.mkdir()
    (Source.root / "file").write_bytes(b"abc")
    return Source()


def test_what_was_decoded_is_found_again(source):
    assert (source.read(), source.read(), source.times) == (b"abc", b"abc", 1)


def test_another_folder_with_files_of_the_same_names_sizes_and_times_is_another_set(source, tmp_path):
    os.utime(source.root / "file", (10**9, 10**9))
    assert source.read() == b"abc"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"xyz")
    os.utime(tmp_path / "other" / "file", (10**9, 10**9))
    source.root = tmp_path / "other"
    assert source.read() == b"xyz"


def test_a_file_that_changed_though_its_time_did_not_is_decoded_again(source):
    """As `cp -p` and `rsync -t` do it."""
    path = source.root / "file"
    os.utime(path, (10**9, 10**9))
    assert source.read() == b"abc"
    path.write_bytes(b"xyz")
    os.utime(path, (10**9, 10**9))
    assert source.read() == b"xyz"


@pytest.mark.parametrize("harm", ["lost", "cut", "junk", "no sizes", "odd sizes", "emptied"])
def test_what_was_damaged_is_decoded_again(source, decoded_folder, harm):
    source.read()
    [folder] = decoded_folder.iterdir()
    if harm == "lost":
        (folder / "x.npy").unlink()
    elif harm == "cut":
        (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()[:-1])
    elif harm == "junk":
        (folder / "x.npy").write_bytes(b"j" * (folder / "x.npy").stat().st_size)
    elif harm == "emptied":
        for path in folder.iterdir():
            path.unlink()
    else:
        (folder / "sizes.json").write_text("{" if harm == "no sizes" else "[1]")
    assert source.read() == b"abc"
    assert source.times == 2
    assert source.read() == b"abc"
    assert source.times == 2


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no way to reserve room here")
def test_a_full_disk_is_told_before_a_mapped_file_is_written(source, decoded_folder, monkeypatch):
    """A write into a mapped file that has no room ends the process without a word."""

    def full(file, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SparsonaError, match="No space left on device") as caught:
        source.read()
    assert str(decoded_folder) in str(caught.value)
    assert "SPARSONA_DATA" in str(caught.value)
    assert not list(decoded_folder.iterdir())


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no way to reserve room here")
def test_room_is_reserved_for_the_whole_file(source, decoded_folder, monkeypatch):
    reserved = []
    monkeypatch.setattr(os, "posix_fallocate", lambda file, start, size: reserved.append((start, size)))
    source.read()
    [folder] = decoded_folder.iterdir()
    assert sorted(reserved) == sorted((0, path.stat().st_size) for path in folder.glob("*.npy"))


def test_decoding_that_is_stopped_leaves_nothing(source, decoded_folder):
    def stop(new):
        new("x", np.uint8, (3,))
        raise KeyboardInterrupt

    source.decode = stop
    with pytest.raises(KeyboardInterrupt):
        source.read()
    assert not list(decoded_folder.iterdir())


def make_part(path, age=10**6, is_ours=True):
    path.mkdir(parents=True)
    (path / "precious").write_text("work of years")
    if is_ours:
        (path / MARK).touch()
    for each in (*path.iterdir(), path):
        os.utime(each, (time.time() - age,) * 2)


def test_only_what_was_surely_made_here_and_abandoned_is_swept(source, decoded_folder):
    digest = "0123456789abcdef01234567"
    make_part(decoded_folder / f"set-{digest}.part-abcd_123")
    stay = [
        ("set.part-one", {}),
        ("thesis.part-abcd_123", {}),  # of another set
        (f"other-{digest}.part-abcd_123", {}),
        (f"set-{digest}.part-abcd_124", {"is_ours": False}),
        (f"set-{digest}.part-abcd_125", {"age": 10}),
    ]
    for name, options in stay:
        make_part(decoded_folder / name, **options)
    source.read()
    assert {name for name, _ in stay} == {path.name for path in decoded_folder.iterdir() if ".part-" in path.name}


def test_a_quicker_process_wins(source, decoded_folder):
    def decode(new):
        del source.decode  # another process decodes the same meanwhile
        source.read()
        source.decode = decode
        new("x", np.uint8, (3,))[:] = 7
        new("count", np.int64, (1,))[:] = 3

    source.decode = decode
    assert source.read() == b"abc"
    assert len(list(decoded_folder.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_told(source, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "occupied"))
    with pytest.raises(SparsonaError, match="SPARSONA_DATA"):
        source.read()
