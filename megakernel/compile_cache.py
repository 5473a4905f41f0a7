"""Compiled kernels on disk, one object file per kernel, configuration, source and DSL version.

A kernel module describes what it compiles by a `KernelBuild`; `load` gives the callable, from
memory, from disk or freshly compiled. An entry is two files, written under a lock that the
operating system drops when its holder dies, each by an atomic rename:

    <name>_<digest>.o      object file: host launch code, the kernel's cubin inside
    <name>_<digest>.json   {"key": what it was compiled from, "sha256": of the object file}

An entry whose key or hash does not match (half written, damaged, foreign) is compiled again. A
directory that cannot be written is still read; what it lacks goes to a private temporary one.
No GPU is needed to compile.
"""

import atexit
import ctypes
import functools
import hashlib
import json
import logging
import os
import pickle
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

import platformdirs
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import Progress

from moe_ep.comm.errors import MoEEpError, MoEEpTimeoutError, MoEEpUnavailableError

ARCH = "sm_90a"
CACHE_DIR_VARIABLE = "MOE_EP_CACHE_DIR"
COMPILE_TIMEOUT_S = 600.0

_log = logging.getLogger(__name__)
_loaded: dict[str, Callable[..., object]] = {}
_load_lock = threading.RLock()


class CompiledFunction(Protocol):
    """What `cute.compile` returns, as far as the cache uses it."""

    def dump_to_object(self, function_prefix: str) -> bytes: ...


@dataclass(frozen=True)
class KernelBuild:
    """One compiled kernel.

    name     of the kernel, an identifier
    config   frozen dataclass of everything that the code depends on; its repr is part of the key
    build    a function of a module (it travels to worker processes), config -> `compile_for_sm90`
    """

    name: str
    config: object
    build: Callable[[object], CompiledFunction]

    @property
    def key(self) -> dict[str, str]:
        """What the object file depends on."""
        return {
            "kernel": self.name,
            "config": repr(self.config),
            "source": _source_digest(),
            "arch": ARCH,
            "host": f"{platform.system()} {platform.machine()}",
            "dsl": _version("nvidia-cutlass-dsl"),
            "cuda-bindings": _version("cuda-bindings"),
        }

    @property
    def symbol(self) -> str:
        """Stem of the entry's files and prefix of the symbols in its object file."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return f"{self.name}_{digest[:24]}"


def compile_for_sm90(function: Callable[..., object], *args: object) -> CompiledFunction:
    """`cute.compile` for sm_90a, on a machine with or without a GPU.

    Raises `MoEEpUnavailableError` where CuTe DSL is not installed.
    """
    try:
        import cutlass.cute as cute
        from cutlass.cute.runtime import find_runtime_libraries
    except ImportError as error:
        raise MoEEpUnavailableError(
            f"compiling a kernel needs nvidia-cutlass-dsl (pip install 'moe-ep[gpu]'): {error}"
        ) from error
    # Object files are written by an engine that resolves the launch functions of this library.
    for path in find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return cute.compile(function, *args, options=f"--gpu-arch {ARCH}")


def cache_dir() -> Path:
    """Directory of the compiled kernels: $MOE_EP_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(chosen) if chosen else platformdirs.user_cache_path("moe-ep") / "kernels"


def object_file(kernel: KernelBuild) -> Path:
    """Path of the kernel's object file, compiled first where the cache does not hold it.

    Of several processes that ask at once, one compiles and the others wait for it. Raises
    `MoEEpTimeoutError` after `COMPILE_TIMEOUT_S` of waiting.
    """
    path = _cached(kernel)
    if path is not None:
        return path
    directory = _writable_dir(cache_dir())
    lock = FileLock(directory / f"{kernel.symbol}.lock")
    try:
        with lock.acquire(timeout=COMPILE_TIMEOUT_S):
            return _find(directory, kernel) or _store(directory, kernel)
    except Timeout as error:
        raise MoEEpTimeoutError(
            f"another process holds {lock.lock_file} for more than {COMPILE_TIMEOUT_S:.0f} s",
            phase="compile",
        ) from error


def load(kernel: KernelBuild) -> Callable[..., object]:
    """The kernel's host function, ready to be called with the arguments of its `__call__`.

    Loaded once per process. Raises `MoEEpUnavailableError` without CuTe DSL.
    """
    symbol = kernel.symbol
    with _load_lock:
        if symbol not in _loaded:
            path = object_file(kernel)
            from cutlass.cute.runtime import load_module

            _loaded[symbol] = load_module(str(path))[symbol]
        return _loaded[symbol]


def compile_all(kernels: Sequence[KernelBuild], *, num_processes: int | None = None) -> int:
    """Fills the cache with `kernels`, several at a time; returns how many were compiled.

    Each compiles in its own process, by default on every core. Raises `MoEEpError` naming the
    kernel, its configuration and the compiler's message if one fails.
    """
    distinct = {kernel.symbol: kernel for kernel in kernels}
    missing = [k for k in distinct.values() if _cached(k) is None]
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        bar = progress.add_task("compiling kernels", total=len(missing))
        pool = ThreadPoolExecutor(num_processes or os.cpu_count())
        stack.callback(pool.shutdown, cancel_futures=True)
        for future in as_completed([pool.submit(_compile_in_process, k) for k in missing]):
            future.result()
            progress.advance(bar)
    return len(missing)


def _compile_in_process(kernel: KernelBuild) -> None:
    # Not multiprocessing: its workers would run the caller's main module again.
    worker = [sys.executable, "-m", __name__]
    env = os.environ | {CACHE_DIR_VARIABLE: str(_writable_dir(cache_dir()))}
    failed = f"kernel {kernel.name} did not compile for {kernel.config}"
    try:
        result = subprocess.run(
            worker,
            input=pickle.dumps(kernel),
            capture_output=True,
            env=env,
            timeout=COMPILE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise MoEEpError(f"{failed}: no result after {COMPILE_TIMEOUT_S:.0f} s") from error
    if result.returncode:
        raise MoEEpError(f"{failed}: {result.stderr.decode(errors='replace')[-2000:]}")


def _cached(kernel: KernelBuild) -> Path | None:
    return _find(cache_dir(), kernel) or _find(_writable_dir(cache_dir()), kernel)


def _find(directory: Path, kernel: KernelBuild) -> Path | None:
    """The entry's object file if it is whole and was made from this key."""
    path = directory / f"{kernel.symbol}.o"
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
    return path if record == {"key": kernel.key, "sha256": digest} else None


def _store(directory: Path, kernel: KernelBuild) -> Path:
    """Compiles and writes the entry; its lock is held."""
    console = Console(stderr=True)
    with console.status(f"compiling {kernel.name}") if console.is_terminal else ExitStack():
        content = kernel.build(kernel.config).dump_to_object(kernel.symbol)
    path = directory / f"{kernel.symbol}.o"
    record = {"key": kernel.key, "sha256": hashlib.sha256(content).hexdigest()}
    _write_atomically(path, content)
    _write_atomically(path.with_suffix(".json"), json.dumps(record, indent=1).encode())
    _log.info("compiled %s into %s", kernel.name, path)
    return path


def _write_atomically(path: Path, content: bytes) -> None:
    # One name per entry, not per process: what a killed process left is overwritten.
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _writable_dir(directory: Path) -> Path:
    """`directory`, or a temporary one of this process where it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        return _private_dir(directory, str(error))


@functools.cache
def _private_dir(instead_of: Path, reason: str) -> Path:
    private = Path(tempfile.mkdtemp(prefix="moe-ep-kernels-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    _log.warning(
        "cannot write compiled kernels to %s (%s): they go to %s and are lost at exit; "
        "set %s to a writable directory",
        instead_of,
        reason,
        private,
        CACHE_DIR_VARIABLE,
    )
    return private


@functools.cache
def _source_digest() -> str:
    """Hash of every source file that can reach a kernel: the folders megakernel/ and comm/."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted(here.glob("*.py")) + sorted((here.parent / "comm").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    object_file(pickle.loads(sys.stdin.buffer.read()))
