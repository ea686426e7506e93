#!/usr/bin/env bash
# The client (no torch, no MPI) on every other Python that is claimed and can be had here. What is not here is named.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
own=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A Python of this version: on the PATH, or one that pyenv keeps.
find_python() {
    local candidate
    for candidate in "$(command -v "python$1" || true)" "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$1".*/bin/python; do
        if [ -x "$candidate" ] && "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

for version in 3.11 3.12 3.13 3.14; do
    [ "$version" = "$own" ] && continue
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        echo "allspan: Python $version is not here: its client is not tested"
        continue
    fi
    echo "allspan: the client on Python $version"
    "$python" -m venv "$folder/$version"
    ALLSPAN_REQUIRE_KERNELS=0 "$folder/$version/bin/pip" --disable-pip-version-check install -q -c "$root/constraints.txt" "$root" \
        pytest pytest-timeout pytest-asyncio hypothesis gguf
    # What is skipped for want of the engine's packages is tested in the first environment.
    (cd "$root" && ALLSPAN_REQUIRE_TOOLS="" "$folder/$version/bin/python" -m pytest -q tests/client tests/protos \
        --ignore tests/client/gateway --ignore tests/protos/test_generated.py)
done
