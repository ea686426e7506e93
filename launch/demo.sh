#!/usr/bin/env bash
# From a fresh clone to an answer: makes .venv, installs the project, fetches the default model, starts two ranks.
#
#   ./launch/demo.sh ["a prompt"]     streams the answer to standard output
#   ./launch/demo.sh --serve          serves: gRPC on 50051, HTTP on 8000
#   --gpu (or ALLSPAN_GPU=1)          installs the CUDA build of torch and computes on the GPU
#   ALLSPAN_VENV=PATH                 uses that environment instead of .venv
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/install/environment.sh
. "$root/launch/install/environment.sh"

prompt="What is the capital of France?"
serve=""
gpu=${ALLSPAN_GPU:-}
for word in "$@"; do
    case "$word" in
    --serve) serve=yes ;;
    --gpu) gpu=1 ;;
    -h | --help)
        sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | grep '^#' | cut -c3-
        exit 0
        ;;
    --*)
        say "unknown flag $word; there are --serve and --gpu"
        exit 2
        ;;
    *) prompt=$word ;;
    esac
done

refuse_other_systems
bootstrap=()
device=(--ranks 2 --oversubscribe)
if [ "$gpu" = 1 ]; then
    bootstrap=(--gpu)
    device=(--device cuda)
elif command -v nvidia-smi >/dev/null && name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) && [ -n "$name" ]; then
    say "there is a GPU ($name); --gpu uses it"
fi
make_environment "$root/.venv" "${bootstrap[@]}"

if [ -n "$serve" ]; then
    exec "$venv/bin/python" -m allspan.launch.cli serve "${device[@]}"
fi
# Decoded weights: two first words of this small model's answer are nearly tied, and inputs of 8 bits may swap them. The
# penalty keeps it from repeating itself.
exec "$venv/bin/python" -m allspan.launch.cli generate "${device[@]}" --quantization none --chat --temperature 0 --frequency-penalty 0.2 --max-tokens 256 --prompt="$prompt"
