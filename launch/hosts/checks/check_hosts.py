"""The checks behind `allspan doctor --hosts`: five findings for each host."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from allspan.launch.console import size
from allspan.launch.hosts.host_list import HostsConfig, check_network, read_hosts
from allspan.launch.hosts.lines import LineBuffer
from allspan.launch.hosts.link import keeper_command
from allspan.launch.hosts.messages import Facts
from allspan.launch.hosts.placement import address_in_network
from allspan.launch.hosts.remote_shell import find_remote_shell
from allspan.launch.install.doctor import FAIL, MIN_MEMORY_BYTES, OK, WARN, Finding
from allspan.protos.api.errors import ConfigError, InternalError

TIMEOUT_S = 30.0
MOST_AT_ONCE = 32
CLOCK_WARN_S, CLOCK_FAIL_S = 30.0, 3600.0
"""Seconds between two clocks that are told, and those from which new certificates are not yet valid on the other."""


@dataclass(frozen=True)
class Answer:
    """What one host told of itself, or why it told nothing. `ahead_s`: its clock against this host's, at least."""

    host: str
    took_s: float
    facts: Facts | None = None
    mpi: str = ""
    problem: str = ""
    ahead_s: float = 0.0


def check_hosts(config: HostsConfig) -> list[Finding]:
    """Returns the findings of the hosts that are given, host by host; takes no more than half a minute for each 32 of
    them. Raises ConfigError for flags that name no hosts or no remote shell."""
    hosts = read_hosts(config)
    if not hosts:
        return []
    network = ""
    try:
        check_network(config, hosts)
    except ConfigError as error:
        network = error.message
    command = (*tuple(keeper_command())[:-1], "allspan.launch.hosts.checks.tell")
    shell = find_remote_shell(config) if len(hosts) > 1 else None
    words = [shell.on(host.name, command) if shell and host is not hosts[0] else command for host in hosts]
    names = [host.name for host in hosts]
    with ThreadPoolExecutor(min(len(hosts), MOST_AT_ONCE)) as pool:
        answers = list(pool.map(ask, names, words))
    through = shell.name if shell else ""
    findings = [finding for answer in answers for finding in check_answer(answer, answers[0], config, through)]
    if network:
        findings.append(Finding(FAIL, "hosts", network, "give --mpi-network"))
    return findings


def ask(host: str, words: Sequence[str], timeout_s: float = TIMEOUT_S) -> Answer:
    """Runs a command that prints a host's facts, and returns them."""
    began, clock = time.monotonic(), time.time()
    pipe = subprocess.PIPE
    try:
        run = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        return Answer(host, 0.0, problem=f"{words[0]} cannot be run: {error.strerror}")
    with run:
        try:
            out, err = run.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # its children, too: they hold the pipes open
            return Answer(host, timeout_s, problem=f"did not answer within {timeout_s:g} s")
    took_s, ended = time.monotonic() - began, time.time()
    try:
        told = [values for values in LineBuffer().feed(out) if "facts" in values]
        facts = Facts.from_json(told[-1]["facts"])
    except (IndexError, TypeError, ValueError, InternalError):
        said = err.decode(errors="replace").strip().splitlines() or ["nothing"]
        return Answer(host, took_s, problem=f"ended with status {run.returncode}; it said last: {said[-1]}")
    ahead = facts.time - ended if facts.time > ended else min(0.0, facts.time - clock)
    return Answer(host, took_s, facts, told[-1].get("mpi", ""), told[-1].get("mpi_problem", ""), ahead)


def check_answer(answer: Answer, first: Answer, config: HostsConfig, through: str) -> list[Finding]:
    """Returns the findings of one host; `first` is this one's answer, `through` the name of the remote shell."""
    name, facts = f"host {answer.host}", answer.facts
    way = "this host" if answer is first else f"through {through}"
    if facts is None:
        fix = (
            f"make `{through} {answer.host} true` work without a question (see --remote-shell), and install the same "
            "Python environment and allspan at the same path there"
        )
        return [Finding(FAIL, name, f"not reachable, {way}: {answer.problem}", fix)]
    findings = [
        Finding(OK, name, f"reachable, {way}, in {answer.took_s:.2f} s"),
        _versions(name, answer, first),
        _clock(name, answer),
    ]
    if config.mpi_network:
        findings.append(_network(name, answer, first, config))
    low = facts.memory < MIN_MEMORY_BYTES
    fix = "end other programs there, or lower --max-model-len and --max-num-seqs" if low else ""
    return [*findings, Finding(WARN if low else OK, name, f"memory: {size(facts.memory)} available", fix)]


def _versions(name: str, answer: Answer, first: Answer) -> Finding:
    if not answer.mpi:
        return Finding(FAIL, name, f"versions: {answer.problem}", "install the same Open MPI on all hosts")
    rows = [("MPI", answer.mpi, first.mpi)]
    if answer.facts and first.facts:
        rows += [("allspan", answer.facts.version, first.facts.version)]
        rows += [("Python", answer.facts.python, first.facts.python)]
    text = ", ".join(f"{what if what != 'MPI' else ''} {version}".strip() for what, version, _ in rows)
    wrong = [f"{what} is {theirs}, on {first.host} {mine or 'none'}" for what, theirs, mine in rows if theirs != mine]
    if wrong:
        return Finding(FAIL, name, f"versions: {'; '.join(wrong)}", "install the same on all hosts, at the same path")
    return Finding(OK, name, f"versions: {text}")


def _clock(name: str, answer: Answer) -> Finding:
    apart = abs(answer.ahead_s)
    if apart < CLOCK_WARN_S:
        return Finding(OK, name, f"clock: {apart:.1f} s from this host's, or less than its answer took")
    text = f"clock: {apart:.0f} s {'ahead of' if answer.ahead_s > 0 else 'behind'} this host's"
    fix = "let both hosts follow a time server (chrony): certificates are refused by a wrong clock"
    return Finding(FAIL if apart >= CLOCK_FAIL_S else WARN, name, text, fix)


def _network(name: str, answer: Answer, first: Answer, config: HostsConfig) -> Finding:
    assert answer.facts is not None
    try:
        found = address_in_network(answer.host, answer.facts, config)
    except ConfigError as error:
        return Finding(
            FAIL, name, f"network: {error.message}", "give a narrower --mpi-network, or each host one address in it"
        )
    text = f"network: {found.address} on {found.interface}, MTU {found.mtu}"
    try:
        mine = address_in_network(first.host, first.facts, config) if first.facts else found
    except ConfigError:
        mine = found  # told in that host's own line
    if found.mtu != mine.mtu:
        return Finding(WARN, name, f"{text}; on {first.host} {mine.mtu}", "set the same MTU on every host and switch")
    return Finding(OK, name, text)
