# Sourced by run and nightly. install_tools TOOL=PACKAGE[,PACKAGE]… installs Debian's packages of the tools that are
# missing, where that is possible.

export ALLSPAN_REQUIRE_KERNELS=1 ALLSPAN_REQUIRE_TOOLS=1

install_tools() {
    local entry packages=()
    for entry in "$@"; do
        if ! command -v "${entry%%=*}" >/dev/null; then IFS=, read -ra names <<<"${entry#*=}" && packages+=("${names[@]}"); fi
    done
    if [ "${#packages[@]}" = 0 ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return; fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}" >/dev/null
}
