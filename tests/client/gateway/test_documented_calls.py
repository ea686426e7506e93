"""The curl lines of the documentation work as they stand, but for the address and the model's name."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from allspan.protos.api.adapters import AdapterModule
from support.gateway import fake_engine, gateway

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = "http://127.0.0.1:8000"


def curl_lines(text: str) -> list[str]:
    """Commands of the page's ```sh blocks that call this server, each with its continued and its quoted lines."""
    commands: list[str] = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.S | re.M):
        open_line = ""
        for line in block.replace("\\\n", " ").split("\n"):
            open_line = f"{open_line}\n{line}" if open_line else line
            if not open_line.startswith("curl ") or is_whole(open_line):
                commands.append(open_line)
                open_line = ""
    return [command for command in commands if command.startswith("curl ") and ADDRESS in command]


def is_whole(command: str) -> bool:
    try:
        return bool(shlex.split(command))
    except ValueError:  # a quotation that goes on
        return False


CALLS = [(page.name, line) for page in PAGES for line in curl_lines(page.read_text())]


def test_the_calls_are_found() -> None:
    assert {"README.md", "serving.md", "http.md"} <= {page for page, _ in CALLS}


@pytest.mark.parametrize(("page", "line"), CALLS)
async def test_a_documented_call_is_answered(page: str, line: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    engine = fake_engine(max_model_len=1024, adapters=(AdapterModule("sql", "/adapters/sql"),), lora_dir="/adapters")
    is_admin_call = "admin.txt" in line
    key = {"admin_api_key": "sk-admin-0123456789abcdef"} if is_admin_call else {}
    line = line.replace("$(cat admin.txt)", "sk-admin-0123456789abcdef")
    async with gateway(engine, served_model_name=("SmolLM2-135M-Instruct",), **key) as server:
        process = await asyncio.create_subprocess_shell(
            line.replace(ADDRESS, server.http_address) + " --silent --show-error --fail-with-body --max-time 20",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
    answer = stdout.decode()
    assert process.returncode == 0, (answer, stderr.decode())
    if '"stream": true' in line:
        assert answer.rstrip().endswith("[DONE]") or "event: response.completed" in answer or "incomplete" in answer
    elif not re.search(r"/(metrics|health|v1/load_lora_adapter)\b", line):
        assert isinstance(json.loads(answer), dict)
