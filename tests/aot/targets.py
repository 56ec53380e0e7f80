"""Accelerators to compile for without having one. Import this before JAX's first use.

XLA compiles for a topology that is described, not present: the CUDA plugin takes a text of what the GPU has, libtpu
knows its chips by name. What comes out is the program that such a device would run.
"""

import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Otherwise JAX looks for a driver and cuDNN, and drops the CUDA plugin when there are none.
jax.config.update("jax_platforms", "cpu")

# What libtpu reads when it is loaded: it is not to ask the cloud for its metadata, this is a host of four chips as far
# as it cares, and a second process may load it, since nobody holds the chip that the lock is about.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# Fields of XLA's GpuTargetConfigProto for one H200 SXM, from NVIDIA's data sheets.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""

GPUS = {"h200": H200}
TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}  # the smallest topologies that libtpu describes everywhere
TARGETS = (*GPUS, *TPUS)


def gpu_device(name: str = "h200") -> Any:
    """A described GPU: programs compile for it and cannot run."""
    return topologies.get_topology_desc(platform="cuda", target_config=GPUS[name], topology="1x1x1").devices[0]


def tpu_device(name: str) -> Any:
    """One chip of a described TPU slice ("v5e", "v6e")."""
    for key, value in LIBTPU.items():
        os.environ.setdefault(key, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=TPUS[name]).devices[0]


@cache
def sharding_for(target: str) -> NamedSharding:
    """The sharding that makes a program of its arguments one for `target`."""
    device = gpu_device(target) if target in GPUS else tpu_device(target)
    return NamedSharding(Mesh([device], ("device",)), PartitionSpec())


def device_kind(target: str) -> str:
    """What JAX calls such a device."""
    return next(iter(sharding_for(target).device_set)).device_kind


def on(target: str, tree: Any) -> Any:
    """The shapes of `tree` (arrays or ShapeDtypeStructs), placed on `target`."""
    sharding = sharding_for(target)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_for(target: str, fn: Callable, *args: Any, static: dict[str, Any] | None = None, **jit_options: Any) -> Any:
    """`fn(*args, **static)` compiled for `target`; of `args` only shapes and dtypes matter.

    `fn` may be jitted already; else `jit_options` go to `jax.jit`. The arguments' mesh is JAX's abstract mesh while
    `fn` is traced, so that Pallas knows which device it lowers for.
    """
    static = static or {}
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn, static_argnames=tuple(static), **jit_options)
    return jitted.lower(*on(target, args), **static).compile()


def copies(compiled: Any, shape: tuple[int, ...]) -> list[str]:
    """Instructions of the optimised program that copy an array of `shape` or of its transposes as a whole."""
    sizes = sorted(shape)
    found = []
    for line in compiled.as_text().splitlines():
        copy = re.search(r"= \(?\w+\[([\d,]+)\][^ ]* .*?\b(copy|copy-start|transpose)\(", line[:2000])
        if copy and sorted(map(int, copy[1].split(","))) == sizes:
            found.append(line.strip()[:200])
    return found
