"""Registers, shared memory and spills of Mosaic GPU kernels, as the compilers report them."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class KernelUse(NamedTuple):
    """What one kernel takes of a multiprocessor."""

    name: str
    registers: int  # a thread
    shared: int  # bytes of dynamic shared memory a block, barriers aside
    spilled: int  # bytes that go to local memory and come back for want of registers, a thread


@contextmanager
def dumped_kernels() -> Iterator[list[KernelUse]]:
    """A list, filled when the block ends, of the kernels that were compiled inside it.

    JAX may compile a kernel once a process: one that was met before is not listed again.
    """
    kernels: list[KernelUse] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            yield kernels
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        kernels += [_kernel_use(report) for report in sorted(Path(folder).glob("*.ptxas"))]


def _kernel_use(report: Path) -> KernelUse:
    """The figures in ptxas' report and in what Pallas counted when it lowered the kernel.

    Both are numbered files, but numbered apart: of several kernels of one name the most shared memory is taken.
    """
    text, name = report.read_text(), report.stem.rpartition("_")[0]
    resources = [path.read_text() for path in report.parent.glob(f"{name}_*.resources.txt")]
    return KernelUse(
        name,
        registers=int(_find(r"Used (\d+) registers", text)),
        shared=max(int(_find(r"smem_scratch_bytes=(\d+)", one)) for one in resources),
        spilled=sum(int(_find(rf"(\d+) bytes spill {kind}", text)) for kind in ("stores", "loads")),
    )


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in\n{text}")
    return found[1]
