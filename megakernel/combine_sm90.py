"""The terms of each token summed in slot order at its owner.

    out[t] = bf16( sum over k of topk_weights[t, k] * terms[pool_row[t, k]] )

FP32, from +0 on, slot 0 first; each slot multiplies, then adds, each rounded (`mul.rn`, `add.rn`,
so that no FMA forms); a slot without a row (-1) is skipped, whatever lies in row 0. Specified by
`moe_ep.dispatch_plan.DispatchPlan.combine`. One thread sums 8 columns of one token; it has all K
of its 16-byte loads in flight at once, which is what a kernel bound by memory needs.

The launch is programmatic: it may start before FC2 ends and waits for it first.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from moe_ep.comm import ptx
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel import bound_call
from moe_ep.megakernel.compile_cache import CompiledFunction, KernelBuild, compile_for_sm90, load

NUM_THREADS = 128
VECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class CombineConfig:
    """What one compiled combine depends on. `hidden` is a multiple of 8 (16 bytes)."""

    top_k: int
    hidden: int

    def __post_init__(self) -> None:
        if self.hidden % 8:
            raise MoEEpConfigError(f"hidden must be a multiple of 8, got {self.hidden}")


class CombineKernel:
    """The launch and the kernel; see the module's text."""

    def __init__(self, config: CombineConfig) -> None:
        self.top_k = config.top_k
        self.num_vectors = config.hidden // 8

    @cute.jit
    def __call__(
        self,
        terms: Int64,
        pool_row: Int64,
        topk_weights: Int64,
        out: Int64,
        num_tokens: Int32,
        stream: cuda.CUstream,
    ):
        num_ctas = cute.ceil_div(num_tokens * self.num_vectors, NUM_THREADS)
        self.kernel(terms, pool_row, topk_weights, out, num_tokens).launch(
            grid=[num_ctas, 1, 1],
            block=[NUM_THREADS, 1, 1],
            # Without it ptxas aims at 32 registers and keeps two of the loads in flight.
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, terms: Int64, pool_row: Int64, topk_weights: Int64, out: Int64, num_tokens: Int32
    ):
        thread_idx, _, _ = cute.arch.thread_idx()
        cta_idx, _, _ = cute.arch.block_idx()
        vector_idx = cta_idx * NUM_THREADS + thread_idx
        own_token_idx = vector_idx // self.num_vectors
        # Threads behind the end load what the last token needs and store nothing.
        token_idx = cutlass.min(own_token_idx, num_tokens - 1)
        column = Int64(vector_idx % self.num_vectors) * VECTOR_BYTES
        row_bytes = self.num_vectors * VECTOR_BYTES

        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        of_token = cute.make_layout(self.top_k)
        rows_ptr = cute.make_ptr(Int32, pool_row, cute.AddressSpace.gmem)
        rows = cute.make_tensor(rows_ptr + token_idx * self.top_k, of_token)
        weights_ptr = cute.make_ptr(Float32, topk_weights, cute.AddressSpace.gmem)
        weights = cute.make_tensor(weights_ptr + token_idx * self.top_k, of_token)
        slot_rows = [rows[k] for k in range(self.top_k)]
        slot_weights = [weights[k] for k in range(self.top_k)]
        slot_terms = []
        for k in cutlass.range_constexpr(self.top_k):
            # A skipped slot reads row 0 rather than branch.
            row = cutlass.max(slot_rows[k], Int32(0))
            slot_terms.append(ptx.ld_global_v4(terms + Int64(row) * row_bytes + column))
        packed = sum_slots(slot_terms, slot_weights, [row >= 0 for row in slot_rows])
        if own_token_idx < num_tokens:
            ptx.st_global(out + Int64(token_idx) * row_bytes + column, packed)


def sum_slots(slot_terms, slot_weights, is_used):
    """Weighted sum of K slots over 8 columns: 4 words of BF16 pairs for each slot, one FP32 weight,
    whether it counts -> 4 words. Traced into the caller."""
    return round_sums(add_slots([Float32(0.0)] * 8, slot_terms, slot_weights, is_used))


def add_slots(sums, slot_terms, slot_weights, is_used):
    """Some slots of `sum_slots` more, onto eight FP32 sums."""
    for words, weight, is_counted in zip(slot_terms, slot_weights, is_used, strict=True):
        totals = []
        for i, so_far in enumerate(sums):
            word = words[i // 2]
            term = ptx.as_float(word & 0xFFFF0000 if i % 2 else word << 16)
            total = ptx.add_rn(so_far, ptx.mul_rn(term, weight))
            totals.append(cutlass.select_(is_counted, total, so_far))
        sums = totals
    return sums


def round_sums(sums):
    """Eight FP32 sums -> 4 words of BF16 pairs."""
    return [ptx.cvt_bf16x2(sums[2 * i], sums[2 * i + 1]) for i in range(4)]


def compile_combine(config: CombineConfig) -> CompiledFunction:
    stream = cute.runtime.make_fake_stream()
    return compile_for_sm90(CombineKernel(config), *[Int64(0)] * 4, Int32(1), stream)


def combine_build(config: CombineConfig) -> KernelBuild:
    return KernelBuild("combine", config, compile_combine)


class Combine:
    """The compiled kernel, launched on torch tensors in the current stream.

    Built with the GPU current that it launches on. Raises `MoEEpUnavailableError` where it is not
    cached and CuTe DSL is not installed.
    """

    def __init__(self, config: CombineConfig) -> None:
        cells = [*(bound_call.Int64() for _ in range(4)), bound_call.Int32(), bound_call.Int64()]
        self._launch = bound_call.BoundCall(load(combine_build(config)), cells)

    def __call__(
        self,
        terms: torch.Tensor,
        pool_row: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """BF16 terms [P, H], P >= 1; pool_row [T, K] int32; topk_weights [T, K] FP32; out [T, H].

        All contiguous, on one GPU, `terms` and `out` aligned to 16 bytes.
        """
        if len(pool_row) == 0:
            return
        self._launch(
            terms.data_ptr(),
            pool_row.data_ptr(),
            topk_weights.data_ptr(),
            out.data_ptr(),
            len(pool_row),
            bound_call.stream_handle(terms.device),
        )
