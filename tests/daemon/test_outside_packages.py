"""What other packages offer in vain is named in the log, beside whatever the daemon does."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import pytest

from sentinel.daemon import outside_packages
from sentinel.daemon.outside_packages import OutsidePackages


def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: str, body: str = "") -> None:
    """Lay down a package `offered` whose module `offered_part` has this body."""
    info = tmp_path / "offered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "offered_part.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    packages = OutsidePackages()
    with caplog.at_level(logging.WARNING, "sentinel.daemon"):
        packages.start()
        packages.close()
    return [record.getMessage() for record in caplog.records]


def test_where_no_package_offers_anything_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.entry_points.installed", lambda group: [])
    before = threading.active_count()

    packages = OutsidePackages()
    packages.start()

    assert threading.active_count() == before
    packages.close()


@pytest.mark.slow
def test_a_detector_and_a_sink_that_cannot_be_loaded_are_named_and_one_that_can_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = "[sentinel.detectors]\nGood = offered_part:Good\nBad = offered_part:Bad\n[sentinel.sinks]\nbad = nowhere:Sink\n"
    offer(tmp_path, monkeypatch, points, "Good = 1")
    monkeypatch.setattr(outside_packages, "LAST_WAIT_S", 60.0)

    (detector, sink) = said(caplog)

    ends = "it is left out, mend or uninstall the package that offers it"
    assert detector.startswith('entry point "Bad" of sentinel.detectors (offered_part:Bad, package "offered") cannot be')
    assert sink.startswith('entry point "bad" of sentinel.sinks (nowhere:Sink, package "offered") cannot be loaded: Module')
    assert detector.endswith(ends) and sink.endswith(ends)
    assert "offered_part" not in sys.modules


def test_a_name_of_our_own_is_taken_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(tmp_path, monkeypatch, "[sentinel.detectors]\nDeadTensor = offered_part:Dead\n")

    (line,) = said(caplog)

    assert "takes the name of one of Sentinel's own; it is left out" in line


@pytest.mark.slow
def test_an_import_that_outlasts_the_daemon_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(
        tmp_path, monkeypatch, "[sentinel.detectors]\nSlow = offered_part:Slow\n", "import time\ntime.sleep(3.0)\nSlow = 1"
    )
    monkeypatch.setattr(outside_packages, "LAST_WAIT_S", 0.1)

    (line,) = said(caplog)

    assert line.startswith('entry point "Slow" of sentinel.detectors') and "its import has not ended" in line
