"""Arguments of the wrong kind, told by name before they fail as something else."""

import reprlib
from pathlib import Path

import torch

from moe_ep.comm.errors import MoEEpConfigError

# What a message shows by value; of anything else it names the type.
_SHOWN = (str, int, float, Path, torch.dtype, torch.device, type(None))


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], allowed: str) -> None:
    """Raise `MoEEpConfigError` unless `value` is one of `kinds`; a bool is no int."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, bool) and bool not in kinds or not isinstance(value, kinds):
        shown = reprlib.repr(value) if isinstance(value, _SHOWN) else type(value).__name__
        raise MoEEpConfigError(f"{name} must be {allowed}, got {shown}")


def check_int(name: str, value: object, minimum: int) -> None:
    check_kind(name, value, int, "an int")
    if value < minimum:
        raise MoEEpConfigError(f"{name} must be at least {minimum}, got {value}")


def check_float_dtype(dtype: object) -> None:
    """BF16, FP16, FP32 or FP64."""
    allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if dtype not in allowed:
        names = ", ".join(str(one) for one in allowed)
        raise MoEEpConfigError(f"dtype must be one of {names}, got {dtype!r}")


def check_device(device: object) -> torch.device:
    """`device` as torch knows it. Raises `MoEEpConfigError` where torch cannot allocate on it."""
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise MoEEpConfigError(
            f"device {device!r} cannot be used: {reason}; allowed: a device of this machine"
        ) from None
    return device
