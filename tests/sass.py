"""Reads what the compiler made of a kernel: resources and instructions of a cubin."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+([^;]+);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*?\b0x([0-9a-f]+)")
_USAGE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@cache
def cuobjdump() -> Path | None:
    """Return the disassembler that Triton's wheel carries, None without Triton."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return path if path.exists() else None


@dataclass(frozen=True)
class Kernel:
    """One compiled function.

    Attributes:
        registers: Per thread.
        stack: Bytes of stack per thread.
        local: Bytes of local memory per thread.
        instructions: Address and text of each instruction.
    """

    registers: int
    stack: int
    local: int
    instructions: tuple[tuple[int, str], ...]

    def count(self, pattern: str) -> int:
        """Return how many instructions match."""
        return sum(bool(re.search(pattern, text)) for _, text in self.instructions)

    def hot_loop(self) -> Kernel:
        """Return the innermost loop with the most global loads: the one over the elements."""
        loops = []
        for address, text in self.instructions:
            branch = _BRANCH.search(text)
            if branch and int(branch[1], 16) < address:
                body = tuple(i for i in self.instructions if int(branch[1], 16) <= i[0] <= address)
                loops.append(Kernel(self.registers, self.stack, self.local, body))
        # Wide loads first: reductions have another loop, over partial sums.
        return max(loops, key=lambda loop: (loop.count(r"LDG\.E\.128"), -len(loop.instructions)))


def disassemble(cubin: bytes) -> dict[str, Kernel]:
    """Return the functions of a cubin by name."""
    tool = cuobjdump()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(  # noqa: S603 (our own file)
                [str(tool), option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    resources = {found[0]: found[1:] for found in _USAGE.findall(usage)}
    kernels = {}
    parts = _FUNCTION.split(code)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        instructions = tuple(
            (int(address, 16), body.strip()) for address, body in _INSTRUCTION.findall(text)
        )
        registers, stack, local = resources[name]
        kernels[name] = Kernel(int(registers), int(stack), int(local), instructions)
    return kernels
