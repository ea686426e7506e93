"""The command line as a user types it: what is refused, with which words and exit code. Nothing is loaded here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from allspan.launch.cli import COMMANDS, usage
from allspan.launch.engine_flags import serve_options
from allspan.launch.models.find_model import DEFAULT_MODEL
from allspan.launch.placement.placement import Placement
from allspan.launch.serve import parallel_config
from allspan.launch.settings import serve_parser, serve_settings
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.adapters import FILES
from allspan.protos.config.home import home
from support.byte_model import save_byte_model


def allspan(*argv: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "allspan.launch.cli", *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that nothing reads."""
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["sreve"], 2, ["unknown command 'sreve'", "did you mean serve"]),
        (["--sreve"], 2, ["unknown flag '--sreve'"]),
        (["serve", "--prot", "1"], 2, ["unknown flag --prot", "--port"]),
        (["serve", "--port", "70000"], 2, ["--port", "70000", "from 0 to 65535"]),
        (["serve", "--ranks", "-1"], 2, ["--ranks", "-1"]),
        (["serve", "--max-model-len", "1", "{folder}"], 2, ["--max-model-len", "1", "at least 2"]),
        (["serve", "--ranks", "999", "{folder}"], 2, ["--ranks", "999 x 1 = 999", "--oversubscribe"]),
        (["serve", "--threads", "999", "{folder}"], 2, ["--threads", "x 999 =", "--oversubscribe"]),
        (["serve", "--lora-modules", "a", "b=/x"], 2, ["lora_modules has 'a'", "must be NAME=PATH"]),
        (["serve", "{folder}", "--lora-modules", "a=/no"], 2, ["the path of 'a' is '/no'", "an existing folder"]),
        (["serve", "{folder}", "--lora-modules", "a=/", "--max-lora-rank", "0"], 2, ["from 1 to 256"]),
        (["plan", "{folder}", "--max-loras", "4", "--max-cpu-loras", "2"], 2, ["must be at least max_loras (4)"]),
        (["generate", "{folder}", "x", "--adapter", "a", "--lora-modules", "b=/"], 3, ["adapter is 'a'", "are 'b'"]),
        (["serve", "nosuch"], 3, ["'nosuch'", "SmolLM2-135M-Instruct"]),
        (["serve", "./no.gguf"], 3, ["'./no.gguf'", "give a folder"]),
        (["plan", "nosuch"], 3, ["'nosuch'"]),
        (["pull", "nosuch"], 3, ["'nosuch'"]),
        (["chat", "nosuch"], 3, ["'nosuch'"]),
        (["generate", "{folder}"], 2, ["the prompt is missing", "names a model"]),
        (["generate", "--prompt", "x", "--max-tokens", "0"], 2, ["max_tokens is 0"]),
        (["generate", "--prompt", "x", "--temperature", "nan"], 2, ["temperature is nan"]),
        (["generate", "--prompt", "x", "--top-p", "1.5"], 2, ["top_p is 1.5"]),
        (["bench", "speed"], 2, ["unknown benchmark 'speed'", "latency"]),
        (["bench", "latency", "--batch-size", "0"], 2, ["--batch-size is 0"]),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(folder: Path, argv: list[str], code: int, words: list[str]) -> None:
    run = allspan(*(word.replace("{folder}", str(folder)) for word in argv))
    lines = run.stderr.splitlines()
    assert run.returncode == code, run.stderr
    assert len(lines) == 1, run.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert run.stdout == ""


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_an_adapter_may_not_have_the_models_own_name(command: str, folder: Path) -> None:
    for file in FILES:
        (folder / file).touch()
    run = allspan(command, str(folder), "--lora-modules", f"MODEL={folder}", *(["--port", "0"] * (command == "serve")))
    assert run.returncode == 2, run.stderr
    assert "'MODEL', which is the model's own name" in run.stderr.splitlines()[-1]


def test_a_busy_port_is_named_before_anything_loads(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = allspan("serve", str(folder), "--port", str(port), "--grpc-port", "0")
    assert run.returncode == 2
    assert f"port {port} (--port)" in run.stderr.splitlines()[-1]


def test_a_parent_that_is_gone_is_refused_and_nothing_is_left(folder: Path) -> None:
    run = allspan("serve", str(folder), "--port", "0", "--grpc-port", "0", "--parent-pid", "2147483646")
    assert run.returncode == 2
    assert "--parent-pid is 2147483646" in run.stderr.splitlines()[-1]


def test_a_program_that_started_it_reads_the_failure(folder: Path) -> None:
    run = allspan("serve", str(folder), "--no-gateway", "--ranks", "999")
    assert run.returncode == 2
    word, _, rest = run.stdout.partition("FAILED ")
    assert word == "ALLSPAN "
    assert json.loads(rest)["code"] == "config"


def test_help_needs_no_torch_and_no_time() -> None:
    started = time.monotonic()
    run = allspan("--help")
    assert run.returncode == 0
    assert time.monotonic() - started < 5
    assert all(name in run.stdout for name in COMMANDS)
    code = "import sys; from allspan.launch.cli import main; main(['serve', '--help'])"
    probe = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); {code}"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stderr.strip() == "False"


def test_usage_lists_every_command() -> None:
    assert all(name in usage() for name in ("serve", "chat", "generate", "pull", "doctor", "plan", "bench"))


def test_other_spellings_mean_the_same() -> None:
    parse = serve_parser().parse
    ours = parse(["m", "--ranks", "2", "--load-format", "dummy", "--max-model-len", "64", "--no-restart"])
    for ranks in ("-tp", "--tensor-parallel-size"):
        theirs = parse(["m", ranks, "2", "--random-weights", "--context-length", "64", "--no-restart"])
        assert theirs == ours
    settings = serve_settings(ours)
    assert (settings.placement.ranks, settings.weights.load_format, settings.supervisor.restart) == (2, "dummy", False)


def test_a_served_name_holds_without_a_gateway_too() -> None:
    """ClientEngine starts its clusters so, and `generate ORG/NAME` names its model by it."""
    settings = serve_settings(serve_parser().parse(["/a/b", "--no-gateway", "--served-model-name", "org/name"]))
    assert (settings.gateway, settings.served_model_name) == (None, ("org/name",))


def test_running_requests_get_their_time_without_a_gateway_too() -> None:
    settings = serve_settings(serve_parser().parse(["/a", "--no-gateway", "--shutdown-timeout", "9", "--no-resume"]))
    assert (settings.shutdown_timeout, settings.resume.resume) == (9.0, False)


@pytest.mark.parametrize(("watchdog", "asked", "collectives"), [("30", "60", 60), ("31", "60", 62), ("2", "5", 5)])
def test_a_collective_waits_for_longer_than_the_watchdog(watchdog: str, asked: str, collectives: float) -> None:
    flags = ["/a", "--watchdog-timeout", watchdog, "--timeout-s", asked]
    parallel = parallel_config(serve_settings(serve_parser().parse(flags)), Placement(()))
    assert parallel.timeout_s == collectives


def test_every_stable_flag_is_there() -> None:
    text = serve_parser().format_help()
    flags = "--ranks -tp --tensor-parallel-size --threads --dtype --max-model-len --load-format --random-weights --host"
    flags += " --port --grpc-port --no-restart --oversubscribe --no-gateway --run-dir --parent-pid --served-model-name"
    flags += (
        " --kv-cache-bytes --max-num-seqs --max-num-batched-tokens --page-size --kv-cache-dtype --collectives --device"
    )
    flags += " --bind --data-parallel-size -dp --watchdog-timeout --max-failures --failure-window-s --shutdown-timeout"
    flags += " --resume --no-resume --resume-timeout"
    assert not [flag for flag in flags.split() if flag not in text.replace(",", " ").split()]


def test_only_what_differs_from_the_defaults_is_handed_to_the_cluster() -> None:
    namespace = serve_parser().parse(["m", "--ranks", "2", "--oversubscribe", "--page-size", "16"])
    assert serve_options(namespace) == {"ranks": 2, "oversubscribe": True, "page_size": 16}


def test_doctor_finds_out_without_leaving_anything() -> None:
    before = set(os.listdir("/dev/shm"))
    run = allspan("doctor", "--json")
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("sm_segment")}
    findings = json.loads(run.stdout)
    assert {"mpirun", "compiler", "kernels", "numa", "shm", "memory", "port", "gpu", "torch"} <= {
        f["name"] for f in findings
    }
    assert run.returncode == int(any(finding["status"] == "fail" for finding in findings))
    assert all(finding["fix"] for finding in findings if finding["status"] != "ok")


def test_files_of_the_current_folder_stand_in_for_no_module(tmp_path: Path) -> None:
    folder = save_byte_model(tmp_path / "model")
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')")
    words = [sys.executable, "-P", "-m", "allspan.launch.cli", "plan", str(folder), "--ranks=1", "--json"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_a_signal_during_a_pull_ends_pip_too(tmp_path: Path) -> None:
    """An index that takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        env = os.environ | {"ALLSPAN_HOME": str(tmp_path), "PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull}
        pull = subprocess.Popen(
            [sys.executable, "-m", "allspan.launch.cli", "pull"], env=env, stderr=subprocess.DEVNULL
        )
        try:
            index.settimeout(30)
            connection, _ = index.accept()
            pips = psutil.Process(pull.pid).children()
            assert pips
            pull.send_signal(signal.SIGTERM)
            assert pull.wait(5) == 128 + signal.SIGTERM
            assert psutil.wait_procs(pips, timeout=5)[1] == []
            connection.close()
        finally:
            pull.kill()
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{DEFAULT_MODEL}.lock"]


def test_bytes_that_are_no_text_and_ascii_terminals_cause_no_traceback(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "allspan.launch.cli"]
    run = subprocess.run([*words, "generate", "nosuch", "--prompt", "-"], input=b"\xff\xfe", capture_output=True)
    assert (run.returncode, len(run.stderr.splitlines())) == (3, 1), run.stderr
    (tmp_path / "modèle").mkdir()
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run([*words, "pull", tmp_path / "modèle", "--print-path"], env=env, capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ALLSPAN_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", nowhere)
    with pytest.raises(ConfigError, match="ALLSPAN_HOME"):
        home()
