"""The comparison with other engines: turns, errors and ratios with fake peers; the peers' script with fake engines."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allspan import ClientEngine
from allspan.client.bench.engine import compare_script
from allspan.client.bench.engine.compare import COMPARE, OURS, CompareConfig, Contender, summary
from allspan.client.bench.engine.compare_peers import SCRIPT, Peer, find_engines, model_files
from allspan.client.bench.plot import plot_compare
from allspan.protos.api.errors import ConfigError, DeadlineExceeded, InternalError
from support.fake_worker import FakeCluster
from support.waiting import wait_until

PEER = """
    import json, sys, time
    rounds = 0
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "find":
            answer = {"found": FOUND}
        elif request["do"] == "load":
            answer = {"version": "1", "got": request}
        else:
            rounds += 1
            BEFORE
            answer = {"ttft_s": 0.5, "decode_s": 0.25, "decode_tokens": len(request["prompts"]) * 2}
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def peer_python(tmp_path: Path) -> Callable[..., str]:
    """Makes an interpreter that runs a fake peer instead of the script that it is given."""
    numbers = itertools.count()

    def make(found: list[str], before: str = "pass") -> str:
        folder = tmp_path / f"peer{next(numbers)}"
        folder.mkdir()
        (folder / "peer.py").write_text(
            textwrap.dedent(PEER).replace("FOUND", json.dumps(found)).replace("BEFORE", before)
        )
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/peer.py"\n')
        python.chmod(0o755)
        return str(python)

    return make


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    return str(tmp_path / "m.gguf")


def run(tmp_path: Path, config: CompareConfig, **options: Any) -> dict[str, Any]:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    options = COMPARE.prepare(config, {"threads": 2, **options})
    with FakeCluster(run_dir, size=1, step_s=0.002), ClientEngine(attach=run_dir) as engine:
        report = COMPARE.measure(engine, config, options)
    return json.loads(json.dumps(report))  # type: ignore[no-any-return]


SHORT = {"input_len": 8, "output_len": 4, "batch_size": 3, "batch_input_len": 4, "batch_output_len": 4, "repeats": 2}


def test_every_engine_has_its_turns_and_one_that_fails_leaves_the_rest(
    tmp_path: Path, peer_python: Callable[..., str], gguf: str
) -> None:
    good = peer_python(["llama.cpp"])
    bad = peer_python(["openvino"], "sys.exit('out of luck') if rounds == 2 else None")
    config = CompareConfig(peers_python=(good, bad), peers_model=(gguf,), **SHORT)  # type: ignore[arg-type]
    report = run(tmp_path, config)
    rates = report["tokens_per_s"]
    assert set(rates) == {"decode", "prefill", "batch decode"}
    assert all(set(engines) == {OURS, "llama.cpp"} for engines in rates.values())
    assert rates["prefill"]["llama.cpp"]["samples"] == [16.0, 16.0]  # 8 tokens in half a second
    assert rates["decode"]["llama.cpp"]["median"] == 8.0
    assert rates["batch decode"]["llama.cpp"]["median"] == 24.0
    assert rates["decode"][OURS]["min"] > 0
    assert report["ratios"]["decode"]["llama.cpp"]["median"] == pytest.approx(rates["decode"][OURS]["median"] / 8)
    assert "ended with code 1; it said last: out of luck" in report["left_out"]["openvino"]
    asked = report["engines"]["llama.cpp"]["got"]
    assert (asked["threads"], asked["sequences"], asked["max_tokens"], asked["model"]) == (2, 3, 12, gguf)
    table = COMPARE.table(report)
    assert "openvino was left out" in table
    assert "batch decode (3)" in table


def test_what_an_engine_cannot_do_is_left_out_with_the_reason(
    tmp_path: Path, peer_python: Callable[..., str], gguf: str
) -> None:
    config = CompareConfig(
        peers_python=(peer_python(["openvino"]),),
        peers_model=(gguf,),
        **SHORT,  # type: ignore[arg-type]
    )
    report = run(tmp_path, config)
    assert set(report["tokens_per_s"]["batch decode"]) == {OURS}
    assert "one sequence" in report["left_out"]["openvino, batch decode"]
    assert set(report["tokens_per_s"]["decode"]) == {OURS, "openvino"}


def test_without_peers_this_project_is_measured_alone(tmp_path: Path) -> None:
    report = run(tmp_path, CompareConfig(**{**SHORT, "batch_size": 0}), load_format="dummy", threads=0)  # type: ignore[arg-type]
    assert set(report["tokens_per_s"]) == {"decode", "prefill"}
    assert report["ratios"] == {"decode": {}, "prefill": {}}
    assert COMPARE.table(report)


def test_ratios_are_of_medians_and_their_spread_is_of_the_rounds() -> None:
    ours = Contender(None, {}, samples={"decode": [10.0, 20.0, 40.0]})
    theirs = Contender(None, {}, samples={"decode": [10.0, 10.0, 5.0]})
    report = summary({OURS: ours, "x": theirs, "y": Contender(None, {"version": "1"}, "broke")}, 0)
    ratio = report["ratios"]["decode"]["x"]
    assert (ratio["median"], ratio["min"], ratio["max"], ratio["quartiles"]) == (2.0, 1.0, 8.0, [1.5, 5.0])
    assert report["left_out"] == {"y": "broke"}
    assert report["engines"]["y"] == {"version": "1"}


def test_a_peer_is_stopped_while_it_is_not_asked_and_ended_at_last(peer_python: Callable[..., str]) -> None:
    peer = Peer(peer_python(["llama.cpp"]))
    try:
        assert peer.ask({"do": "find"}, 30)["found"] == ["llama.cpp"]
        pid = peer._process.pid
        wait_until(lambda: _state(pid) == "T", 10)
        assert peer.ask({"do": "load"}, 30)["version"] == "1"
    finally:
        peer.close()
    peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_peer_that_does_not_answer_is_not_waited_for(peer_python: Callable[..., str]) -> None:
    peer = Peer(peer_python([], "time.sleep(600)"))
    started = time.monotonic()
    try:
        with pytest.raises(DeadlineExceeded, match=r"no answer to 'round' within --peers-timeout \(1 s\)"):
            peer.ask({"do": "round", "prompts": [[1]]}, 1)
    finally:
        peer.close()
    assert time.monotonic() - started < 30


def test_settings_that_cannot_be_measured_are_refused(
    tmp_path: Path, peer_python: Callable[..., str], gguf: str
) -> None:
    with pytest.raises(ConfigError, match="--peers-python needs --threads"):
        COMPARE.run("nosuch", CompareConfig(peers_python=("x",)))
    with pytest.raises(ConfigError, match="--random-weights has no file"):
        COMPARE.run("nosuch", CompareConfig(peers_python=("x",)), threads=1, load_format="dummy")
    with pytest.raises(ConfigError, match="--output-len is 1, must be at least 2"):
        CompareConfig(output_len=1)
    assert COMPARE.prepare(CompareConfig(), {})["max_model_len"] == 576
    with pytest.raises(ConfigError, match="--peers-python /no/python: No such file"):
        COMPARE.prepare(CompareConfig(peers_python=("/no/python",)), {"threads": 1})
    with pytest.raises(ConfigError, match="neither llama_cpp nor openvino_genai"):
        find_engines((peer_python([]),))
    first, second = peer_python(["llama.cpp"]), peer_python(["llama.cpp", "openvino"])
    assert find_engines((first, second)) == {"llama.cpp": first, "openvino": second}


def test_each_engine_gets_its_own_file_or_the_one_for_all(tmp_path: Path, gguf: str) -> None:
    other = str(tmp_path / "other.gguf")
    Path(other).write_bytes(b"GGUF")
    engines = ("llama.cpp", "openvino")
    assert model_files((), engines, gguf) == dict.fromkeys(engines, gguf)
    assert model_files((f"openvino={other}", gguf), engines, "folder") == {"llama.cpp": gguf, "openvino": other}
    with pytest.raises(ConfigError, match=r"llama\.cpp reads GGUF files, and folder is none"):
        model_files((), engines, "folder")
    with pytest.raises(ConfigError, match="no such engine was found; there is: none"):
        model_files((f"vllm={other}",), (), gguf)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    samples = {"decode": [1.0, 2.0], "prefill": [10.0, 30.0]}
    report = summary({OURS: Contender(None, {}, samples=samples), "x": Contender(None, {}, samples=samples)}, 0)
    plot_compare(str(tmp_path / "x.png"), report, "tiny")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_answers_by_itself_whatever_is_installed() -> None:
    peer = Peer(sys.executable, SCRIPT)
    try:
        assert peer.ask({"do": "find"}, 60)["found"] == compare_script.find()
        with pytest.raises(InternalError, match="KeyError: 'nosuch'"):
            peer.ask({"do": "load", "engine": "nosuch"}, 60)
    finally:
        peer.close()


class FakeLlama(types.ModuleType):
    """Those functions of llama.cpp that the script calls. The next token is the sum of its sequence mod 50."""

    __version__ = "0"

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.sequences: dict[int, list[int]] = {}
        self.calls: list[int] = []
        self.threads = 0

    def __getattr__(self, name: str) -> Any:
        constant = {
            "llama_print_system_info": b"AVX2 = 1 | ",
            "llama_vocab_n_tokens": 50,
            "llama_context_default_params": types.SimpleNamespace(),
        }
        if not name.startswith("llama_"):
            raise AttributeError(name)
        return lambda *args: constant.get(name, 1)

    def llama_init_from_model(self, model: int, params: Any) -> Any:
        self.threads = params.n_threads
        return types.SimpleNamespace(limit=params.n_ctx, sequences=params.n_seq_max)

    def llama_memory_clear(self, memory: Any, data: bool) -> None:
        self.sequences = {}

    def llama_batch_init(self, n_tokens: int, embd: int, n_seq_max: int) -> Any:
        names = ("token", "pos", "n_seq_id", "logits")
        rows = {name: [0] * n_tokens for name in names} | {"seq_id": [[0] for _ in range(n_tokens)]}
        return types.SimpleNamespace(n_tokens=0, **rows)

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.calls.append(batch.n_tokens)
        self.logits = {}
        for i in range(batch.n_tokens):
            sequence = self.sequences.setdefault(batch.seq_id[i][0], [])
            assert batch.pos[i] == len(sequence)
            assert batch.seq_id[i][0] < context.sequences
            sequence.append(batch.token[i])
            if batch.logits[i]:
                self.logits[i] = sum(sequence) % 50
        assert sum(map(len, self.sequences.values())) <= context.limit
        return 0

    def llama_get_logits_ith(self, context: Any, i: int) -> Any:
        row = (ctypes.c_float * 50)()
        row[self.logits[i]] = 1.0
        return ctypes.cast(row, ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_reads_every_prompt_and_goes_on_with_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", llama)
    monkeypatch.setattr(compare_script, "MAX_BATCH", 4)
    request = {"do": "load", "engine": "llama.cpp", "model": "m", "threads": 3, "sequences": 2, "max_tokens": 6}
    loaded: list[Any] = []
    assert compare_script.answer(loaded, request) == {"version": "llama-cpp-python 0", "details": "AVX2 = 1"}
    answer = compare_script.answer(loaded, {"do": "round", "prompts": [[1, 2, 3], [5, 7, 11]], "output_len": 3})
    assert llama.sequences == {0: [1, 2, 3, 6, 12], 1: [5, 7, 11, 23, 46]}
    assert llama.calls == [4, 2, 2, 2]
    assert llama.threads == 3
    assert answer["decode_tokens"] == 4
    assert min(answer["ttft_s"], answer["decode_s"]) > 0
    compare_script.answer(loaded, {"do": "round", "prompts": [[9, 9]], "output_len": 2})
    assert llama.sequences == {0: [9, 9, 18]}


def test_openvino_is_timed_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipeline:
        def __init__(self, model: str, device: str, **properties: Any) -> None:
            assert (model, device, properties) == ("m", "CPU", {"INFERENCE_NUM_THREADS": 2})

        def generate(self, tensor: Any, config: Any, streamer: Any) -> None:
            assert tensor.tolist() == [[1, 2, 3]]
            assert config.ignore_eos
            for token in range(min(config.max_new_tokens, 5)):
                time.sleep(0.01)
                streamer.write(token)
            streamer.end()

    genai = types.SimpleNamespace(
        __version__="0",
        LLMPipeline=Pipeline,
        GenerationConfig=types.SimpleNamespace,
        StreamerBase=object,
        StreamingStatus=types.SimpleNamespace(RUNNING=0),
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", types.SimpleNamespace(Tensor=lambda array: array))
    loaded: list[Any] = []
    compare_script.answer(loaded, {"do": "load", "engine": "openvino", "model": "m", "threads": 2})
    answer = compare_script.answer(loaded, {"do": "round", "prompts": [[1, 2, 3]], "output_len": 4})
    assert answer["decode_tokens"] == 3
    assert answer["ttft_s"] >= 0.01
    assert answer["decode_s"] >= 0.03
    with pytest.raises(RuntimeError, match="5 tokens came, 9 were asked for"):
        compare_script.answer(loaded, {"do": "round", "prompts": [[1, 2, 3]], "output_len": 9})
