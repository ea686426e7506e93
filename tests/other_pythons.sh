#!/usr/bin/env bash
# The client (no torch, no MPI) on every other Python that is claimed and can be had here. What is not here is named.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${ALLSPAN_VENV:-$root/.venv-tests}/bin/python
if [ ! -x "$python" ]; then python=python3; fi
own=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') # the suite itself runs on this one
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

# Makes an environment and runs the client's tests in it; most of their time they wait.
run_on() {
    "$2" -m venv "$folder/$1"
    # The client needs no kernels: they are not compiled again.
    "$folder/$1/bin/pip" --disable-pip-version-check install -q -C wheel.cmake=false -c "$root/constraints.txt" "$root" \
        pytest pytest-timeout pytest-asyncio hypothesis gguf
    # What is skipped for want of the engine's packages is tested in the first environment.
    (cd "$root" && ALLSPAN_REQUIRE_TOOLS="" "$folder/$1/bin/python" -m pytest -q -p no:cacheprovider tests/client tests/protos \
        --ignore tests/client/gateway --ignore tests/client/cluster/test_readiness.py --ignore tests/client/bench/serving/test_serve.py \
        --ignore tests/client/bench/serving/test_streaming.py --ignore tests/protos/test_generated.py --ignore tests/protos/text/test_grammar_compiler.py)
}

declare -A runs
for version in 3.11 3.12 3.13 3.14; do
    [ "$version" = "$own" ] && continue
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        echo "allspan: Python $version is not here: its client is not tested"
        continue
    fi
    run_on "$version" "$python" >"$folder/$version.log" 2>&1 &
    runs[$version]=$!
done
failed=0
for version in "${!runs[@]}"; do
    wait "${runs[$version]}" || failed=1
    echo "allspan: the client on Python $version"
    cat "$folder/$version.log"
done
exit "$failed"
