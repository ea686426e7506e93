#!/usr/bin/env bash
# Regenerates the protobuf code beside the .proto files with the grpcio-tools of $PYTHON (python3), which must be the oldest
# supported version, because newer generated code refuses older runtimes. The extra `dev` has it.
# With --check it only compares, for CI: 0 up to date, 1 out of date, 3 when grpcio-tools of that version is not there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=1.76.0
python=${PYTHON:-python3}
if ! "$python" -c "import grpc_tools, importlib.metadata as m; assert m.version('grpcio-tools') == '$version'" 2>/dev/null; then
  echo "$python has no grpcio-tools $version: pip install '.[dev]' in the checkout" >&2
  exit 3
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mkdir "$out/gen"
(cd "$here/.." && "$python" -m grpc_tools.protoc -Iallspan/protos=protos --python_out="$out/gen" --pyi_out="$out/gen" \
  --grpc_python_out="$out/gen" protos/inference.proto protos/worker.proto protos/agent.proto &&
  "$python" -m grpc_tools.protoc -Iallspan/protos=protos --python_out="$out/gen" --pyi_out="$out/gen" \
    protos/vllm_worker.proto)  # messages alone: its service is served by generic handlers
status=0
for file in "$out"/gen/allspan/protos/*; do
  if [ "${1:-}" = --check ]; then
    diff -u "$here/$(basename "$file")" "$file" || status=1
  else
    cp "$file" "$here/"
  fi
done
exit $status
