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
from contextlib import nullcontext, suppress
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
            "source": SOURCE_DIGEST,
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
    directory = writable_dir(cache_dir())
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

    They are dealt out to as many processes as the machine has cores, or `num_processes`. Raises
    `MoEEpError` naming the kernel, its configuration and the compiler's message if one fails.
    """
    distinct = {kernel.symbol: kernel for kernel in kernels}
    missing = [k for k in distinct.values() if _cached(k) is None]
    if not missing:
        return 0
    num_processes = min(num_processes or os.cpu_count() or 1, len(missing))
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        ThreadPoolExecutor(num_processes) as pool,
    ):
        bar = progress.add_task("compiling kernels", total=len(missing))
        hands = [missing[i::num_processes] for i in range(num_processes)]
        compiled = [
            pool.submit(_compile_in_process, hand, lambda: progress.advance(bar)) for hand in hands
        ]
        for future in as_completed(compiled):
            future.result()
    return len(missing)


def _compile_in_process(kernels: Sequence[KernelBuild], on_compiled: Callable[[], None]) -> None:
    # Not multiprocessing: its workers would run the caller's main module again.
    command = [sys.executable, "-c", f"from {__name__} import _serve; _serve()"]
    env = os.environ | {CACHE_DIR_VARIABLE: str(writable_dir(cache_dir()))}
    num_compiled = 0
    with (
        tempfile.TemporaryFile() as messages,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, env=env
        ) as worker,
    ):
        watchdog = threading.Timer(COMPILE_TIMEOUT_S * len(kernels), worker.kill)
        watchdog.daemon = True
        watchdog.start()
        with suppress(BrokenPipeError):  # it ended at once; its messages say why
            worker.stdin.write(pickle.dumps((SOURCE_DIGEST, kernels)))
            worker.stdin.close()
        for _ in worker.stdout:  # a line for each kernel
            num_compiled += 1
            on_compiled()
        exit_code = worker.wait()
        watchdog.cancel()
        messages.seek(0)
        text = messages.read().decode(errors="replace")[-2000:]
    if exit_code:
        failed = kernels[min(num_compiled, len(kernels) - 1)]
        raise MoEEpError(
            f"kernel {failed.name} did not compile for {failed.config}: exit code {exit_code}; "
            f"{text}"
        )


def _serve() -> None:
    """The worker: compiles what it reads, prints a line for each."""
    global SOURCE_DIGEST
    # The asking process looks for the entries under its own digest, edited since or not.
    SOURCE_DIGEST, kernels = pickle.loads(sys.stdin.buffer.read())
    for kernel in kernels:
        print(object_file(kernel), flush=True)


def _cached(kernel: KernelBuild) -> Path | None:
    return _find(cache_dir(), kernel) or _find(writable_dir(cache_dir()), kernel)


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
    with console.status(f"compiling {kernel.name}") if console.is_terminal else nullcontext():
        content = kernel.build(kernel.config).dump_to_object(kernel.symbol)
    path = directory / f"{kernel.symbol}.o"
    record = {"key": kernel.key, "sha256": hashlib.sha256(content).hexdigest()}
    write_atomically(path, content)
    write_atomically(path.with_suffix(".json"), json.dumps(record, indent=1).encode())
    _log.info("compiled %s into %s", kernel.name, path)
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """The whole content or what was there before, for readers; the caller holds the file's lock."""
    # One name per entry, not per process: what a killed process left is overwritten.
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def writable_dir(directory: Path) -> Path:
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


def _source_digest() -> str:
    """Hash of every source file that can reach a kernel: the folders megakernel/ and comm/."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted(here.glob("*.py")) + sorted((here.parent / "comm").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# At import, not at first use: the code that runs is what the files held about then.
SOURCE_DIGEST = _source_digest()


@functools.cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
