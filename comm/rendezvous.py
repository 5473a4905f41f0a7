"""All ranks of a group exchange one small record through the store, and late ranks are named."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from moe_ep.comm.errors import MoEEpTimeoutError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import GRACE_S, StoreLostError, ask_store


def next_layer_id(group: EpGroup, timeout_s: float) -> int:
    """1, 2, 3, ... for the layers that this rank builds in this group; the same on every rank."""
    if group.num_ranks == 1:
        return 1
    key = f"moe_ep/num_layers/{group.rank}"
    return _ask(lambda: group.store.add(key, 1), "construction", timeout_s)


def exchange_records(group: EpGroup, name: str, record: Any, timeout_s: float) -> list[Any]:
    """Every rank's JSON record under `name`, in rank order. Collective.

    No tensor moves, so it works before the first collective and for any backend. Raises
    `MoEEpTimeoutError` naming the ranks that did not come within `timeout_s`.
    """
    if group.num_ranks == 1:
        return [record]
    keys = [f"moe_ep/{name}/{rank}" for rank in range(group.num_ranks)]

    def publish_and_read() -> tuple[list[int], list[bytes]]:
        store = group.store
        store.set(keys[group.rank], json.dumps(record))
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # torch's DistStoreError: some are missing
            late = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if late:
                return late, []
        return [], store.multi_get(keys)

    late, values = _ask(publish_and_read, name, timeout_s + GRACE_S)
    if late:
        names = ", ".join(group.rank_name(rank) for rank in late)
        raise MoEEpTimeoutError(
            f"{name}: {names} did not come within timeout_s={timeout_s:g}",
            phase=name,
            ranks=late,
        )
    return [json.loads(value) for value in values]


def _ask(question: Callable[[], Any], name: str, timeout_s: float) -> Any:
    try:
        return ask_store(question, timeout_s)
    except StoreLostError as error:
        raise MoEEpTimeoutError(
            f"{name}: the store that the ranks share is lost ({error})", phase=name
        ) from error
