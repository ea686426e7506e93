"""One world or several, with worlds that are played: what the cluster's files say, who starts again, how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allspan.launch.models.file_changes import FileChanges
from allspan.launch.placement.placement import Placement, RankPlace
from allspan.launch.supervision import supervisor as supervisor_module
from allspan.launch.supervision.cluster import Cluster, Reaper
from allspan.launch.supervision.mpi import OPEN_MPI, Mpirun
from allspan.launch.supervision.run_dir import RunDir, make_run_dir
from allspan.launch.supervision.supervisor import SupervisorConfig
from allspan.launch.supervision.world import Death, WorldPlan, is_readable
from allspan.protos.api.errors import CheckpointError, Unavailable
from allspan.protos.cluster.cluster_file import ClusterInfo, RankInfo, read_cluster, write_cluster
from allspan.protos.config.settings import ModelConfig, ServiceConfig, WorkerConfig
from support.serving import is_alive
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)


class PlayedWorld:
    """A world that does what the test says."""

    def __init__(self, plan: WorldPlan, run: RunDir, epoch: int) -> None:
        self.plan, self.run, self.epoch = plan, run, epoch
        self.weights = FileChanges(Path(plan.config.model.path))
        self.is_ready = False
        self.fate: Death | None = None
        self.drain_s: float | None = -1.0
        """-1: it has not been ended."""

    def become_ready(self) -> None:
        model = self.plan.config.model
        info = ClusterInfo(self.epoch, "ready", model.name, model.path, 512, 1000, (7,), ranks=(RankInfo(0, 1, "h"),))
        write_cluster(self.run.path, info)
        self.is_ready = True

    def die(self, death: Death) -> None:
        self.fate = death

    def info(self) -> ClusterInfo | None:
        return read_cluster(self.run.path) if self.is_ready else None

    def wait(self, stops: list[int], done: Callable[[], bool] | None = None, timeout_s: float = 1e9) -> str:
        deadline = time.monotonic() + timeout_s
        while not is_readable(stops, 0.005):
            if self.fate is not None:
                return "died"
            if done is not None and done():
                return "done"
            if time.monotonic() > deadline:
                return "timeout"
        return "stop"

    def death(self) -> Death:
        assert self.fate is not None
        return self.fate

    def end(self, drain_s: float | None) -> None:
        self.drain_s = drain_s


class Stage:
    """Clusters in a short folder of their own, and the worlds that they have started, in order, by replica."""

    def __init__(self, folder: Path) -> None:
        self.run = make_run_dir("", {"XDG_RUNTIME_DIR": str(folder)}, folder / "shm")
        self.worlds: list[PlayedWorld] = []

    def start(self, replicas: int = 1, **settings: object) -> Cluster:
        config = SupervisorConfig(**settings)  # type: ignore[arg-type]
        worker = WorkerConfig(ModelConfig(path="/m", name="m"), ServiceConfig(run_dir=str(self.run.path)))
        plan = WorldPlan(worker, Placement((RankPlace(0, None, 1),)), Mpirun("/bin/false", OPEN_MPI, (5, 0, 0)))
        cluster = Cluster([plan] * replicas, self.run, config)
        cluster.start()
        return cluster

    def world(self, replica: int = 0, epoch: int = 1) -> PlayedWorld:
        """The one of that epoch, once it has been started."""
        path = self.run.path / f"replica-{replica}" if (self.run.path / "replica-0").exists() else self.run.path

        def found() -> list[PlayedWorld]:
            return [world for world in self.worlds if world.run.path == path and world.epoch == epoch]

        wait_until(found, what=f"epoch {epoch} of replica {replica}")
        return found()[0]

    def state(self, replica: int | None = None) -> str:
        return self.told(replica).state

    def told(self, replica: int | None = None) -> ClusterInfo:
        return read_cluster(self.run.path if replica is None else self.run.path / f"replica-{replica}")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    folder = Path(f"/tmp/ac-{os.getpid()}")
    folder.mkdir(mode=0o700)
    stage = Stage(folder)

    def world(plan: WorldPlan, run: RunDir, epoch: int) -> PlayedWorld:
        stage.worlds.append(PlayedWorld(plan, run, epoch))
        return stage.worlds[-1]

    monkeypatch.setattr(supervisor_module, "WorldProcess", world)
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor_module, "LINGER_S", 0.05)
    yield stage
    shutil.rmtree(folder)


KILLED = Death("rank 0 (pid 1 on h) was killed by signal 9 (SIGKILL)")


def test_one_world_lies_in_the_run_directory_itself(stage: Stage) -> None:
    cluster = stage.start()
    stage.world().become_ready()
    assert cluster.wait_ready()
    assert stage.told().replicas == ()
    assert stage.told().ranks
    assert cluster.info == stage.told()
    cluster.stop(7.0)
    cluster.join()
    drain_s = stage.world().drain_s
    assert drain_s is not None
    assert 6.0 < drain_s <= 7.0
    assert cluster.error is None
    assert not stage.run.path.exists()
    assert not stage.run.shm.exists()


def test_a_death_says_whether_another_world_follows(stage: Stage) -> None:
    cluster = stage.start(max_failures=2)
    stage.world().become_ready()
    stage.world().die(KILLED)
    wait_until(lambda: stage.world(epoch=2), what="the next world")
    stage.world(epoch=2).become_ready()
    stage.world(epoch=2).die(Death("rank 0 once more"))
    wait_until(lambda: stage.state() == "down", what="the second death")
    assert stage.told().cause == "rank 0 once more"
    assert not stage.told().will_restart
    cluster.join()
    assert isinstance(cluster.error, Unavailable)
    assert cluster.error.message == f"the cluster is down: 2 failures within 120 s, the first: {KILLED.cause}"
    assert stage.world(epoch=2).drain_s is None, "a dead world was ended as if it could still do something"


def test_a_world_that_is_to_be_followed_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 60.0)
    cluster = stage.start(watchdog_timeout=11.0)
    stage.world().become_ready()
    stage.world().die(KILLED)
    wait_until(lambda: stage.state() == "down", what="the death")
    assert stage.told().will_restart
    cluster.stop()
    cluster.join()
    assert cluster.error is None


def test_failures_that_lie_far_apart_are_forgiven(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = stage.start(max_failures=2, failure_window_s=0.001)
    for epoch in range(1, 6):
        stage.world(epoch=epoch).become_ready()
        stage.world(epoch=epoch).die(KILLED)
    stage.world(epoch=6).become_ready()
    cluster.stop()
    cluster.join()
    assert cluster.error is None


def test_a_start_that_fails_by_itself_is_not_tried_again(stage: Stage) -> None:
    cluster = stage.start()
    stage.world().die(Death("rank 0: no such file", CheckpointError("no such file")))
    cluster.join()
    assert isinstance(cluster.error, CheckpointError)
    assert len(stage.worlds) == 1


def test_a_start_that_fails_after_one_that_worked_is_tried_again(stage: Stage) -> None:
    cluster = stage.start()
    stage.world().become_ready()
    assert cluster.wait_ready()
    stage.world().die(KILLED)
    stage.world(epoch=2).die(Death("rank 0: no memory just now", CheckpointError("no memory just now")))
    stage.world(epoch=3).become_ready()
    cluster.stop()
    cluster.join()
    assert cluster.error is None


def test_replicas_have_folders_of_their_own_and_are_ready_together(stage: Stage) -> None:
    cluster = stage.start(2)
    assert stage.state() == "starting"
    stage.world(1).become_ready()
    assert stage.state() == "starting"
    stage.world(0).become_ready()
    assert cluster.wait_ready()
    told = stage.told()
    assert (told.state, told.replicas, told.ranks) == ("ready", ("replica-0", "replica-1"), ())
    assert (told.model, told.max_model_len, told.vocab_size, told.eos_token_ids) == ("m", 512, 1000, (7,))
    assert stage.told(0).ranks
    assert [world.plan.config.service.run_dir for world in stage.worlds] == [str(w.run.path) for w in stage.worlds]
    assert len({world.run.shm for world in stage.worlds}) == 2
    cluster.stop()
    cluster.join()
    assert cluster.error is None
    assert not stage.run.path.exists()
    assert not stage.run.shm.exists()


def test_a_replica_dies_and_comes_back_without_the_others(stage: Stage) -> None:
    cluster = stage.start(2)
    for replica in (0, 1):
        stage.world(replica).become_ready()
    assert cluster.wait_ready()
    stage.world(1).die(KILLED)
    stage.world(1, epoch=2).become_ready()
    assert (stage.state(), stage.state(0)) == ("ready", "ready")
    assert stage.told(0).epoch == 1
    cluster.stop()
    cluster.join()


def test_a_replica_given_up_stays_down_while_others_serve_and_the_last_one_ends_all(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = stage.start(3, restart=False)
    for replica in range(3):
        stage.world(replica).become_ready()
    assert cluster.wait_ready()
    for replica in (2, 0):
        stage.world(replica).die(Death(f"the end of {replica}"))
        wait_until(lambda replica=replica: stage.state(replica) == "stopped", what="its end")  # type: ignore[misc]
        assert f"the end of {replica}" in stage.told(replica).cause
    assert (stage.state(), stage.state(1)) == ("ready", "ready")
    stage.world(1).die(Death("the end of 1"))
    cluster.join()
    assert cluster.error is not None
    assert "the end of 2" in cluster.error.message, "not the first cause"
    assert "2 of 3 go on" in capsys.readouterr().err
    assert not stage.run.path.exists()


def test_a_replica_that_cannot_start_ends_the_start(stage: Stage) -> None:
    cluster = stage.start(2)
    good = stage.world(0)
    good.become_ready()
    stage.world(1).die(Death("rank 0: bad", CheckpointError("bad")))
    assert not cluster.wait_ready()
    cluster.join()
    assert isinstance(cluster.error, CheckpointError)
    assert good.drain_s == 0.0


def test_a_reaper_that_dies_is_replaced_and_does_its_work(stage: Stage) -> None:
    watch = Reaper(stage.run)
    first = watch.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: watch.pid != first, what="another reaper")
    assert stage.run.path.exists()
    watch.dismiss()
    assert not is_alive(watch.pid)
    assert stage.run.path.exists()
    stage.run.remove()
