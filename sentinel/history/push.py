"""Pushing a history into a store: its new files first, then its manifest: a reader has each step once at any instant.

Whatever ends a push, the former manifest stands with all its files, and the next push goes on where it ended: what is there
whole is not sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError, StoreError
from sentinel.history.config import FOLDER
from sentinel.history.manifest import GRACE_S, MANIFEST, Manifest, Retired, read_manifest
from sentinel.history.remote_run import RemoteRun
from sentinel.history.store_folder import FileVanished

MOST_ANEW = 20
"""How often a push begins anew because the run's files were merged meanwhile (chosen): each time less is left to send."""


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What a push did."""

    run: str
    url: str
    """Which `sentinel sql` and `sentinel.open` take."""
    last_step: int
    """That is published there; -1: no step is."""
    files: int
    """That were sent."""
    bytes: int
    """Of these."""
    deleted: int
    """Files that were retired long ago, and are gone now."""


def push(run_dir: Path, remote: RemoteRun, clock: Callable[[], float] = time.time) -> Pushed:
    """Have what is published of a run's history published in a store too.

    Files that are not named any more stay for `GRACE_S` there, as they do here. StoreError where the run has no history,
    another history lies there or a newer state of this one, or the store refuses.
    """
    if remote.folder.local_path is not None and remote.folder.local_path.resolve() == (run_dir / FOLDER).resolve():
        raise ConfigError(f"{remote.url}: expected another place than the run's own directory")
    num_files = num_bytes = 0
    for _ in range(MOST_ANEW):
        manifest = read_manifest(run_dir / FOLDER)
        if not (run_dir / FOLDER / MANIFEST).is_file():
            raise StoreError(
                f"{run_dir}: expected a run with a history, there is none in {run_dir / FOLDER}; the daemon writes it "
                "unless its configuration says history: {enabled: false}"
            )
        there = _claimed(remote, manifest)
        sizes = remote.folder.sizes()
        try:
            for name, size in _lacking(run_dir / FOLDER, manifest, there, sizes):
                remote.folder.put(run_dir / FOLDER / name, name)
                num_files, num_bytes = num_files + 1, num_bytes + size
        except (FileNotFoundError, FileVanished) as error:
            if read_manifest(run_dir / FOLDER) != manifest:
                continue  # Merged into others, whose time was over before all was sent.
            raise StoreError(f"{run_dir / FOLDER}: a file that the manifest names is not there: {error}") from error
        deleted = _publish(remote, manifest, there, sizes, clock())
        last = max((one.last_step for one in manifest.of("steps")), default=-1)
        return Pushed(
            run=run_dir.name, url=remote.url, last_step=last, files=num_files, bytes=num_bytes, deleted=deleted
        )  # fmt: skip
    raise StoreError(f"{run_dir}: its files are merged faster than they are sent to {remote.url}; push again later")


def _claimed(remote: RemoteRun, manifest: Manifest) -> Manifest:
    """Return what is published there. Where nothing is, an empty history of this id is: what a push that is killed leaves
    is known by it as this history's."""
    try:
        there = remote.manifest()
    except StoreError as error:
        if not isinstance(error.__cause__, FileVanished):
            raise
        there = Manifest(id=manifest.id)
        remote.folder.replace(MANIFEST, msgspec.json.encode(there))
    known = {one.name: one for one in there.files}
    is_other = there.id != manifest.id if there.id and manifest.id else False
    if is_other or any(known.get(one.name, one) != one for one in manifest.files):
        raise StoreError(
            f"{remote.url}: expected nothing there, or the history of this run, found that of another one; push to another "
            "URL, or delete what is there"
        )
    if there.decision > manifest.decision:
        raise StoreError(
            f"{remote.url}: expected an older state of this history, found a newer one (decision {there.decision}, here "
            f"{manifest.decision}); what is here is a copy that did not go on"
        )
    return there


def _lacking(folder: Path, manifest: Manifest, there: Manifest, sizes: dict[str, int]) -> list[tuple[str, int]]:
    """Return (name, bytes) of the files that are not there whole. FileNotFoundError where one is not here either."""
    named = {there.series, *(one.name for one in there.files)} & sizes.keys()
    wanted = {one.name: one.bytes for one in manifest.files if one.name not in named}
    if manifest.series and manifest.series not in named:
        wanted[manifest.series] = (folder / manifest.series).stat().st_size
    # Without an id nobody knows whose what is left of a push is.
    is_known = bool(manifest.id)
    return [(name, size) for name, size in wanted.items() if not is_known or sizes.get(name) != size]


def _publish(remote: RemoteRun, manifest: Manifest, there: Manifest, sizes: dict[str, int], now: float) -> int:
    """Replace the manifest there; return how many files were deleted whose time is over."""
    named = {manifest.series, *(one.name for one in manifest.files)}
    # What an earlier push sent and never named is deleted in its time too: another push may be at work.
    retired = {name: now for name in sizes if name.endswith(".parquet") and name not in named}
    retired |= {one.name: one.at for one in there.retired if one.name not in named}
    over = [name for name, at in retired.items() if not 0 <= now - at < GRACE_S]
    for name in over:
        if name in sizes:
            remote.folder.delete(name)
    stays = tuple(Retired(name, at) for name, at in retired.items() if name not in over)
    published = msgspec.structs.replace(manifest, retired=stays)
    if published != there:
        remote.folder.replace(MANIFEST, msgspec.json.encode(published))
    return len(over)
