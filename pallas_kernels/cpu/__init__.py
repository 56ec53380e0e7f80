"""Kernels for CPUs in C++, called by XLA: compiled on first use by the machine's own compiler.

Where there is no compiler, plain XLA serves.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

FOLDER = Path(__file__).parent
# No -ffast-math: a row's sums must keep their order, whatever is computed beside it. Products and sums are fused where
# the source says so and nowhere else.
FLAGS = ("-O3", "-ffp-contract=off", "-march=native", "-std=c++17", "-fPIC", "-shared", "-w")
HANDLERS = {
    "carousel_slot_attention": "CarouselSlotAttention",
    "carousel_matmul": "CarouselMatmul",
    "carousel_norm": "CarouselNorm",
    "carousel_gate": "CarouselGate",
    "carousel_sum_exp": "CarouselSumExp",
}
LANES = 16  # a multiple of the lanes of any machine's vectors

# True while a program is traced whose gradient is taken: the kernels have none, and XLA's own operations serve. It is
# part of the key under which JAX keeps what it traced.
differentiable = jax.make_user_context(False)


def matmul(x: Float[Array, "T I"], weight: Float[Array, "O I"]) -> Float[Array, "T O"]:
    """`x @ weight.T` in float32: bitwise the same for a row whatever the number of rows and its place among them.

    In a program that is compiled for another platform it is XLA's product.
    """
    return lax.platform_dependent(x, weight, cpu=_call, default=_product)


def _product(x, weight):
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def _call(x, weight):
    rows, inputs = x.shape
    result = jax.ShapeDtypeStruct((rows, weight.shape[0]), jnp.float32)
    # The scratch is a result so that XLA allocates it, once for all the products of a program.
    scratch = jax.ShapeDtypeStruct((-(-rows // LANES) * LANES, inputs), jnp.float32)
    return jax.ffi.ffi_call("carousel_matmul", (result, scratch))(x, weight)[0]


def takes_matmul(x: Float[Array, "T I"], weight: Float[Array, "O I"]) -> bool:
    """Whether `matmul` can run here: in float32.

    Against XLA's product as fast for one row, 1.5 to 2.1 times for 4 to 64, 1.2 for 128, 1.1 for 256, 1.03 for 576.
    """
    return x.dtype == weight.dtype == jnp.float32 and _serve()


def norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], otherwise: Callable, *, eps: float, offset: float
) -> Float[Array, "*rows D"]:
    """`x` over its root mean square, times `offset + weight`, in float32: bitwise the same for a row, as `matmul` is.

    In a program that is compiled for another platform it is `otherwise(x, weight)`.
    """

    def call(x, weight):
        run = jax.ffi.ffi_call("carousel_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return run(x, weight, eps=float(eps), offset=float(offset))

    return lax.platform_dependent(x, weight, cpu=call, default=otherwise)


def takes_norm(x: Float[Array, "*rows D"], weight: Float[Array, " D"]) -> bool:
    """Whether `norm` can run here: in float32 and bfloat16."""
    return x.dtype == weight.dtype and x.dtype in (jnp.float32, jnp.bfloat16) and _serve()


def gated(x: Float[Array, "T 2*F"], activation: str, otherwise: Callable) -> Float[Array, "T F"]:
    """`activation(gate) * up` for gate and up beside each other, in float32: the same bits for a row as `matmul`.

    In a program that is compiled for another platform it is `otherwise(x)`.
    """

    def call(x):
        T, width = x.shape
        run = jax.ffi.ffi_call("carousel_gate", jax.ShapeDtypeStruct((T, width // 2), x.dtype))
        return run(x, gelu=activation == "gelu_tanh")

    return lax.platform_dependent(x, cpu=call, default=otherwise)


def takes_gated(x: Float[Array, "T 2*F"], activation: str) -> bool:
    """Whether `gated` can run here: in float32 and bfloat16, with silu and tanh's gelu."""
    known = x.dtype in (jnp.float32, jnp.bfloat16) and activation in ("silu", "gelu_tanh")
    return known and _serve()


def sum_exp(x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """`exp(x).sum(-1)` in float32 for values of at most 0: the same bits for a row as `matmul`.

    By XLA in a program that is compiled for another platform, and where the kernels cannot run or give no gradient.
    """

    def call(x):
        return jax.ffi.ffi_call("carousel_sum_exp", jax.ShapeDtypeStruct(x.shape[:-1], x.dtype))(x)

    def formula(x):
        return jnp.exp(x).sum(axis=-1)

    return lax.platform_dependent(x, cpu=call, default=formula) if _serve() else formula(x)


def rows_invariant(dtype) -> bool:
    """Whether a row of a model of this dtype has the same bits in every program, whatever else is computed in it.

    In float32, where all sums over a row are these kernels'. In bfloat16 products are XLA's, which may promise that no
    more than it does in float32.
    """
    return dtype == jnp.float32 and unavailable() is None


def _serve() -> bool:
    """Whether the kernels are taken in what is traced now."""
    return not differentiable.value and unavailable() is None


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot run here, None if they can. The first call compiles them and tells XLA of them."""
    if jax.default_backend() != "cpu":
        return f"it runs on CPUs, not on {jax.default_backend()}"
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return "it needs a C++ compiler: c++, g++ or clang++"
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the kernels do not compile or load: {getattr(error, 'stderr', '') or error}"
    for target, handler in HANDLERS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, handler)), platform="cpu")
    return None


def _build(compiler: str) -> Path:
    """The shared library, from the user's cache folder if it was built for this source, compiler, jaxlib and CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    files = sorted(FOLDER.glob("*.h")) + sorted(FOLDER.glob("*.cc"))
    parts = (*(file.read_text() for file in files), *FLAGS, version, importlib.metadata.version("jaxlib"), _cpu())
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "carousel" / "cpu"
    path = base / f"{hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:24]}.so"
    if not path.exists():
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base) as folder:
            built = Path(folder) / path.name
            sources = [str(file) for file in files if file.suffix == ".cc"]
            command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", *sources, "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            built.rename(path)  # whole or not at all, whoever else builds it too
    return path


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model", "cpu family", "flags", "Features"))}))
