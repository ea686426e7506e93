"""Real ranks over TCP with certificates made at the start: reached by the gateway, by the run directory, by address."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams, TlsFiles
from allspan.protos.errors import Unavailable
from support.certificates import Certificates
from support.serving import Served, runtime_folder

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.mark.timeout(180)
def test_ranks_on_tcp_serve_whoever_has_a_certificate(tiny: Path, tmp_path: Path) -> None:
    with runtime_folder() as runtime:
        server = Served(tiny, "--ranks=2", "--oversubscribe", "--rank-host=127.0.0.1", runtime=runtime)
        try:
            server.wait_ready()
            traces = server.traces()
            addresses = [entry["address"] for entry in server.cluster()["ranks"]]
            assert all(address.startswith("127.0.0.1:") for address in addresses)
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
            made = Certificates(tmp_path)
            foreign = TlsFiles(made.pem("ca"), made.pem("client"), made.key("client"), tls.server_name)
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                ClientEngine(attach=addresses, tls=foreign)
            assert server.ask_to_end() == 0
            traces.assert_gone()
        finally:
            server.kill()
