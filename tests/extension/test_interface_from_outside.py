"""What a sampling parameter, a counter, an endpoint and a flag cost: counted, or one is added from outside."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi import Request
from starlette.responses import JSONResponse, Response

from allspan.client.gateway import application
from allspan.client.gateway.http.endpoint import Access, Endpoint
from allspan.protos.config.flags import Parser, add_options
from support.gateway import gateway

ROOT = Path(__file__).resolve().parents[2]
CODE = ("protos", "client", "worker", "kernels", "launch")
ADMIN_KEY = "sk-admin-0123456789abcdef"


def files_with(word: str) -> set[str]:
    """The files of the code that name it; generated ones, benchmarks and the page aside."""
    left_out = (":!*_pb2*", ":!client/bench", ":!*.js")
    command = ["git", "grep", "-lw", word, "--", *CODE, *left_out]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize(
    ("field", "files"),
    [
        ("no_repeat_ngram_size", {"protos/api/sampling.py", "protos/inference.proto", "worker/sampling/masks.py"}),
        (
            "suppress_repetition_in_generation",
            {"protos/api/sampling.py", "protos/inference.proto", "worker/sampling/penalties.py"},
        ),
    ],
)
def test_a_sampling_parameter_that_changes_logits_stands_in_three_files(field: str, files: set[str]) -> None:
    assert files_with(field) == files


def test_a_counter_stands_in_the_table_and_where_it_counts() -> None:
    """Its metric's row in docs/metrics.md, which a test compares, is the third file."""
    assert files_with("failed_requests") == {"protos/api/counters.py", "worker/scheduler/scheduler.py"}
    named_by_vllm = {"client/gateway/metrics/vllm_names.py"}  # a counter that vLLM has, too, has a row there
    assert files_with("num_preemptions_total") == {"protos/api/counters.py"} | named_by_vllm


@dataclass(frozen=True)
class ToyConfig:
    """A group of flags from outside."""

    toy_rate: float = 1.0
    """Sets the toy's rate in 1/s."""


def test_a_flag_is_a_field_with_its_help() -> None:
    parser = Parser("toy")
    add_options(parser, ToyConfig)
    assert parser.parse(["--toy-rate", "2.5"]).toy_rate == 2.5
    assert "Sets the toy's rate in 1/s." in parser.help_on("toy-rate")


async def test_an_endpoint_from_outside_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    async def toy(request: Request) -> Response:
        return JSONResponse({"toy": True})

    row = Endpoint("GET", "/toy", toy, "Answers.", Access.ADMIN, answer={"type": "object"})
    monkeypatch.setattr(application, "ROUTES", (*application.ROUTES, lambda _: [row]))
    async with gateway(admin_api_key=ADMIN_KEY) as server:
        assert (await server.http.get("/toy")).status_code == 401
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        assert (await server.http.get("/toy", headers=headers)).json() == {"toy": True}
        described = (await server.http.get("/openapi.json")).json()["paths"]["/toy"]["get"]
    assert described["summary"] == "Answers."
    assert described["responses"]["200"]["content"] == {"application/json": {"schema": {"type": "object"}}}
