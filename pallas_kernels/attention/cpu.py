"""Slot attention on a CPU: `cpu.cc`, compiled on first use by the machine's own C++ compiler.

Reads each live key and value once a tile of rows, on all of XLA's threads. Where there is no compiler, `xla` serves.
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
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

SOURCE = Path(__file__).with_name("cpu.cc")
TARGET = "carousel_slot_attention"
# No -ffast-math: a row's sums must keep their order, whatever tile the row is in.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-w")


def cpu_attention(q, k, v, slots, positions, *, num_decode, block_q, window, soft_cap, scale):
    """See `slot_attention`. Decode rows are chunks of one: every run of consecutive positions is split into tiles."""
    if reason := cpu_unavailable():
        raise ValueError(reason)
    if any(array.dtype not in (jnp.float32, jnp.bfloat16) for array in (q, k, v)):
        raise ValueError(f"the CPU kernel takes float32 and bfloat16, not {q.dtype}, {k.dtype} and {v.dtype}")
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        k,
        v,
        slots,
        positions,
        window=np.int64(window or 0),
        soft_cap=np.float32(soft_cap or 0.0),
        scale=np.float32(scale),
    )


@functools.cache
def cpu_unavailable() -> str | None:
    """Why the kernel cannot run here, None if it can. The first call compiles it and tells XLA of it."""
    if jax.default_backend() != "cpu":
        return f"it runs on CPUs, not on {jax.default_backend()}"
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return "it needs a C++ compiler: c++, g++ or clang++"
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{SOURCE.name} does not compile or load: {getattr(error, 'stderr', '') or error}"
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.CarouselSlotAttention), platform="cpu")
    return None


def _build(compiler: str) -> Path:
    """The shared library, from the user's cache folder if it was built for this source, compiler, jaxlib and CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = "\0".join((SOURCE.read_text(), " ".join(FLAGS), version, importlib.metadata.version("jaxlib"), _cpu()))
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "carousel" / "cpu"
    path = base / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base) as folder:
            built = Path(folder) / path.name
            command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(built)]
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
