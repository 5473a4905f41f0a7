"""Draw what `moe-ep bench` measured: latency with its limit, and the roofline."""

from pathlib import Path
from typing import Any

from moe_ep.comm.errors import MoEEpUnavailableError


def plot(record: dict[str, Any], path: Path) -> None:
    """Write a PNG (or what `path` ends in) of a bench record.

    Left, latency over tokens per rank: median as a line, p99 as its shade, the limit dashed. Right,
    the roofline: operations per second over operations per byte, under the device's two peaks.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MoEEpUnavailableError(
            "--plot needs matplotlib: pip install 'moe-ep[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (latency, roofline) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    series: dict[str, list[dict[str, Any]]] = {}
    for result in record["results"]:
        kind = result["backend"] + (" graph" if result["is_graph"] else "")
        series.setdefault(f"{kind}, {result['weights_format']}", []).append(result)
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
        limits = [result["limit_us"] for result in results]
        latency.plot(tokens, limits, linestyle="--", color=line.get_color(), label=f"{name}: limit")
        intensity = [result["num_flops"] / result["num_bytes"] for result in results]
        rate = [result["num_flops"] / result["median_us"] / 1e6 for result in results]
        roofline.plot(intensity, rate, marker="o", color=line.get_color(), label=name)
        intensities += intensity
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
    for axes in (latency, roofline):
        axes.set(xscale="log", yscale="log")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(fontsize="small")
    first = record["results"][0] if record["results"] else {"geometry": "-", "num_ranks": 0}
    figure.suptitle(
        f"{first['geometry']} on {first['num_ranks']} x {record['device']}, "
        f"{record['date'][:10]}, commit {record['commit']}"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
