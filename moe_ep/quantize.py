"""Quantised tensors: exact decoding of every weight format (encoding follows)."""

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """[..., K/2] uint8, low nibble = even k -> [..., K] FP32, exact."""
    magnitudes = torch.tensor(E2M1_VALUES, device=packed.device)
    codes = torch.cat([magnitudes, -magnitudes])
    high, low = codes.repeat_interleave(16), codes.repeat(16)
    pairs = torch.stack([low, high], dim=-1).view(torch.int64).flatten()  # [256] pairs of FP32
    values = pairs.index_select(0, packed.reshape(-1).int())
    return values.view(torch.float32).view(*packed.shape[:-1], packed.shape[-1] * 2)


def decode_e8m0(byte: torch.Tensor) -> torch.Tensor:
    """uint8 -> FP32 2^(byte - 127); byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    bits = byte.int() << 23
    bits = torch.where(byte == 0, 0x00400000, bits)
    bits = torch.where(byte == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)
