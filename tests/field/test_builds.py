"""Field cases about which build of a kernel runs: chosen by rank, tuned too early, failed on one.

Without knobs="auto" no build is chosen by a timing: `make_buckets` is a function of shape, format,
capacity and number of ranks, `choose_bucket` of the bound on tokens, which are the same on all
ranks. With it `mega_tune.Tuner` times candidates; here also on a CPU, where the times are made up.
"""

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from field_ranks import S0, TIMEOUT_S, device_of, on, places, weights_of
from layer_cases import make_inputs
from test_lifecycle import build

from moe_ep import mega_tune
from moe_ep.comm.errors import MoEEpConfigError, MoEEpError
from moe_ep.comm.group import EpGroup
from moe_ep.launch import spawn
from moe_ep.megakernel import compile_cache, tune
from moe_ep.megakernel.knobs import choose_knobs
from moe_ep.megakernel.mega_spec import choose_bucket, make_buckets


@contextmanager
def busy(device: str):
    """A thread that multiplies matrices meanwhile."""
    is_over = threading.Event()

    def work() -> None:
        matrix = torch.randn(512, 512, device=device)
        stream = torch.cuda.Stream() if device != "cpu" else None
        while not is_over.is_set():
            with torch.cuda.stream(stream):
                matrix = matrix @ matrix / 512
            if stream is not None:
                stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    is_over.set()
    thread.join()


@on("mega@2")
def test_A08_a_loaded_rank_tunes_to_the_builds_of_an_idle_one(ranks):
    layer = ranks.module(S0, ranks.weights(), 64)
    tuner = mega_tune.Tuner(
        *(layer.group, S0, layer._backend.held, 64), max_sms=None, timeout_s=TIMEOUT_S
    )
    load = busy(ranks.device) if ranks.rank == 1 else nullcontext()
    with load:
        mine = [repr(tuner.run().buckets) for _ in range(10)]
    held = [None] * ranks.num_ranks
    dist.all_gather_object(held, mine)
    assert held[0] == held[1]


class FakeMega:
    """A candidate that nobody launches; where `FAILS` holds its knobs it cannot be built."""

    FAILS: list = []
    num_asked = 0

    def __init__(self, *args, knobs, **options) -> None:
        FakeMega.num_asked += 1
        if knobs in self.FAILS:
            raise MoEEpConfigError(f"the workspace of {knobs} needs more than is free")

    def kernel_builds(self) -> list[None]:
        return [None]

    def destroy(self) -> None:
        pass


class NoisyTuner(mega_tune.Tuner):
    """Times that differ by rank and run by up to a half, as on a machine that is loaded."""

    def _sweep(self, layers, counts, is_skewed):
        self.measured, generator = counts, torch.Generator()
        generator.seed()
        noise = 1 + torch.rand(len(layers), len(counts), generator=generator) / 2
        self.own = noise.tolist()
        return self.own


@pytest.fixture
def no_kernels(monkeypatch) -> None:
    imitate_kernels(monkeypatch)


def imitate_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mega_tune, "MegaMoE", FakeMega)
    patch.setattr(mega_tune, "compile_all", lambda builds: 0)
    patch.setattr(mega_tune.torch.cuda, "get_device_name", lambda device: "none")


def noisy_tuner(num_tokens: int = 1024) -> NoisyTuner:
    group = EpGroup.single("cpu")
    if dist.is_initialized():
        group = EpGroup.from_process_group(dist.group.WORLD, "cpu")
    weights = weights_of(S0, "nvfp4")
    return NoisyTuner(group, S0, weights, num_tokens, max_sms=None, timeout_s=TIMEOUT_S)


def tune_ten_times(rank: int, num_ranks: int, cache: str) -> tuple[list[str], list[str]]:
    """What each run chose, and what this rank's own times would have chosen."""
    with pytest.MonkeyPatch.context() as patch:
        imitate_kernels(patch)
        patch.setenv(compile_cache.CACHE_DIR_VARIABLE, cache)
        tuner, chosen, alone = noisy_tuner(), [], []
        for _ in range(10):
            tuned = tuner.run()
            chosen.append(repr(tuned.buckets))
            alone.append(repr(tune.choose(tuned.knobs, tuned.counts, tuner.own)))
    return chosen, alone


def test_A08_ranks_whose_times_differ_tune_to_the_same_builds(tmp_path):
    (chosen_0, alone_0), (chosen_1, alone_1) = spawn.run(tune_ten_times, 2, str(tmp_path))
    assert chosen_0 == chosen_1
    assert alone_0 != alone_1


def fail_a_candidate_on_rank_one(rank: int, num_ranks: int, cache: str) -> tuple[str, bool, int]:
    with pytest.MonkeyPatch.context() as patch:
        imitate_kernels(patch)
        patch.setenv(compile_cache.CACHE_DIR_VARIABLE, cache)
        second = tune.candidates("nvfp4", S0, 64, num_ranks)[1]
        tuner = noisy_tuner(64)
        if rank == 1:
            patch.setattr(FakeMega, "FAILS", [second])
        with pytest.raises(MoEEpConfigError) as error:
            tuner.run()
        num_asked = FakeMega.num_asked
        patch.setattr(FakeMega, "FAILS", [])
        return str(error.value), len(tuner.run().buckets) > 0, num_asked


def test_A09_a_candidate_that_fails_on_one_rank_raises_on_all_and_the_next_run_works(tmp_path):
    results = spawn.run(fail_a_candidate_on_rank_one, 2, str(tmp_path))
    (text_0, again_0, num_asked_0), (text_1, again_1, num_asked_1) = results
    assert "needs more than is free" in text_1
    assert "rank 1" in text_0 and text_1 in text_0
    assert again_0 and again_1
    # Rank 0 asked for no memory that ranks take together after rank 1 had failed.
    assert num_asked_0 == num_asked_1 == 2


def fail_on_rank_one(rank: int, num_ranks: int, kind: str) -> tuple[str, str]:
    """One build of rank 1 does not compile."""
    layer = build(kind, rank, num_ranks, timeout_s=TIMEOUT_S)

    def fails() -> None:
        raise MoEEpError("kernel mega_moe did not compile for this rank")

    if rank == 1:
        (layer._backend._mega if kind == "mega" else layer._backend).warmup = fails
    with pytest.raises(MoEEpError) as error:
        layer.warmup()
    layer.destroy()
    if kind == "mega":  # gloo cannot go on: rank 0 was in the call that follows
        build(kind, rank, num_ranks).warmup()
    return str(error.value), type(error.value).__name__


@pytest.mark.parametrize(("kind", "num_ranks"), places(("cpu", 2), ("mega", 2)))
def test_A09_a_build_that_fails_on_one_rank_raises_on_all(kind, num_ranks):
    (text_0, _), (text_1, _) = spawn.run(
        fail_on_rank_one, num_ranks, kind, device=device_of(kind), timeout_s=60.0
    )
    assert text_1 == "kernel mega_moe did not compile for this rank"
    assert "rank 1" in text_0 and text_1 in text_0


@on("mega1", "split1")
def test_A09_a_build_that_fails_leaves_a_layer_that_says_so_and_the_next_one_works(
    ranks, monkeypatch, tmp_path
):
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_cache, "_loaded", {})
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.sys, "executable", "/bin/false")
        layer = ranks.module(S0, ranks.weights())
        with pytest.raises(MoEEpError, match="did not compile for .*exit code 1"):
            layer.warmup()
        with pytest.raises(MoEEpError, match="an earlier call failed"):
            layer.check()
        layer.destroy()
    monkeypatch.undo()
    inputs = make_inputs(S0, 16, seed=0)
    ranks.assert_right(ranks.layer(S0, ranks.weights())([inputs]), [inputs], ranks.weights())


def test_A91_the_build_for_many_tokens_is_the_tables_whatever_was_called_before():
    for name in ("nvfp4", "bf16"):
        buckets = make_buckets(name, S0, 4096, 1)
        for tokens in (4, 1024, 4, 4096):
            knobs = buckets[choose_bucket(buckets, tokens)].knobs
            assert tokens <= buckets[choose_bucket(buckets, tokens)].max_tokens
            mean_rows = tokens * S0.top_k / S0.num_experts
            wanted = choose_knobs(name, mean_rows + 1.5 * mean_rows**0.5)
            assert knobs.tile_widths == wanted.tile_widths


def test_A91_tuning_measures_up_to_the_capacity_whatever_is_called_first(no_kernels, tmp_path):
    """As no call tunes, but `warmup`, which knows the capacity alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compile_cache.CACHE_DIR_VARIABLE, str(tmp_path))
        tuner = noisy_tuner(1024)
        tuned = tuner.run()
    assert {1, 4, 64, 1024} <= set(tuner.measured)
    assert tuned.buckets[-1].max_tokens == 1024
    for idx, count in enumerate(tuner.measured):
        took = [row[idx] for row in tuner.own]
        chosen = tuned.buckets[choose_bucket(tuned.buckets, count)].knobs
        assert took[tuned.knobs.index(chosen)] <= (1 + tune.EQUAL_SHARE) * min(took)


@on("mega2")
def test_A91_a_first_call_of_few_tokens_does_not_fix_the_build_of_many(ranks, monkeypatch):
    few, many = ranks.parts(S0, 4), ranks.parts(S0, 1024, seed=9)
    outputs, taken = [], []
    for order in ((0, 1), (1, 0)):
        layer = ranks.layer(S0, ranks.weights(), 1024, takes_table=True)
        bind = layer.mega._bind
        monkeypatch.setattr(
            layer.mega, "_bind", lambda *a, bind=bind: taken.append(a[0]) or bind(*a)
        )
        calls = [layer.bind(few, max_tokens=4), layer.bind(many, max_tokens=1024)]
        for which in order:
            calls[which].launch()
        layer.check()
        outputs.append([*calls[0].outputs(), *calls[1].outputs()])
        layer.destroy()
    last = len(make_buckets("nvfp4", S0, 1024, 2)) - 1
    assert taken == [0, last, last, 0]
    assert all(map(torch.equal, *outputs))
    ranks.assert_right(outputs[0], few + many, ranks.weights())
