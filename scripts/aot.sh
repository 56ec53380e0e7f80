#!/usr/bin/env bash
# Compiles the kernels and the step for an H200 and for TPUs v5e and v6e, none of which need be here: tests/aot.
# Options go to pytest: bash scripts/test.sh --aot -k decode
# In an environment of its own (some 2 GB from PyPI), with .venv's version of JAX; AOT_JAX names another.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "The compilers for TPU (libtpu) exist for Linux on x86-64 alone; this is $(uname -sm)." >&2
    exit 1
fi

version_of_jax() { "$PYTHON" -c 'from importlib.metadata import version; print(version("jax"))'; }

requirements() {
    "$PYTHON" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")'
}

jax="${AOT_JAX:-$(version_of_jax)}"
AOT=".venv-aot/$jax"
COMPILERS=(nvidia-cuda-nvcc nvidia-nvvm)  # ptxas and libdevice; jax[tpu] brings libtpu

install_aot() {
    echo "installing JAX $jax and the compilers for GPU and TPU into $AOT (some 2 GB from PyPI)" >&2
    "$PYTHON" -m venv --clear "$AOT"
    "$AOT/bin/python" -m pip install -q "jax[tpu]==$jax" "${COMPILERS[@]}" 'pytest>=9' -r <(requirements)
    # Without its dependencies: cuDNN, cuBLAS and the like are for running.
    "$AOT/bin/python" -m pip install -q --no-deps "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax"
}

# Installed again when what is asked for, the interpreter or the place has changed.
wanted="$PWD $("$PYTHON" --version) $(cat pyproject.toml scripts/aot.sh | cksum)"
if [ "$(cat "$AOT/carousel-installed" 2>/dev/null || true)" != "$wanted" ]; then
    install_aot
    echo "$wanted" > "$AOT/carousel-installed"
fi

exec "$AOT/bin/python" -m pytest tests/aot "$@"
