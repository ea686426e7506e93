"""Where adapters may be read from while the server runs: below one folder, whatever links say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from allspan.protos.api.errors import PermissionDenied
from allspan.protos.config.adapters import FILES
from allspan.protos.model_files.regular_file import Opener, open_regular


def resolved_folder(path: str, lora_dir: str) -> Path:
    """Returns an adapter's folder with every link followed. A relative path begins at `lora_dir`; "": any folder will
    do. Raises PermissionDenied for a folder, or a file in it, that lies outside now: of what is opened later
    `opener_below` makes sure."""
    folder = Path(os.path.realpath(Path(lora_dir) / os.path.expanduser(path)))
    if lora_dir:
        for each in (folder, *(folder / name for name in FILES)):
            if not _is_below(os.path.realpath(each), lora_dir):
                raise _refusal(f"lora_path is {path[:200]!r}, of which {each.name[:80]!r} lies", lora_dir)
    return folder


def opener_below(lora_dir: str) -> Opener:
    """Returns what opens regular files that lie below `lora_dir`; "": any. What was opened is what is checked, since a
    link or a folder of its path may be replaced at any time. Raises PermissionDenied for one that lies outside."""

    def opened(path: Path) -> BinaryIO:
        file = open_regular(path)
        try:
            if not _is_below(os.readlink(f"/proc/self/fd/{file.fileno()}"), lora_dir):
                raise _refusal(f"{path} was replaced by a file that lies", lora_dir)
        except BaseException:
            file.close()
            raise
        return file

    return opened if lora_dir else open_regular


def _is_below(real: str, lora_dir: str) -> bool:
    root = Path(os.path.realpath(lora_dir))
    return Path(real) != root and Path(real).is_relative_to(root)


def _refusal(what: str, lora_dir: str) -> PermissionDenied:
    return PermissionDenied(
        f"{what} outside of --lora-dir {lora_dir}: only folders below that, and links within it, are read"
    )
