"""The record that a device wait leaves when its time is up, as the host reads it.

One record for each rank of a launch, Int32 words in pinned host memory, which the GPU writes
directly: it can be read while a kernel still runs, and after one that never ends.
"""

import ctypes
from collections.abc import Sequence

import torch

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError

# Words of a record. `bad_slot`: 1 + token * top_k + slot of an id that is not an expert, `bad_id`
# its value; `status`: -1 - code of a rank that refused the step, `status_rank` that rank; `expert`:
# 1 + the expert whose rows were waited for, or 0.
FIELDS = (
    *("is_set", "phase", "rank", "step", "peer", "expected", "seen"),
    *("bad_slot", "bad_id", "status", "status_rank", "expert"),
)
RECORD_WORDS = 16  # 64 bytes


class PostMortem:
    """Records of `num_ranks` ranks of one process (one, or all of a virtual group)."""

    def __init__(self, num_ranks: int) -> None:
        is_pinned = torch.cuda.is_available()
        self._words = torch.zeros(num_ranks, RECORD_WORDS, dtype=torch.int32, pin_memory=is_pinned)
        self._bytes = (ctypes.c_char * self._words.nbytes).from_address(self._words.data_ptr())
        self._nothing = bytes(self._words.nbytes)

    @property
    def address(self) -> int:
        """Of the first record; the same on host and device."""
        return self._words.data_ptr()

    def records(self) -> list[dict[str, int]]:
        """Of the ranks that ran out of time."""
        rows = [dict(zip(FIELDS, row.tolist(), strict=False)) for row in self._words]
        return [row for row in rows if row["is_set"]]

    def check(
        self,
        phase_names: dict[int, str],
        top_k: int,
        *,
        refusals: Sequence[str] = (),
        own_rank: int | None = None,
    ) -> None:
        """Raises what the device found, without waiting for it; a fraction of a microsecond where
        it found nothing.

        refusals  what each code of a refused step stands for
        own_rank  whose refusals were raised when it refused, and are dropped here

        `MoEEpTimeoutError` for a wait that ran out of time, naming phase, waiting rank and the
        ranks waited for. Else, once, as it is then forgotten, `MoEEpConfigError` for a step that a
        rank refused, and for an id that is not an expert, whose slot was masked.
        """
        if self._bytes.raw == self._nothing:
            return
        records = self.records()
        if records:
            raise _timeout_error(records, phase_names)
        first, last = FIELDS.index("status"), FIELDS.index("status_rank")
        for row in self._words:
            status, rank = row[first : last + 1].tolist()
            if status:
                self._words[:, first : last + 1].zero_()
                if rank != own_rank:
                    raise MoEEpConfigError(_refusal(rank, -1 - status, refusals))
        for row in self._words:
            fields = dict(zip(FIELDS, row.tolist(), strict=False))
            if fields["bad_slot"]:
                row.zero_()
                token, slot = divmod(fields["bad_slot"] - 1, top_k)
                raise MoEEpConfigError(
                    f"topk_ids[{token}, {slot}] was {fields['bad_id']} in an earlier call; the "
                    "slot was masked; allowed: negative (masked) or below num_experts"
                )


def _refusal(rank: int, code: int, refusals: Sequence[str]) -> str:
    what = refusals[code] if code < len(refusals) else "input"
    return (
        f"rank {rank} refused its {what} (code {code}) in an earlier call, which computed nothing "
        "on any rank"
    )


def _timeout_error(records: list[dict[str, int]], phase_names: dict[int, str]) -> MoEEpTimeoutError:
    first = records[0]
    lines = [
        f"rank {r['rank']} waited in phase {phase_names.get(r['phase'], r['phase'])} for rank "
        f"{r['peer']}{_of_expert(r)}: expected {r['expected']}, seen {r['seen']}"
        for r in records
    ]
    return MoEEpTimeoutError(
        f"step {first['step']} ran out of time: {'; '.join(lines)}",
        phase=phase_names.get(first["phase"], str(first["phase"])),
        step=first["step"],
        ranks=sorted({r["peer"] for r in records}),
        expert=first["expert"] - 1 if first["expert"] else None,
        expected=first["expected"],
        seen=first["seen"],
    )


def _of_expert(record: dict[str, int]) -> str:
    return f", expert {record['expert'] - 1}" if record["expert"] else ""
