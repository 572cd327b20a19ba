"""Downloads and the user's own files, against a server of this machine."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from posthoc.errors import FileError
from reproduction.data import files
from reproduction.data.files import DataFolder, RemoteFile, UnavailableError, cache_folder, fetch

BODY = bytes(range(256)) * 64
SHA256 = "sha256:" + hashlib.sha256(BODY).hexdigest()


class Server:
    """One file, and the behavior of the server; `requests` counts the requests."""

    def __init__(self) -> None:
        self.body, self.status, self.requests, self.url = BODY, 200, 0, ""
        self.truncated = 0
        """Responses that break off after half of the file."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.requests += 1
            if state.status != 200:
                self.send_error(state.status)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(state.body)))
            self.end_headers()
            state.truncated, broken = max(0, state.truncated - 1), state.truncated > 0
            self.wfile.write(state.body[: len(state.body) // 2] if broken else state.body)

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


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_file_is_downloaded_once_and_its_checksum_is_recorded(server, tmp_path):
    for _ in range(2):
        assert fetch(RemoteFile(server.url, "file.bin"), tmp_path / "cache").read_bytes() == BODY
    assert server.requests == 1
    assert names(tmp_path / "cache") == ["file.bin", "file.bin.sha256"]
    assert (tmp_path / "cache" / "file.bin.sha256").read_text().strip() == SHA256


def test_a_broken_connection_is_tried_again(server, tmp_path):
    server.truncated = files.RETRIES
    assert fetch(RemoteFile(server.url, "file.bin", SHA256), tmp_path).read_bytes() == BODY
    assert server.requests == 1 + files.RETRIES


def test_a_download_that_breaks_off_leaves_nothing(server, tmp_path):
    server.truncated = 1 + files.RETRIES
    with pytest.raises(UnavailableError, match=r"Expected to download file\.bin"):
        fetch(RemoteFile(server.url, "file.bin", SHA256), tmp_path)
    assert names(tmp_path) == []


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    with pytest.raises(FileError, match=rf"file\.bin with checksum md5:{'0' * 32}, found another at"):
        fetch(RemoteFile(server.url, "file.bin", "md5:" + "0" * 32), tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("published", [None, SHA256])
def test_a_file_that_was_changed_is_downloaded_again(server, tmp_path, published):
    remote = RemoteFile(server.url, "file.bin", published)
    path = fetch(remote, tmp_path)
    path.write_bytes(BODY[:-1])
    assert fetch(remote, tmp_path).read_bytes() == BODY
    path.write_bytes(BODY[:-1])
    server.body = BODY[::-1]  # the recorded checksum is that of the first download
    with pytest.raises(FileError, match="another version"):
        fetch(remote, tmp_path)


@pytest.mark.parametrize("status", [404, 503])
def test_a_server_that_refuses(server, tmp_path, status):
    server.status = status
    with pytest.raises(UnavailableError, match=str(status)):
        fetch(RemoteFile(server.url, "file.bin"), tmp_path)
    assert names(tmp_path) == []


def test_no_network(server, tmp_path, monkeypatch):
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path))
    remote = RemoteFile("http://127.0.0.1:9/file.bin", "file.bin")  # no server listens at this port
    with pytest.raises(UnavailableError, match=r"file\.bin from http://127\.0\.0\.1:9/file\.bin, found .*refused") as e:
        DataFolder("data", None).get(remote)
    assert "put file.bin into the subfolder data" in e.value.__notes__[0]


def test_a_folder_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError, match=r"Expected to write file\.bin into"):
        fetch(RemoteFile(server.url, "file.bin"), tmp_path / "file")


def test_a_users_own_file_is_preferred_and_not_checked(server, tmp_path, monkeypatch):
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path / "cache"))
    remote = RemoteFile(server.url, "file.bin", SHA256)
    assert DataFolder("data", None).get(remote) == tmp_path / "cache" / "data" / "file.bin"
    own = tmp_path / "mine" / "data" / "file.bin"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"mine")
    assert DataFolder("data", tmp_path / "mine").get(remote) == own
    monkeypatch.setenv("POSTHOC_DATA", str(tmp_path / "mine"))
    assert DataFolder("data", None).get(remote) == own
    assert DataFolder("other", None).find("*.bin") == []


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(FileError, match="POSTHOC_DATA"):
        DataFolder("data", tmp_path / "nowhere")


def test_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("POSTHOC_CACHE")
    assert cache_folder().name == "posthoc"
