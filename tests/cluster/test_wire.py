"""Real ranks over TCP with certificates made at the start: reached by the gateway, by the run directory, by address."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams, TlsFiles
from allspan.protos.api.errors import Unavailable
from support.certificates import Certificates
from support.serving import Served, runtime_folder
from support.waiting import wait_until

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def two_free_ports() -> int:
    """The first of two in a row, which nobody listens on now."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port


@pytest.mark.timeout(300)
def test_ranks_on_tcp_serve_whoever_has_a_certificate(tiny: Path, tmp_path: Path) -> None:
    with runtime_folder() as runtime:
        port = two_free_ports()
        flags = ("--ranks=2", "--oversubscribe", "--rank-host=127.0.0.1", f"--rank-port={port}")
        server = Served(tiny, *flags, runtime=runtime)
        try:
            server.wait_ready()
            traces = server.traces()
            addresses = [entry["address"] for entry in server.cluster()["ranks"]]
            assert addresses == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
            body = json.dumps({"prompt": "abc", "max_tokens": 8, "temperature": 0}).encode()
            request = urllib.request.Request(
                f"{server.http}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                text = json.load(response)["choices"][0]["text"]
            with ClientEngine(attach=server.run_dir) as engine:
                assert engine.generate("abc", GREEDY)[0].text == text
            tls = TlsFiles(**server.cluster()["tls"])
            with ClientEngine(attach=addresses, tls=tls) as engine:
                assert engine.generate("abc", GREEDY)[0].text == text
                os.kill(server.rank_pid(1), signal.SIGKILL)
                wait_until(lambda: not engine.is_ready, 30.0, "the loss")
                wait_until(lambda: engine.is_ready, 90.0, "the next ranks, under the same addresses")
                assert engine.generate("abc", GREEDY)[0].text == text
            made = Certificates(tmp_path)
            foreign = TlsFiles(made.pem("ca"), made.pem("client"), made.key("client"), tls.server_name)
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                ClientEngine(attach=addresses, tls=foreign, startup_timeout=0)
            assert server.ask_to_end() == 0
            traces.assert_gone()
        finally:
            server.kill()
