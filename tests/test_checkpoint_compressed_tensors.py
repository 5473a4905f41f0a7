"""NVFP4 experts that compressed-tensors itself wrote load as it reads them (extra `oracle`)."""

import pytest
import torch
from checkpoint_files import NAMES, SHAPE, load, matrix_shape, save

pytest.importorskip("compressed_tensors", reason="needs the extra 'oracle'")
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

ARGS = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
)
SCHEME = QuantizationScheme(targets=["Linear"], weights=ARGS)


def compressed(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """What llm-compressor stores of one BF16 matrix [N, K]."""
    blocks = w.unflatten(1, (-1, 16))
    global_scale = generate_gparam(w.min(), w.max())
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), ARGS, global_scale=global_scale)
    state = {"weight": w, "weight_scale": scale, "weight_global_scale": global_scale}
    return NVFP4PackedCompressor.compress(state, SCHEME)


def test_values_are_those_that_the_library_decompresses(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors, expected = {}, {"gate": [], "up": [], "down": []}
    for matrix, projection in NAMES.items():
        for expert in range(SHAPE.num_experts):
            w = torch.randn(*matrix_shape(matrix, SHAPE), generator=generator) * (expert + 1) / 64
            state = compressed(w.bfloat16())
            tensors |= {f"{expert}.{projection}.{name}": t for name, t in state.items()}
            expected[matrix].append(NVFP4PackedCompressor.decompress(state, SCHEME)["weight"])
    folder = save(tmp_path, tensors)
    weights = load(folder, "compressed_tensors_nvfp4")
    gate, up, down = (torch.stack(experts) for experts in expected.values())
    for held, wanted in zip(weights.dequantize(), (torch.cat([gate, up], 1), down), strict=True):
        assert wanted.dtype == torch.bfloat16  # it divides and multiplies in BF16
        assert ((held - wanted.float()).abs() <= 2**-7 * held.abs()).all()
