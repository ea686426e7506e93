#!/usr/bin/env bash
# Checks what lies here with the tools whose files they are, as far as they are installed (Debian: prometheus, systemd;
# Docker's compose plugin). The tests compare the same files with the code. Give the address of a server to have its
# metrics checked, too: deploy/check.sh http://127.0.0.1:8000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run() {
    if command -v "$1" >/dev/null; then
        "$@" && echo "ok: $*"
    else
        echo "not installed, left out: $1"
    fi
}

run promtool check config prometheus/prometheus.yml
# The dashboard's queries, as rules, so that PromQL's own parser reads them.
python3 - >"$work/dashboard.yml" <<'PYTHON'
import json

panels = json.load(open("grafana/dashboards/allspan.json"))["panels"]
queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
queries = [query.replace("$__rate_interval", "1m").replace("$model_name", ".*") for query in queries]
rules = [{"record": f"dashboard:query_{i}", "expr": query} for i, query in enumerate(queries)]
print(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
PYTHON
run promtool check rules "$work/dashboard.yml"

sed 's#/opt/allspan/bin/allspan#/bin/true#' systemd/allspan.service >"$work/allspan.service"
run systemd-analyze verify "$work/allspan.service"

if docker compose version >/dev/null 2>&1; then
    ALLSPAN_API_KEY=none docker compose -f compose.yaml config --quiet && echo "ok: docker compose config"
else
    echo "not installed, left out: docker compose"
fi

if [ "$#" -gt 0 ] && command -v promtool >/dev/null; then
    # Colons are in the prefix, as in vLLM's, and one histogram is called …_total, as vLLM's is: promtool minds both.
    curl -sSf "$1/metrics" | promtool check metrics 2>&1 |
        grep -v -e "should not contain ':'" -e 'allspan:iteration_tokens_total non-counter metrics' && exit 1
    echo "ok: $1/metrics"
fi
