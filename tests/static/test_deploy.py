"""What deploy/ holds fits the code: metrics, flags, files and exit codes are those that there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from allspan.client.gateway.metrics.table import METRICS, MODEL, PREFIX
from allspan.launch.commands.gateway import make_parser as gateway_parser
from allspan.launch.exit_codes import exit_code
from allspan.launch.settings import serve_parser, serve_settings
from allspan.protos.api.errors import ConfigError, ModelNotFound
from allspan.protos.config.config_json import from_json
from support.dockerfile import assignments, ignored, instructions, sent, words

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}
LABELS = {
    PREFIX + metric.name + suffix: {MODEL, *metric.labels} | ({"le"} if suffix == "_bucket" else set())
    for metric in METRICS
    for suffix in SUFFIXES.get(metric.kind, ("",))
}
FOREIGN = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}
WORDS = {"histogram_quantile", "sum", "min", "max", "by", "rate", "changes", "and"}


def dashboard() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/allspan.json").read_text())
    return made


def expressions() -> list[str]:
    """Of the dashboard and of the alerts."""
    shown = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return shown + [rule["expr"] for rule in group["rules"]]


def names(expression: str) -> set[str]:
    """Metrics that it names."""
    bare = re.sub(r"\{.*?\}|\[.*?\]|\b(?:by|on) ?\(.*?\)|(?<![\w:])\d[\w.]*", " ", expression)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS


@pytest.mark.parametrize("expression", expressions())
def test_dashboard_and_alerts_use_metrics_and_labels_that_exist(expression: str) -> None:
    used = names(expression)
    assert used
    assert used <= LABELS.keys() | FOREIGN, expression
    labels = set(re.findall(r"([a-z_]+) ?=~?", " ".join(re.findall(r"\{(.*?)\}", expression))))
    for listed in re.findall(r"\bby ?\((.*?)\)", expression):
        labels |= {label.strip() for label in listed.split(",")}
    known = set().union(*(LABELS.get(name, {"job", "instance"}) for name in used))
    assert labels <= known, expression


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = re.findall(r"\bby ?\((.*?)\)", target["expr"])
            labels = {label.strip() for part in kept for label in part.split(",")}
            for name in () if kept else names(target["expr"]):
                labels |= LABELS.get(name, {"instance", "job"})
            assert shown <= labels, (panel["title"], target)


def test_the_dashboard_is_whole() -> None:
    made = dashboard()
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels lie on each other"
    assert max(x for x, _ in cells) < 24
    assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource", "model_name"]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["type"] == "prometheus"


@pytest.mark.parametrize("name", ["docker/serve.yaml", "systemd/serve.toml"])
def test_an_example_of_a_config_file_is_taken(name: str) -> None:
    settings = serve_settings(serve_parser().parse(["--config", str(DEPLOY / name)]))
    assert settings.gateway is not None
    assert (settings.gateway.port, settings.gateway.grpc_port) == (8000, 50051)
    assert settings.log.log_format == "json"
    assert settings.shutdown_timeout == 60
    commented = re.findall(r"^#([a-z-]+) = ", (DEPLOY / name).read_text(), re.M)
    flags = {option for action in serve_parser()._actions for option in action.option_strings}
    assert not [key for key in commented if f"--{key}" not in flags]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_is_built_from_files_that_reach_it_and_starts_as_nobody(file: Path) -> None:
    steps = instructions(file)
    for word, rest in steps:
        if word == "COPY" and "--from" not in rest:
            source = rest.split()[0]
            assert list(sent(ROOT, source)), source
    last = dict(steps)
    assert last["USER"] == "10001:10001"
    assert last["VOLUME"] == "/models"
    check = words(last["HEALTHCHECK"])
    assert check[:2] == ["python", "-c"]
    compile(check[2], "HEALTHCHECK", "exec")
    assert words(last["ENTRYPOINT"]) == ["tini", "--", "allspan"]
    copied = {rest.split()[1]: rest.split()[0] for word, rest in steps if word == "COPY" and "--from" not in rest}
    command = [str(ROOT / copied[word]) if word in copied else word for word in words(last["CMD"])]
    assert command[0] == "serve"
    settings = serve_settings(serve_parser().parse(command[1:]))
    assert settings.gateway is not None
    assert set(last["EXPOSE"].split()) == {str(settings.gateway.port), str(settings.gateway.grpc_port)}
    assert assignments(last["ENV"], {})["ALLSPAN_HEALTH_URL"] == f"http://127.0.0.1:{settings.gateway.port}/health"
    assert settings.weights.device == ("cuda" if file.suffix == ".cuda" else "cpu")


def test_what_the_package_is_built_from_is_in_the_context_and_nothing_else() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    folders = set(re.findall(r'"allspan/\w+" = "(\w+)"', project)) | {"public"}
    for name in (*folders, "pyproject.toml", "README.md", "LICENSE", "constraints.txt", "CMakeLists.txt"):
        assert not ignored(ROOT, name), name
    for name in (".git", "tests", "docs", "deploy/systemd/allspan.env", "kernels/cpu/_native.so", "build"):
        assert ignored(ROOT, name), name


def test_compose_mounts_what_is_there_and_publishes_to_loopback_alone() -> None:
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in composed["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in composed["volumes"], volume
    own = composed["services"]["allspan"]
    assert (DEPLOY / own["build"]["context"] / own["build"]["dockerfile"]).exists()
    assert own["read_only"]
    command = [str(DEPLOY / "docker/serve.yaml") if word.startswith("/etc") else word for word in own["command"]]
    settings = serve_settings(serve_parser().parse(command[1:]))
    assert settings.gateway is not None
    assert settings.gateway.security.open_metrics, "Prometheus has no key there"
    assert int(own["stop_grace_period"].removesuffix("s")) > settings.shutdown_timeout
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["allspan:8000"]


def test_the_unit_knows_our_flags_and_exit_codes() -> None:
    unit = (DEPLOY / "systemd/allspan.service").read_text()
    values = dict(re.findall(r"^(\w+)=(.*)$", unit, re.M))
    program, command, *flags = values["ExecStart"].split()
    assert (Path(program).name, command, flags) == ("allspan", "serve", ["--config", "/etc/allspan/serve.toml"])
    given_up = {int(code) for code in values["RestartPreventExitStatus"].split()}
    assert given_up == {exit_code(ConfigError("")), exit_code(ModelNotFound(""))}
    settings = serve_settings(serve_parser().parse(["--config", str(DEPLOY / "systemd/serve.toml")]))
    assert int(values["TimeoutStopSec"].removesuffix("s")) > settings.shutdown_timeout
    variables = re.findall(r"^#(\w+)=", (DEPLOY / "systemd/allspan.env").read_text(), re.M)
    assert variables == ["ALLSPAN_API_KEY", "ALLSPAN_ADMIN_API_KEY"]


SLURM_JOBS = sorted((DEPLOY / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("file", SLURM_JOBS, ids=lambda file: file.name)
def test_a_slurm_job_drains_before_its_limit_and_uses_flags_that_there_are(file: Path) -> None:
    text = file.read_text()
    subprocess.run(["bash", "-n", str(file)], check=True, timeout=20)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", text, re.M))
    assert options.keys() >= {"nodes", "ntasks-per-node", "signal", "requeue", "output"}
    assert int(options["signal"].partition("@")[2]) >= 60 + 15
    whole = re.sub(r"\\\n\s*", " ", text)
    command = re.search(r"allspan\.launch\.cli (gateway|serve) (.*)", whole)
    assert command
    parser = serve_parser() if command[1] == "serve" else gateway_parser()
    known = {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"--[a-z-]+", command[2])) <= known


def test_a_slurm_jobs_settings_are_a_ranks(tmp_path: Path) -> None:
    """The script's own Python writes them; a rank reads them."""
    (program,) = re.findall(r"<<'PYTHON'\n(.*?)\nPYTHON\n", (DEPLOY / "slurm/model-pmix.sbatch").read_text(), re.S)
    words = ["/models/chat", str(tmp_path), "7000", "60", "/wire"]
    more = {"WORKER_CONFIG": '{"cache": {"kv_cache_bytes": 8000000000}}', "SLURM_CPUS_PER_TASK": "16"}
    run = subprocess.run([sys.executable, "-c", program, *words], env=more, capture_output=True, text=True, timeout=20)
    config = from_json(run.stdout)
    assert (config.model.name, config.parallel.threads, config.service.port) == ("chat", 16, 7000)
    assert config.cache.kv_cache_bytes == 8_000_000_000
    assert config.service.tls.is_given
