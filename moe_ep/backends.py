"""Which backend can run here, and why not.

Asking starts nothing: no process group, no kernel, no allocation.
"""

from dataclasses import dataclass

import torch

from moe_ep.arguments import check_int, check_kind
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
from moe_ep.megakernel.problem import PARALLEL_MODES, MoEShape, weight_format
from moe_ep.weight_parts import tp_misfit

# What `backend="auto"` tries, best first.
AUTO_ORDER: tuple[Backend, ...] = (
    MegaConfig(),
    SplitConfig(comm=NcclEpConfig(), kernel=GroupedGemmConfig()),
    SplitConfig(comm=TorchCommConfig(), kernel=GroupedGemmConfig()),
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
    *,
    parallel: str = "ep",
    num_ranks: int = 1,
    apart: str | None = None,
    max_tokens_per_rank: int | None = None,
) -> Support:
    """Whether `backend` runs a layer of `shape` with weights in `weights_format` on `device`.

    parallel, num_ranks   "ep" or "tp", and the ranks that divide the layer
    apart                 why the ranks are not of one NVLink domain, None where they are
    max_tokens_per_rank   the layer's capacity; None: not asked

    "auto" is supported where one of its candidates is; the reason names it. Raises
    `MoEEpConfigError` for a format, backend or device that does not exist, and for other arguments
    that no layer has.
    """
    check_kind("shape", shape, MoEShape, "a MoEShape")
    if parallel not in PARALLEL_MODES:
        raise MoEEpConfigError(
            f"parallel {parallel!r} is not known; allowed: {', '.join(PARALLEL_MODES)}"
        )
    check_int("num_ranks", num_ranks, 1)
    if max_tokens_per_rank is not None:
        check_int("max_tokens_per_rank", max_tokens_per_rank, 1)
    backend = check_backend(backend)
    limits = {
        "parallel": parallel,
        "num_ranks": num_ranks,
        "max_tokens_per_rank": max_tokens_per_rank,
    }
    if backend == "auto":
        try:
            choice = choose_backend(shape, weights_format, "auto", device, apart=apart, **limits)
        except MoEEpUnavailableError as error:
            return Support(False, str(error))
        return Support(True, f"{describe(choice.backend)}: {choice.considered[-1][1].reason}")
    device = _device(device)
    misfit = _misfit(shape, weights_format)
    if parallel == "tp":
        misfit = misfit or tp_misfit(shape.intermediate, weights_format, num_ranks)
    if misfit is not None:
        return Support(False, misfit)
    if isinstance(backend, MegaConfig):
        return _supports_mega(shape, weights_format, backend, device, apart=apart, **limits)
    if isinstance(backend.comm, NcclEpConfig):
        return _supports_nccl_ep(shape, weights_format, backend, device, **limits)
    if isinstance(backend.kernel, GroupedGemmConfig):
        return _supports_grouped(shape, weights_format, backend.kernel, device, **limits)
    return _supports_torch(device)


def choose_backend(
    shape: MoEShape,
    weights_format: str,
    backend: Backend | str,
    device: torch.device | str,
    *,
    parallel: str = "ep",
    num_ranks: int = 1,
    apart: str | None = None,
    max_tokens_per_rank: int | None = None,
) -> Choice:
    """The backend asked for, or the first of `AUTO_ORDER` that can run.

    Raises `MoEEpUnavailableError` where that one, or every one of "auto", cannot run.
    """
    backend = check_backend(backend)
    considered = []
    for candidate in AUTO_ORDER if backend == "auto" else (backend,):
        support = supports(
            *(shape, weights_format, candidate, device),
            parallel=parallel,
            num_ranks=num_ranks,
            apart=apart,
            max_tokens_per_rank=max_tokens_per_rank,
        )
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


def _supports_mega(
    shape: MoEShape,
    weights_format: str,
    config: MegaConfig,
    device: torch.device,
    *,
    parallel: str,
    num_ranks: int,
    max_tokens_per_rank: int | None,
    apart: str | None,
) -> Support:
    if device.type != "cuda":
        return Support(False, f"needs NVIDIA GPUs of compute capability 9.0, device is {device}")
    if num_ranks > 1 and apart is not None:
        return Support(False, f"needs the GPUs of one NVLink domain: {apart}")
    from moe_ep.grouped_limits import device_misfit
    from moe_ep.mega_limits import layer_misfit

    misfit = device_misfit(device, "MegaConfig") or layer_misfit(
        shape,
        weights_format,
        config,
        parallel=parallel,
        num_ranks=num_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
    )
    if misfit is not None:
        return Support(False, misfit)
    return Support(True, "the whole layer in one launch")


def _supports_nccl_ep(
    shape: MoEShape,
    weights_format: str,
    backend: SplitConfig,
    device: torch.device,
    *,
    parallel: str,
    num_ranks: int,
    max_tokens_per_rank: int | None,
) -> Support:
    comm = backend.comm
    if device.type != "cuda":
        return Support(False, f"NCCL-EP needs NVIDIA GPUs, device is {device}")
    if parallel != "ep":
        return Support(False, f"NCCL-EP divides experts over ranks, parallel is {parallel!r}")
    if num_ranks == 1:
        return Support(False, "NCCL-EP moves tokens between ranks, there is one")
    from moe_ep.comm.nccl_ep_limits import capacity_misfit, layer_misfit, library_misfit

    kind = (comm.mode, comm.layout)
    misfit = layer_misfit(
        *kind,
        hidden=shape.hidden,
        top_k=1 if comm.exact_combine else shape.top_k,
        num_experts=shape.num_experts,
        num_ranks=num_ranks,
    )
    if max_tokens_per_rank is not None:
        rows = shape.top_k if comm.exact_combine else 1
        misfit = misfit or capacity_misfit(
            *kind, max_tokens_per_rank=max_tokens_per_rank, top_k=rows
        )
    misfit = misfit or library_misfit()
    if misfit is not None:
        return Support(False, misfit)
    if isinstance(backend.kernel, GroupedGemmConfig):
        answer = _supports_grouped(
            *(shape, weights_format, backend.kernel, device),
            parallel=parallel,
            num_ranks=num_ranks,
            max_tokens_per_rank=None,  # NCCL-EP's own limit holds
        )
        if not answer.ok:
            return answer
    return Support(True, f"tokens over NCCL-EP, {comm.mode} {comm.layout}")


def _supports_grouped(
    shape: MoEShape,
    weights_format: str,
    kernel: GroupedGemmConfig,
    device: torch.device,
    *,
    parallel: str,
    num_ranks: int,
    max_tokens_per_rank: int | None,
) -> Support:
    from moe_ep.grouped_limits import device_misfit, layer_misfit

    misfit = device_misfit(device) or layer_misfit(
        shape,
        weights_format,
        kernel,
        parallel=parallel,
        num_ranks=num_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
    )
    if misfit is not None:
        return Support(False, misfit)
    if num_ranks == 1 and parallel == "ep":
        return Support(True, "GEMM kernels for Hopper, the whole layer on the device")
    return Support(True, "GEMM kernels for Hopper, tokens over torch.distributed")


def _supports_torch(device: torch.device) -> Support:
    if device.type not in ("cpu", "cuda"):
        return Support(False, f"plain torch kernels run on cpu and cuda, device is {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        return Support(False, f"device is {device}, torch finds no GPU")
    return Support(True, f"plain torch on {device.type}, tokens over torch.distributed")
