"""All ranks of a group exchange one small record through the store, and late ranks are named."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from moe_ep.comm.errors import MoEEpTimeoutError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import GRACE_S, StoreLostError, ask_store


def exchange_records(
    group: EpGroup, topic: str, record: Any, timeout_s: float
) -> tuple[int, list[Any]]:
    """How many exchanges of `topic` this group has had, this one included; every rank's JSON
    record, in rank order. Collective.

    No tensor moves, so it works before the first collective and for any backend. Raises
    `MoEEpTimeoutError` naming the ranks that did not come within `timeout_s`; the exchange then
    counts as not begun, so that ranks which try again meet.
    """
    if group.num_ranks == 1:
        return 1, [record]
    store = group.store
    counter = f"moe_ep/{topic}/count/{group.rank}"

    def publish_and_read() -> tuple[int, list[int], list[bytes]]:
        number = store.add(counter, 1)
        keys = [f"moe_ep/{topic}/{number}/{rank}" for rank in range(group.num_ranks)]
        store.set(keys[group.rank], json.dumps(record))
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # torch's DistStoreError: some are missing
            late = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if late:
                store.delete_key(keys[group.rank])
                store.add(counter, -1)
                return number, late, []
        return number, [], store.multi_get(keys)

    number, late, values = _ask(publish_and_read, topic, timeout_s + GRACE_S)
    if late:
        names = ", ".join(group.rank_name(rank) for rank in late)
        raise MoEEpTimeoutError(
            f"{topic}: {names} did not come within timeout_s={timeout_s:g}",
            phase=topic,
            ranks=late,
        )
    return number, [json.loads(value) for value in values]


def _ask(question: Callable[[], Any], topic: str, timeout_s: float) -> Any:
    try:
        return ask_store(question, timeout_s)
    except StoreLostError as error:
        raise MoEEpTimeoutError(
            f"{topic}: the store that the ranks share is lost ({error})", phase=topic
        ) from error
