"""The page driven in a real browser: switches, tooltips, explorer, keyboard; no console errors, no network requests."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pointsman_lab.report import write_report
from tests.lab.report.fixtures import write_comparison, write_finetuning

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1200,900",
    "--force-prefers-reduced-motion",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "comparison"
    write_comparison(path, ("smoe", "hyperrouter", "thor"), (0, 1), explorer=True, unfinished=[("thor", 1)])
    for seed in (0, 1):
        run = path / "runs/r0" / f"seed-{seed}"
        write_finetuning(run, "sst2", "smoe", seed, metric=0.7 + 0.01 * seed)
        write_finetuning(run, "sst2,from-scratch", "smoe", seed, metric=0.6, scratch=True)
    return write_report(path)


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    browser.set_window_size(1200, 900)
    browser.get("about:blank")
    browser.get_log("performance")  # what the browser's own first page asked for
    browser.get(page.as_uri())
    eventually(browser, lambda: run(browser, "return document.querySelector('#explorer').dataset.ready"))
    yield browser
    messages = [entry["message"] for entry in browser.get_log("browser")]
    assert messages == []
    requests = [
        event["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if (event := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    ]
    assert requests
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def eventually(browser: Any, condition: Callable[[], Any]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20).until(lambda _: condition())


def run(browser: Any, script: str, *arguments: Any) -> Any:
    return browser.execute_script(script, *arguments)


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def hover(browser: Any, element: Any, right: int = 0, down: int = 0) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    run(browser, "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    # two moves: a pointer that the last test left just there would not move
    chain = ActionChains(browser, duration=50).move_to_element_with_offset(element, right + 3, down + 3)
    chain.move_to_element_with_offset(element, right, down).perform()


def click(browser: Any, selector: str) -> None:
    element = find(browser, selector)
    run(browser, "arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def tooltip(browser: Any) -> str | None:
    return run(browser, "const t = document.getElementById('tip'); return t.hidden ? null : t.innerText")


def press(browser: Any, element: Any, *keys: str) -> None:
    run(browser, "arguments[0].focus()", element)
    element.send_keys(*keys)


def test_every_section_is_drawn(opened: Any) -> None:
    for name in ("quality", "differences", "loss", "validation", "entropy", "entropy-by-layer"):
        assert run(opened, "return document.querySelectorAll(arguments[0]).length", f"#{name} svg.chart path") >= 3, (
            name
        )
    for name, count in (("loads", 4), ("map", 3), ("token-maps", 12)):
        assert run(opened, "return document.querySelectorAll(arguments[0]).length", f"#{name} canvas") == count
    assert run(opened, "return document.querySelectorAll('[data-key]').length") == 0


def test_chart_shows_values_on_hover_and_by_keyboard(opened: Any) -> None:
    chart = find(opened, "#quality svg.chart")
    hover(opened, chart)
    eventually(opened, lambda: "smoe" in (tooltip(opened) or ""))
    press(opened, chart, "\ue011")  # Home
    shown = tooltip(opened) or ""
    assert shown.startswith("k = 1")
    assert "2.511 ± 0.016" in shown  # smoe: 2.5 and 2.522
    assert "smoe 2.5" in find(opened, "#live").get_attribute("textContent")
    press(opened, chart, "\ue014")  # right
    assert (tooltip(opened) or "").startswith("k = 2")
    opened.execute_script("document.activeElement.blur()")
    assert tooltip(opened) is None


def test_legend_hides_a_row_and_log_switches(opened: Any) -> None:
    before = run(opened, "return document.querySelectorAll('#quality svg.chart > g').length")
    click(opened, "#quality .legend button")
    assert run(opened, "return document.querySelectorAll('#quality svg.chart > g').length") == before - 1
    click(opened, "#quality .controls button")
    assert "(log)" in run(opened, "return document.querySelector('#quality svg.chart').textContent")


def test_legend_singles_out_a_row(opened: Any) -> None:
    hover(opened, find(opened, "#quality .legend button:nth-child(2)"))
    faded = "return [...document.querySelectorAll('#quality .series')].map(g => g.classList.contains('fade'))"
    eventually(opened, lambda: run(opened, faded) == [True, False, True])


def test_theme_follows_the_system_and_the_button(opened: Any) -> None:
    def theme() -> str:
        return str(run(opened, "return document.documentElement.dataset.theme"))

    def prefers(scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    prefers("dark")
    eventually(opened, lambda: theme() == "dark")
    dark = run(opened, "return getComputedStyle(document.body).backgroundColor")
    click(opened, "#theme")
    assert theme() == "light"
    assert run(opened, "return getComputedStyle(document.body).backgroundColor") != dark
    prefers("light")


def test_explorer_switches_change_the_text(opened: Any) -> None:
    def colours() -> str:
        return str(run(opened, "return [...document.querySelectorAll('.tok')].map(t => t.className).join()"))

    def pressed(group: str) -> str:
        return str(
            run(
                opened,
                "return document.querySelector("
                "`#explorer [aria-label=${arguments[0]}] [aria-pressed=true]`).dataset.value",
                group,
            )
        )

    seen = {colours()}
    for group, position in (("layer", 3), ("k", 1)):
        click(opened, f"#explorer [aria-label='{group}'] button:nth-of-type({position})")
        seen.add(colours())
    assert len(seen) == 3
    assert (pressed("layer"), pressed("k")) == ("blocks.2.moe", "1")
    run(
        opened,
        "const menu = document.querySelector('#explorer select');"
        "menu.selectedIndex = 1; menu.dispatchEvent(new Event('change'))",
    )
    eventually(opened, lambda: colours() not in seen)
    assert (pressed("layer"), pressed("k")) == ("blocks.2.moe", "1")


def test_explorer_keeps_the_focus_on_its_menu(opened: Any) -> None:
    menu = find(opened, "#explorer .controls select")
    press(opened, menu, "\ue015")  # down: the next router
    eventually(opened, lambda: run(opened, "return !arguments[0].isConnected", menu))
    assert run(opened, "return document.activeElement.getAttribute('aria-label')") == "router"


def test_explorer_shows_the_full_distribution(opened: Any) -> None:
    hover(opened, find(opened, "#tok-5"))
    eventually(opened, lambda: len(opened.find_elements("css selector", "#explorer .side .bars li")) == 8)
    shown = run(
        opened, "return [...document.querySelectorAll('#explorer .bars .p')].map(p => parseFloat(p.textContent))"
    )
    assert sum(shown) == pytest.approx(100, abs=4)
    assert shown == sorted(shown, reverse=True)
    chosen = run(opened, "return document.querySelectorAll('#explorer .bars .chosen').length")
    k = run(
        opened,
        "return Number(document.querySelector(\"#explorer [aria-label='k'] [aria-pressed=true]\").dataset.value)",
    )
    assert chosen == k


def test_explorer_by_keyboard(opened: Any) -> None:
    pane = find(opened, "#explorer .text")
    press(opened, pane, "\ue014", "\ue014", "\ue014")
    assert run(opened, "return document.querySelector('.tok.kept').dataset.t") == "2"
    assert "expert" in find(opened, "#live").get_attribute("textContent")
    press(opened, pane, "\ue015")  # down: another line
    assert int(run(opened, "return document.querySelector('.tok.kept').dataset.t")) > 10
    press(opened, pane, "\ue00c")  # Escape
    assert run(opened, "return document.querySelector('.tok.kept')") is None


def test_clicking_an_expert_lists_its_tokens(opened: Any) -> None:
    click(opened, "#explorer .chips button:nth-child(2)")
    assert "Tokens that expert 1 takes most" in find(opened, "#explorer .side").text
    rows = run(
        opened,
        "return [...document.querySelectorAll('#explorer .side tbody tr')].map(r => Number(r.cells[1].textContent))",
    )
    assert rows
    assert rows == sorted(rows, reverse=True)
    dim = run(opened, "return [...document.querySelectorAll('.tok')].filter(t => t.classList.contains('dim')).length")
    assert 0 < dim < run(opened, "return document.querySelectorAll('.tok').length")
    click(opened, "#explorer .chips button:nth-child(2)")
    assert run(opened, "return document.querySelector('.tok.dim')") is None


def test_heat_maps_and_map_tell_their_cells(opened: Any) -> None:
    press(opened, find(opened, "#loads canvas"), "\ue014")
    assert (tooltip(opened) or "").startswith("expert 0, around step")
    press(opened, find(opened, "#token-maps canvas"), "\ue014")
    assert "expert 0" in (tooltip(opened) or "")
    press(opened, find(opened, "#map canvas"), "\ue014")
    assert "expert" in (tooltip(opened) or "")


def test_narrow_screens_do_not_scroll_sideways(opened: Any) -> None:
    opened.set_window_size(500, 900)
    assert run(opened, "return document.documentElement.scrollWidth <= innerWidth")
