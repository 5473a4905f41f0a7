"""Which backend runs the layer, and how. Checking a configuration needs no GPU and no library.

"auto"                                       the first that can run
MegaConfig(megakernel=MegaKernelConfig())    one fused launch over NVSHMEM
SplitConfig(comm=..., kernel=...)            transport and grouped GEMMs as separate steps
"""

from dataclasses import dataclass, field

from moe_ep.comm.errors import MoEEpConfigError

ACTIVATIONS = ("bf16", "fp8", "nvfp4")
# Layouts of each mode of NCCL-EP, its default first.
NCCL_EP_LAYOUTS = {"ll": ("rank_major", "expert_major"), "ht": ("flat", "expert_major")}


def __getattr__(name: str) -> object:
    """`KernelKnobs`, which a configuration takes; it loads torch, so on first use."""
    if name != "KernelKnobs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moe_ep.megakernel.knobs import KernelKnobs

    return KernelKnobs


def _check_activations(activations: str) -> None:
    if activations not in ACTIVATIONS:
        raise MoEEpConfigError(
            f"activations {activations!r} is not known; allowed: {', '.join(ACTIVATIONS)}"
        )


def _check_knobs(config: str, knobs: object, words: dict[str, str]) -> None:
    """`words`: what may stand for a choice, and what it means."""
    if knobs is None or isinstance(knobs, str) and knobs in words:
        return
    from moe_ep.megakernel.knobs import KernelKnobs  # it loads torch, which its owner has loaded

    if not isinstance(knobs, KernelKnobs):
        allowed = ["None (chosen from the table)", *(f"{w!r} ({words[w]})" for w in words)]
        raise MoEEpConfigError(
            f"{config} knobs is {knobs!r}; allowed: {', '.join(allowed)} or KernelKnobs"
        )


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise MoEEpConfigError(f"{name} must be True or False, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class MegaKernelConfig:
    """The fused kernel. `knobs`: None (table), "auto" (tuned at warm-up) or explicit `KernelKnobs`.

    `max_sms` bounds the SMs one launch takes, so that other work may run beside it.
    """

    activations: str = "bf16"
    knobs: object | None = None
    max_sms: int | None = None

    def __post_init__(self) -> None:
        _check_activations(self.activations)
        _check_knobs("MegaKernelConfig", self.knobs, {"auto": "tuned at warm-up"})
        if self.max_sms is not None and (type(self.max_sms) is not int or self.max_sms < 1):
            raise MoEEpConfigError(
                f"MegaKernelConfig max_sms must be None or an int of at least 1, got "
                f"{self.max_sms!r}"
            )


@dataclass(frozen=True, kw_only=True)
class MegaConfig:
    """One persistent launch per forward.

    `quantize_input=None` means "as `activations` needs"; a value that contradicts it is an error.
    `preprocess_weights=False` takes weights that are already in the prepared layout.
    """

    megakernel: MegaKernelConfig = field(default_factory=MegaKernelConfig)
    quantize_input: bool | None = None
    preprocess_weights: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.megakernel, MegaKernelConfig):
            raise MoEEpConfigError(
                f"MegaConfig megakernel must be MegaKernelConfig, got {self.megakernel!r}"
            )
        _check_bool("MegaConfig preprocess_weights", self.preprocess_weights)
        needed = self.megakernel.activations != "bf16"
        if self.quantize_input is not None and self.quantize_input != needed:
            raise MoEEpConfigError(
                f"quantize_input={self.quantize_input} contradicts activations="
                f"{self.megakernel.activations!r}; leave it None or give {needed}"
            )


@dataclass(frozen=True, kw_only=True)
class NcclEpConfig:
    """NCCL-EP transport. `mode`: "ll" (low latency) or "ht" (high throughput).

    layout          how rows lie where they arrive: "rank_major" or "expert_major" (ll), "flat" or
                    "expert_major" (ht); None: the first, which moves a token once to each rank
    exact_combine   sends each (token, slot) as a top-1 row, so that the sum over the slots is made
                    at the token's owner in slot order
    """

    mode: str = "ll"
    layout: str | None = None
    exact_combine: bool = False

    def __post_init__(self) -> None:
        _check_bool("NcclEpConfig exact_combine", self.exact_combine)
        if self.mode not in tuple(NCCL_EP_LAYOUTS):
            raise MoEEpConfigError(
                f"NcclEpConfig mode {self.mode!r} is not known; allowed: "
                f"{', '.join(NCCL_EP_LAYOUTS)}"
            )
        allowed = NCCL_EP_LAYOUTS[self.mode]
        if self.layout is None:
            object.__setattr__(self, "layout", allowed[0])
        elif self.layout not in allowed:
            raise MoEEpConfigError(
                f"NcclEpConfig layout {self.layout!r} is not one of mode {self.mode!r}; allowed: "
                f"{', '.join(allowed)}"
            )


@dataclass(frozen=True, kw_only=True)
class TorchCommConfig:
    """torch.distributed transport: exact counts, one uneven all-to-all over gloo or NCCL."""


@dataclass(frozen=True, kw_only=True)
class TorchGemmConfig:
    """Plain torch matmuls per expert, on CPU and GPU. `activations` is always "bf16"."""

    activations: str = "bf16"

    def __post_init__(self) -> None:
        _check_activations(self.activations)
        if self.activations != "bf16":
            raise MoEEpConfigError(
                f"TorchGemmConfig runs activations='bf16' only, got {self.activations!r}"
            )


@dataclass(frozen=True, kw_only=True)
class GroupedGemmConfig:
    """The W4A16 grouped GEMM kernel in CuTe DSL (compute capability 9.0)."""

    activations: str = "bf16"
    knobs: object | None = None

    def __post_init__(self) -> None:
        _check_activations(self.activations)
        _check_knobs("GroupedGemmConfig", self.knobs, {})


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Transport and grouped GEMMs as separate steps."""

    comm: NcclEpConfig | TorchCommConfig = field(default_factory=TorchCommConfig)
    kernel: GroupedGemmConfig | TorchGemmConfig = field(default_factory=TorchGemmConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.comm, NcclEpConfig | TorchCommConfig):
            raise MoEEpConfigError(
                f"SplitConfig comm must be NcclEpConfig or TorchCommConfig, got {self.comm!r}"
            )
        if not isinstance(self.kernel, GroupedGemmConfig | TorchGemmConfig):
            raise MoEEpConfigError(
                f"SplitConfig kernel must be GroupedGemmConfig or TorchGemmConfig, "
                f"got {self.kernel!r}"
            )


Backend = MegaConfig | SplitConfig


def check_backend(backend: object) -> Backend | str:
    """`backend` itself if it is "auto", a `MegaConfig` or a `SplitConfig`; else an error."""
    if backend == "auto" or isinstance(backend, Backend):
        return backend
    raise MoEEpConfigError(
        f"backend must be 'auto', MegaConfig(...) or SplitConfig(...), got {backend!r}"
    )
