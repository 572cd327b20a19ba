"""Downloads: whole or not there, gone on with, checked; against a server of this machine."""

from __future__ import annotations

import hashlib
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from posthoc.errors import FileError
from reproduction.data import download
from reproduction.data.download import Remote, Shelf, cache_folder, fetch

BODY = bytes(range(256)) * 4096  # 1 MiB
SHA256 = "sha256:" + hashlib.sha256(BODY).hexdigest()


class Server:
    """One file, and how the server behaves; `asked` are the Range headers of the requests so far."""

    def __init__(self) -> None:
        self.body, self.tag = BODY, '"v1"'
        self.breaks_after: list[int] = []  # bytes sent before the connection breaks, a request each
        self.ranges, self.status = True, 200
        self.asked: list[str | None] = []
        self.url = ""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = self.headers["Range"]
            state.asked.append(wanted)
            if state.status != 200:
                self.send_error(state.status)
                return
            start = 0
            if wanted and state.ranges and self.headers["If-Range"] == state.tag:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(state.body):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(state.body)}")
                    self.end_headers()
                    return
            rest = state.body[start:]
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(state.body) - 1}/{len(state.body)}")
            self.send_header("Content-Length", str(len(rest)))
            if state.tag:
                self.send_header("ETag", state.tag)
            self.end_headers()
            self.wfile.write(rest[: state.breaks_after.pop(0)] if state.breaks_after else rest)

        def log_message(self, *args):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{running.server_address[1]}/file.bin"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    running.shutdown()
    running.server_close()
    thread.join()


@contextmanager
def given_up_after_one_attempt():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "ATTEMPTS", 1)
        yield


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_file_is_downloaded_once_and_its_checksum_is_written_down(server, tmp_path):
    remote = Remote(server.url, "file.bin")
    for _ in range(2):
        assert fetch(remote, tmp_path / "cache").read_bytes() == BODY
    assert server.asked == [None]
    assert names(tmp_path / "cache") == ["file.bin", "file.bin.sha256"]
    assert (tmp_path / "cache" / "file.bin.sha256").read_text().strip() == SHA256


def test_a_broken_connection_is_gone_on_with(server, tmp_path):
    server.breaks_after = [300_000, 200_000]
    assert fetch(Remote(server.url, "file.bin", SHA256), tmp_path).read_bytes() == BODY
    assert server.asked == [None, "bytes=300000-", "bytes=500000-"]


def test_a_half_downloaded_file_is_kept_and_gone_on_with_by_a_later_call(server, tmp_path):
    remote = Remote(server.url, "file.bin", SHA256)
    server.breaks_after = [400_000]
    with given_up_after_one_attempt(), pytest.raises(FileError, match=r"too early.* 400000 bytes are kept"):
        fetch(remote, tmp_path)
    assert names(tmp_path) == ["file.bin.part", "file.bin.part.version"]
    assert fetch(remote, tmp_path).read_bytes() == BODY
    assert server.asked == [None, "bytes=400000-"]
    assert names(tmp_path) == ["file.bin", "file.bin.sha256"]


def test_a_part_of_another_version_is_not_mixed_with_this_one(server, tmp_path):
    server.breaks_after = [400_000]
    remote = Remote(server.url, "file.bin")
    with given_up_after_one_attempt(), pytest.raises(FileError):
        fetch(remote, tmp_path)
    server.body, server.tag = BODY[::-1], '"v2"'
    assert fetch(remote, tmp_path).read_bytes() == BODY[::-1]


def test_a_server_that_cannot_go_on_sends_all(server, tmp_path):
    server.ranges, server.breaks_after = False, [400_000]
    assert fetch(Remote(server.url, "file.bin", SHA256), tmp_path).read_bytes() == BODY
    assert server.asked == [None, "bytes=400000-"]


@pytest.mark.parametrize("tag", ["", 'W/"v1"'])
def test_without_a_version_that_promises_the_same_bytes_all_is_asked_for(server, tmp_path, tag):
    server.tag, server.breaks_after = tag, [400_000]
    assert fetch(Remote(server.url, "file.bin", SHA256), tmp_path).read_bytes() == BODY
    assert server.asked == [None, None]


def test_a_part_that_is_whole_is_taken_as_it_is(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY)
    (tmp_path / "file.bin.part.version").write_text('"\\"v1\\""')
    assert fetch(Remote(server.url, "file.bin", SHA256), tmp_path).read_bytes() == BODY
    assert server.asked == [f"bytes={len(BODY)}-"]


def test_a_part_that_is_too_long_is_thrown_away(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY + b"more")
    (tmp_path / "file.bin.part.version").write_text('"\\"v1\\""')
    assert fetch(Remote(server.url, "file.bin"), tmp_path).read_bytes() == BODY


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    remote = Remote(server.url, "file.bin", "md5:" + "0" * 32)
    found = hashlib.md5(BODY).hexdigest()
    with pytest.raises(FileError, match=f"file.bin with md5 {'0' * 32}, found one with {found}"):
        fetch(remote, tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("published", [None, SHA256])
def test_a_file_that_was_changed_is_refused(server, tmp_path, published):
    remote = Remote(server.url, "file.bin", published)
    path = fetch(remote, tmp_path)
    path.write_bytes(BODY[:-1])
    with pytest.raises(FileError, match=r"remove .*file\.bin to download it again"):
        fetch(remote, tmp_path)
    assert path.read_bytes() == BODY[:-1]


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (503, 3)])
def test_a_server_that_refuses(server, tmp_path, status, requests):
    server.status = status
    with pytest.raises(FileError, match=f"HTTP {status}"):
        fetch(Remote(server.url, "file.bin"), tmp_path)
    assert len(server.asked) == requests  # what is not there now will not be there in a second
    assert names(tmp_path) == []


def test_no_network(server, tmp_path, monkeypatch):
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path))
    remote = Remote("http://127.0.0.1:9/file.bin", "file.bin")  # the port where nobody answers
    with pytest.raises(FileError, match=r"file\.bin from http://127\.0\.0\.1:9/file\.bin, found .*refused") as caught:
        Shelf("data", None).get(remote)
    assert "put file.bin into the folder data" in caught.value.__notes__[0]


def test_a_full_disk_is_told(server, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(FileError, match=r"No space left on device.*gone on with"):
        fetch(Remote(server.url, "file.bin"), tmp_path)
    assert "file.bin" not in names(tmp_path)


def test_two_do_not_download_the_same_file(server, tmp_path):
    with download.lock(tmp_path / ".file.bin.lock"), pytest.raises(FileError, match="only one writing"):
        fetch(Remote(server.url, "file.bin"), tmp_path)
    path = fetch(Remote(server.url, "file.bin"), tmp_path)
    with download.lock(tmp_path / ".file.bin.lock"):  # but what is there may be read by many
        assert fetch(Remote(server.url, "file.bin"), tmp_path) == path


def test_a_file_that_another_has_just_brought_is_not_downloaded_again(server, tmp_path, monkeypatch):
    @contextmanager
    def waited_for(_):
        (tmp_path / "file.bin").write_bytes(BODY)
        yield

    monkeypatch.setattr(download, "lock", waited_for)
    assert fetch(Remote(server.url, "file.bin", SHA256), tmp_path).read_bytes() == BODY
    assert server.asked == []


def test_a_users_own_file_is_preferred_and_taken_as_it_is(server, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path / "cache"))
    remote = Remote(server.url, "file.bin", SHA256)
    assert Shelf("data", None).get(remote) == tmp_path / "cache" / "data" / "file.bin"
    own = tmp_path / "mine" / "data" / "file.bin"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"mine")
    assert Shelf("data", tmp_path / "mine").get(remote) == own
    monkeypatch.setenv("POSTHOC_DATA", str(tmp_path / "mine"))
    assert Shelf("data", None).get(remote) == own
    assert Shelf("other", None).find("*.bin") == []


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileError, match="POSTHOC_DATA"):
        Shelf("data", tmp_path / "nowhere")


def test_where_downloads_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("POSTHOC_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "posthoc"
