"""deploy/kubernetes/lws on hosts of namespaces: the pods' own commands, with the variables that the controller sets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from allspan.launch.certificates import make_certificates
from support.default_model import default_model
from support.network_hosts import Host, Hosts, network_hosts
from support.waiting import wait_until

GROUP = Path(__file__).resolve().parents[3] / "deploy/kubernetes/lws/group.yaml"
ALLSPAN = (sys.executable, "-m", "allspan.launch.cli")
KEY = "sk-a-key-of-this-test-000"
PODS = ("allspan-0.allspan.default", "allspan-0-1.allspan.default")
ASK = """
import json, ssl, sys, urllib.error, urllib.request
headers, body = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[2]}, None
if len(sys.argv) > 3:
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}).encode()
call = urllib.request.Request(sys.argv[1], body, headers)
try:
    answer = urllib.request.urlopen(call, timeout=20, context=ssl._create_unverified_context())
    print(answer.status, json.load(answer).get("choices"))
except urllib.error.HTTPError as error:
    print(error.code)
"""
pytestmark = [pytest.mark.nightly, pytest.mark.alone, pytest.mark.timeout(400)]


class Pods:
    """Both containers of the group; /etc/allspan lies in `folder`, and the pod network is the hosts' own."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        documents = yaml.safe_load_all(GROUP.read_text())
        (group,) = (each for each in documents if each["kind"] == "LeaderWorkerSet")
        template = group["spec"]["leaderWorkerTemplate"]
        assert template["restartPolicy"] == "None"
        self.size = template["size"]
        self.specs = [template[role]["spec"] for role in ("leaderTemplate", "workerTemplate")]
        for host, pod in zip(hosts, PODS, strict=True):
            host.run(["hostname", pod.partition(".")[0]])
        make_certificates(folder / "agent", PODS)
        (folder / "tls").mkdir()
        (folder / "keys").mkdir()
        for name, given in (("tls.crt", "server.pem"), ("tls.key", "server.key")):
            (folder / "tls" / name).symlink_to(folder / "agent" / given)
        for name in ("keys", "admin"):
            (folder / "keys" / name).write_text((KEY if name == "keys" else KEY + "-admin") + "\n")
            (folder / "keys" / name).chmod(0o600)
        with (hosts.remote_shell.parent / "hosts").open("a") as file:
            file.writelines(f"{host.address} {pod}\n" for host, pod in zip(hosts, PODS, strict=True))

    def start(self, index: int) -> subprocess.Popen[Any]:
        (container,) = self.specs[min(index, 1)]["containers"]
        given = {row["name"]: self._here(row["value"]) for row in container.get("env", ())}
        group = {"LWS_LEADER_ADDRESS": PODS[0], "LWS_GROUP_SIZE": str(self.size), "LWS_WORKER_INDEX": str(index)}
        with (self.folder / f"log-{index}").open("a") as log:
            words = [*ALLSPAN, *(self._here(word) for word in container["args"])]
            return self.hosts[index].popen(words, stdout=log, stderr=log, env=os.environ | given | group)

    def log(self) -> str:
        return "".join((self.folder / f"log-{index}").read_text()[-4000:] for index in range(self.size))

    def _here(self, word: str) -> str:
        return word.replace("/etc/allspan", str(self.folder)).replace("10.244.0.0/16", self.hosts.network)

    def probe(self, name: str) -> bool:
        """As the kubelet does: whether the leader's answer is a success."""
        (container,) = self.specs[0]["containers"]
        get = container[f"{name}Probe"]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        return (
            ask(self.hosts[0], f"{get['scheme'].lower()}://127.0.0.1:{ports[get['port']]}{get['path']}") == "200 None"
        )


def ask(host: Host, *words: str) -> str:
    url, *more = words
    return host.run([sys.executable, "-S", "-c", ASK, url, KEY, *more], check=False).stdout.strip()


def test_a_groups_leader_serves_with_its_workers_gets_over_one_made_anew_and_drains(tmp_path: Path) -> None:
    default_model()
    url = "https://127.0.0.1:8000/v1/completions"
    with network_hosts(2) as hosts:
        pods = Pods(hosts, tmp_path)
        leader, worker = pods.start(0), pods.start(1)
        try:
            wait_until(lambda: pods.probe("readiness") or leader.poll() is not None, 120, "readiness")
            assert pods.probe("startup"), pods.log()
            agents = {port["containerPort"] for port in pods.specs[1]["containers"][0]["ports"]}
            for port in agents:  # the worker's readinessProbe
                hosts[0].run(["timeout", "3", "bash", "-c", f"exec 3<>/dev/tcp/{PODS[1]}/{port}"])
            first = ask(hosts[0], url, "complete")
            assert "Paris" in first, first + pods.log()
            hosts[1].signal_all(signal.SIGKILL)  # the pod is gone, with its ranks
            wait_until(lambda: not pods.probe("readiness"), 15, "the leader's word that it is not ready")
            assert pods.probe("liveness"), "the leader's pod must live on"
            worker.wait(timeout=10)
            worker = pods.start(1)  # restartPolicy None: the pod alone is made anew
            wait_until(lambda: pods.probe("readiness") or leader.poll() is not None, 120, "a new world")
            assert ask(hosts[0], url, "complete") == first, pods.log()
            (container,) = pods.specs[0]["containers"]
            hosts[0].run(container["lifecycle"]["preStop"]["exec"]["command"])
            began = time.monotonic()
            leader.terminate()
            assert leader.wait(timeout=pods.specs[0]["terminationGracePeriodSeconds"] - 5) == 0, pods.log()
            assert time.monotonic() - began < 30, "nothing was running"
            worker.terminate()
            worker.wait(timeout=20)
            assert not hosts[1].processes()
        finally:
            for process in (leader, worker):
                process.kill()
                process.wait(timeout=20)
