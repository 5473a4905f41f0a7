"""Draw what `moe-ep bench` measured: latency with its limit, and the roofline."""

import itertools
from pathlib import Path
from typing import Any

from moe_ep.comm.errors import MoEEpUnavailableError


def plot(record: dict[str, Any], path: Path) -> None:
    """Write a PNG (or what `path` ends in) of a bench record.

    Left, latency over tokens per rank: median as a line, p99 as its shade, the limit dashed. Beside
    it the roofline: operations per second over operations per byte, under the device's two peaks.
    Right, where stages were measured, a bar of them for each case.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MoEEpUnavailableError(
            "--plot needs matplotlib: pip install 'moe-ep[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    staged = [result for result in record["results"] if result["stages"]]
    num_axes = 3 if staged else 2
    figure, axes = pyplot.subplots(1, num_axes, figsize=(6 * num_axes, 5), layout="constrained")
    latency, roofline = axes[:2]
    if staged:
        _stage_bars(axes[2], staged)
    series: dict[str, list[dict[str, Any]]] = {}
    layers: dict[str, dict[int, float]] = {}  # limits by tokens: a layer's, whatever its backend
    for result in record["results"]:
        kind = result["backend"] + (" graph" if result["is_graph"] else "")
        series.setdefault(f"{kind}, {_layer(result)}", []).append(result)
        limits = layers.setdefault(_layer(result), {})
        limits[result["tokens_per_rank"]] = result["limit_us"]
    peaks = record["peaks"]
    intensities = []
    for name, results in series.items():
        results = sorted(results, key=lambda result: result["tokens_per_rank"])
        tokens = [result["tokens_per_rank"] for result in results]
        medians = [result["median_us"] for result in results]
        (line,) = latency.plot(tokens, medians, marker="o", label=name)
        latency.fill_between(
            tokens, medians, [r["p99_us"] for r in results], color=line.get_color(), alpha=0.15
        )
        intensity = [result["num_flops"] / result["num_bytes"] for result in results]
        rate = [result["num_flops"] / result["median_us"] / 1e6 for result in results]
        roofline.plot(intensity, rate, marker="o", color=line.get_color(), label=name)
        intensities += intensity
    for style, (name, limits) in zip(itertools.cycle(("--", ":", "-.")), layers.items()):
        tokens = sorted(limits)
        limit_us = [limits[count] for count in tokens]
        latency.plot(tokens, limit_us, linestyle=style, color="black", label=f"limit, {name}")
    ridge = peaks["flops_per_s"] / peaks["bytes_per_s"]
    roof = sorted([min(intensities, default=ridge) / 2, ridge, 2 * max([ridge, *intensities])])
    roofline.plot(
        roof,
        [min(i * peaks["bytes_per_s"], peaks["flops_per_s"]) / 1e12 for i in roof],
        color="black",
        label=f"peaks ({peaks['source']})",
    )
    latency.set(xlabel="tokens per rank", ylabel="latency of the slowest rank, us")
    roofline.set(xlabel="operations per byte", ylabel="TFLOP/s of a rank")
    for axis in (latency, roofline):
        axis.set(xscale="log", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend(fontsize="small")
    counts = sorted({count for limits in layers.values() for count in limits})
    latency.set_xticks(counts, [str(count) for count in counts])
    latency.xaxis.set_minor_locator(ticker.NullLocator())
    latency.yaxis.set_major_formatter(ticker.LogFormatter())
    latency.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.4)))
    num_ranks = record["results"][0]["num_ranks"] if record["results"] else 0
    figure.suptitle(
        f"{num_ranks} x {record['device']}, {record['date'][:10]}, commit {record['commit']}"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _layer(result: dict[str, Any]) -> str:
    return f"{result['geometry']} {result['parallel']} {result['weights_format']}"


def _stage_bars(axis: Any, staged: list[dict[str, Any]]) -> None:
    """A bar for each case (graph and eager share their stages): one part per stage, in order."""
    cases = {
        f"{_layer(result)}, {result['tokens_per_rank']}": result["stages"]["spans_us"]
        for result in staged
    }
    bottoms = [0.0] * len(cases)
    for name in next(iter(cases.values())):
        spans = [spans_us[name] for spans_us in cases.values()]
        axis.bar(list(cases), spans, bottom=bottoms, label=name)
        bottoms = [bottom + span for bottom, span in zip(bottoms, spans, strict=True)]
    axis.set(xlabel="layer, tokens per rank", ylabel="stages of the fused launch, us")
    axis.tick_params(axis="x", rotation=45)
    axis.legend(fontsize="small")
