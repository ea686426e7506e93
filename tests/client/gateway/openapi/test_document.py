"""What /openapi.json promises holds: Schemathesis asks every endpoint for what the document allows and for what not.
docs/http.md has the command for a long run against a real server."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from support.gateway import eventually, fake_engine, gateway

CHECKS = ",".join(
    (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    )
)


@pytest.mark.nightly
@pytest.mark.timeout(360)
async def test_schemathesis_finds_no_answer_that_the_document_does_not_promise(tmp_path: Path) -> None:
    st = Path(sys.executable).with_name("st")
    async with gateway(fake_engine(max_model_len=1024)) as server:
        words = [str(st), "run", f"{server.http_address}/openapi.json", "--checks", CHECKS, "--seed", "1"]
        words += ["--phases", "coverage,fuzzing", "--max-examples", "3", "--request-timeout", "10", "--no-color"]
        process = await asyncio.create_subprocess_exec(
            *words, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), 300)
        report = output.decode()
        assert process.returncode == 0, report[-6000:]
        generated = re.search(r"(\d+) generated", report)
        assert generated, report
        assert int(generated[1]) > 500
        await eventually(lambda: all(asked.released for asked in server.engine.asked.values()))


async def test_the_document_has_the_ranges_of_this_server() -> None:
    async with gateway(max_n=3, max_logprobs=5, strict=True) as server:
        document = (await server.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 3}
    assert fields["logprobs"]["anyOf"][0]["maximum"] == 5
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 100.0}
    assert schemas["ChatRequest"]["properties"]["logprobs"]["anyOf"][0] == {"type": "boolean"}
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["responses"]["400"]["content"], (method, path)
