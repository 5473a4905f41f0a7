"""The experts' weights as one rank holds them: codes, scale factors, biases, ownership.

Letters: e experts held here, E experts of the layer, H hidden, I the model's intermediate, I_r as
held here (I, or I / num_ranks under tp). w13 has the gate rows, then the up rows; when not gated,
the up rows alone. Low nibble = even column where two codes share a byte.

format      w13, w2                       w13_sf, w2_sf (linear)                  global scales
bf16        BF16 [e, 2I_r, H], [e, H, I_r]   -                                       -
nvfp4       uint8, two codes in a byte    float8_e4m3fn, 1 x 16 columns           FP32 [e], decode
mxfp4       uint8, two codes in a byte    uint8 E8M0, 1 x 32                      -
mxfp8       float8_e4m3fn                 uint8 E8M0, 1 x 32                      -
fp8_block   float8_e4m3fn                 FP32, 128 x 128; gate and up blocked    -
                                          each by itself
"""

from dataclasses import dataclass, replace

import torch

from moe_ep.arguments import check_device, check_float_dtype, check_int, check_kind
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import PARALLEL_MODES, weight_format
from moe_ep.quantize import (
    QuantizedTensor,
    QuantSpec,
    element_progress,
    expand_sf,
    quantize,
    unscaled,
)
from moe_ep.weight_checks import check_ownership, check_scales, check_tensors
from moe_ep.weight_parts import ep_part, fresh, tp_part

GLOBAL_SCALES = ("gate_scale", "up_scale", "down_scale")
TENSOR_NAMES = ("w13", "w2", "w13_sf", "w2_sf", *GLOBAL_SCALES, "b13", "b2")


def _from_blocks(weights_format: str, layout: str) -> classmethod:
    """The class method of a format whose only scales are those of blocks."""

    def build(
        cls: "type[MoEWeights]",
        w13: torch.Tensor,
        w13_sf: torch.Tensor,
        w2: torch.Tensor,
        w2_sf: torch.Tensor,
        *,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        is_gated: bool = True,
    ) -> "MoEWeights":
        sf = {"w13_sf": w13_sf, "w2_sf": w2_sf}
        return cls._full(weights_format, w13, w2, is_gated, **sf, b13=b13, b2=b2)

    build.__name__ = weights_format
    build.__doc__ = f"All experts in {weights_format}: {layout}."
    return classmethod(build)


@dataclass(frozen=True, kw_only=True, eq=False)
class MoEWeights:
    """Weights of the experts that one rank holds; tensors are kept as given, never copied.

    Tensors may be views with any stride over the experts; within an expert they are row-major.
    The class methods take full weights; `shard` cuts them. A loader that reads one rank's part
    names the ownership fields itself.

    b13, b2        optional biases [e, fc1_rows] and [e, H], FP32 or BF16; under tp rank 0 alone
                   holds b2, so that the sum over the ranks adds it once
    num_experts    E; expert_ids: the global ids held here, in the order of the tensors
    intermediate   I of the model, whatever is held here
    slot_experts   where `place` or `load` put experts by a map: the expert of each of E slots

    Raises `MoEEpConfigError` for a tensor of another dtype, shape, device or layout, naming what is
    allowed, and, naming tensor and expert, for a scale that is NaN, infinite or negative, for a
    zero global or FP32 scale, and for an E8M0 scale whose products are not exact in BF16.
    """

    weights_format: str
    w13: torch.Tensor
    w2: torch.Tensor
    w13_sf: torch.Tensor | None = None
    w2_sf: torch.Tensor | None = None
    gate_scale: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    num_experts: int
    expert_ids: tuple[int, ...]
    hidden: int
    intermediate: int
    is_gated: bool = True
    parallel: str = "ep"
    rank: int = 0
    num_ranks: int = 1
    slot_experts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        weight_format(self.weights_format)
        check_ownership(self)
        check_tensors(self)
        if self.device.type != "meta":
            check_scales(self)

    def __repr__(self) -> str:
        """What the weights are, without their numbers."""
        return (
            f"MoEWeights({self.weights_format}, {self.num_local_experts} of {self.num_experts} "
            f"experts, hidden {self.hidden}, intermediate {self.intermediate}, "
            f"{self.parallel} rank {self.rank} of {self.num_ranks}, on {self.device})"
        )

    @classmethod
    def from_dense(
        cls,
        w13: torch.Tensor,
        w2: torch.Tensor,
        *,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        is_gated: bool = True,
    ) -> "MoEWeights":
        """All experts in BF16: w13 [E, 2I, H] ([E, I, H] when not gated), w2 [E, H, I]."""
        return cls._full("bf16", w13, w2, is_gated, b13=b13, b2=b2)

    @classmethod
    def nvfp4(
        cls,
        w13: torch.Tensor,
        w13_sf: torch.Tensor,
        w2: torch.Tensor,
        w2_sf: torch.Tensor,
        *,
        gate_scale: torch.Tensor | None = None,
        up_scale: torch.Tensor,
        down_scale: torch.Tensor,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        is_gated: bool = True,
    ) -> "MoEWeights":
        """All experts in NVFP4: codes [E, N, K/2], block scales [E, N, K/16], decode scales [E]."""
        scales = {"gate_scale": gate_scale, "up_scale": up_scale, "down_scale": down_scale}
        sf = {"w13_sf": w13_sf, "w2_sf": w2_sf}
        return cls._full("nvfp4", w13, w2, is_gated, **sf, **scales, b13=b13, b2=b2)

    mxfp4 = _from_blocks("mxfp4", "codes [E, N, K/2], E8M0 scales [E, N, K/32]")
    mxfp8 = _from_blocks("mxfp8", "E4M3 codes [E, N, K], E8M0 scales [E, N, K/32]")
    fp8_block = _from_blocks(
        "fp8_block",
        "E4M3 codes [E, N, K], FP32 scales [E, halves * ceil(I/128), ceil(H/128)] and "
        "[E, ceil(H/128), ceil(I/128)] (DeepSeek's `weight_scale_inv`: multipliers)",
    )

    @classmethod
    def _full(
        cls,
        weights_format: str,
        w13: torch.Tensor,
        w2: torch.Tensor,
        is_gated: bool,
        **tensors: torch.Tensor | None,
    ) -> "MoEWeights":
        for name, tensor in (("w13", w13), ("w2", w2)):
            check_kind(name, tensor, torch.Tensor, "a tensor")
            if tensor.dim() != 3:
                raise MoEEpConfigError(
                    f"{name} must be [experts, rows, columns], got shape {tuple(tensor.shape)}"
                )
        # w2 is [E, H, I]; H is read off its rows, where no packing hides it.
        codes_per_column = 2 if weight_format(weights_format).bits == 4 else 1
        return cls(
            weights_format=weights_format,
            w13=w13,
            w2=w2,
            **tensors,
            num_experts=w13.shape[0],
            expert_ids=tuple(range(w13.shape[0])),
            hidden=w2.shape[1],
            intermediate=w2.shape[2] * codes_per_column,
            is_gated=is_gated,
        )

    @property
    def num_local_experts(self) -> int:
        return len(self.expert_ids)

    @property
    def num_halves(self) -> int:
        return 2 if self.is_gated else 1

    @property
    def local_intermediate(self) -> int:
        """I_r: the model's I, or this rank's part of it under tp."""
        return self.intermediate // (self.num_ranks if self.parallel == "tp" else 1)

    @property
    def fc1_rows(self) -> int:
        return self.num_halves * self.local_intermediate

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are present, by field name."""
        held = {name: getattr(self, name) for name in TENSOR_NAMES}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return self.w13.device

    def to(self, device: torch.device | str) -> "MoEWeights":
        """The same weights on another device (the same tensors if they are there already)."""
        device = check_device(device)
        return replace(self, **{n: t.to(device) for n, t in self.tensors.items()})

    def quantize(self, weights_format: str) -> "MoEWeights":
        """BF16 weights in another format (`moe_ep.quantize` has the chains), as fresh tensors.

        Every expert's gate, up and down matrix is quantised by itself. Needs memory for the result
        and a few MiB.

        Raises `MoEEpConfigError` for weights that are quantised already, for NaN or Inf (naming
        matrix and expert), and for a tp part in nvfp4, whose scales belong to the full matrix.
        """
        if self.weights_format != "bf16":
            raise MoEEpConfigError(
                f"weights_format {self.weights_format!r} is quantised already; allowed: 'bf16'"
            )
        if weight_format(weights_format).name == "bf16":
            return self
        if weights_format == "nvfp4" and self.parallel == "tp" and self.num_ranks > 1:
            raise MoEEpConfigError(
                "nvfp4 takes its global scales over full matrices: quantize first, then shard('tp')"
            )
        return _quantized(self, weights_format)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 [e, fc1_rows, H] and w2 [e, H, I_r] in `dtype`, scale factors and scales applied.

        FP64 is exact; FP32 rounds once where a scale is FP32; BF16 rounds once more and is not what
        the layer computes with.
        """
        check_float_dtype(dtype)
        e, i_r, h = self.num_local_experts, self.local_intermediate, self.hidden
        w13 = torch.empty(e, self.fc1_rows, h, dtype=dtype, device=self.device)
        w2 = torch.empty(e, h, i_r, dtype=dtype, device=self.device)
        for local_expert_idx in range(e):
            w13[local_expert_idx] = self.dequantize_expert("w13", local_expert_idx, dtype)
            w2[local_expert_idx] = self.dequantize_expert("w2", local_expert_idx, dtype)
        return w13, w2

    def dequantize_expert(
        self, name: str, local_expert_idx: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """One expert's `name` ("w13" or "w2") [rows, cols], as `dequantize`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = self.unscaled(name, local_expert_idx).to(wide)
        if self.weights_format == "fp8_block":
            values *= expand_sf(self.fp8_scales(name, local_expert_idx), values.shape, (1, 128))
        for rows, scale in self.global_scales(name, local_expert_idx):
            values[rows] *= scale
        return values.to(dtype)

    def unscaled(self, name: str, local_expert_idx: int) -> torch.Tensor:
        """One expert's `name` ("w13" or "w2") as a tensor core multiplies it: exact in BF16.

        BF16 for bf16 weights (the tensor itself), else FP32: q * s, or q alone for fp8_block.
        """
        codes = getattr(self, name)[local_expert_idx]
        if self.weights_format == "bf16":
            return codes
        sf = getattr(self, f"{name}_sf")[local_expert_idx]
        return unscaled(codes, sf, self.weights_format)

    def fp8_scales(self, name: str, local_expert_idx: int) -> torch.Tensor:
        """fp8_block: FP32 [rows, K blocks], each row's scale factor of each 128 columns."""
        sf = getattr(self, f"{name}_sf")[local_expert_idx]
        num_halves = self.num_halves if name == "w13" else 1
        rows = self.local_intermediate if name == "w13" else self.hidden
        halves = sf.view(num_halves, -1, sf.shape[1])
        expanded = expand_sf(halves, (num_halves, rows, sf.shape[1]), (128, 1))
        return expanded.reshape(num_halves * rows, sf.shape[1])

    def global_scales(self, name: str, local_expert_idx: int) -> list[tuple[slice, torch.Tensor]]:
        """nvfp4: (output rows, FP32 scalar) of `name`, gate and up each its own; else nothing."""
        if self.weights_format != "nvfp4":
            return []
        if name == "w2":
            return [(slice(None), self.down_scale[local_expert_idx])]
        gate_rows = self.fc1_rows - self.local_intermediate
        up = (slice(gate_rows, None), self.up_scale[local_expert_idx])
        if not self.is_gated:
            return [up]
        return [(slice(0, gate_rows), self.gate_scale[local_expert_idx]), up]

    def shard(self, parallel: str, rank: int, num_ranks: int) -> "MoEWeights":
        """What `rank` of `num_ranks` holds of full weights, as fresh tensors.

        ep   the experts of `owned_experts` (as `torch.tensor_split` cuts them)
        tp   every expert, columns of w2 and the same rows of gate and up: I / num_ranks of them

        Raises `MoEEpConfigError` for weights that are a part already, for a rank out of range, and
        under tp for an I that does not divide into whole scale blocks for each rank.
        """
        if self.num_ranks != 1:
            raise MoEEpConfigError(
                f"shard needs full weights, these are rank {self.rank} of {self.num_ranks}"
            )
        if parallel not in PARALLEL_MODES:
            raise MoEEpConfigError(f"parallel must be one of {PARALLEL_MODES}, got {parallel!r}")
        check_int("num_ranks", num_ranks, 1)
        check_int("rank", rank, 0)
        if not 0 <= rank < num_ranks:
            raise MoEEpConfigError(f"rank must be 0 to {num_ranks - 1}, got {rank}")
        if num_ranks == 1:
            return replace(self, parallel=parallel)
        part = ep_part if parallel == "ep" else tp_part
        ids, cut = part(self, rank, num_ranks)
        return replace(
            self, **cut, expert_ids=tuple(ids), parallel=parallel, rank=rank, num_ranks=num_ranks
        )


def _quantized(weights: MoEWeights, weights_format: str) -> MoEWeights:
    spec = QuantSpec(format=weights_format)
    names = ("gate", "up", "down")[-weights.num_halves - 1 :]
    e, i_r, h = weights.num_local_experts, weights.local_intermediate, weights.hidden
    # [e, halves, I_r, H]: gate and up are matrices of their own.
    w13 = weights.w13.unflatten(1, (weights.num_halves, i_r))
    q13 = QuantizedTensor.empty((e, weights.num_halves, i_r, h), spec, weights.device)
    q2 = QuantizedTensor.empty((e, h, i_r), spec, weights.device)
    with element_progress(
        f"quantising experts to {weights_format}", w13.numel() + weights.w2.numel()
    ) as advance:
        for idx, expert_id in enumerate(weights.expert_ids):
            matrices = [(w13[idx, half], q13.matrix((idx, half))) for half in range(len(names) - 1)]
            matrices.append((weights.w2[idx], q2.matrix((idx,))))
            for name, (matrix, out) in zip(names, matrices, strict=True):
                label = f"{name} matrix of expert {expert_id}"
                quantize(matrix, spec, name=label, out=out, advance=advance)
    scales: dict[str, torch.Tensor] = {}
    if weights_format == "nvfp4":
        scales = {"up_scale": fresh(q13.global_scale[:, -1]), "down_scale": q2.global_scale}
        if weights.is_gated:
            scales["gate_scale"] = fresh(q13.global_scale[:, 0])
    return replace(
        weights,
        weights_format=weights_format,
        w13=q13.codes.flatten(1, 2),
        w13_sf=q13.sf.flatten(1, 2),
        w2=q2.codes,
        w2_sf=q2.sf,
        **scales,
    )
