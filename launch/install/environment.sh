# Sourced by launch/demo.sh and tests/run.sh: makes a Python environment with the project in it.
#
#   make_environment FOLDER [flags of launch/install/bootstrap.py]     sets $venv

say() { printf 'allspan: %s\n' "$*" >&2; }

refuse_other_systems() {
    case "$(uname -s)" in
    Linux) ;;
    Darwin)
        say "macOS runs the client only (pip install ./client), against a cluster on Linux"
        exit 1
        ;;
    MINGW* | MSYS* | CYGWIN* | Windows_NT)
        say "Windows needs WSL2: run this inside it (wsl --install)"
        exit 1
        ;;
    *)
        say "a cluster needs Linux, this is $(uname -s)"
        exit 1
        ;;
    esac
}

has_pip() { [ -x "$1/bin/python" ] && "$1/bin/python" -c 'import pip' 2>/dev/null; }

has_torch() {
    "$1" -c 'import importlib.metadata as m, sys; v = m.version("torch").split("+")[0].split(".")
sys.exit((int(v[0]), int(v[1])) < (2, 11))' 2>/dev/null
}

# Makes the environment $2 with the interpreter $1; its own torch is reused if it will do.
new_environment() {
    local options=() output
    if has_torch "$1"; then options=(--system-site-packages); fi
    if output=$(rm -rf "$2" 2>&1 && "$1" -m venv "${options[@]}" "$2" 2>&1) && has_pip "$2"; then return; fi
    say "that failed: ${output##*$'\n'}"
    return 1
}

can_write_to() { mkdir -p "$1" 2>/dev/null && [ -w "$1" ]; }

make_environment() {
    venv=$1
    shift
    local code=0 version python tried="" flags=("$@" --pinned)
    if [ -n "${ALLSPAN_VENV:-}" ]; then
        venv=$ALLSPAN_VENV
        flags=("$@")
        if ! has_pip "$venv" && [ -e "$venv" ]; then
            say "ALLSPAN_VENV is $venv, which is no Python environment with pip"
            exit 1
        fi
    fi
    if has_pip "$venv"; then
        "$venv/bin/python" "$root/launch/install/bootstrap.py" "${flags[@]}" || code=$?
        if [ "$code" -ne 10 ] || [ -n "${ALLSPAN_VENV:-}" ]; then return "$code"; fi
    fi
    if ! can_write_to "$(dirname "$venv")"; then
        say "cannot write to $(dirname "$venv"); set ALLSPAN_VENV=PATH to have the environment elsewhere"
        return 1
    fi
    for version in 3.14 3.13 3.12 3.11; do
        python=$(command -v "python$version") || continue
        "$python" -c 'import venv, ensurepip' 2>/dev/null || continue
        say "making the environment $venv with $("$python" --version 2>&1)"
        new_environment "$python" "$venv" || continue
        tried=yes code=0
        "$venv/bin/python" "$root/launch/install/bootstrap.py" "${flags[@]}" || code=$?
        if [ "$code" -ne 10 ]; then return "$code"; fi
        rm -rf "$venv"
        say "trying the next Python"
    done
    if [ -z "$tried" ]; then
        say "no python3.14 … python3.11 here can make an environment; install one (apt install python3-venv, dnf install python3)"
        return 1
    fi
    say "no Python here gets a CPU build of torch; the lines above say what to set"
    return "$code"
}
