"""`allspan bench serve` against a server that runs, through the command line."""

from __future__ import annotations

import asyncio
import json

import pytest

from allspan.launch.commands import bench
from support.gateway import fake_engine, gateway


async def test_limits_are_written_as_vllm_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    async with gateway(fake_engine(endless=True)) as running:
        words = ["serve", "--base-url", running.http_address, "--num-prompts", "3", "--random-output-len", "4"]
        words += ["--random-input-len", "8", "--goodput", "ttft:60000", "tpot:60000", "e2el:60000", "--json"]
        assert await asyncio.to_thread(bench.run, words) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["completed"], report["model_id"], report["backend"]) == (3, "tiny", "openai-chat")
    assert report["request_goodput"] == report["request_throughput"] > 0
    assert report["settings"]["goodput"] == ["ttft:60000", "tpot:60000", "e2el:60000"]
