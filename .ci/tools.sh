# shellcheck shell=bash
# Sourced by run and nightly: install_tools TOOL=PACKAGE[,PACKAGE]… installs Debian's packages of the tools that are
# missing, and names them where it may not.

export ALLSPAN_REQUIRE_KERNELS=1 ALLSPAN_REQUIRE_TOOLS=1

install_tools() {
    local entry names packages=()
    for entry in "$@"; do
        command -v "${entry%%=*}" >/dev/null && continue
        IFS=, read -ra names <<<"${entry#*=}"
        packages+=("${names[@]}")
    done
    if [ "${#packages[@]}" = 0 ]; then return; fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "allspan: not installed, without root or apt-get: ${packages[*]}" >&2
        return
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}" >/dev/null
}
