"""The disk cache of compiled kernels, with builds that take a file name instead of a compiler."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_ep.comm.errors import MoEEpError, MoEEpTimeoutError
from moe_ep.megakernel import compile_cache
from moe_ep.megakernel.compile_cache import KernelBuild, compile_all, load, object_file

# A module of its own: worker processes import it. Every build leaves a line in $BUILD_LOG.
FAKE_BUILDS = """
import os, time
from moe_ep.megakernel.compile_cache import KernelBuild, object_file

class Compiled:
    def __init__(self, config): self.config = config
    def dump_to_object(self, symbol): return f"{symbol} {self.config}".encode()

def build(config):
    with open(os.environ["BUILD_LOG"], "a") as log:
        log.write(f"{config}\\n")
    time.sleep(config.get("seconds", 0))
    if "error" in config:
        raise ValueError(config["error"])
    return Compiled(config)

def kernel(**config): return KernelBuild("fake", config, build)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The module above; its cache and its log lie in tmp_path."""
    (tmp_path / "fake_builds.py").write_text(FAKE_BUILDS)
    monkeypatch.setenv("BUILD_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fake_builds", raising=False)
    import fake_builds

    return fake_builds


def num_builds(tmp_path: Path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def wait_for_build(tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    while num_builds(tmp_path) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask_in_process(config: str) -> subprocess.Popen:
    code = f"import fake_builds as f; print(f.object_file(f.kernel({config})))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_second_request_reads_what_the_first_compiled(fake, tmp_path):
    path = object_file(fake.kernel(n=8))
    assert path.parent == tmp_path / "cache"
    assert path.read_bytes() == f"{path.stem} {{'n': 8}}".encode()
    assert object_file(fake.kernel(n=8)) == path
    assert num_builds(tmp_path) == 1


def test_key_tells_config_name_source_arch_and_versions_apart(fake, monkeypatch):
    kernel = fake.kernel(n=8)
    symbols = {kernel.symbol, fake.kernel(n=16).symbol}
    symbols.add(KernelBuild("other", kernel.config, kernel.build).symbol)
    for name, value in {
        "ARCH": "sm_100a",
        "SOURCE_DIGEST": "edited",
        "_version": lambda distribution: f"{distribution} 9.9",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(compile_cache, name, value)
            symbols.add(kernel.symbol)
    assert len(symbols) == 6
    assert all(symbol.isidentifier() for symbol in symbols)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: content[:4] + bytes([content[4] ^ 1]) + content[5:],
        lambda content: content + b"\0",
    ],
    ids=["half written", "empty", "one bit", "longer"],
)
@pytest.mark.parametrize("suffix", [".o", ".json"])
def test_damaged_entry_is_compiled_again(fake, tmp_path, suffix, damage):
    path = object_file(fake.kernel(n=8))
    whole = path.read_bytes()
    victim = path.with_suffix(suffix)
    victim.write_bytes(damage(victim.read_bytes()))
    assert object_file(fake.kernel(n=8)).read_bytes() == whole
    assert num_builds(tmp_path) == 2


@pytest.mark.parametrize("suffix", [".o", ".json"])
def test_missing_half_of_an_entry_is_compiled_again(fake, tmp_path, suffix):
    path = object_file(fake.kernel(n=8))
    path.with_suffix(suffix).unlink()
    assert object_file(fake.kernel(n=8)).with_suffix(suffix).exists()
    assert num_builds(tmp_path) == 2


def test_foreign_entry_under_our_name_is_compiled_again(fake, tmp_path):
    ours, foreign = object_file(fake.kernel(n=8)), object_file(fake.kernel(n=16))
    whole = ours.read_bytes()
    for suffix in (".o", ".json"):  # whole in itself, made from another key
        ours.with_suffix(suffix).write_bytes(foreign.with_suffix(suffix).read_bytes())
    assert object_file(fake.kernel(n=8)).read_bytes() == whole
    assert num_builds(tmp_path) == 3


def test_four_processes_and_four_threads_compile_once(fake, tmp_path):
    processes = [ask_in_process("n=8, seconds=1.0") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(object_file, [fake.kernel(n=8, seconds=1.0)] * 4))
    paths |= {Path(process.communicate(timeout=60)[0].strip()) for process in processes}
    assert len(paths) == 1
    assert num_builds(tmp_path) == 1


def test_killed_compile_leaves_neither_a_lock_nor_an_entry(fake, tmp_path):
    process = ask_in_process("n=8, seconds=600")
    wait_for_build(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    same_entry = KernelBuild("fake", {"n": 8, "seconds": 600}, fake.Compiled)
    start = time.monotonic()
    assert object_file(same_entry).read_bytes().startswith(same_entry.symbol.encode())
    assert time.monotonic() - start < 10
    assert list((tmp_path / "cache").glob("*.partial")) == []


def test_lock_that_is_never_given_back_is_a_time_out_that_names_it(fake, tmp_path, monkeypatch):
    holder = ask_in_process("n=8, seconds=600")
    try:
        wait_for_build(tmp_path)
        monkeypatch.setattr(compile_cache, "COMPILE_TIMEOUT_S", 0.2)
        with pytest.raises(MoEEpTimeoutError, match=r"fake_\w+\.lock") as error:
            object_file(fake.kernel(n=8, seconds=600))
        assert error.value.phase == "compile"
    finally:
        holder.kill()
        holder.communicate(timeout=60)


def test_remains_of_a_killed_write_are_replaced(fake, tmp_path):
    symbol = fake.kernel(n=8).symbol
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{symbol}.o.partial").write_bytes(b"half")
    (tmp_path / "cache" / f"{symbol}.lock").touch()
    assert object_file(fake.kernel(n=8)).read_bytes() == f"{symbol} {{'n': 8}}".encode()
    assert list((tmp_path / "cache").glob("*.partial")) == []


def test_failed_build_leaves_nothing_and_may_be_tried_again(fake, tmp_path):
    for _ in range(2):
        with pytest.raises(ValueError, match="no registers left"):
            object_file(fake.kernel(error="no registers left"))
    assert num_builds(tmp_path) == 2
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} <= {".lock"}


def test_directory_that_cannot_be_written_is_replaced_with_a_warning(
    fake, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").touch()  # nobody can make a folder below a file, not even root
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path / "file" / "cache"))
    paths = {object_file(fake.kernel(n=8)) for _ in range(2)}
    assert len(paths) == 1 and num_builds(tmp_path) == 1
    assert paths.pop().is_file()
    assert len(caplog.records) == 1
    assert "MOE_EP_CACHE_DIR" in caplog.text and str(tmp_path / "file") in caplog.text


def test_filled_directory_is_read_even_if_it_cannot_be_written(fake, tmp_path, monkeypatch, caplog):
    path = object_file(fake.kernel(n=8))
    monkeypatch.setattr(compile_cache, "writable_dir", lambda directory: tmp_path / "nowhere")
    assert object_file(fake.kernel(n=8)) == path
    assert caplog.records == []


def test_compile_all_compiles_each_missing_kernel_once(fake, tmp_path):
    object_file(fake.kernel(n=0))
    kernels = [fake.kernel(n=n) for n in (0, 1, 2, 1)]
    assert compile_all(kernels, num_processes=2) == 2
    assert compile_all(kernels, num_processes=2) == 0
    assert num_builds(tmp_path) == 3


def test_compile_all_stores_under_the_digest_of_the_asking_process(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "SOURCE_DIGEST", "before an edit")
    assert compile_all([fake.kernel(n=1)], num_processes=1) == 1
    object_file(fake.kernel(n=1))
    assert num_builds(tmp_path) == 1


def test_compile_all_names_the_kernel_that_fails(fake):
    with pytest.raises(MoEEpError, match=r"(?s)fake.*'n': 3.*no registers left"):
        compile_all([fake.kernel(n=3, error="no registers left")], num_processes=1)


def test_compile_all_says_why_a_worker_could_not_start(fake, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(MoEEpError, match="(?s)fake.*No module named 'fake_builds'"):
        compile_all([fake.kernel(n=3)], num_processes=1)


def test_cache_lies_in_the_users_cache_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("MOE_EP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache.cache_dir() == tmp_path / "moe-ep" / "kernels"


@dataclass(frozen=True)
class NoOp:
    num_threads: int = 32


def build_no_op(config: NoOp) -> compile_cache.CompiledFunction:
    import no_op_kernel

    return compile_cache.compile_for_sm90(*no_op_kernel.arguments(config.num_threads))


NO_OP_KERNEL = """
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

class NoOp:
    def __init__(self, num_threads): self.num_threads = num_threads

    @cute.jit
    def __call__(self, n: Int32, stream: cuda.CUstream):
        self.kernel(n).launch(grid=[n, 1, 1], block=[self.num_threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, n: Int32):
        cute.arch.sync_threads()

def arguments(num_threads): return NoOp(num_threads), Int32(1), make_fake_stream()
"""


def test_real_kernel_is_compiled_stored_and_loaded_without_a_gpu(tmp_path, monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    (tmp_path / "no_op_kernel.py").write_text(NO_OP_KERNEL)
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    kernel = KernelBuild("no_op", NoOp(), build_no_op)
    function = load(kernel)
    assert callable(function) and load(kernel) is function
    content = object_file(kernel).read_bytes()
    assert content.startswith(b"\x7fELF") and b"sm_90a" in content
