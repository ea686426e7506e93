"""A real nginx before a gateway, with the site that deploy/ has for it."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SITE = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True)
class Proxy:
    """HTTP and gRPC on loopback."""

    http: int
    grpc: int


@asynccontextmanager
async def nginx(http_address: str, grpc_address: str, buffering: bool = False) -> AsyncIterator[Proxy]:
    """`buffering`: nginx collects answers, unless they say themselves that they are a stream."""
    if NGINX is None:
        pytest.skip("no nginx")
    proxy = Proxy(_free_port(), _free_port())
    site = SITE.read_text()
    for words, port in (("listen 80;", proxy.http), ("listen 8443 http2;", proxy.grpc)):
        assert words in site
        site = site.replace(words, re.sub(r"\d+", f"127.0.0.1:{port}", words, count=1))
    site = site.replace("127.0.0.1:8000", http_address.removeprefix("http://")).replace("127.0.0.1:50051", grpc_address)
    if buffering:
        site = site.replace("proxy_buffering off;", "proxy_buffering on;")
    with tempfile.TemporaryDirectory(prefix="nx-", dir="/tmp") as folder:
        paths = "".join(f"{name}_temp_path {folder}/{name};\n" for name in TEMPORARY)
        # fmt: off
        Path(folder, "nginx.conf").write_text(
            f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error warn;\n"
            f"events {{ worker_connections 256; }}\nhttp {{ access_log off;\n{paths}{site}\n}}\n"
        )
        # fmt: on
        process = subprocess.Popen(
            [NGINX, "-c", f"{folder}/nginx.conf", "-p", folder, "-e", f"{folder}/error"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            await _answers(process, proxy.http)
            yield proxy
        finally:
            process.terminate()
            await asyncio.to_thread(process.communicate, timeout=10)


async def _answers(process: subprocess.Popen[str], port: int) -> None:
    async with asyncio.timeout(10):
        while True:
            assert process.poll() is None, process.communicate()[1]
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
