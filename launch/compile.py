"""`moe-ep compile`: every kernel that a layer may launch, compiled into the cache ahead of a job.

Needs CuTe DSL and no GPU: build an image, or fill a folder that many machines read, on any host
of the GPU machines' CPU architecture. Cached kernels are found by shape, format, knobs, source and
version of CuTe DSL, those of the mega kernel by ranks and capacity too, so the job must run this
version of moe-ep and those numbers.
"""

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterable

from moe_ep.arguments import check_int
from moe_ep.comm.errors import MoEEpConfigError, MoEEpUnavailableError
from moe_ep.config import GroupedGemmConfig
from moe_ep.grouped_limits import layer_misfit
from moe_ep.launch.geometries import GEOMETRIES
from moe_ep.launch.random_layer import shard_shape
from moe_ep.megakernel.compile_cache import CACHE_DIR_VARIABLE, KernelBuild, cache_dir, compile_all
from moe_ep.megakernel.grouped_gemm import GemmSpec
from moe_ep.megakernel.knobs import KNOB_TABLE
from moe_ep.megakernel.mega_spec import fit_spec, make_buckets, make_layout
from moe_ep.megakernel.problem import (
    NAMED_ACTIVATIONS,
    PARALLEL_MODES,
    WEIGHT_FORMATS,
    MoEShape,
    owned_experts,
)

BACKENDS = ("split", "mega")


def split_builds(
    shape: MoEShape,
    weights_format: str,
    *,
    num_ranks: int = 1,
    parallel: str = "ep",
    has_bias: bool = False,
) -> list[KernelBuild]:
    """Every kernel of a layer over the split path: permutation, FC1 and FC2 in each build of the
    table, combine; under tp FC1 and FC2 alone.

    Where experts do not divide evenly over the ranks, for both numbers of local experts. Raises
    `MoEEpConfigError` for a shape that the kernels do not take, `MoEEpUnavailableError` where CuTe
    DSL is not installed.
    """
    misfit = layer_misfit(
        shape, weights_format, GroupedGemmConfig(), parallel=parallel, num_ranks=num_ranks
    )
    if misfit is not None:
        raise MoEEpConfigError(misfit)
    try:
        from moe_ep.grouped import permute_and_combine_builds
    except ImportError as error:
        raise MoEEpUnavailableError(
            f"compiling kernels needs nvidia-cutlass-dsl (pip install 'moe-ep[gpu]'): {error}"
        ) from error
    builds = {}
    is_tp = parallel == "tp"
    intermediate = shape.intermediate // (num_ranks if is_tp else 1)
    num_dividing = 1 if is_tp else num_ranks  # the experts
    shares = {len(owned_experts(shape.num_experts, num_dividing, r)) for r in (0, num_dividing - 1)}
    for num_local_experts in shares - {0}:
        kernels = [] if is_tp else permute_and_combine_builds(shape, num_local_experts)
        for row in KNOB_TABLE:
            if weights_format in row.formats:
                fc1 = GemmSpec(
                    name="fc1",
                    weights_format=weights_format,
                    num_cols=shape.hidden,
                    num_channels=intermediate,
                    activation=shape.activation,
                    has_bias=has_bias,
                    num_experts=num_local_experts,
                    scatters_rows=False,
                    knobs=row.knobs,
                )
                kernels.append(fc1.kernel_build())
                for has_bias2 in fc2_biases(num_ranks, parallel, has_bias):
                    fc2 = dataclasses.replace(
                        fc1,
                        name="fc2",
                        num_cols=intermediate,
                        num_channels=shape.hidden,
                        activation=None,
                        has_bias=has_bias2,
                        is_fp32=is_tp,
                    )
                    kernels.append(fc2.kernel_build())
        builds |= {kernel.symbol: kernel for kernel in kernels}
    return list(builds.values())


def fc2_biases(num_ranks: int, parallel: str, has_bias: bool) -> tuple[bool, ...]:
    """Whether FC2 adds a bias: under tp rank 0 alone does."""
    is_mixed = has_bias and parallel == "tp" and num_ranks > 1
    return (True, False) if is_mixed else (has_bias,)


def mega_builds(
    shape: MoEShape,
    weights_format: str,
    *,
    max_tokens_per_rank: int,
    num_ranks: int = 1,
    parallel: str = "ep",
    has_bias: bool = False,
) -> list[KernelBuild]:
    """Every kernel of a layer over the mega kernel: its buckets, for both dtypes of ids."""
    buckets = make_buckets(weights_format, shape, max_tokens_per_rank, num_ranks, parallel)
    layout = make_layout(shape, num_ranks, max_tokens_per_rank, buckets, parallel)
    return [
        fit_spec(
            shape=shape,
            layout=layout,
            knobs=bucket.knobs,
            weights_format=weights_format,
            has_bias13=has_bias,
            has_bias2=has_bias2,
            ids_are_int64=is_int64,
        ).kernel_build()
        for bucket in buckets
        for is_int64 in (False, True)
        for has_bias2 in fc2_biases(num_ranks, parallel, has_bias)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", nargs="+", choices=GEOMETRIES, required=True)
    parser.add_argument("--formats", nargs="+", choices=WEIGHT_FORMATS, default=["nvfp4"])
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[1], help="numbers of ranks (default: 1)"
    )
    parser.add_argument(
        "--parallel",
        choices=PARALLEL_MODES,
        default="ep",
        help="what ranks divide: experts, or every expert's intermediate (default: ep)",
    )
    parser.add_argument(
        "--experts-per-rank", type=int, help="shrink the layers as moe-ep bench does"
    )
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument(
        "--max-tokens-per-rank", type=int, default=512, help="capacity, mega (default: 512)"
    )
    parser.add_argument("--activation", choices=NAMED_ACTIVATIONS, help="default: swiglu")
    parser.add_argument("--bias", action="store_true", help="FC1 and FC2 add a bias")
    parser.add_argument("--jobs", type=int, help="compiler processes (default: one per core)")


def check_can_keep(symbols: Iterable[str]) -> None:
    """Raise `MoEEpConfigError` where a kernel is missing in a cache that cannot be written.

    A job then compiles into a folder of its own, which ends with it: no use to this command.
    """
    directory = cache_dir()
    if all((directory / f"{symbol}.o").exists() for symbol in symbols):
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise MoEEpConfigError(
            f"the kernel cache {directory} cannot be written ({error}); allowed: a writable folder "
            f"in {CACHE_DIR_VARIABLE}"
        ) from error


def run(args: argparse.Namespace) -> int:
    counts = [("--ranks", num_ranks) for num_ranks in args.ranks]
    counts.append(("--max-tokens-per-rank", args.max_tokens_per_rank))
    if args.jobs is not None:
        counts.append(("--jobs", args.jobs))
    for option, count in counts:
        check_int(option, count, 1)
    builds = {}
    for name, weights_format, num_ranks in itertools.product(
        args.geometry, args.formats, args.ranks
    ):
        shape = shard_shape(name, args.experts_per_rank, num_ranks)
        if args.activation:
            shape = dataclasses.replace(shape, activation=args.activation)
        division = {
            "num_ranks": num_ranks,
            "parallel": args.parallel,
            "has_bias": args.bias,
        }
        layer = []
        if "split" in args.backend:
            layer += split_builds(shape, weights_format, **division)
        if "mega" in args.backend:
            tokens = args.max_tokens_per_rank
            layer += mega_builds(shape, weights_format, max_tokens_per_rank=tokens, **division)
        builds |= {build.symbol: build for build in layer}
    check_can_keep(builds)
    start = time.monotonic()
    num_compiled = compile_all(list(builds.values()), num_processes=args.jobs)
    print(
        f"{len(builds)} kernels in {cache_dir()} (${CACHE_DIR_VARIABLE}): {num_compiled} compiled "
        f"in {time.monotonic() - start:.1f} s, {len(builds) - num_compiled} were there"
    )
    return 0
