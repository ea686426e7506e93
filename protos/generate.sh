#!/usr/bin/env bash
# Regenerates the protobuf code beside the .proto files. Uses the oldest supported grpcio-tools, because newer generated
# code refuses older runtimes. With --check it only compares, for CI.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tools=grpcio-tools==1.76.0
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
python=${PYTHON:-python3}
if ! "$python" -c "import grpc_tools, importlib.metadata as m; assert m.version('grpcio-tools') == '${tools#*==}'" 2>/dev/null; then
  "$python" -m venv "$out/venv"
  "$out/venv/bin/pip" install -q "$tools" setuptools
  python=$out/venv/bin/python
fi
mkdir "$out/gen"
(cd "$here/.." && "$python" -m grpc_tools.protoc -Iallspan/protos=protos --python_out="$out/gen" --pyi_out="$out/gen" \
  --grpc_python_out="$out/gen" protos/inference.proto protos/worker.proto)
status=0
for file in "$out"/gen/allspan/protos/*; do
  if [ "${1:-}" = --check ]; then
    diff -u "$here/$(basename "$file")" "$file" || status=1
  else
    cp "$file" "$here/"
  fi
done
exit $status
