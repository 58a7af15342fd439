"""How fast the page is over large runs, and what a tab takes while a run goes on: in the Chromium of the system.

    python benchmarks/page.py [--ranks 2048] [--series 10000] [--incidents 500] [--clicks 60] [--minutes 60]
    python benchmarks/page.py --long-steps 1000000 [--long-tensors 1000] [--only WORDS] [--keep DIR]

First useful paint: from the navigation to the first paint in which a view shows what it is for, median of `--loads`. Clicks:
from the input event to the frame that was painted behind it (`event timing`, in steps of 8 ms), of every kind of control.
Memory: of a tab that shows a run which takes a step every `--step-s` seconds, its heap and its nodes after a collection of
garbage, at the beginning, on the way and at the end; 0 minutes: not measured. `--long-steps`: instead of all that, the views
of one run whose history has so many steps (`long_history.py`); `--keep`: where `history_scale.py` kept it, or it is kept.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from long_history import LongHistory
from page_answers import asked, served, until
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from sentinel.history.config import FOLDER
from tests.support.large_run import write_deep_run, write_wide_run
from tests.support.serving import judge_run, small_run

VIEWS: Sequence[tuple[str, str, str]] = (
    ("all runs", "/", "table.runs tbody tr"),
    ("one run", "/#/runs/wide", "figure.plot canvas"),
    ("pipeline", "/#/runs/wide/pipeline?incident={incident}", ".pipeline canvas"),
    ("layers x steps", "/#/runs/deep/layers?kind=activation", ".heat canvas"),
    ("an incident", "/#/incidents/{incident}?run=wide", "dl.story"),
    ("search", "/#/search?q=attn", "ul.tensors li"),
)
"""Name, address, and what is there once the view shows what it is for."""
LONG_VIEWS: Sequence[tuple[str, str, str]] = (
    ("all runs", "/", "table.runs tbody tr"),
    ("one run, its name and health", "/#/runs/many", "dl.facts dd"),
    ("one run, its first plot", "/#/runs/many", "figure.plot canvas"),
    ("layers x steps", "/#/runs/many/layers?kind=wgrad", ".heat canvas"),
    ("layers x steps, 10,000 old steps", "/#/runs/many/layers?kind=wgrad&from={first}&to={last}", ".heat canvas"),
)
WATCH = """() => {
  globalThis.took = [];
  new PerformanceObserver((list) => {
    for (const one of list.getEntries()) if (one.interactionId) globalThis.took.push([one.name, one.duration]);
  }).observe({ type: "event", durationThreshold: 16, buffered: false });
}"""
PAINTED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"


def paint_ms(browser: Browser, address: str, path: str, wanted: str) -> float:
    """Return the milliseconds until a view that was never open shows what it is for."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.goto(f"{address}{path}", wait_until="commit")
    page.locator(wanted).first.wait_for(timeout=120_000)
    took = float(page.evaluate(PAINTED))
    context.close()
    return took


def long_paints(player: Playwright, chromium: str, runs: Path, options: argparse.Namespace) -> None:
    """Print how long the views of a run of very many steps take."""
    steps, tensors = options.long_steps, options.long_tensors
    run = runs / "many"
    small_run(run, micro_steps=1).write(5)
    judge_run(run, is_over=True)
    kept = options.keep / "many" / FOLDER if options.keep else None
    if kept is None or not kept.exists():
        made = LongHistory(kept.parent if kept else run, tensors, steps)
        made.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made.write()
    if kept is not None:
        # The files are never changed, only the manifest is replaced: what was kept stays as it is.
        shutil.copytree(
            kept, run / FOLDER, copy_function=os.link if kept.stat().st_dev == run.stat().st_dev else shutil.copy2
        )
    run.chmod(0o700)
    browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    load = "/".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"a run of {steps:,} steps x {tensors:,} tensors; Chromium {browser.version}, load {load}\n")
    print("| first useful paint of | ms, median | longest |\n|---|---|---|")
    with served(runs) as address:
        until(lambda: asked(address, "history?run=many")["last_step"] == steps - 1)
        for name, path, wanted in [one for one in LONG_VIEWS if options.only in one[0]]:
            where = path.format(first=steps // 2, last=steps // 2 + 9_999)
            took = [paint_ms(browser, address, where, wanted) for _ in range(options.loads)]
            print(f"| {name} | {median(took):.0f} | {max(took):.0f} |", flush=True)
    browser.close()


def clicks_ms(browser: Browser, address: str, incident: str, num: int) -> dict[str, list[float]]:
    """Return view -> milliseconds of each interaction; what took less than 16 ms counts as 16."""
    found: dict[str, list[float]] = {}

    def play(name: str, path: str, wanted: str, act: Callable[[Page, int], object]) -> None:
        page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
        page.goto(f"{address}{path}")
        page.locator(wanted).first.wait_for(timeout=120_000)
        page.wait_for_timeout(1500)
        page.evaluate(WATCH)
        for at in range(num):
            act(page, at)
            page.wait_for_timeout(150)
        page.wait_for_timeout(500)
        took = [float(duration) for _, duration in page.evaluate("globalThis.took")]
        found[name] = [*took, *[16.0] * max(0, num - len(took))]
        page.context.close()

    def button(page: Page, at: int) -> None:
        page.get_by_role("button", name="Next" if at % 4 < 3 else "Previous", exact=True).click()

    pipeline, heat = f"/#/runs/wide/pipeline?incident={incident}", "/#/runs/deep/layers?kind=activation"
    plot, arrow = "figure.plot canvas", "ArrowRight"
    play("pipeline: next and previous", pipeline, ".pipeline canvas", button)
    play("pipeline: arrows", pipeline, ".pipeline canvas", lambda page, at: page.locator(".pipeline canvas").press(arrow))
    play("layers: arrows", heat, ".heat canvas", lambda page, at: page.locator(".heat canvas").press("ArrowDown"))
    play("layers: a tensor", heat, ".heat canvas", lambda page, at: page.locator("tbody button.plain").nth(at % 12).click())
    play("one run: zoom", "/#/runs/wide", plot, lambda page, at: page.locator(".plot .canvas").first.press("+-"[at % 2]))
    play("between views", "/#/runs/wide", "nav.tabs a", lambda page, at: page.locator("nav.tabs a").nth(at % 3).click())
    play("all runs: incidents that are over", "/", "details", lambda page, at: page.locator("details summary").first.click())
    return found


def memory(browser: Browser, address: str, minutes: float, looks: int = 12) -> list[tuple[float, float, int, int]]:
    """Return (minutes, MB of heap, nodes, step shown) of a tab that shows a run which goes on."""
    page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
    page.goto(f"{address}/#/runs/live")
    page.locator("figure.plot canvas").first.wait_for(timeout=120_000)
    page.wait_for_timeout(10_000)
    session = page.context.new_cdp_session(page)
    found = []
    begun = time.monotonic()
    for at in range(looks + 1):
        while time.monotonic() - begun < 60 * minutes * at / looks:
            page.wait_for_timeout(1000)
        session.send("HeapProfiler.collectGarbage")
        heap = session.send("Runtime.getHeapUsage")["usedSize"] / 2**20
        nodes = page.evaluate("document.querySelectorAll('*').length")
        step = int(page.locator("dl.facts dd").first.inner_text().split()[0].replace(",", ""))
        found.append(((time.monotonic() - begun) / 60, heap, nodes, step))
    page.context.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2048)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--incidents", type=int, default=500)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--clicks", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--long-steps", type=int, default=0, help="Measure a run whose history has so many. 0: the others.")
    parser.add_argument("--long-tensors", type=int, default=1000)
    parser.add_argument("--only", default="", metavar="WORDS", help="Of a long history only views with these in the name.")
    parser.add_argument("--keep", type=Path, help="Where the long history is kept.")
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(dir=options.keep) as directory, sync_playwright() as player:
        runs = Path(directory)
        runs.chmod(0o700)
        if options.long_steps:
            long_paints(player, chromium, runs, options)
            return
        write_wide_run(runs / "wide", num_ranks=options.ranks, num_scalars=options.series, num_incidents=options.incidents)
        write_deep_run(runs / "deep", num_tensors=options.series)
        live = small_run(runs / "live", micro_steps=2)
        live.write(50)
        for one in runs.iterdir():
            one.chmod(0o700)
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with served(runs) as address:
            until(lambda: asked(address, "history?run=deep")["last_step"] == 9)
            incidents = asked(address, "incidents?run=wide&limit=1000")["incidents"]
            incident = next(one["id"] for one in incidents if "born" in one["title"])
            print(
                f"{options.ranks} ranks, {options.series} values and as many tensors, {len(incidents)} incidents; Chromium "
                f"{browser.version}, {platform.machine()}, Python {platform.python_version()}\n"
            )
            print("| first useful paint of | ms, median | longest |\n|---|---|---|")
            for name, path, wanted in VIEWS:
                took = [paint_ms(browser, address, path.format(incident=incident), wanted) for _ in range(options.loads)]
                print(f"| {name} | {median(took):.0f} | {max(took):.0f} |", flush=True)
            print("\n| clicks and keys | number | ms, p50 | p95 | longest |\n|---|---|---|---|---|")
            every: list[float] = []
            for name, took in clicks_ms(browser, address, incident, options.clicks).items():
                every += took
                print(f"| {name} | {len(took)} | {_at(took, 0.5):.0f} | {_at(took, 0.95):.0f} | {max(took):.0f} |")
            print(f"| all | {len(every)} | {_at(every, 0.5):.0f} | {_at(every, 0.95):.0f} | {max(every):.0f} |", flush=True)
            if options.minutes:
                print(
                    f"\nA step every {options.step_s:g} s.\n\n| minutes | heap, MB | nodes | step shown |\n|---|---|---|---|"
                )
                is_over = threading.Event()
                writer = threading.Thread(target=_write, args=(live, options.step_s, is_over))
                writer.start()
                for minutes, heap, nodes, step in memory(browser, address, options.minutes):
                    print(f"| {minutes:.1f} | {heap:.1f} | {nodes} | {step} |", flush=True)
                is_over.set()
                writer.join()
        browser.close()


def _write(live: Any, step_s: float, is_over: threading.Event) -> None:
    while not is_over.wait(step_s):
        live.write(1)


def _at(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
