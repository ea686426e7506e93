"""Named pipes, sockets, devices, folders, circles of links and files without rights where a model's files belong:
refused at once by name, whatever file it is."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.regular_file import open_regular
from allspan.worker.weights.mapped_file import MappedFile
from support.hostile_models import CONFIG, gguf, refusals, save_sound

pytestmark = pytest.mark.timeout(60)


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def circle(path: Path) -> None:
    other = path.with_name("circle")
    path.symlink_to(other)
    other.symlink_to(path)


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "named pipe": lambda path: os.mkfifo(path),
    "socket": bind,
    "folder": lambda path: path.mkdir(),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to /dev/tty": lambda path: path.symlink_to("/dev/tty"),
    "link to a folder": lambda path: path.symlink_to("/tmp"),
    "link to nothing": dangling,
    "circle of links": circle,
}
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "allspan.json",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    said = refusals(folder)
    assert said
    assert any(name in line for line in said), said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["model", "model.gguf", "model/only.gguf", "model-00001-of-00002.gguf"])
def test_a_model_that_is_no_file_is_refused_by_name(place: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    KINDS[kind](path)
    said = refusals(path.parent if "/" in place else path)
    assert said
    assert any(path.name in line or kind == "link to a folder" for line in said), said


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_part_of_a_split_file_is_looked_at(kind: str, tmp_path: Path) -> None:
    first = tmp_path / "model-00001-of-00002.gguf"
    first.write_bytes(gguf().bytes())
    KINDS[kind](tmp_path / "model-00002-of-00002.gguf")
    assert any("model-00002-of-00002.gguf" in line for line in refusals(first))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_maps_is_a_regular_file(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "x")
    for opened in (open_regular, MappedFile):
        with pytest.raises(CheckpointError, match=r"/x[: ]"):
            opened(tmp_path / "x")


@pytest.mark.skipif(os.geteuid() != 0, reason="root: becomes an ordinary user")
@pytest.mark.parametrize("where", [*FILES, "", "only.gguf"])
def test_what_may_not_be_read_is_refused_with_the_way_out(where: str, tmp_path: Path) -> None:
    folder = save_sound(tmp_path / "model")
    if where == "only.gguf":
        (folder / "config.json").unlink()
        (folder / where).write_bytes(gguf().bytes())
    elif where and not (folder / where).exists():
        (folder / where).write_text(json.dumps(CONFIG))
    for parent in (folder, *folder.parents):
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    (folder / where).chmod(0)
    with ordinary_user():
        said = refusals(folder)
    words = ": cannot be read: Permission denied: allow user 65534"
    assert any(line.startswith(str(folder / where)) and words in line for line in said), said


@contextmanager
def ordinary_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
