#!/usr/bin/env bash
# Regenerates the protobuf code beside the .proto files. Uses the oldest supported grpcio-tools, because newer generated
# code refuses older runtimes; fetched once into the user's cache unless $PYTHON (python3) has it.
# With --check it only compares, for CI: 0 up to date, 1 out of date, 3 when grpcio-tools cannot be had.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=1.76.0
python=${PYTHON:-python3}
has_tools() {
  "$1" -c "import grpc_tools, importlib.metadata as m; assert m.version('grpcio-tools') == '$version'" 2>/dev/null
}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
if ! has_tools "$python"; then
  tag=$("$python" -c 'import sys; print(f"py{sys.version_info[0]}.{sys.version_info[1]}")')
  cached=${ALLSPAN_HOME:-$HOME/.cache/allspan}/tools/grpcio-tools-$version-$tag
  if ! has_tools "$cached/bin/python"; then
    rm -rf "$cached"
    if ! { "$python" -m venv "$cached" && "$cached/bin/python" -m pip install -q "grpcio-tools==$version" setuptools; } >&2; then
      rm -rf "$cached"
      echo "grpcio-tools $version cannot be installed for $python" >&2
      exit 3
    fi
  fi
  python=$cached/bin/python
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
