"""Checkpoints as publishers write them, from random codes, with their values in FP64.

Written from the formats' definitions with NumPy and safetensors; the loader has no part in it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from oracles import e8m0, unpack_e2m1
from safetensors.torch import save_file

import moe_ep
from moe_ep import MoEShape, MoEWeights

SHAPE = MoEShape(num_experts=8, top_k=2, hidden=256, intermediate=128)
PREFIX = "model.layers.3.mlp.experts"
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
PER_EXPERT = ("hf", "modelopt_nvfp4", "compressed_tensors_nvfp4", "deepseek_fp8", "deepseek_mxfp4")
FUSED = ("hf_fused", "gpt_oss", "gpt_oss_mxfp4")
FORMATS = PER_EXPERT + FUSED
DIVISIBLE = tuple(fmt for fmt in FORMATS if fmt != "deepseek_fp8")  # by two tp ranks: I is 128
WEIGHTS_FORMATS = {
    "hf": "bf16",
    "hf_fused": "bf16",
    "gpt_oss": "bf16",
    "modelopt_nvfp4": "nvfp4",
    "compressed_tensors_nvfp4": "nvfp4",
    "deepseek_fp8": "fp8_block",
    "deepseek_mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
}


@dataclass
class Written:
    """tensors by relative name; values[matrix][expert] FP64 [N, K]; biases[matrix] FP64 [E, N]."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)
    biases: dict[str, np.ndarray] = field(default_factory=dict)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """FP64 w13 [E, 2I, H], gate rows first, and w2 [E, H, I]."""
        gate, up, down = (np.stack(self.values[name]) for name in ("gate", "up", "down"))
        return torch.from_numpy(np.concatenate([gate, up], axis=1)), torch.from_numpy(down)


def matrix_shape(matrix: str, shape: MoEShape) -> tuple[int, int]:
    if matrix == "down":
        return shape.hidden, shape.intermediate
    return shape.intermediate, shape.hidden


def make(
    fmt: str,
    shape: MoEShape = SHAPE,
    names: dict[str, str] = NAMES,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Written:
    """One layer's experts in a checkpoint format; no two matrices are alike."""
    written = Written()
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, list[dict[str, torch.Tensor]]] = {}
    for matrix in ("gate", "up", "down"):
        made = [
            _matrix(fmt, *matrix_shape(matrix, shape), generator, dtype)
            for _ in range(shape.num_experts)
        ]
        stored[matrix] = [tensors for tensors, _ in made]
        written.values[matrix] = [values for _, values in made]
    if fmt in FUSED:
        _fuse(fmt, shape, stored, written, generator)
        return written
    for matrix, experts in stored.items():
        for expert, tensors in enumerate(experts):
            for suffix, tensor in tensors.items():
                written.tensors[f"{expert}.{names[matrix]}.{suffix}"] = tensor
    return written


def _matrix(
    fmt: str, rows: int, cols: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    def randint(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.uint8)

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.3

    if WEIGHTS_FORMATS[fmt] == "bf16":
        # Few bits, so that FP16 and BF16 hold the same value.
        w = (torch.randn(rows, cols, generator=generator) * 16).round().clamp(-127, 127) / 128
        return {"weight": w.to(dtype)}, w.double().numpy()
    if WEIGHTS_FORMATS[fmt] == "nvfp4":
        codes, sf = randint(0, 256, rows, cols // 2), randint(1, 0x7F, rows, cols // 16)
        sf = sf.view(torch.float8_e4m3fn)
        scale = uniform() * 1e-3
        if fmt == "modelopt_nvfp4":
            values = _blocks(unpack_e2m1(codes.numpy()), sf.float().numpy(), 16) * float(scale)
            names = {"weight": codes, "weight_scale": sf, "weight_scale_2": scale}
            return names | {"input_scale": uniform() * 1e-3}, values
        encode = 1 / scale.reshape(1)
        decode = float(np.float32(1) / encode.numpy()[0])
        values = _blocks(unpack_e2m1(codes.numpy()), sf.float().numpy(), 16) * decode
        return {"weight_packed": codes, "weight_scale": sf, "weight_global_scale": encode}, values
    if fmt == "deepseek_fp8":
        q = torch.randn(rows, cols, generator=generator).to(torch.float8_e4m3fn)
        sf = uniform(-(-rows // 128), -(-cols // 128)) * 0.01  # not powers of two
        wide = np.kron(sf.double().numpy(), np.ones((128, 128)))[:rows, :cols]
        return {"weight": q, "weight_scale_inv": sf}, q.double().numpy() * wide
    codes, sf = randint(0, 256, rows, cols // 2), randint(118, 126, rows, cols // 32)
    values = _blocks(unpack_e2m1(codes.numpy()), e8m0(sf.numpy()), 32)
    if fmt == "deepseek_mxfp4":
        return {"weight": codes.view(torch.int8), "scale": sf.view(torch.float8_e8m0fnu)}, values
    return {"_blocks": codes.view(rows, cols // 32, 16), "_scales": sf}, values


def _blocks(q: np.ndarray, sf: np.ndarray, block: int) -> np.ndarray:
    return q.astype(np.float64) * np.repeat(sf.astype(np.float64), block, axis=1)


def _fuse(
    fmt: str,
    shape: MoEShape,
    stored: dict[str, list[dict[str, torch.Tensor]]],
    written: Written,
    generator: torch.Generator,
) -> None:
    for suffix in stored["gate"][0]:
        gate, up, down = (
            torch.stack([tensors[suffix] for tensors in stored[matrix]]) for matrix in stored
        )
        if fmt == "hf_fused":
            gate_up = torch.cat([gate, up], dim=1)
        else:
            gate_up = torch.stack([gate, up], dim=2).flatten(1, 2)
        if fmt == "gpt_oss":
            gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
        name = "" if suffix == "weight" else suffix
        written.tensors |= {f"gate_up_proj{name}": gate_up, f"down_proj{name}": down}
    if fmt == "hf_fused":
        return
    b13 = torch.randn(shape.num_experts, shape.fc1_rows, generator=generator).bfloat16()
    b2 = torch.randn(shape.num_experts, shape.hidden, generator=generator).bfloat16()
    written.tensors |= {"gate_up_proj_bias": b13, "down_proj_bias": b2}
    halves = b13.double().numpy()
    written.biases = {"gate": halves[:, 0::2], "up": halves[:, 1::2], "down": b2.double().numpy()}


def save(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    *,
    num_shards: int = 2,
    prefix: str = PREFIX,
    has_index: bool = True,
) -> Path:
    """Tensors dealt in turn to shards, beside some that are no experts."""
    folder.mkdir(parents=True, exist_ok=True)
    full = {f"{prefix}.{name}": tensor.contiguous().clone() for name, tensor in tensors.items()}
    full["model.layers.3.mlp.gate.weight"] = torch.zeros(4, 4)
    full["model.layers.3.mlp.shared_experts.up_proj.weight"] = torch.zeros(4, 4)
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(num_shards)]
    for idx, (name, tensor) in enumerate(full.items()):
        shards[idx % num_shards][name] = tensor
    weight_map = {}
    for idx, shard in enumerate(shards):
        file = f"model-{idx + 1:05}-of-{num_shards:05}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    if has_index:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(path: Path, fmt: str, *, shape: MoEShape = SHAPE, **options: object) -> MoEWeights:
    """The layer that `save` wrote."""
    return moe_ep.load(path, 3, shape=shape, format=fmt, **options)
