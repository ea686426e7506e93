#!/usr/bin/env bash
# The whole test suite, from nothing: makes .venv-tests, installs the project with what the checks need, checks, tests.
# Words given are passed on to pytest: ./tests/run.sh tests/worker -k sampler
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/install/environment.sh
. "$root/launch/install/environment.sh"
cd "$root"

refuse_other_systems
make_environment "$root/.venv-tests" --dev
PATH="$venv/bin:$PATH"
export PATH

say "checks: ruff, mypy, import-linter, clang-format"
mypy -p allspan &
types=$!
ruff check .
ruff format --check .
PYTHONPATH=.typing lint-imports
clang-format --dry-run --Werror $(git ls-files "*.cpp" "*.h" "*.inc" "*.cu" "*.cuh" ":!examples")
wait "$types"

say "tests"
if [ "$#" -gt 0 ]; then
    python -m pytest "$@"
    exit
fi
# What computes, waits for scripted engines or asks a cluster what it answers shares the processors out, the longest
# folders first; what measures how long real processes take comes after it, undisturbed.
folders=(tests/kernels tests/cluster tests/worker tests/client tests/examples)
for folder in tests/[a-z]*/; do
    case " ${folders[*]} tests/support " in *" ${folder%/} "*) ;; *) folders+=("${folder%/}") ;; esac
done
# Threads of torch would spin there beside those of the other processes; ranks are told by launch how many they have.
OMP_NUM_THREADS=1 python -m pytest --durations 15 -m "not alone and not nightly" -n logical --dist loadfile --no-loadscope-reorder "${folders[@]}"
python -m pytest --durations 15 -m "alone and not nightly" "${folders[@]}"
