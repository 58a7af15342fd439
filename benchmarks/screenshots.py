"""Renews the pictures of the page in the docs: of runs that nobody trained, through the Chromium of the system.

    python benchmarks/screenshots.py [--out docs/images] [--only WORD]

The runs: a model with a loss spike, an activation 300 times as large, a restart and a NaN; another on its data that parts
from it; a mixture of experts under 1F1B; and one whose ranks trace attention. All is drawn from fixed seeds: pictures
differ from one time to the next in ages and in the names of incidents alone. `--only`: those with this in their names.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import msgspec
import numpy as np
from page_answers import asked, served, until
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from sentinel.daemon.http.tokens import load_tokens
from sentinel.dump import HEAD_KEY
from sentinel.messages import Heartbeat
from sentinel.tensor_file import write_tensors
from sentinel.testing import BlowUp, LossJump, Nan
from sentinel.trace import Compressor, TracedTensor, TraceHead, ring_dir, step_path
from tests.support.expert_run import expert_run, write_with_vectors
from tests.support.serving import small_run

DENSE, OTHER, EXPERTS, TRACED = "llama-7b", "mistral-7b", "moe-1f1b", "copy-task"
STEPS, SPIKE, BLOWN, RESTARTED, BAD = 300, 115, 165, 210, 250
EXPERT_STEPS, EXPERT_BAD = 60, 45
HEADS, TOKENS, TRACED_STEPS = 4, 40, 60
WIDE, PHONE = (1100, 800), (390, 844)

UNHURRIED = {
    "sentinel.ingest.liveness.MAX_LOOK_S": 0.0,
    "sentinel.daemon.live_ranks.LIVE_S": float("inf"),
    "sentinel.daemon.history_api.WAIT_S": 120.0,
    "sentinel.daemon.pipeline_api.READ_S": 120.0,
    "sentinel.daemon.what_if_process.LIMIT_S": 540.0,
}
"""Limits of the daemon that a slow machine would show in the pictures: ranks that fell silent, answers that were cut off."""


class Shot(NamedTuple):
    """One picture."""

    name: str
    path: str
    shown: str
    """What is there once all of it is drawn."""
    height: int
    """Most pixels of it."""
    act: Callable[[Page], object] = lambda page: None
    size: tuple[int, int] = WIDE
    is_dark: bool = False


def write_runs(runs: Path) -> None:
    """Write all runs."""
    for name, faults in (
        (DENSE, (LossJump(step=SPIKE), BlowUp(step=BLOWN, module="layers.6.mlp", factor=300.0, in_gradients=0.5),
                 Nan(step=BAD, module="layers.8.attn"))),
        (OTHER, (BlowUp(step=80, module="layers.3.mlp", factor=3.0, in_gradients=0.5),)),
    ):  # fmt: skip
        source = small_run(runs / name, layers=10)
        source.plant(*faults)
        source.write(RESTARTED)
        if name == DENSE:
            source.report(0, Heartbeat(step=RESTARTED - 1, call_id=0, activity="checkpoint"))
            source.restart(RESTARTED, attempt=1)
        source.write(STEPS - RESTARTED)
    experts = expert_run(runs / EXPERTS, pp=4, dp=2, micro_steps=6, per_micro_step=True, schedule="1f1b")
    experts.plant(Nan(step=EXPERT_BAD, module="layers.2.attn", micro_step=2))
    write_with_vectors(experts, EXPERT_STEPS)
    small_run(runs / TRACED).write(TRACED_STEPS)
    for rank in range(2):
        write_attention(runs / TRACED, rank)
    for one in runs.iterdir():
        one.chmod(0o700)


def write_attention(run_dir: Path, rank: int) -> None:
    """Write what each query of some heads attends to, as one learns to copy what it was given half of the tokens before."""
    shape = (HEADS, TOKENS, TOKENS)
    about = TracedTensor(
        kind="attention", name="layers.0.attn:scores", micro_step=0, shape=shape, dtype="float32",
        compressor=Compressor(name="tile"),
    )  # fmt: skip
    rng = np.random.default_rng(rank)
    query, key = np.mgrid[:TOKENS, :TOKENS]
    noise = rng.standard_normal(shape)
    for step in range(TRACED_STEPS):
        learned = 7.0 * step / TRACED_STEPS
        logits = noise + learned * ((key == query - TOKENS // 2) | ((key == query) & (query < TOKENS // 2)))
        weights = np.where(key <= query, np.exp(logits), 0.0)
        weights /= weights.sum(axis=-1, keepdims=True)
        head = TraceHead(run=run_dir.name, attempt=0, rank=rank, step=step, time=time.time(), tensors={"a": about})
        metadata = {"format": "pt", HEAD_KEY: msgspec.json.encode(head).decode()}
        folder = ring_dir(run_dir, 0, rank)
        write_tensors(step_path(folder, step), {"a": ("F32", shape, weights.astype("<f4").tobytes())}, metadata)


def shots(address: str, token: str) -> Sequence[Shot]:
    """Return what is drawn."""
    born = {
        run: next(one["id"] for one in asked(address, f"incidents?run={run}")["incidents"] if "born" in one["title"])
        for run in (DENSE, EXPERTS)
    }
    way = f"/#/runs/{EXPERTS}/pipeline?incident={born[EXPERTS]}"

    def walk(page: Page) -> None:
        for _ in range(12):
            page.locator(".pipeline canvas").press("ArrowRight")

    def trace(page: Page) -> None:
        page.get_by_label("token", exact=True).fill(token)
        page.get_by_role("textbox", name="ranks").wait_for()
        page.get_by_role("textbox", name="ranks").fill("0-1")
        page.get_by_role("textbox", name="ranks").press("Enter")
        page.get_by_role("heading", name="Rank 1").wait_for()

    def open_tensor(page: Page) -> None:
        page.locator("tbody button.plain").first.click()
        page.locator("figure.plot canvas").first.wait_for()

    first = "figure.plot canvas"
    return (
        Shot("page-overview", "/", "table.runs tbody tr", 800),
        Shot("page-run", f"/#/runs/{DENSE}", "ul.incidents li", 1600, lambda page: page.locator(first).nth(3).wait_for()),
        Shot("page-tensors", f"/#/runs/{TRACED}/tensors", "form.acts", 1000, trace),
        Shot("page-compare", f"/#/compare?a={DENSE}&b={OTHER}", "text=They diverge at", 920),
        Shot("page-layers", f"/#/runs/{DENSE}/layers?kind=activation", "tbody button.plain", 1500, open_tensor),
        Shot("page-pipeline", way, ".pipeline canvas", 800, walk),
        Shot("page-experts", f"/#/runs/{EXPERTS}/experts", first, 800),
        Shot("page-incident", f"/#/incidents/{born[DENSE]}?run={DENSE}", first, 1400),
        Shot("page-search", "/#/search?q=attn", "ul.tensors li", 800),
        Shot(
            "page-phone-dark",
            f"/#/runs/{DENSE}",
            first,
            2000,
            lambda page: page.locator(first).nth(3).wait_for(),
            PHONE,
            True,
        ),
        # Last, for it takes as long as the run is judged again.
        Shot("page-rules", f"/#/runs/{DENSE}/rules?rule=loss-spike&n.k=1000", "text=As a pack", 1600),
    )


def take(browser: Browser, address: str, shot: Shot, path: Path) -> None:
    """Draw one picture."""
    width, height = shot.size
    context = browser.new_context(
        base_url=address, viewport={"width": width, "height": height}, color_scheme="dark" if shot.is_dark else "light"
    )
    context.set_default_timeout(600_000)
    page = context.new_page()
    page.goto(shot.path)
    page.locator(shot.shown).first.wait_for()
    shot.act(page)
    page.wait_for_timeout(2_000)  # For what comes behind the first answer.
    whole = int(page.evaluate("document.documentElement.scrollHeight"))
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": min(whole, shot.height)})
    context.close()
    as_small(path)


def as_small(path: Path) -> None:
    """Write a picture with a palette of its own, which takes a third of the bytes."""
    with Image.open(path) as one:
        # By coverage: what few pixels say alone, as a NaN does, keeps its colour.
        small = one.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> None:
    """Write the runs, serve them, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "images")
    parser.add_argument("--only", default="", metavar="WORD")
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player, contextlib.ExitStack() as limits:
        for name, value in UNHURRIED.items():
            limits.enter_context(mock.patch(name, value))
        runs = Path(folder) / "runs"
        runs.mkdir(mode=0o700)
        write_runs(runs)
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=180_000)
        with served(runs) as address:
            last = {DENSE: STEPS, OTHER: STEPS, EXPERTS: EXPERT_STEPS, TRACED: TRACED_STEPS}
            until(lambda: all(asked(address, f"history?run={run}")["last_step"] == num - 1 for run, num in last.items()))
            for one in shots(address, str(load_tokens(runs / ".daemon").read)):
                if options.only in one.name:
                    take(browser, address, one, options.out / f"{one.name}.png")
                    print(one.name, flush=True)
            born = next(one["id"] for one in asked(address, f"incidents?run={DENSE}")["incidents"] if "born" in one["title"])
        if options.only in "postmortem":
            report = Path(folder) / "report.html"
            verb = [sys.executable, "-m", "sentinel.cli", "report", str(runs / DENSE), born, "-o", str(report)]
            subprocess.run(verb, check=True)
            shot = Shot("postmortem", f"file://{report}", "h1", 1500, size=(960, 800))
            take(browser, "about:blank", shot, options.out / "postmortem.png")
            print(shot.name, flush=True)
        browser.close()


if __name__ == "__main__":
    main()
