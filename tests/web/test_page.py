"""The page in a real Chromium, over runs that a daemon serves: what it shows is so, and the browser complains of nothing."""

from __future__ import annotations

import functools
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from sentinel.daemon.config import DaemonConfig
from sentinel.history.config import HistoryConfig
from sentinel.messages import Heartbeat
from sentinel.rules.language.listing import check_packs
from sentinel.testing import BlowUp, LossJump, Nan
from sentinel.testing.values import SyntheticValues

from ..daemon.test_daemon import daemon, url
from ..support.browser import Looked
from ..support.hostile_run import write_hostile_run
from ..support.serving import small_run
from ..support.waiting import wait_for
from .shown_runs import LONG_S, shown_runs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = [pytest.mark.server, pytest.mark.slow]

GOOD = "llama-7b"
STEPS = 160
SPIKE, BLOWN, BAD = 60, 90, 130
"""Steps at which the loss jumps, an activation is 300 times as large, and a NaN is born."""
AGAIN = "mistral-7b"
PARTED, RESTARTED = 40, 120
"""Steps at which the other run's activation is 3 times as large, and from which it was started anew."""
COLOURS = """(one) => {
  const copy = Object.assign(document.createElement("canvas"), { width: one.width, height: one.height });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(one, 0, 0);
  const data = context.getImageData(0, 0, one.width, one.height).data;
  const found = {};
  for (let at = 0; at < data.length; at += 4) {
    const colour = data.slice(at, at + 3).join(",");
    found[colour] = (found[colour] ?? 0) + 1;
  }
  return found;
}"""
"""How many pixels of a canvas are of each colour."""
VIEWS = {
    "/": "Open incidents",
    f"/#/runs/{GOOD}": "greatest at step 60",
    f"/#/runs/{GOOD}/layers": "in the order of the forward",
    f"/#/runs/{GOOD}/rules": "blind: ",
    f"/#/runs/{GOOD}/rules?rule=loss-spike&n.k=1000": "As a pack",
    f"/#/compare?a={GOOD}&b=mistral-7b": "They diverge at",
    "/#/runs/mistral-7b": "R restart (1)",
    "/#/search?q=attn": "Tensors",
}
"""Address of a view -> a text that stands there once it is whole."""
shown = functools.partial(wait_for, timeout_s=LONG_S, interval_s=0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs: one with three incidents that are over; one on its data with another fault and a restart; a hostile one
    whose last incident is open; one without steps."""
    directory = tmp_path_factory.mktemp("runs")
    write_hostile_run(directory / "hostile", is_skipped=False, **{"x" * 4_000: 1.0})
    small_run(directory / "no-steps")
    scalars = SyntheticValues.scalars
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SyntheticValues, "scalars", lambda self, place, step: {**scalars(self, place, step), "tokens": 4096.0 * step}
        )
        good = small_run(directory / GOOD)
        good.plant(
            LossJump(step=SPIKE),
            BlowUp(step=BLOWN, module="layers.1.mlp", factor=300.0, in_gradients=0.5),
            Nan(step=BAD, module="layers.2.attn"),
        )
        good.write(STEPS)
        again = small_run(directory / AGAIN).plant(BlowUp(step=PARTED, module="layers.1.mlp", factor=3.0, in_gradients=0.5))
        again.write(RESTARTED)
        again.report(0, Heartbeat(step=RESTARTED - 1, call_id=0, activity="checkpoint"))
        again.restart(RESTARTED, attempt=1)
        again.write(STEPS - RESTARTED)
    return directory


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """The daemon's, once all is judged and in the histories."""
    with shown_runs(runs, {GOOD: STEPS - 1, AGAIN: STEPS - 1, "hostile": 11}) as found:
        yield found


def incident_ids(address: str) -> dict[str, str]:
    """Return title -> id of the incidents of the good run."""
    with urllib.request.urlopen(f"{address}/api/v1/incidents?run={GOOD}", timeout=LONG_S) as answer:
        return {one["title"]: one["id"] for one in json.load(answer)["incidents"]}


def test_the_overview_shows_runs_with_their_loss_and_open_incidents_first(looked: Looked) -> None:
    page = looked.go("/", "Open incidents")
    page.locator("canvas.spark").nth(1).wait_for()

    page.get_by_role("row", name=re.compile("^hostile.* critical")).wait_for()
    page.get_by_role("row", name=re.compile(f"^{GOOD}.* {STEPS - 1} .*4 of 4")).wait_for()
    rows = page.locator("table.runs tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["hostile", GOOD, AGAIN, "no-steps"]
    first = page.locator("ul.incidents").first.locator("li").first.inner_text()
    assert "critical" in first and "hostile" in first
    page.get_by_text("Incidents that are over").click()
    page.get_by_role("link", name=re.compile(f"NaN born in layers.2.attn .* step {BAD}")).wait_for()


def test_a_run_shows_what_it_logs_with_incidents_on_it_and_zooms(looked: Looked) -> None:
    page = looked.go(f"/#/runs/{GOOD}", "greatest at step 60")
    plots = page.locator("figure.plot")
    loss = plots.first
    marks = loss.locator("a.mark")
    # What the daemon's memory has is drawn first; the history adds to it, and the time of steps.
    names = ["loss", "grad_norm", "lr", "step"]
    shown(lambda: [one.split()[0] for one in plots.locator("figcaption").all_inner_texts()] == names, "the plots in order")
    shown(lambda: marks.count() == 3, "marks of the incidents")
    loss.get_by_text("not finite in 1 step").wait_for()

    assert f"step {BAD}" in str(marks.last.get_attribute("title")) + str(marks.first.get_attribute("title"))

    box = loss.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 60, steps=4)
    page.mouse.up()
    page.mouse.move(5, 5)
    page.wait_for_url(re.compile(r"from=4\d&to=7\d"))
    page.get_by_text(f"of 0 to {STEPS - 1}").wait_for()
    shown(lambda: marks.count() == 1 and "greatest at step 60" in loss.inner_text(), "the jump alone")

    loss.locator(".canvas").press("0")
    page.wait_for_url(lambda address: "from=" not in address)
    page.get_by_label("log scale").click()
    page.wait_for_url(re.compile("log=1"))


def test_layers_by_steps_show_a_nan_and_a_spike_of_one_step_and_lead_to_the_tensor(looked: Looked) -> None:
    page = looked.go(f"/#/runs/{GOOD}/layers?kind=activation", "What stands out")
    first = page.locator("tbody tr").first.inner_text()
    canvas = page.locator(".heat canvas")
    colours = shown(lambda: (found := canvas.evaluate(COLOURS)).get("230,0,126", 0) > 100 and found, "the colour of NaN")

    assert first.startswith("layers.2.attn") and f"{BAD}" in first, "where the NaN was born stands first"
    assert max(colours.get(one, 0) for one in ("255,255,255", "255,254,246", "254,249,220")) > 0, "a spike goes to white"
    canvas.focus()
    for key, step in (("ArrowDown", STEPS - 1), ("ArrowLeft", STEPS - 2)):
        canvas.press(key)
        page.locator(".readout", has_text=re.compile(rf"layers.* step {step}: std [\d.]+")).wait_for()

    page.get_by_role("button", name="layers.1.mlp", exact=True).click()
    page.get_by_text("std of layers.1.mlp (activation)").wait_for()
    page.get_by_text(f"greatest at step {BLOWN}").first.wait_for()
    page.get_by_label("statistic").select_option("norm")
    page.get_by_text("norm of layers.1.mlp (activation)").wait_for()

    looked.go(page.url, "norm of layers.1.mlp (activation)")


def test_the_link_of_a_message_opens_its_incident_which_can_be_acknowledged(
    looked: Looked, runs: Path, address: str
) -> None:
    name = next(one for title, one in incident_ids(address).items() if "NaN born" in title)
    page = looked.go(f"/incidents/{name}?run={GOOD}", "CRITICAL resolved")

    story = page.locator("dl.story").inner_text()
    # One click, that on the link: module, rank, micro-step and machine stand there, and what to do.
    assert re.search(r"began with\s+layers\.2\.attn \(activation\) rank 2 micro_step 0", story)
    assert f"step {BAD}" in story and "rank 2, where it began: node0" in story and "what to do" in story
    page.get_by_text("std of layers.2.attn (activation)").wait_for()
    page.get_by_text("anomalies that followed").click()
    page.get_by_text("1 first cause").wait_for()
    with page.expect_download(timeout=LONG_S * 1000) as saved:
        page.get_by_role("link", name="post-mortem", exact=True).click()
    assert saved.value.suggested_filename == f"postmortem-{GOOD}-{name}.html"
    assert "layers.2.attn" in Path(saved.value.path()).read_text()
    page.get_by_text("values around it").click()
    page.wait_for_url(re.compile(f"runs/{GOOD}"))


def test_an_act_needs_a_token_and_is_shown_when_the_judge_has_taken_it(browser: Browser, runs: Path, address: str) -> None:
    with urllib.request.urlopen(f"{address}/api/v1/incidents?run=hostile&state=open", timeout=LONG_S) as answer:
        opened = json.load(answer)["incidents"][0]["id"]
    token = json.loads((runs / ".daemon" / "tokens.json").read_text())["silence"]
    with Looked(browser, address) as looked:
        page = looked.go(f"/incidents/{opened}?run=hostile", "Do something about it")
        page.get_by_label("your name").fill("ana")
        page.get_by_label("why", exact=True).fill("the node is drained")
        page.get_by_label("token").fill("wrong" * 5)
        page.get_by_role("button", name="Acknowledge").click()
        page.get_by_text("Not done: a token with the silence scope").wait_for()
        page.get_by_label("token").fill(token)
        page.get_by_role("button", name="Acknowledge").click()
        page.get_by_text("Acknowledged; the run's judge takes it").wait_for()
        page.get_by_text("acknowledged by ana: the node is drained", exact=True).wait_for()
        page.get_by_role("button", name="Silence for").click()
        page.get_by_text("Silenced for 2 h.").wait_for()
        page.get_by_role("link", name="Sentinel").click()
        page.get_by_text(f"incident={opened}").wait_for()

    assert len(looked.complaints) == 1 and "401" in looked.complaints[0]


def test_a_hostile_run_is_shown_with_everything_escaped_and_nothing_of_it_runs(looked: Looked, address: str) -> None:
    page = looked.go("/", "forged line")
    text = page.locator("body").inner_text()
    assert "\\u001b" in text and "<script>alert(1)</script>" in text and "\x1b" not in text and "\u202e" not in text

    page = looked.go("/#/runs/hostile", "greatest at step")
    page.get_by_text("more value").wait_for()
    page.get_by_text("not finite in").first.wait_for()
    page = looked.go("/#/runs/hostile/layers?kind=wgrad", "What stands out")
    page.get_by_text("<script>alert(1)</script>").first.wait_for()
    page.get_by_role("button", name=re.compile("forged line")).first.click()
    page.locator("figure.plot").wait_for()
    page = looked.go("/#/runs/hostile/rules", "Rules in force")
    page.get_by_text("forged line").first.wait_for()
    page = looked.go(f"/#/compare?a=hostile&b={GOOD}&series={quote('<img src=x onerror=alert(1)>')}", "Where they diverge")
    shown(lambda: page.get_by_text("it has logged no value of this name").count() == 2, "that neither run has the value")
    page = looked.go(f"/#/search?q={quote('<script>')}", "Tensors")
    page.locator("ul.tensors").get_by_role("link", name=re.compile("forged line")).first.click()
    page.get_by_text("What stands out").wait_for()
    assert page.evaluate(
        "[document.scripts.length, document.querySelectorAll('[onerror], iframe, main script').length]"
    ) == [1, 0]


def test_rules_say_what_they_said_and_a_what_if_what_would_come_and_go(looked: Looked, address: str, tmp_path: Path) -> None:
    spiked = next(one for title, one in incident_ids(address).items() if "loss" in title.lower())
    page = looked.go(f"/#/runs/{GOOD}/rules", "Rules in force")
    row = page.get_by_role("row", name=re.compile("^loss-spike"))
    assert re.search(r"critical\s+1 x\s+step 60", row.inner_text())
    assert spiked in str(row.get_by_role("link", name="step 60").get_attribute("href"))
    attention = page.get_by_role("row", name=re.compile("^attention-entropy")).inner_text()
    assert "blind: nothing of kind attention" in attention and "never" in attention
    assert "blind" not in page.get_by_role("row", name=re.compile("^loss-drift")).inner_text()

    row.get_by_role("link", name="loss-spike").click()
    k = page.get_by_role("spinbutton", name="k", exact=True)
    assert page.get_by_role("button", name="What would it have said?").is_disabled()
    k.fill("1000")
    k.press("Enter")
    page.wait_for_url(re.compile(r"rule=loss-spike&n\.k=1000"))
    page.get_by_text("0 alarms come, 1 goes, 0 stay").wait_for()
    page.get_by_text(f"over steps 0 to {STEPS - 1}").wait_for()
    gone = page.get_by_role("row", name=re.compile("^goes 60 loss")).get_by_role("link", name=spiked)
    assert gone.count() == 1
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download what-if.yaml").click()
    saved.value.save_as(tmp_path / "what-if.yaml")
    checked = check_packs([tmp_path / "what-if.yaml"])
    assert (checked.errors, checked.lint) == ((), ()) and "k: 1000" in (tmp_path / "what-if.yaml").read_text()

    page = looked.go(page.url, "0 alarms come, 1 goes, 0 stay")
    page.get_by_role("link", name="60", exact=True).click()
    page.wait_for_url(re.compile(f"runs/{GOOD}\\?from=0&to=120"))


def test_a_number_that_no_pack_may_have_is_refused_in_the_words_of_the_reader(browser: Browser, address: str) -> None:
    with Looked(browser, address) as looked:
        looked.go(f"/#/runs/{GOOD}/rules?rule=loss-spike&n.window=-1", "what-if.yaml:")
        looked.go(f"/#/runs/{GOOD}/rules?rule=loss-spike&n.domain=2", 'has no number "domain"')
        looked.go(f"/#/runs/{GOOD}/rules?rule=nobody", "No rule of this name is in force")

    assert {"400" in one for one in looked.complaints} == {True} and len(looked.complaints) == 2


def test_runs_lie_over_each_other_and_where_they_diverge_is_found_and_led_to(looked: Looked) -> None:
    page = looked.go("/", "Open incidents")
    page.get_by_role("link", name="compare them").click()
    for label, run in (("first run", GOOD), ("second run", AGAIN)):
        page.get_by_label(label).select_option(run)
    page.wait_for_url(re.compile(f"a={GOOD}&b={AGAIN}"))
    told = page.locator("section.whatif", has_text=f"{GOOD} and {AGAIN}")
    told.get_by_text(f"They diverge at step {PARTED}").wait_for()
    assert "first in layers.1.mlp activation" in told.inner_text() and "equal before, but for rounding" in told.inner_text()

    canvas = page.locator("figure.plot canvas")
    colours = shown(lambda: (one := canvas.evaluate(COLOURS)).get("179,71,0", 0) > 50 and one, "the second run's line")
    assert colours.get("31,111,235", 0) > 50
    assert page.get_by_label("by", exact=True).locator("option").all_inner_texts() == [
        "step", "tokens", "time since its first step",
    ]  # fmt: skip
    page.get_by_label("by", exact=True).select_option("tokens")
    page.get_by_text("loss over tokens").wait_for()
    shown(lambda: canvas.evaluate(COLOURS).get("179,71,0", 0) > 50, "the second run's line, by tokens")
    page.get_by_label("by", exact=True).select_option("time")
    page.wait_for_url(re.compile("by=time"))
    page.get_by_label("value", exact=True).select_option("grad_norm")
    page.get_by_text("grad_norm over time since its first step").wait_for()
    shown(lambda: canvas.evaluate(COLOURS).get("179,71,0", 0) > 50, "the second run's line, by time")

    told.get_by_role("link", name="layers.1.mlp", exact=True).click()
    page.wait_for_url(re.compile(f"runs/{AGAIN}/layers.*from=0&to=100"))
    page.get_by_text("std of layers.1.mlp (activation)").wait_for()
    looked.go(f"/#/compare?a={GOOD}&b={GOOD}", "Choose two different runs")
    page = looked.go(f"/#/compare?a={GOOD}&b=hostile&by=tokens", "over step")
    page.get_by_text("only one has").wait_for()
    options = page.get_by_label("by", exact=True).locator("option").all_inner_texts()
    assert options == ["step", "time since its first step"], "one of them has recorded no tokens"


def test_a_tensor_of_two_runs_is_drawn_by_its_name(looked: Looked) -> None:
    page = looked.go(f"/#/compare?a={GOOD}&b={AGAIN}&kind=activation", "Type the name of a tensor")
    box = page.get_by_label("tensor", exact=True)
    box.fill("layers.1.mlp")
    box.press("Enter")
    page.get_by_text("std of layers.1.mlp (activation) over step").wait_for()
    shown(lambda: page.locator("figure.plot").inner_text().count("last 0") == 2, "both lines")


def test_restarts_and_checkpoints_are_marked_on_the_plots_and_reached_by_keyboard(looked: Looked) -> None:
    page = looked.go(f"/#/runs/{AGAIN}", "R restart (1), C checkpoint (1)")
    loss = page.locator("figure.plot").first
    marks = loss.locator("button.event")
    shown(lambda: marks.count() == 1, "one mark, for the two lie over each other")
    words = str(marks.first.get_attribute("aria-label"))
    assert f"step {RESTARTED - 1}: a checkpoint is written" in words
    assert f"step {RESTARTED}: attempt 1 begins, with the state of a checkpoint behind step {RESTARTED - 1}" in words
    marks.first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(f"from={RESTARTED - 51}&to={STEPS - 1}"))
    tab_stops = [one.get_attribute("tabindex") for one in page.locator("button.event").all()]
    assert tab_stops.count("0") == 1 < len(tab_stops)
    assert looked.go(f"/#/runs/{GOOD}", "greatest at step 60").locator("button.event").count() == 0, "nothing happened there"


def test_a_run_without_steps_says_so(looked: Looked) -> None:
    looked.go("/#/runs/no-steps", "No step of this run has been judged")
    looked.go("/#/runs/no-steps/layers", "holds no tensor yet")
    looked.go("/#/runs/no-steps/rules", "judged 0 steps")


def test_a_run_without_a_history_shows_what_is_in_memory_and_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    small_run(tmp_path / "plain").write(30)
    config = DaemonConfig(history=HistoryConfig(enabled=False))
    with daemon(tmp_path, config=config) as one, Looked(browser, url(tmp_path)) as looked:
        shown(one.api.is_ready, "the daemon")
        page = looked.go("/#/runs/plain", "history: {enabled: false}")
        page.locator("figure.plot").first.get_by_text("last 4").wait_for()
        looked.go("/#/runs/plain/layers", "history: {enabled: false}")

    assert {"404" in one for one in looked.complaints} == {True}


def test_the_heat_map_does_not_wait_for_the_list_of_what_there_is(browser: Browser, address: str) -> None:
    with Looked(browser, address) as looked:
        waiting: list[Route] = []
        looked.page.route("**/api/v1/history?*", lambda route: waiting.append(route))

        page = looked.go(f"/#/runs/{GOOD}/layers", "in the order of the forward")

        assert page.get_by_label("kind").count() == 0, "kinds to choose from come with the list"
        # Only who asks the page is told of its requests.
        shown(lambda: page.title() and waiting, "the question for the list")
        waiting[0].continue_()
        page.get_by_label("kind").wait_for()
        assert page.get_by_label("kind").input_value() == "wgrad"


def test_an_answer_that_took_too_long_says_what_to_do_and_offers_it(browser: Browser, address: str) -> None:
    error = {"error": "no answer within 10 s; ask for fewer steps"}
    held = {
        "first_step": 0,
        "last_step": 999_999,
        "kinds": {"wgrad": 3},
        "statistics": ["std"],
        "scalars": [],
        "tensors": [],
    }
    with Looked(browser, address) as looked:
        looked.page.route("**/api/v1/history?*", lambda route: route.fulfill(json=held))
        looked.page.route("**/api/v1/history/heatmap?*", lambda route: route.fulfill(status=504, json=error))
        page = looked.go(f"/#/runs/{GOOD}/layers", error["error"])
        with page.expect_request(lambda one: "from=990000&to=999999" in one.url, timeout=LONG_S * 1000):
            page.get_by_role("button", name="The newest 10,000 steps").click()

        assert all("504" in one for one in looked.complaints)


def test_why_there_is_no_post_mortem_stands_beside_its_link(browser: Browser, address: str) -> None:
    error = {"error": "no post-mortem within 60 s: the run is large, or its disk slow; sentinel report has no such limits"}
    with Looked(browser, address) as looked:
        looked.page.route("**/api/v1/report?*", lambda route: route.fulfill(status=504, json=error))
        page = looked.go(f"/#/runs/{GOOD}", "Post-mortem as a file")

        page.get_by_role("link", name="Post-mortem as a file").click()

        page.get_by_text(f"not written: {error['error']}").wait_for()


def test_one_box_finds_runs_incidents_and_tensors(looked: Looked) -> None:
    page = looked.go("/", "Open incidents")
    page.get_by_role("searchbox").fill("layers.2.attn")
    page.get_by_role("searchbox").press("Enter")

    page.get_by_role("link", name="layers.2.attn.weight").first.wait_for()
    page.get_by_role("link", name=re.compile("NaN born in layers.2.attn")).wait_for()
    looked.go("/#/search?q=nobodys", "Nothing: no run, no incident")


@pytest.mark.parametrize(
    "path",
    [
        "",
        f"#/runs/{GOOD}",
        f"#/runs/{GOOD}/layers",
        f"#/compare?a={GOOD}&b={AGAIN}",
        f"#/runs/{GOOD}/rules?rule=loss-spike&n.k=99",
    ],
)
def test_a_phone_shows_all_of_it_within_its_width(browser: Browser, address: str, path: str) -> None:
    with Looked(browser, address, viewport={"width": 390, "height": 800}, color_scheme="dark") as looked:
        page = looked.go(f"/{path}", "As a pack" if "rules" in path else "layers")
        page.locator("canvas, svg").first.wait_for()

        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert looked.complaints == []


def test_every_view_is_accessible_by_the_rules_of_axe(looked: Looked, address: str) -> None:
    """Contrast, names and roles, landmarks, order of headings: what a machine can tell of WCAG 2.1 AA and best practices."""
    incident = next(iter(incident_ids(address).values()))

    assert looked.violations({**VIEWS, f"/#/incidents/{incident}": "What to do"}) == {}


def test_what_is_not_accessible_is_found(looked: Looked) -> None:
    page = looked.go("/", "Open incidents")
    page.evaluate(
        """() => {
          const [button, text] = [document.createElement("button"), document.createElement("p")];
          text.append("a text that can hardly be read");
          Object.assign(text.style, { color: "#777", background: "#888" });
          document.querySelector("main").append(button, text);
        }"""
    )

    found = set(looked.violations_here())

    assert found == {("light", "button-name"), ("light", "color-contrast"), ("dark", "color-contrast")}


def test_without_a_script_the_page_says_what_matters(browser: Browser, address: str) -> None:
    name = next(iter(incident_ids(address).values()))
    with Looked(browser, address, java_script_enabled=False) as looked:
        looked.go("/", "Open incidents")
        page = looked.go(f"/incidents/{name}?run={GOOD}", "How it went on")

        assert page.get_by_text("began with").is_visible()
