"""What a model knows of its layer: shape, activation, weight formats. Plain integers and names.

No kernel, no tensor and no GPU stands behind these records; every other module reads them.
"""

import math
from dataclasses import dataclass
from numbers import Real

from moe_ep.comm.errors import MoEEpConfigError

# What ranks divide: the experts, or every expert's intermediate.
PARALLEL_MODES = ("ep", "tp")

# kind -> whether FC1 has a gate half beside the up half.
ACTIVATION_KINDS = {
    "swiglu": True,
    "geglu_tanh": True,
    "reglu": True,
    "situ": True,
    "relu2": False,
}


@dataclass(frozen=True)
class Activation:
    """What stands between FC1 and FC2, applied in FP32 after scales and bias.

    g = gate pre-activation, u = up pre-activation, a = alpha, b = beta, L = limit. A limit clamps
    first, g' = min(g, L) and u' = min(max(u, -L), L), for every gated kind; NaN passes through.

    kind          formula
    swiglu        g' * sigmoid(a g') * (u' + b)
                  a = 1, b = 0 is plain SwiGLU; a = 1.702, b = 1, L = 7 is gpt-oss;
                  L = 10 is DeepSeek-V4
    geglu_tanh    0.5 g' (1 + tanh(sqrt(2/pi) (g' + 0.044715 g'^3))) * u'
    reglu         max(g', 0) * u'
    situ          a tanh(g'/a) sigmoid(g') * (b tanh(u'/b) if b > 0 else u'); defaults a = 4, b = 25
    relu2         max(u, 0)^2, not gated: w13 holds the up rows alone

    Raises `MoEEpConfigError` for an unknown kind, for parameters that the kind does not take and
    for those that are no finite numbers.
    """

    kind: str = "swiglu"
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ACTIVATION_KINDS:
            raise MoEEpConfigError(
                f"activation kind {self.kind!r} is not known; "
                f"allowed: {', '.join(ACTIVATION_KINDS)}"
            )
        for name in ("alpha", "beta", "limit"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value)):
                raise MoEEpConfigError(
                    f"activation {name} is {value!r}; allowed: a finite number, or None"
                )
        default_alpha, default_beta = (4.0, 25.0) if self.kind == "situ" else (1.0, 0.0)
        alpha = default_alpha if self.alpha is None else float(self.alpha)
        beta = default_beta if self.beta is None else float(self.beta)
        if self.kind not in ("swiglu", "situ") and (alpha, beta) != (1.0, 0.0):
            raise MoEEpConfigError(
                f"activation {self.kind!r} takes no alpha or beta, got alpha={alpha}, beta={beta}"
            )
        if self.kind == "situ" and not (alpha > 0 and beta >= 0):
            raise MoEEpConfigError(f"situ needs alpha > 0 and beta >= 0, got {alpha}, {beta}")
        if self.limit is not None and not (self.is_gated and self.limit > 0):
            raise MoEEpConfigError(
                f"activation limit {self.limit} must be positive and needs a gated kind, "
                f"got kind {self.kind!r}"
            )
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "beta", beta)

    @property
    def is_gated(self) -> bool:
        return ACTIVATION_KINDS[self.kind]

    @classmethod
    def from_name(cls, name: str) -> "Activation":
        """The activation of that name; raises `MoEEpConfigError` listing the names."""
        if name not in NAMED_ACTIVATIONS:
            raise MoEEpConfigError(
                f"activation {name!r} is not known; allowed: {', '.join(NAMED_ACTIVATIONS)}"
            )
        return NAMED_ACTIVATIONS[name]


NAMED_ACTIVATIONS = {kind: Activation(kind) for kind in ACTIVATION_KINDS} | {
    "gpt_oss": Activation("swiglu", alpha=1.702, beta=1.0, limit=7.0),
    "deepseek_v4": Activation("swiglu", limit=10.0),
}


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """One layer as the model defines it.

    num_experts   E, experts over all ranks
    top_k         K, slots per token, 1 <= K <= E
    hidden        H, width of a token
    intermediate  I, width of one expert's hidden activation
    activation    a name (`Activation.from_name`) or an `Activation`

    Raises `MoEEpConfigError` naming the field, its value and what is allowed.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation | str = "swiglu"

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden", "intermediate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise MoEEpConfigError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise MoEEpConfigError(f"{name} must be at least 1, got {value}")
        if self.top_k > self.num_experts:
            raise MoEEpConfigError(
                f"top_k {self.top_k} is above num_experts {self.num_experts}; "
                f"allowed: 1 to {self.num_experts}"
            )
        if isinstance(self.activation, str):
            object.__setattr__(self, "activation", Activation.from_name(self.activation))
        elif not isinstance(self.activation, Activation):
            raise MoEEpConfigError(
                f"activation must be a name or an Activation, got {self.activation!r}"
            )

    @property
    def num_fc1_halves(self) -> int:
        """2 for gated activations (gate rows, then up rows), else 1."""
        return 2 if self.activation.is_gated else 1

    @property
    def fc1_rows(self) -> int:
        """Rows of w13: 2I when gated, I when not."""
        return self.num_fc1_halves * self.intermediate


@dataclass(frozen=True)
class WeightFormat:
    """How one weight matrix [N, K] is stored in a checkpoint.

    bits      of one element code
    sf_rows   rows that share a block scale factor
    sf_cols   columns (along K, the summed dimension) that share it
    sf_bits   of one block scale factor, 0 without
    has_global_scale   an FP32 decode scale per expert and matrix (gate, up, down)
    """

    name: str
    bits: int
    sf_rows: int = 0
    sf_cols: int = 0
    sf_bits: int = 0
    has_global_scale: bool = False

    def num_bytes(self, rows: int, cols: int) -> int:
        """Bytes of codes and block scale factors of a [rows, cols] matrix."""
        num_sf = 0
        if self.sf_bits:
            num_sf = -(-rows // self.sf_rows) * -(-cols // self.sf_cols)
        return rows * cols * self.bits // 8 + num_sf * self.sf_bits // 8

    @property
    def k_multiple(self) -> int:
        """What H and I must divide by in this format (fp8_block pads its last block)."""
        return 1 if self.sf_rows > 1 or not self.sf_bits else self.sf_cols


WEIGHT_FORMATS = {
    "bf16": WeightFormat("bf16", bits=16),
    # E2M1 codes, E4M3 scale factor per 16, FP32 global scale.
    "nvfp4": WeightFormat("nvfp4", 4, sf_rows=1, sf_cols=16, sf_bits=8, has_global_scale=True),
    # E2M1 codes, E8M0 scale factor per 32.
    "mxfp4": WeightFormat("mxfp4", 4, sf_rows=1, sf_cols=32, sf_bits=8),
    # E4M3 codes, E8M0 scale factor per 32.
    "mxfp8": WeightFormat("mxfp8", 8, sf_rows=1, sf_cols=32, sf_bits=8),
    # E4M3 codes, FP32 scale factor per 128 x 128 block (DeepSeek-V3).
    "fp8_block": WeightFormat("fp8_block", 8, sf_rows=128, sf_cols=128, sf_bits=32),
}


def weight_format(name: str) -> WeightFormat:
    """The format of that name; raises `MoEEpConfigError` listing the names."""
    if not isinstance(name, str):
        raise MoEEpConfigError(f"weights_format must be a name, got {type(name).__name__}")
    if name not in WEIGHT_FORMATS:
        raise MoEEpConfigError(
            f"weight format {name!r} is not known; allowed: {', '.join(WEIGHT_FORMATS)}"
        )
    return WEIGHT_FORMATS[name]


def owned_experts(num_experts: int, num_ranks: int, rank: int) -> range:
    """The contiguous expert ids of one rank, as `torch.tensor_split(range(E), ranks)` cuts them."""
    share, extra = divmod(num_experts, num_ranks)
    first = rank * share + min(rank, extra)
    return range(first, first + share + (rank < extra))
