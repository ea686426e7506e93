"""The cache of compiled and fetched artefacts: made once, whole or not there, removed when nobody uses them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from support.artefacts import entry, key, prune


def test_an_entry_is_made_once_even_by_several_at_a_time(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(target: Path) -> None:
        made.append(target)
        time.sleep(0.05)  # the others come meanwhile
        target.write_text("content")

    threads = [threading.Thread(target=entry, args=("kind", "name", make, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert entry("kind", "name", make, tmp_path).read_text() == "content"


def test_what_could_not_be_made_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        target.mkdir()
        (target / "half").write_text("")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError):
        entry("kind", "name", fail, tmp_path)
    assert [path.name for path in (tmp_path / "kind").iterdir()] == [".name.lock"]
    assert entry("kind", "name", Path.mkdir, tmp_path).is_dir()


def test_entries_that_nobody_used_are_removed(tmp_path: Path) -> None:
    old, used = (entry("kind", name, Path.mkdir, tmp_path) for name in ("old", "used"))
    for path in (old, used):
        os.utime(path, (0, 0))
    entry("kind", "used", Path.mkdir, tmp_path)
    prune(tmp_path, 1000)
    assert [path.exists() for path in (old, used)] == [False, True]


def test_a_key_changes_with_every_part_and_with_a_files_content(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("a")
    keys = {key("a", "b"), key("ab"), key("a", file), key(file, "a")}
    file.write_text("b")
    assert len(keys | {key(file, "a")}) == 5
