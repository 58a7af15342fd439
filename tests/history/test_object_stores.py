"""Histories in an object store: as on a disk, whatever ends a push, and no more of them is fetched than is asked for."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sentinel
from sentinel.errors import ConfigError, SentinelError, StoreError
from sentinel.history import remote_files
from sentinel.history.config import HistoryConfig
from sentinel.history.manifest import GRACE_S, MANIFEST, Manifest, decoded_manifest, read_manifest
from sentinel.history.opened_runs import OpenedRuns
from sentinel.history.push import push
from sentinel.history.questions import answered, asking
from sentinel.history.remote_run import RemoteRun
from sentinel.history.store_folder import StoreFolder
from sentinel.history.vector_rows import MeasuredVector
from sentinel.store.journal import Journal

from ..support.anomalies import a_nan, an_excursion
from ..support.merged_steps import FlatLayout, merged_step
from ..support.object_store import ACCOUNT_KEY, ObjectStore, azure_object_store, google_object_store, object_store
from ..support.waiting import wait_for
from .test_found_rows import commit
from .test_vector_rows import LAYOUT, histogram
from .test_writer import writing

pytestmark = pytest.mark.slow

KEPT = HistoryConfig(enabled=True, flush_s=0.05, full_steps=100, around_steps=3)
NAME = "layers.0.weight"
VIEWS = (
    "moments", "moments_16", "moments_256", "moments_4096", "scalars", "vectors", "steps", "series", "anomalies",
    "incidents", "commands",
)  # fmt: skip
NOW = 1e9


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as one:
        yield one


@pytest.fixture
def google_store() -> Iterator[None]:
    with google_object_store():
        yield


@pytest.fixture(scope="module")
def azure_store() -> Iterator[str]:
    with azure_object_store() as found:
        yield found


@pytest.fixture
def bucket(store: ObjectStore) -> Iterator[ObjectStore]:
    """The store with nothing in its bucket."""
    yield store
    for one in store.client.list_objects_v2(Bucket="bucket").get("Contents", []):
        store.client.delete_object(Bucket="bucket", Key=one["Key"])


def write(run: Path, first: int, last: int) -> None:
    """Write steps of a run with a NaN, an infinite loss, histograms, and what was found, at most 20 steps to a file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Journal(Path(folder) / "journal.sqlite")) as journal:
        commit(journal, a_nan(step=9, id="a"), an_excursion(step=5, id="b"), revisions=3)
        with writing(run, KEPT, journal=journal.path, clock=lambda: NOW) as one:
            for seq in range(first, last + 1):
                loss = {4: math.nan, 6: math.inf}.get(seq, 1.0 + seq)
                step = merged_step(LAYOUT, seq, num_nan=7 if seq == 20 else 0, loss=loss)
                one.take(step, [MeasuredVector(step, 0, histogram(0, seq, 2))] if seq % 20 == 0 else [])
                if seq % 20 == 0 or seq == last:
                    one.flush()
                    wait_for(lambda seq=seq: one.decision >= seq, interval_s=0.001)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 240 steps; nobody changes it."""
    run = tmp_path_factory.mktemp("runs") / "run"
    write(run, 1, 240)
    return run


@pytest.fixture(scope="module")
def grown(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, 100 steps later: some of its files are merged into others."""
    run = tmp_path_factory.mktemp("grown") / "run"
    shutil.copytree(written, run)
    write(run, 241, 340)
    assert read_manifest(run / "history").retired
    return run


def pushed(run: Path, url: str = "s3://bucket/runs", now: float = NOW) -> RemoteRun:
    remote = RemoteRun(f"{url}/{run.name}")
    push(run, remote, lambda: now)
    return remote


def everything(*places: Path | str) -> dict[str, Any]:
    """Return what runs answer to each view, as Arrow tables."""
    with asking(sentinel.open(*places).places) as connection:
        return {view: answered(connection, f"SELECT * FROM {view} ORDER BY ALL") for view in VIEWS}


@pytest.mark.parametrize("url", ["file://{there}", "memory://runs", "gs://bucket/runs", "abfs://bucket/runs"])
def test_views_of_any_store_are_those_of_the_disk(
    written: Path, grown: Path, url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if (name := {"gs": "google_store", "abfs": "azure_store"}.get(url.partition(":")[0])) is not None:
        request.getfixturevalue(name)
    for run in (written, grown):
        remote = pushed(run, url.format(there=tmp_path))

        assert everything(remote.url) == everything(run)


def test_answers_of_a_store_are_those_of_the_disk(bucket: ObjectStore, written: Path) -> None:
    remote = pushed(written)

    assert everything(remote.url) == everything(written)
    here, there = sentinel.open(written), sentinel.open(f"{remote.url}/")
    asked: list[Callable[[OpenedRuns], Any]] = [
        lambda run: run.series("*"), lambda run: run.series(NAME, "rms", points=None), lambda run: run.series("loss"),
        lambda run: run.tensors(), lambda run: run.scalars(),
    ]  # fmt: skip
    for ask in asked:
        assert ask(there).to_arrow().equals(ask(here).to_arrow()) and len(ask(here))
    assert [one["value"] for one in there.sql("SELECT value FROM scalars WHERE step IN (3, 5)")] == [None, None]
    assert "steps 0 to 239" in repr(there)


def test_what_was_found_is_read_from_the_history(bucket: ObjectStore, written: Path) -> None:
    there = sentinel.open(pushed(written).url)

    assert [(one["step"], one["id"]) for one in there.anomalies()] == [(5, "b"), (9, "a")]
    assert there.anomalies(severity="critical")["id"] == ["a"]
    assert [(one["id"], one["revision"]) for one in there.incidents()] == [("i1", 3)]
    assert [(one["step"], one["bin"], one["count"]) for one in there.histogram(NAME)] == [(239, 0, 240), (239, 1, 2)]
    assert there.histogram("layers.*", step=219)["count"] == [220, 2]
    with pytest.raises(ConfigError, match=r"s3://bucket/runs/run.*has none at step 7; near it: "):
        there.histogram(NAME, step=7)
    with pytest.raises(ConfigError, match=f'none is of a tensor "layers.0.wieght"; nearest: "{NAME}"'):
        there.histogram("layers.0.wieght")
    assert "i1" in repr(there)


def test_a_run_in_a_store_and_one_on_a_disk_are_asked_together(bucket: ObjectStore, written: Path, tmp_path: Path) -> None:
    remote = pushed(written)
    shutil.copytree(written, tmp_path / "other")

    both = sentinel.open(remote.url, tmp_path / "other").sql("SELECT run, count(*) n FROM moments GROUP BY 1 ORDER BY 1")

    (other, run) = both
    assert (other["run"], run["run"]) == ("other", "run") and other["n"] == run["n"] > 0
    with pytest.raises(ConfigError, match='two runs are called "run"'):
        sentinel.open(remote.url, written)


def test_a_question_for_one_series_fetches_few_files_and_little_of_them(
    bucket: ObjectStore, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of a test are small: as large ones they are read in ranges.
    monkeypatch.setattr(remote_files, "WHOLE_BYTES", 0)
    remote = pushed(written)
    manifest = remote.manifest()
    bucket.requests.clear()

    with asking({"run": remote}) as connection:
        assert len(answered(connection, f"SELECT step, std FROM moments WHERE name = '{NAME}' AND step >= 230")) == 10

    fetched = {one.path.rpartition("/")[2]: 0 for one in bucket.requests}
    for one in bucket.requests:
        fetched[one.path.rpartition("/")[2]] += one.num_bytes
    assert {one.method for one in bucket.requests} == {"GET"}
    first_of_each = {manifest.of(one.table)[0].name for one in manifest.files}
    touched = fetched.keys() - {MANIFEST, manifest.series} - first_of_each
    assert touched <= {one.name for one in manifest.of("moments")}
    assert len(fetched) < len(manifest.files)


def test_what_every_question_opens_first_is_asked_of_the_store_at_once(
    bucket: ObjectStore, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = pushed(written)
    manifest = remote.manifest()
    firsts = {(one.table, one.table == "moments" and one.level == 0) for one in manifest.files}
    # None of them is answered before all are asked for.
    together = threading.Barrier(1 + len(firsts), timeout=120.0)
    is_opening = True

    def waiting(real: Callable[..., bytes]) -> Callable[..., bytes]:
        def read(self: StoreFolder, name: str, *bounds: int) -> bytes:
            if is_opening and name != MANIFEST:
                together.wait()
            return real(self, name, *bounds)

        return read

    for name in ("read", "read_range"):
        monkeypatch.setattr(StoreFolder, name, waiting(getattr(StoreFolder, name)))
    bucket.requests.clear()

    with asking({"run": remote}) as connection:
        is_opening = False
        num_opening = len(bucket.requests)
        assert answered(connection, "SELECT count(*) AS n FROM series")["n"].to_pylist() == [len(LAYOUT.tensors) + 1]

    assert num_opening == 2 + len(firsts) == len(bucket.requests), "the manifest, then all others together"


def test_of_a_large_file_only_the_columns_of_a_question_are_fetched(bucket: ObjectStore, tmp_path: Path) -> None:
    with writing(tmp_path / "wide", HistoryConfig(enabled=True, flush_s=60.0)) as one:
        for seq in range(1, 41):
            one.take(merged_step(FlatLayout(500), seq))
    remote = pushed(tmp_path / "wide")
    (moments,) = remote.manifest().of("moments")
    assert moments.bytes > 2 * remote_files.WHOLE_BYTES
    bucket.requests.clear()

    opened = sentinel.open(remote.url)
    assert len(opened.sql(f"SELECT step, std FROM moments WHERE name = '{NAME}'")) == 40

    ranges = [one.num_bytes for one in bucket.requests if one.path.endswith(moments.name)]
    assert 0 < sum(ranges) < 0.4 * moments.bytes and len(ranges) <= 4, (ranges, moments.bytes)


def test_a_second_push_sends_what_is_new_and_deletes_in_its_time(bucket: ObjectStore, written: Path, grown: Path) -> None:
    remote = pushed(written)
    before = remote.folder.sizes().keys()
    again = push(written, remote, lambda: NOW + 1)
    assert (again.files, again.bytes, again.deleted) == (0, 0, 0)
    named = {one.name for one in read_manifest(grown / "history").files}

    later = push(grown, remote, lambda: NOW + 2)

    gone = before - named - {MANIFEST, read_manifest(grown / "history").series}
    assert gone and later.files == len(named - before) and later.deleted == 0 and later.last_step == 339
    assert gone <= remote.folder.sizes().keys(), "who has the former manifest reads them still"
    assert everything(remote.url) == everything(grown)
    assert push(grown, remote, lambda: NOW + GRACE_S).deleted == 0
    assert push(grown, remote, lambda: NOW + 2 + GRACE_S).deleted == len(gone)
    assert not gone & remote.folder.sizes().keys()
    assert everything(remote.url) == everything(grown)


class Killed(BaseException):
    """In the place of a signal: nothing catches it."""


def test_whatever_kills_a_push_a_reader_has_one_state_and_the_next_push_goes_on(
    bucket: ObjectStore, written: Path, grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[int] = []
    num_done = 0
    fuse = math.inf

    def fused(name: str) -> Callable[..., None]:
        real = getattr(StoreFolder, name)

        def call(*arguments: Any) -> None:
            nonlocal num_done
            if num_done >= fuse:
                raise Killed
            num_done += 1
            real(*arguments)

        return call

    for name in ("put", "replace", "delete"):
        monkeypatch.setattr(StoreFolder, name, fused(name))
    remote = RemoteRun("s3://bucket/runs/run")
    for run, now in ((written, NOW), (grown, NOW + 1), (grown, NOW + 2 + GRACE_S)):
        # Killed before its first operation, then behind each that it does: each goes on from there.
        for at in range(100):
            num_done, fuse = 0, min(at, 1)
            with contextlib.suppress(Killed):
                push(run, remote, lambda now=now: now)
                fuse = math.inf
            sizes = remote.folder.sizes()
            if MANIFEST in sizes:
                manifest = remote.manifest()
                assert all(sizes[one.name] == one.bytes for one in manifest.files)
                states.append(sum(one.rows for one in manifest.of("steps")))
            if fuse == math.inf:
                break
        assert fuse == math.inf

    assert list(dict.fromkeys(states)) == [0, 240, 340] and states.count(0) > 5 < states.count(240)
    assert everything(remote.url) == everything(grown)
    names = {MANIFEST, read_manifest(grown / "history").series, *(one.name for one in remote.manifest().files)}
    assert remote.folder.sizes().keys() == names


def test_a_file_that_went_since_is_looked_for_in_the_manifest_that_is_there_now(
    bucket: ObjectStore, written: Path, grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = pushed(written)
    former = remote.manifest()
    pushed(grown, now=NOW + 1)
    pushed(grown, now=NOW + 2 + GRACE_S)
    given: list[Manifest] = [former, former]
    real = RemoteRun.manifest
    monkeypatch.setattr(RemoteRun, "manifest", lambda self: given.pop() if given else real(self))
    opened = sentinel.open(remote.url)

    given[:] = [former]
    assert len(opened.sql("FROM moments")) == len(sentinel.open(grown).sql("FROM moments"))
    given[:] = [former, former]
    with pytest.raises(StoreError, match=r"it is not there.*the manifest there names it"):
        opened.sql("FROM moments")


def test_the_history_of_another_run_is_not_written_over(
    bucket: ObjectStore, written: Path, grown: Path, tmp_path: Path
) -> None:
    remote = pushed(grown)
    there = everything(remote.url)
    write(tmp_path / "run", 1, 40)

    with pytest.raises(StoreError, match="found that of another one"):
        push(tmp_path / "run", remote)
    with pytest.raises(StoreError, match="found a newer one"):
        push(written, remote)
    with pytest.raises(StoreError, match="expected a run with a history"):
        push(tmp_path, RemoteRun("s3://bucket/runs/empty"))
    with pytest.raises(ConfigError, match="another place than the run's own directory"):
        push(written, RemoteRun(f"file://{written}"))
    assert everything(remote.url) == there


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://nobody/runs/run", r"s3://nobody/runs/run.*there is no such bucket"),
        ("s3://bucket/runs/none", r"expected a run with a history, there is no history/manifest.json.*history push"),
        ("s3://AKIA:hunter2@bucket/run", r"s3://\*\*\*@bucket/run: expected a URL without credentials"),
        ("https://host/run?X-Amz-Signature=hunter2", r"https://host/run\?\*\*\*: expected a URL without credentials"),
        ("simplecache::s3://bucket/run", "expected the URL of one store"),
        ("s4://bucket/run", "s4.*known are s3, gs, abfs"),
        ("oci://bucket/run", "pip install 'the package that fsspec wants for \"oci\"'"),
    ],
)
def test_an_error_says_what_is_wrong_and_no_secret(store: ObjectStore, url: str, words: str) -> None:
    with pytest.raises(SentinelError, match=words) as told:
        sentinel.open(url).sql("FROM steps")

    assert "hunter2" not in str(told.value) and "wJalrXUt" not in str(told.value)


def test_who_may_not_read_is_told_so(bucket: ObjectStore, written: Path) -> None:
    remote = pushed(written)

    with bucket.refusing():
        with pytest.raises(StoreError, match=r"s3://bucket/runs/run/history: no right to read manifest.json") as told:
            sentinel.open(remote.url).series("loss")
        with pytest.raises(StoreError, match="no right to"):
            push(written, remote)

    assert "AKIAKEY" not in str(told.value) and "wJalrXUt" not in str(told.value)


def test_azure_s_store_deletes_in_time_and_knows_a_container_by_its_account(
    azure_store: str, written: Path, grown: Path
) -> None:
    for now in (NOW, NOW + 1, NOW + 2 + GRACE_S):
        remote = pushed(grown if now > NOW else written, "abfs://bucket/kept", now)

    named = {one.name for one in read_manifest(grown / "history").files}
    assert remote.folder.sizes().keys() == named | {MANIFEST, read_manifest(grown / "history").series}
    account = "abfss://bucket@devstoreaccount1.dfs.core.windows.net"
    assert everything(f"{account}/kept/run") == everything(grown)
    with pytest.raises(StoreError, match=r"abfs://nobody/runs/run.*there is no such bucket"):
        sentinel.open("abfs://nobody/runs/run").sql("FROM steps")


def test_azure_s_store_says_who_may_not_read_or_write_in_words_and_no_key(
    azure_store: str, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = pushed(written, "abfs://bucket/closed")
    another = ACCOUNT_KEY.replace("Eby8", "Eby9")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_store.replace(ACCOUNT_KEY, another))
    folder, said = StoreFolder(remote.url), ""

    for ask, words in (
        (lambda: sentinel.open(remote.url).series("loss"), "no right to read manifest.json"),
        (lambda: push(written, RemoteRun(remote.url)), "no right to read manifest.json"),
        (lambda: folder.replace("x", b"x"), "no right to write x"),
        (lambda: folder.delete("x"), "no right to delete x"),
        (folder.sizes, "no right to list"),
    ):
        with pytest.raises(StoreError, match=words) as told:
            ask()
        said += str(told.value)
    assert "as in AZURE_STORAGE_CONNECTION_STRING" in said and "Eby" not in said

    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    with pytest.raises(ConfigError, match=r"client does not start.*as in AZURE_STORAGE_CONNECTION_STRING"):
        StoreFolder(remote.url)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)

    with pytest.raises(ConfigError, match="pip install 'adlfs'"):
        StoreFolder("az://bucket/run")  # What fsspec has imported once it keeps, by scheme.


def test_a_query_reaches_no_other_object_and_writes_none(bucket: ObjectStore, written: Path) -> None:
    import duckdb

    remote = pushed(written)
    bucket.client.put_object(Bucket="bucket", Key="runs/run/history/secret.parquet", Body=b"x")
    before = remote.folder.sizes()
    (moments, *_) = remote.manifest().of("moments")

    with asking({"run": remote}) as connection:
        for path in ("sentinel://0/secret.parquet", "sentinel://0/*.parquet", "s3://bucket/runs/run/history/secret.parquet"):
            with pytest.raises(duckdb.Error):
                connection.execute(f"FROM read_parquet('{path}')")
        with pytest.raises(duckdb.Error):
            connection.execute(f"COPY (SELECT 1) TO 'sentinel://0/{moments.name}' (FORMAT parquet)")

    assert remote.folder.sizes() == before


def test_a_manifest_leads_out_of_no_folder(tmp_path: Path) -> None:
    for manifest in (b'{"series": "../x"}', b'{"retired": [{"name": "../x", "at": 1.0}]}'):
        with pytest.raises(StoreError, match="expected names of files"):
            decoded_manifest(manifest, "there")
    assert msgspec.json.decode(msgspec.json.encode(Manifest(id="a")), type=Manifest).id == "a"
