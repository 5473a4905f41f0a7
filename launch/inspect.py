"""`moe-ep inspect`: the experts of a checkpoint, layer by layer, and whether a layer can run them.

Names, dtypes and shapes are read from the files' headers; `moe_ep.load` looks at the values. The
format printed is the one that the names are nearest to; name it to `load`. A layer whose tensors
are not exactly those of the format cannot run, and the reason names the ones that are not.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from moe_ep.arguments import check_int
from moe_ep.backends import supports
from moe_ep.checkpoint import Checkpoint, check_tensors, layer_number, meta_weights
from moe_ep.checkpoint_formats import CHECKPOINT_FORMATS, CheckpointFormat
from moe_ep.checkpoint_layout import find_projections
from moe_ep.checkpoint_names import known_matrix, nearest_format
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.launch.estimate import format_bytes
from moe_ep.megakernel.problem import PARALLEL_MODES, MoEShape
from moe_ep.progress import progress_bar

_PROGRESS_MIN_TENSORS = 20_000  # about two seconds
_NUM_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class ExpertsReport:
    """One experts module. Sizes are None where the names are near to no format; `reason` is why it
    runs, by which backend, or why not. `num_bytes` is of the weights of rank 0."""

    name: str
    layer: int | None
    num_tensors: int
    format: str | None = None
    weights_format: str | None = None
    num_experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    is_gated: bool | None = None
    has_bias: bool | None = None
    num_bytes: int | None = None
    can_run: bool = False
    reason: str = ""


def examine(
    checkpoint: Checkpoint, device: str = "cpu", parallel: str = "ep", num_ranks: int = 1
) -> list[ExpertsReport]:
    """Every experts module of a checkpoint, in order of layer."""
    modules = sorted(checkpoint.experts().items(), key=lambda item: layer_number(item[0]) or 0)
    is_long = sum(len(names) for _, names in modules) >= _PROGRESS_MIN_TENSORS
    config = ModelConfig.beside(checkpoint.path)
    reports = []
    with progress_bar("reading headers", len(modules), is_shown=is_long) as advance:
        for name, names in modules:
            reports.append(
                _examine_module(checkpoint, name, names, config, device, parallel, num_ranks)
            )
            advance(1)
    return reports


@dataclass(frozen=True)
class ModelConfig:
    """What the model's config.json says of its experts; None where it does not."""

    num_experts: int | None = None
    top_k: int | None = None

    @classmethod
    def beside(cls, path: Path) -> "ModelConfig":
        """That of a checkpoint's folder. Raises `MoEEpConfigError` if it is not a JSON object."""
        file = (path if path.is_dir() else path.parent) / "config.json"
        if not file.is_file():
            return cls()
        try:
            config = json.loads(file.read_text())
        except ValueError as error:
            raise MoEEpConfigError(f"{file} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise MoEEpConfigError(f"{file} holds a {type(config).__name__}; allowed: an object")
        config = config.get("text_config", config)

        def count(*keys: str) -> int | None:
            values = [config[key] for key in keys if isinstance(config.get(key), int)]
            return values[0] if values and values[0] > 0 else None

        return cls(
            count("num_experts", "num_local_experts", "n_routed_experts"),
            count("num_experts_per_tok"),
        )


def _examine_module(
    checkpoint: Checkpoint,
    name: str,
    names: list[str],
    config: ModelConfig,
    device: str,
    parallel: str,
    num_ranks: int,
) -> ExpertsReport:
    found = {"name": name, "layer": layer_number(name), "num_tensors": len(names)}
    fmt_name = nearest_format(names)
    if fmt_name is None:
        examples = ", ".join(sorted(names)[:_NUM_EXAMPLES])
        reason = f"no known format has such names ({examples}); known: "
        return ExpertsReport(**found, reason=reason + ", ".join(CHECKPOINT_FORMATS))
    fmt = CHECKPOINT_FORMATS[fmt_name]
    found |= {"format": fmt.name, "weights_format": fmt.weights_format, "has_bias": fmt.has_bias}
    differs = ""
    try:
        shape = _shape(checkpoint, name, names, fmt, config.top_k or 1)
        found |= {
            "num_experts": shape.num_experts,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "is_gated": shape.activation.is_gated,
        }
        wanted = config.num_experts or shape.num_experts
        if wanted != shape.num_experts:
            differs = f"; config.json says {wanted} experts, the tensors are of {shape.num_experts}"
            shape = replace(shape, num_experts=wanted, top_k=min(shape.top_k, wanted))
        form = meta_weights(shape, fmt)
        check_tensors(checkpoint, name, names, fmt, form, wanted, form.expert_ids)
        found["num_bytes"] = form.shard(parallel, 0, num_ranks).num_bytes
    except MoEEpConfigError as error:
        return ExpertsReport(**found, reason=f"{error}{differs}")
    support = supports(
        shape, fmt.weights_format, "auto", device, parallel=parallel, num_ranks=num_ranks
    )
    return ExpertsReport(**found, can_run=support.ok, reason=support.reason)


def _shape(
    checkpoint: Checkpoint, prefix: str, names: list[str], fmt: CheckpointFormat, top_k: int
) -> MoEShape:
    """What the names and one down matrix's shape say, by the rules of the format."""
    gate, _, down = find_projections(fmt, names)
    part = next(part for part in fmt.parts if part.kind == "codes")
    if fmt.is_fused:
        down_name, is_gated = down + part.suffix, True
    else:
        num_experts = _count_experts(names)
        held = (f"{expert}.{down}.{part.suffix}" for expert in range(num_experts))
        down_name = next((name for name in held if name in names), f"0.{down}.{part.suffix}")
        is_gated = any(f".{gate}." in name for name in names)
    if down_name not in names:
        unknown = [name for name in names if known_matrix(fmt, name) is None]
        also = f", {', '.join(unknown[:_NUM_EXAMPLES])}: not known" if unknown else ""
        raise MoEEpConfigError(f"{prefix}.{down_name}: missing{also}")
    stored, _ = checkpoint.header(f"{prefix}.{down_name}")
    num_dims = 2 + fmt.is_fused + (part.chunk > 0)
    if len(stored) != num_dims:
        raise MoEEpConfigError(
            f"{prefix}.{down_name} has {len(stored)} dimensions; allowed: {num_dims}"
        )
    if fmt.is_fused:
        num_experts, hidden, cols = stored[:3]
    else:
        hidden, cols = stored
    if fmt.is_transposed:
        hidden, cols = cols, hidden
    return MoEShape(
        num_experts=num_experts,
        top_k=min(top_k, num_experts),
        hidden=hidden,
        intermediate=cols * part.block[1] * (part.chunk or 1),
        activation="swiglu" if is_gated else "relu2",
    )


def _count_experts(names: Sequence[str]) -> int:
    """Of names "5.up_proj.weight": the number of experts with the fewest tensors missing below it
    and extra above it, so that one misnumbered tensor counts as one."""
    held = Counter(int(expert) for name in names if (expert := name.partition(".")[0]).isdecimal())
    per_expert = max(held.values(), default=0)
    num_experts, fewest, num_below = 0, 0, 0
    for expert, num_tensors in sorted(held.items()):
        num_below += num_tensors
        # Missing, less those that are no longer extra.
        misfits = (expert + 1) * per_expert - 2 * num_below
        if misfits < fewest:
            num_experts, fewest = expert + 1, misfits
    return num_experts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="folder of safetensors shards, or one file")
    parser.add_argument("--ranks", type=int, default=1, help="EP size (default: 1)")
    parser.add_argument("--parallel", choices=PARALLEL_MODES, default="ep")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where it would run (default: what this machine has)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """0 if every layer with experts can run, else 1."""
    check_int("--ranks", args.ranks, 1)
    checkpoint = Checkpoint(args.path)
    reports = examine(checkpoint, args.device, args.parallel, args.ranks)
    if args.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    elif reports:
        _print_table(args, reports)
    if not reports:
        raise MoEEpConfigError(f"path {args.path} holds no '...experts.' tensors")
    return 0 if all(report.can_run for report in reports) else 1


def _print_table(args: argparse.Namespace, reports: Sequence[ExpertsReport]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=f"experts of {escape(str(args.path))}, rank 0 of {args.ranks}, {args.parallel}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("layer", overflow="fold", min_width=len("layer"))
    for heading in ("format", "E", "H", "I", "per rank", "runs"):
        table.add_column(heading, overflow="fold")
    layers_of: dict[str, list[str]] = defaultdict(list)
    num_modules = Counter(report.layer for report in reports)
    for report in reports:
        sizes = (report.num_experts, report.hidden, report.intermediate)
        is_number = report.layer is not None and num_modules[report.layer] == 1
        layer = str(report.layer) if is_number else report.name
        layers_of[report.reason].append(layer)
        table.add_row(
            escape(layer),
            report.format or "-",
            *("-" if size is None else str(size) for size in sizes),
            "-" if report.num_bytes is None else format_bytes(report.num_bytes),
            "[green]yes" if report.can_run else "[yellow]no",
        )
    console = Console()
    console.print(table)
    for reason, layers in layers_of.items():
        of = f"layer {layers[0]}" + (f" and {len(layers) - 1} more" if layers[1:] else "")
        console.print(escape(f"{of}: {reason}"))
    console.print("From headers alone: moe_ep.load looks at the values.")
