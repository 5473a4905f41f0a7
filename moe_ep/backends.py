"""Which backend can run here, and why not.

Asking starts nothing: no process group, no kernel, no allocation.
"""

from dataclasses import dataclass

import torch

from moe_ep.comm.errors import MoEEpConfigError, MoEEpUnavailableError
from moe_ep.config import (
    Backend,
    GroupedGemmConfig,
    MegaConfig,
    NcclEpConfig,
    SplitConfig,
    TorchCommConfig,
    TorchGemmConfig,
    check_backend,
)
from moe_ep.megakernel.problem import MoEShape, weight_format

# What `backend="auto"` tries, best first.
AUTO_ORDER: tuple[Backend, ...] = (
    MegaConfig(),
    SplitConfig(comm=NcclEpConfig(), kernel=GroupedGemmConfig()),
    SplitConfig(comm=TorchCommConfig(), kernel=TorchGemmConfig()),
)


@dataclass(frozen=True)
class Support:
    """Whether a backend can run, and the reason either way."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and every one that was considered with its answer."""

    backend: Backend
    considered: tuple[tuple[Backend, Support], ...]

    def explain(self) -> str:
        """One line for the backend that runs, one for each that does not."""
        lines = []
        for backend, support in self.considered:
            verdict = "runs" if backend == self.backend else "not chosen"
            lines.append(f"{describe(backend)} {verdict}: {support.reason}")
        return "\n".join(lines)


def supports(
    shape: MoEShape,
    weights_format: str,
    backend: Backend | str = "auto",
    device: torch.device | str = "cpu",
) -> Support:
    """Whether `backend` runs a layer of `shape` with weights in `weights_format` on `device`.

    "auto" is supported where one of its candidates is; the reason names it. Raises
    `MoEEpConfigError` for a format, backend or device that does not exist.
    """
    backend = check_backend(backend)
    if backend == "auto":
        try:
            choice = choose_backend(shape, weights_format, "auto", device)
        except MoEEpUnavailableError as error:
            return Support(False, str(error))
        return Support(True, f"{describe(choice.backend)}: {choice.considered[-1][1].reason}")
    device = _device(device)
    misfit = _misfit(shape, weights_format)
    if misfit is not None:
        return Support(False, misfit)
    if isinstance(backend, MegaConfig):
        return _supports_mega(device)
    return _supports_split(backend, device)


def choose_backend(
    shape: MoEShape,
    weights_format: str,
    backend: Backend | str,
    device: torch.device | str,
) -> Choice:
    """The backend asked for, or the first of `AUTO_ORDER` that can run.

    Raises `MoEEpUnavailableError` where that one, or every one of "auto", cannot run.
    """
    backend = check_backend(backend)
    considered = []
    for candidate in AUTO_ORDER if backend == "auto" else (backend,):
        support = supports(shape, weights_format, candidate, device)
        considered.append((candidate, support))
        if support.ok:
            return Choice(candidate, tuple(considered))
    reasons = "; ".join(f"{describe(one)}: {answer.reason}" for one, answer in considered)
    raise MoEEpUnavailableError(f"backend {backend!r} cannot run here: {reasons}")


def describe(backend: Backend) -> str:
    """`split over TorchCommConfig with TorchGemmConfig`; what a log line can hold."""
    if isinstance(backend, MegaConfig):
        return "mega"
    return f"split over {type(backend.comm).__name__} with {type(backend.kernel).__name__}"


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise MoEEpConfigError(f"device {device!r} is not known to torch: {error}") from error


def _misfit(shape: MoEShape, weights_format: str) -> str | None:
    """Why no backend can hold such weights, or None."""
    multiple = weight_format(weights_format).k_multiple
    for name in ("hidden", "intermediate"):
        value = getattr(shape, name)
        if value % multiple:
            return (
                f"{name} {value} is not a multiple of {multiple}, the scale block of "
                f"{weights_format}"
            )
    return None


def _supports_mega(device: torch.device) -> Support:
    if device.type != "cuda":
        return Support(False, f"needs NVIDIA GPUs of compute capability 9.0, device is {device}")
    return Support(False, "the mega kernel is not built yet in this version")


def _supports_split(backend: SplitConfig, device: torch.device) -> Support:
    if isinstance(backend.comm, NcclEpConfig):
        if device.type != "cuda":
            return Support(False, f"NCCL-EP needs NVIDIA GPUs, device is {device}")
        return Support(False, "the NCCL-EP transport is not built yet in this version")
    if isinstance(backend.kernel, GroupedGemmConfig):
        if device.type != "cuda":
            return Support(
                False,
                "GroupedGemmConfig needs an NVIDIA GPU of compute capability 9.0, "
                f"device is {device}",
            )
        return Support(False, "the grouped GEMM kernel is not built yet in this version")
    if device.type not in ("cpu", "cuda"):
        return Support(False, f"plain torch kernels run on cpu and cuda, device is {device}")
    return Support(True, f"plain torch on {device.type}, tokens over torch.distributed")
