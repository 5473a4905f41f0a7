"""What ptxas made of a kernel: the machine code inside the object file that the cache stores."""

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_ep.megakernel.compile_cache import KernelBuild

_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_BRANCH = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
_REGISTERS = re.compile(r"EIATTR_REGCOUNT.*?\.word\s+index.*?\.word\s+(0x[0-9a-f]+)", re.DOTALL)


@dataclass(frozen=True)
class Sass:
    """opcodes in program order (with their suffixes), registers of a thread, bodies of loops."""

    opcodes: tuple[str, ...]
    num_registers: int
    loops: tuple[tuple[str, ...], ...] = ()

    def count(self, *prefixes: str) -> int:
        return sum(opcode.startswith(prefixes) for opcode in self.opcodes)

    @property
    def histogram(self) -> Counter[str]:
        return Counter(opcode.split(".")[0] for opcode in self.opcodes)


def disassemble(kernel: KernelBuild, folder: Path) -> Sass:
    """Compiles the kernel, past the cache, and disassembles its one cubin."""
    content = kernel.build(kernel.config).dump_to_object(kernel.symbol)
    cubin = folder / f"{kernel.symbol}.cubin"
    cubin.write_bytes(content[content.index(b"\x7fELF", 4) :])
    result = subprocess.run([_nvdisasm(), cubin], capture_output=True, text=True, check=True)
    registers = _REGISTERS.search(result.stdout)
    assert registers, "nvdisasm names no register count"
    opcodes = tuple(_OPCODE.findall(result.stdout))
    return Sass(opcodes, int(registers.group(1), 16), _loops(result.stdout))


def _loops(text: str) -> tuple[tuple[str, ...], ...]:
    """Opcodes from the target of every backward branch to the branch."""
    starts, found, end = {}, [], 0
    for line in text.splitlines(keepends=True):
        start, end = end, end + len(line)
        if label := _LABEL.match(line):
            starts[label.group(1)] = start
        elif (branch := _BRANCH.search(line)) and branch.group(1) in starts:
            found.append(tuple(_OPCODE.findall(text, starts[branch.group(1)], end)))
    return tuple(found)


def _nvdisasm() -> str:
    folders = find_spec("nvidia").submodule_search_locations if find_spec("nvidia") else []
    packaged = [str(path) for folder in folders for path in Path(folder).glob("*/bin/nvdisasm")]
    path = shutil.which("nvdisasm") or next(iter(packaged), None)
    if path is None:
        pytest.skip("needs nvdisasm (pip install nvidia-cuda-nvdisasm)")
    return path
