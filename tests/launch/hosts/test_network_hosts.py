"""The tests' own hosts: they reach each other, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.network_hosts import network_hosts
from support.waiting import wait_until


def test_hosts_have_names_addresses_and_folders_of_their_own(tmp_path: Path) -> None:
    with network_hosts(2) as hosts:
        a, b = hosts
        for one, other in ((a, b), (b, a)):
            assert one.run(["hostname"]).stdout.strip() == one.name
            assert one.reaches(other, 10)
            one.run(["grep", "-q", f"{other.address} {other.name}", "/etc/hosts"])
        runs = f"/tmp/allspan-{os.getuid()}"
        a.run(["touch", "/dev/shm/of-a", f"{runs}/of-a"])
        assert b.run(["ls", "/dev/shm", runs]).stdout.split() == ["/dev/shm:", f"{runs}:"]
        assert b.run(["pwd"], cwd=tmp_path).stdout.strip() == str(tmp_path)
        assert b.run(["sh", "-c", "exit 7"], check=False).returncode == 7


def test_links_break_both_ways_and_one_way() -> None:
    with network_hosts(2) as (a, b):
        assert a.reaches(b, 10)
        for cut, mend in (
            (b.unplug, b.plug),
            (b.mute, lambda: b.mute(False)),
            (b.deafen, lambda: b.deafen(False)),
        ):
            cut()
            assert not a.reaches(b)
            mend()
            wait_until(lambda: a.reaches(b), what="the mended link")


def test_a_remote_shell_enters_every_host_from_the_first() -> None:
    with network_hosts(3) as hosts:
        a, b, c = hosts
        for host in hosts:
            command = [str(hosts.remote_shell), "-o", "BatchMode=yes", host.name, "hostname; echo $WORD $0", "; exit 3"]
            for run in (
                a.run(command, check=False, env={"WORD": "lost"}),
                subprocess.run(command, capture_output=True, text=True),
            ):
                assert (run.stdout.split(), run.returncode) == ([host.name, "sh"], 3), run.stderr
        refused = b.run([str(hosts.remote_shell), c.name, "true"], check=False)
        assert refused.returncode == 255
        assert "only the first host" in refused.stderr


def test_processes_of_a_host_are_listed_and_end_with_its_power() -> None:
    with network_hosts(2) as (a, b):
        first = a.popen(["sleep", "321"])
        second = b.popen(["sh", "-c", "sleep 322 & sleep 323; true"])
        wait_until(lambda: len(b.processes()) == 3)
        assert [(process.pid, process.command) for process in a.processes()] == [(first.pid, "sleep 321")]
        b.power_off()
        assert second.wait(5) == -signal.SIGKILL
        assert a.processes()
    assert first.wait(5) == -signal.SIGKILL


def test_nothing_is_left_after_the_test_is_killed(tmp_path: Path) -> None:
    script = (
        "from support.network_hosts import network_hosts\n"
        "with network_hosts(2) as (a, b):\n"
        "  p = [a.popen(['setsid', 'sleep', '331']), b.popen(['sleep', '332'])]\n"
        "  print(a.init, b.init, *[q.pid for q in p], flush=True)\n"
        "  input()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    test = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True, env=environment)
    assert test.stdout is not None
    pids = test.stdout.readline().split()
    test.kill()
    test.communicate()
    assert len(pids) == 4
    wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], what="the end of all processes")
