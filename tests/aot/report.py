"""What was compiled, for the table at the end of a run."""

from typing import Any, NamedTuple

from tests.aot.ptxas import KernelUse


class Line(NamedTuple):
    """One program, or one Mosaic GPU kernel of it."""

    target: str
    case: str
    temporary: int  # bytes that the program needs besides arguments and results
    kernel: KernelUse | None


REPORT: list[Line] = []


def add(target: str, case: str, compiled: Any, kernels: list[KernelUse]) -> None:
    """Note a program and its kernels; TPUs' report none."""
    temporary = compiled.memory_analysis().temp_size_in_bytes
    REPORT.extend(Line(target, case, temporary, kernel) for kernel in kernels or [None])


def table() -> list[str]:
    """The report as lines of text, in columns."""
    head = ("target", "case", "kernel", "registers", "shared KiB", "spilled B", "temporary KiB")
    rows = [head, *map(_cells, sorted(REPORT, key=lambda line: (line.target, line.case)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cells(line: Line) -> tuple[str, ...]:
    use = line.kernel
    kernel = ("", "", "", "")
    if use is not None:
        kernel = (use.name, str(use.registers), f"{use.shared / 1024:.0f}", str(use.spilled))
    return (line.target, line.case, *kernel, f"{line.temporary / 1024:.0f}")
