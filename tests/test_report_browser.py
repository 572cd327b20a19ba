"""The report in a real browser: no error, nothing loaded, and it can be read and sorted in every way it promises."""

from __future__ import annotations

import pytest

from posthoc.evaluate.report.page import write_report
from tests.chromium import BINARY, chromium
from tests.report_cases import METHODS, document, everything, write

pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no Chromium here (chromium, google-chrome)")

FIRST = "document.querySelector('table.figures')"
ROWS = f"[...{FIRST}.tBodies[0].rows]"
NAMES = f"{ROWS}.map(row => row.cells[0].firstChild.data.trim())"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(everything(folder / "results"), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def opened(browser, page):
    """The page, fresh, on a desktop in the light."""
    browser.size(1280, 900)
    browser.colors("light")
    browser.open(page)
    yield browser
    assert browser.errors == []


def test_it_opens_without_an_error_and_loads_nothing(opened):
    assert opened.eval("document.querySelectorAll('svg.chart').length") > 80
    loaded = opened.eval("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [url for url in loaded if not url.startswith("data:")] == []
    # The style was applied (the policy did not refuse it), and so were the scripts.
    assert opened.eval("getComputedStyle(document.querySelector('.chart path')).strokeLinejoin") == "round"
    opened.click(".legend button")
    assert opened.eval("document.querySelector('.legend button').getAttribute('aria-pressed')") == "true"


def test_the_policy_lets_nothing_in(opened):
    image = '<img src="file:///etc/hostname" onerror="window.x=1">'
    opened.eval(f"document.body.insertAdjacentHTML('beforeend', '{image}')")
    opened.eval("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.y=1'}))")
    assert opened.eval("[window.x, window.y].filter(Boolean).length") == 0
    assert any("Content Security Policy" in text for text in opened.errors)
    opened.errors.clear()


@pytest.mark.parametrize(("title", "first"), [("NLL", "ascending"), ("accuracy", "descending")])
def test_a_click_sorts_the_better_end_first_and_another_turns_round(opened, title, first):
    assert opened.eval(NAMES) == list(METHODS.values())
    column = opened.eval(f"[...{FIRST}.tHead.rows[0].cells].findIndex(cell => cell.innerText.startsWith('{title}'))")
    values = f"{ROWS}.map(row => Number(row.cells[{column}].dataset.v))"
    for way in (first, "descending" if first == "ascending" else "ascending"):
        opened.click(f"table.figures thead th:nth-child({column + 1}) button")
        assert opened.eval(f"{FIRST}.tHead.rows[0].cells[{column}].getAttribute('aria-sort')") == way
        found = opened.eval(values)
        assert found == sorted(found, reverse=way == "descending")
        assert len(set(found)) == 8
    assert opened.eval(f"{FIRST}.querySelectorAll('[aria-sort]').length") == 1
    opened.click("table.figures thead th:first-child button")
    assert opened.eval(NAMES) == sorted(METHODS.values())
    assert opened.eval(f"{FIRST}.querySelectorAll('[aria-sort]').length") == 1


def test_the_keyboard_sorts_too_and_shows_where_it_is(opened):
    opened.eval(f"{FIRST}.parentElement.focus()")
    for _ in range(2):  # method, NLL
        opened.press("Tab", 9)
    assert opened.eval("document.activeElement.innerText").startswith("NLL")
    assert opened.eval("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key, code, text, order, row in (("Enter", 13, "\r", "ascending", 0), (" ", 32, " ", "descending", -1)):
        opened.press(key, code, text)
        assert opened.eval("document.activeElement.parentElement.getAttribute('aria-sort')") == order
        assert opened.eval(NAMES)[row] == "FMGP"


def test_what_is_missing_stays_last_whichever_way(browser, tmp_path):
    for method, nll in (("map", 0.5), ("ella", None), ("fmgp", 0.25)):
        write(tmp_path / "results", document(method=method, metrics={"nll": nll}))
    write_report(tmp_path / "results", tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    orders = []
    for _ in range(2):
        browser.click("table.figures thead th:nth-child(2) button")
        orders.append(browser.eval(NAMES))
    assert orders == [["fmgp", "map", "ella"], ["map", "fmgp", "ella"]]
    assert browser.errors == []


def test_a_picked_method_is_brought_out_and_let_go(opened):
    faint = "document.querySelectorAll('.experiment:first-of-type .series.faint').length"
    lines = "document.querySelectorAll('.experiment:first-of-type .series').length"
    opened.click(".legend button:last-child")
    assert opened.eval(faint) == opened.eval(lines) * 7 // 8
    assert opened.eval("document.querySelectorAll('.series.faint').length") == opened.eval(faint)
    assert opened.eval("document.querySelectorAll('.experiment:first-of-type [aria-pressed=true]').length") == 4
    opened.click(".legend button:last-child")
    assert opened.eval(faint) == 0


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_but_tables_scrolls_sideways(opened, width):
    opened.size(width, 800, phone=width < 700)
    opened.eval("document.querySelectorAll('details').forEach(folded => folded.open = true)")
    assert opened.eval("document.documentElement.scrollWidth") <= width
    if width < 700:
        assert opened.eval(f"{FIRST}.parentElement.scrollWidth > {FIRST}.parentElement.clientWidth")


def test_dark_and_light(opened):
    brightness = (
        "getComputedStyle(document.querySelector('{}')).{}.match(/[0-9.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    ground, ink = (brightness.format(*where) for where in (("body", "backgroundColor"), ("body", "color")))
    axis = brightness.format(".chart text", "fill")
    assert opened.eval(ground) > 600 > 200 > opened.eval(ink)
    assert opened.eval(axis) < 400
    opened.colors("dark")
    assert opened.eval(ground) < 150 < 500 < opened.eval(ink)
    assert opened.eval(axis) > 400


def test_paper_shows_what_is_folded_away(opened):
    folded = "document.querySelectorAll('details:not([open])').length"
    before = opened.eval(folded)
    assert before > 0
    for event, count in (("beforeprint", 0), ("afterprint", before)):
        opened.eval(f"dispatchEvent(new Event('{event}'))")
        assert opened.eval(folded) == count


def test_pictures_can_be_decoded_and_have_room(opened):
    picture = "document.querySelector('.picture')"
    opened.eval(f"{picture}.scrollIntoView({{behavior: 'instant'}})")
    opened.eval(f"{picture}.decode()")
    assert opened.eval(f"[{picture}.naturalWidth, {picture}.naturalHeight]") == [32, 32]
    assert opened.eval(f"{picture}.getBoundingClientRect().width") > 20
