#!/usr/bin/env bash
# Starts ranks by hand, with mpirun and nothing around it: no supervisor, no gateway, no placement. Read it and edit it.
#
#   launch/mpirun.sh MODEL [RANKS [flags of `python -m allspan.worker`, e.g. --threads 4]]
#
# MODEL is a folder in Hugging Face's layout or a GGUF file; RANKS is 1 if not given. The variable RUN_DIR chooses the run
# directory. When its cluster.json says "state": "ready", a program of yours attaches to it:
#
#   from allspan import ClientEngine
#   with ClientEngine(attach="/tmp/allspan-by-hand") as engine:
#       print(engine.generate("Once upon a time")[0].text)
#
# Ctrl-C ends the ranks.
set -euo pipefail
if [ "$#" -lt 1 ]; then
    sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed -n '2,$p' >&2
    exit 2
fi
model=$1 ranks=${2:-1}
shift "$(($# < 2 ? $# : 2))"

run_dir=${RUN_DIR:-/tmp/allspan-by-hand}
mkdir -p -m 700 "$run_dir"

# Open MPI refuses to run as root unless both are set.
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi

# --bind-to none: else mpirun confines a rank to one core. --oversubscribe: more ranks than cores are allowed.
exec mpirun --bind-to none --oversubscribe -n "$ranks" \
    python -m allspan.worker --model "$model" --run-dir "$run_dir" "$@"
