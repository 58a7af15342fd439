"""In which order a pipeline's ranks run their micro-steps, forward and backward, under each schedule."""

from __future__ import annotations

from typing import NamedTuple

from sentinel.place import depth


class MicroStepPass(NamedTuple):
    """One pass of one micro-step through one chunk."""

    is_forward: bool
    chunk: int
    micro_step: int


def program_order(schedule: str, pp: int, vpp: int, micro_steps: int) -> list[list[MicroStepPass]]:
    """Return what each pipeline rank does, in its order: a feasible one, of the kind that the schedule makes.

    gpipe: all forwards, then all backwards. loopedbfs: chunk by chunk, backwards with the last micro-step first. All
    others: a backward as soon as there is one, and no more forwards ahead than the pipeline is deep. Empty: no pipeline.
    """
    if not schedule:
        return [[MicroStepPass(is_forward, 0, m) for m in range(micro_steps) for is_forward in (True, False)]] * pp
    depths = {depth(schedule, stage, chunk, pp): (stage, chunk) for stage in range(pp) for chunk in range(vpp)}
    last = len(depths) - 1
    order: list[list[MicroStepPass]] = [[] for _ in range(pp)]
    done: set[tuple[bool, int, int]] = set()
    left = {(is_forward, at, m) for is_forward in (True, False) for at in depths for m in range(micro_steps)}

    def is_ready(item: tuple[bool, int, int]) -> bool:
        is_forward, at, m = item
        if is_forward:
            return at == 0 or (True, at - 1, m) in done
        return (True, last, m) in done and (at == last or (False, at + 1, m) in done)

    def wish(item: tuple[bool, int, int]) -> tuple[int, ...]:
        is_forward, at, m = item
        if schedule == "loopedbfs":
            return (0, depths[at][1], m) if is_forward else (1, -at, -m)
        if schedule == "gpipe":
            return (0, m, at) if is_forward else (1, m, -at)
        return (1, m // pp, -at, m) if is_forward else (0, m, -at)

    def may_run(item: tuple[bool, int, int]) -> bool:
        stage = depths[item[1]][0]
        if schedule in ("loopedbfs", "gpipe"):
            # Backwards wait until all forwards of this rank are over; of loopedbfs they come in one fixed order.
            own = [one for one in left if depths[one[1]][0] == stage]
            return min(own, key=wish) == item if schedule == "loopedbfs" else item[0] or not any(one[0] for one in own)
        ahead = sum(1 for one in order[stage] if one.is_forward) - sum(1 for one in order[stage] if not one.is_forward)
        return not item[0] or ahead < 2 * pp * vpp

    while left:
        ran = []
        for stage in range(pp):
            ready = [one for one in left if depths[one[1]][0] == stage and is_ready(one) and may_run(one)]
            if ready:
                item = min(ready, key=wish)
                order[stage].append(MicroStepPass(item[0], depths[item[1]][1], item[2]))
                ran.append(item)
        assert ran, f"{schedule}: no rank can go on"
        left -= set(ran)
        done |= set(ran)
    return order
