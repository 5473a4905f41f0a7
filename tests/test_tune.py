"""Tuning without a GPU: which builds are tried, which are taken, and what is kept of it."""

import json
import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from layer_cases import make_weights

from moe_ep import MoEShape, mega_tune
from moe_ep.comm.group import EpGroup
from moe_ep.launch import spawn
from moe_ep.megakernel import compile_cache, tune
from moe_ep.megakernel.knobs import choose_knobs
from moe_ep.megakernel.mega_spec import Bucket, fit_spec, make_buckets, make_layout
from moe_ep.megakernel.problem import WEIGHT_FORMATS

V3 = MoEShape(num_experts=32, top_k=8, hidden=7168, intermediate=2048)
SMALL = MoEShape(num_experts=4, top_k=2, hidden=64, intermediate=64)
A, B, C = (replace(choose_knobs("nvfp4", 8), stages=stages) for stages in (3, 4, 5))
KEY = {"device": "H200", "num_ranks": 2}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(compile_cache.CACHE_DIR_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("capacity", [1, 128, 8192])
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_candidates_fit_and_begin_with_the_tables_builds(name, capacity, num_ranks):
    shape = replace(V3, num_experts=32 * num_ranks)
    knobs = tune.candidates(name, shape, capacity, num_ranks)
    table = [b.knobs for b in make_buckets(name, shape, capacity, num_ranks)]
    assert list(knobs[: len(table)]) == table
    assert len(table) <= len(knobs) == len(set(knobs)) <= 24
    for one in knobs:
        layout = make_layout(shape, num_ranks, capacity, (Bucket(capacity, one),))
        options = {"weights_format": name, "has_bias13": True, "has_bias2": True}
        assert fit_spec(shape=shape, layout=layout, knobs=one, **options).knobs == one


def test_candidates_keep_to_the_accumulators_that_registers_hold():
    for one in tune.candidates("nvfp4", V3, 8192, 1):
        columns = one.slices_per_item * one.max_tile_width
        assert columns <= {4: 96, 2: 352}[one.num_math_warpgroups]  # what the table's own take
    few = tune.candidates("nvfp4", V3, 8, 1)
    assert {one.max_tile_width for one in few} == {16, 32}


def test_token_counts_are_powers_of_two_up_to_the_capacity():
    assert tune.token_counts(1) == (1,)
    assert tune.token_counts(8) == (1, 2, 4, 8)
    assert tune.token_counts(100) == (1, 2, 4, 8, 16, 32, 64, 100)


def test_a_sweep_measures_every_build_at_every_number_of_tokens():
    asked = []

    def measure(candidate_idx: int, num_tokens: int) -> float:
        asked.append((candidate_idx, num_tokens))
        return 10.0 * candidate_idx + num_tokens

    assert tune.sweep(measure, 2, (1, 5), is_shown=False) == [[1.0, 5.0], [11.0, 15.0]]
    assert asked == [(0, 1), (0, 5), (1, 1), (1, 5)]


@pytest.mark.parametrize(
    ("seconds", "buckets"),
    [
        # The best each time.
        ([[1, 9, 9], [2, 2, 8], [3, 3, 3]], [(1, A), (2, B), (4, C)]),
        # One build is best everywhere.
        ([[2, 2, 2], [1, 1, 1], [3, 3, 3]], [(4, B)]),
        # B is better than A at 2 tokens, but not by more than times repeat.
        ([[1, 1.005, 9], [2, 1, 5], [3, 3, 5]], [(2, A), (4, B)]),
        # A is as good again at 4 tokens, but B has not become worse.
        ([[1, 3, 1], [2, 2, 1.009], [3, 3, 3]], [(1, A), (4, B)]),
    ],
)
def test_a_build_serves_more_tokens_as_long_as_it_is_as_good_as_the_best(seconds, buckets):
    chosen = tune.choose((A, B, C), (1, 2, 4), seconds)
    assert [(bucket.max_tokens, bucket.knobs) for bucket in chosen] == buckets


# ---- the file


def test_what_is_kept_is_found_by_the_same_key_alone():
    buckets = (Bucket(8, A), Bucket(128, C))
    assert tune.find(KEY) is None
    path = tune.store(KEY, buckets)
    assert path.parent == compile_cache.cache_dir()
    assert tune.find(KEY) == buckets
    assert tune.find(KEY | {"num_ranks": 4}) is None
    tune.store(KEY, buckets[1:])
    assert tune.find(KEY) == buckets[1:]
    assert [p.suffix for p in path.parent.iterdir() if p.suffix != ".lock"] == [".json"]


def test_a_key_tells_apart_everything_that_times_depend_on(monkeypatch):
    fields = {
        "device_name": "H200",
        "shape": V3,
        "weights_format": "nvfp4",
        "num_ranks": 2,
        "max_tokens_per_rank": 128,
        "parallel": "ep",
        "has_bias13": False,
        "has_bias2": False,
        "max_sms": None,
    }
    others = {
        "device_name": "H100",
        "shape": replace(V3, hidden=4096),
        "weights_format": "mxfp4",
        "num_ranks": 4,
        "max_tokens_per_rank": 256,
        "parallel": "tp",
        "has_bias13": True,
        "has_bias2": True,
        "max_sms": 100,
    }
    key = tune.knob_key(**fields)
    assert json.loads(json.dumps(key)) == key
    assert all(tune.knob_key(**fields | {name: others[name]}) != key for name in fields)
    monkeypatch.setattr(tune, "SOURCE_DIGEST", "another kernel")
    assert tune.knob_key(**fields) != key


def damaged(record: dict) -> list[str]:
    """Texts that no `store` has written."""
    whole = json.dumps(record)
    other_knob = json.loads(whole)
    other_knob["buckets"][0]["knobs"]["speed"] = 9
    no_such_build = json.loads(whole)
    no_such_build["buckets"][0]["knobs"]["num_math_warpgroups"] = 3
    descending = record | {"buckets": record["buckets"][::-1]}
    empty = record | {"buckets": []}
    texts = [other_knob, no_such_build, descending, empty, [], {}]
    return ["", whole[:50], "\0" * 80, *map(json.dumps, texts)]


def test_a_damaged_or_foreign_file_is_passed_over_and_written_anew():
    buckets = (Bucket(8, A), Bucket(128, C))
    path = tune.store(KEY, buckets)
    for text in damaged(json.loads(path.read_text())):
        path.write_text(text)
        assert tune.find(KEY) is None, text
        tune.store(KEY, buckets)
        assert tune.find(KEY) == buckets


def test_writers_at_once_leave_a_whole_file():
    choices = [(Bucket(n, A),) for n in range(1, 9)]
    threads = [threading.Thread(target=tune.store, args=(KEY, choice)) for choice in choices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tune.find(KEY) in choices


# ---- several ranks


class FakeMega:
    def __init__(self, *args, knobs, **options) -> None:
        self.knobs, self.is_destroyed = knobs, False
        made.append(self)

    def kernel_builds(self) -> list[None]:
        return [None]

    def destroy(self) -> None:
        self.is_destroyed = True


made: list[FakeMega] = []


class FakeTuner(mega_tune.Tuner):
    """Times by rank: rank 0 alone would take the second build, rank 1 the third."""

    def _sweep(self, layers, counts, is_skewed):
        slow = 2 - self._group.rank
        return tune.sweep(
            lambda i, n: {0: 1.1, slow: 3.0}.get(i, 1.0 if i < 3 else 2.0),
            *(len(layers), counts),
            is_shown=False,
        )


def fail(*args) -> None:
    raise OSError("no space left")


def tune_on_ranks(rank: int, num_ranks: int, folder: str) -> list:
    patch = pytest.MonkeyPatch()
    patch.setenv(compile_cache.CACHE_DIR_VARIABLE, f"{folder}/{rank}")  # no file that both see
    patch.setattr(mega_tune, "MegaMoE", FakeMega)
    patch.setattr(mega_tune, "compile_all", lambda builds: 0)
    patch.setattr(mega_tune.torch.cuda, "get_device_name", lambda device: "fake")
    group = EpGroup.from_process_group(dist.group.WORLD, "cpu")
    tuner = FakeTuner(
        *(group, SMALL, make_weights(SMALL, "nvfp4"), 4), max_sms=None, timeout_s=20.0
    )
    before = tuner.known()
    tuned = tuner.run()
    with pytest.MonkeyPatch.context() as full_disk:
        full_disk.setattr(tune, "write_atomically", fail)
        assert tuner.run().buckets == tuned.buckets
    first = tuned.knobs[0]
    return [
        before,
        [(b.max_tokens, b.knobs == first) for b in tuned.buckets],
        tuned.seconds[1][0],
        tuner.known() == tuned.buckets,
        tuned.path is not None,
        len(made) == 2 * len(tuned.knobs) and all(mega.is_destroyed for mega in made),
    ]


def test_ranks_take_the_build_whose_slowest_rank_is_fastest_and_rank_0_keeps_it(folder):
    results = spawn.run(tune_on_ranks, 2, str(folder), timeout_s=60)
    for rank, found in enumerate(results):
        assert found == [None, [(4, True)], 3.0, True, rank == 0, True]
    assert list(folder.glob("0/knobs_*.json")) and not list(folder.glob("1/knobs_*.json"))
