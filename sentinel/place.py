"""Place: a rank's coordinates in the parallel layout; depths of chunks and canonical names of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from sentinel.bounds import MAX_CHUNKS, MAX_RANKS, MAX_SCHEDULE
from sentinel.errors import ConfigError

AXES: tuple[str, ...] = ("dp", "pp", "tp", "cp", "ep")
"""Parallel axes by their usual names; vpp (virtual pipeline) belongs to a chunk, not to a rank."""

V_SHAPED = frozenset({"zbv", "zbvzerobubble", "dualpipev", "vschedule", "vhalf", "vmin", "zerobubblev"})
"""Schedules whose odd chunks run back up the ranks: ZB-V, V-Half and V-Min, DualPipeV, in small letters alone."""

_NO_LETTER = re.compile(r"[^a-z0-9]+")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Coordinates of one rank. Sizes are at least 1, coordinates 0-based and below their size."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    vpp_size: int = 1
    """Model chunks on each pipeline rank."""
    schedule: str = ""
    """gpipe, 1f1b, interleaved1f1b, loopedbfs, interleavedzerobubble, zbv, dualpipev; empty: no pipeline known."""

    def __post_init__(self) -> None:
        bounds = [("rank", self.rank, self.world_size)]
        bounds += [(f"{axis}_rank", self.coordinate(axis), self.size(axis)) for axis in AXES]
        for name, value, size in bounds:
            if not 1 <= size <= MAX_RANKS:
                raise ConfigError(f"place.{name.replace('rank', 'size')} must be in [1, {MAX_RANKS}], got {size}")
            if not 0 <= value < size:
                raise ConfigError(f"place.{name} must be in [0, {size}), got {value}")
        if not 1 <= self.vpp_size <= MAX_CHUNKS:
            raise ConfigError(f"place.vpp_size must be in [1, {MAX_CHUNKS}], got {self.vpp_size}")
        if len(self.schedule) > MAX_SCHEDULE:
            raise ConfigError(f"place.schedule must have at most {MAX_SCHEDULE} characters, got {len(self.schedule)}")

    def coordinate(self, axis: str) -> int:
        """Return the 0-based coordinate on `axis`, one of AXES."""
        return int(getattr(self, f"{axis}_rank"))

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`, one of AXES."""
        return int(getattr(self, f"{axis}_size"))

    def coordinates(self) -> dict[str, int]:
        """Return axis -> coordinate for the axes that are really split; small, for JSON and series keys."""
        return {axis: self.coordinate(axis) for axis in AXES if self.size(axis) > 1}


def world_size_of(num_reports: Mapping[int, int], last_rank: int) -> int:
    """Return how many ranks a run has: of the numbers that ranks report, and that have room for all of them, the commonest.

    Of two that are equally common the smaller: then no rank is waited for that may not exist.
    num_reports: number of ranks -> how many ranks report it; not empty. last_rank: the highest that reports.
    """
    counts = {size: num for size, num in num_reports.items() if size > last_rank} or num_reports
    return min(counts, key=lambda size: (-counts[size], size))


def is_v_shaped(schedule: str) -> bool:
    """Tell whether a schedule folds: however it is spelt (`ZBV`, `ScheduleZBVZeroBubble`, `DualPipe-V`)."""
    word = _NO_LETTER.sub("", schedule.lower())
    return word in V_SHAPED or word.removeprefix("schedule").removesuffix("schedule") in V_SHAPED


def depth(schedule: str, pp_stage: int, vpp_stage: int, pp_size: int) -> int:
    """Return the place of a chunk in the forward order of the whole model, 0-based. The one place that knows.

    Looped schedules go round the ranks: vpp_stage * pp_size + pp_stage. V-shaped ones fold: odd chunks run back up.
    """
    if vpp_stage % 2 == 1 and is_v_shaped(schedule):
        return vpp_stage * pp_size + (pp_size - 1 - pp_stage)
    return vpp_stage * pp_size + pp_stage


WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")


def strip_wrappers(name: str) -> str:
    """Return a module or parameter name without the prefixes that DDP, FSDP, compile and checkpoint wrappers add.

    `module` is stripped at the front only, or behind another wrapper: a model may have a child of that name.
    """
    changed = True
    while changed:
        changed = False
        for prefix in ("module.", "_forward_module."):
            if name.startswith(prefix):
                name, changed = name[len(prefix) :], True
    inner = re.sub(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)", "", name)
    return inner.rstrip(".") if inner != name else name


def chunk_name(depth: int, num_depths: int, model: str = "") -> str:
    """Return the canonical name of a whole chunk: `model`, or `stage<depth>` where the model is cut.

    model: which of several it belongs to; its own name then takes the place of `model`, and stands before the stage's.
    """
    if num_depths <= 1:
        return model or "model"
    return f"{model}.stage{depth}" if model else f"stage{depth}"


def layer_offsets(blocks_by_depth: Mapping[int, Iterable[str]]) -> dict[int, dict[str, int]]:
    """Return depth -> {block container: number to add to the layer numbers of that depth}.

    blocks_by_depth: depth -> local names of the repeated layers (`layers.0`, `layers.1`).
    Numbers that are already global (no number appears on two depths) are left alone; local ones, which begin again on
    each depth, are shifted by the number of layers of the depths before.
    """
    by_container: dict[str, dict[int, list[int]]] = {}
    for at, names in sorted(blocks_by_depth.items()):
        for name in names:
            container, _, number = name.rpartition(".")
            if number.isdigit():
                by_container.setdefault(container, {}).setdefault(at, []).append(int(number))
    offsets: dict[int, dict[str, int]] = {at: {} for at in blocks_by_depth}
    for container, numbers in by_container.items():
        seen = [number for per_depth in numbers.values() for number in set(per_depth)]
        if len(seen) == len(set(seen)):
            continue
        total = 0
        for at in sorted(numbers):
            offsets[at][container] = total
            total += max(numbers[at]) + 1
    return offsets


def canonical(name: str, offsets: Mapping[str, int], whole: str, name_map: Mapping[str, str] | None = None) -> str:
    """Return the name a tensor has on every layout.

    name: local name; offsets: local name of a container -> number to add to its children's numbers (`layer_offsets`, the
    config's layer_offset, experts); whole: the name of the chunk itself, for the site named `""`.
    """
    name = _renumbered(name, offsets)
    if name_map:
        for prefix, other in name_map.items():
            if name == prefix or name.startswith(prefix + "."):
                name = other + name[len(prefix) :]
                break
    return whole + name if name == "" or name.startswith(":") else name


def _renumbered(name: str, offsets: Mapping[str, int]) -> str:
    """Return `name` with the number behind each named container raised; containers may lie in one another."""
    words = name.split(".")
    found = list(words)
    for container, offset in offsets.items():
        parents = container.split(".") if container else []
        at = len(parents)
        if offset and len(words) > at and words[:at] == parents:
            digits, colon, index = words[at].partition(":")
            if digits.isdigit():
                found[at] = f"{int(digits) + offset}{colon}{index}"
    return ".".join(found)
