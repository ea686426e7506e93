"""Where adapters may be read from while the server runs: below one folder, whatever links say."""

from __future__ import annotations

import os
from pathlib import Path

from allspan.protos.api.errors import PermissionDenied
from allspan.protos.config.adapters import FILES


def resolved_folder(path: str, lora_dir: str) -> Path:
    """Returns an adapter's folder with every link followed, so that what is opened is what was checked. A relative path
    begins at `lora_dir`; "": any folder will do. Raises PermissionDenied for a folder, or a file in it, that lies
    outside."""
    folder = Path(os.path.realpath(Path(lora_dir) / os.path.expanduser(path)))
    if lora_dir:
        root = Path(os.path.realpath(lora_dir))
        for each in (folder, *(folder / name for name in FILES)):
            real = Path(os.path.realpath(each))
            if real == root or not real.is_relative_to(root):
                raise PermissionDenied(
                    f"lora_path is {path[:200]!r}, of which {each.name[:80]!r} lies outside of --lora-dir {lora_dir}: "
                    "only folders below that, and links within it, are read"
                )
    return folder
