"""Takes the pictures of docs/report.md from a report page: python docs/pictures/make.py REPORT.html

`make.py card EXAM/report.html` takes README's report card, of `pointsman exam smoe-dropout,hyperrouter,xmoe,loss-free
--tasks clusters,zipf,norms,neighbours --out EXAM`. The others of README are figures as they are: quickstart.svg is
`pointsman report runs/quickstart --figures svg`, audit.svg `pointsman report AUDIT --figures svg`.

Needs selenium, chromium and chromedriver.
"""

import sys
import tempfile
from pathlib import Path
from shutil import which
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--force-prefers-reduced-motion",
)  # fmt: skip
WIDTH = 1200


def browser(profile: str) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = which("chromium") or ""
    for flag in (*FLAGS, f"--window-size={WIDTH},900", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    return webdriver.Chrome(options, Service(which("chromedriver")))


def main(page: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(profile)

        def show(scheme: str) -> None:
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            driver.get(page.resolve().as_uri())
            WebDriverWait(driver, 30).until(
                lambda d: d.execute_script(
                    "const e = document.querySelector('#explorer'); return !e || e.dataset.ready"
                )
            )

        def shoot(name: str, height: int, scroll_to: str | None = None) -> None:
            driver.set_window_size(WIDTH, height)
            if scroll_to:
                driver.execute_script("document.querySelector(arguments[0]).scrollIntoView()", scroll_to)
            driver.execute_script(
                "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            driver.save_screenshot(str(out / name))

        show("light")
        shoot("report-light.png", 1290)
        show("dark")
        driver.execute_script("document.querySelector('#explorer .tok:nth-child(60)')?.click()")
        shoot("explorer-dark.png", 900, "#explore")
        driver.quit()


def card(page: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(profile)
        driver.set_window_size(760, 900)
        driver.get(page.resolve().as_uri())
        driver.find_element("css selector", ".card").screenshot(str(out / "exam.png"))
        driver.quit()


if __name__ == "__main__":
    here = Path(__file__).parent
    if len(sys.argv) == 3 and sys.argv[1] == "card":
        card(Path(sys.argv[2]), here)
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]), here)
    else:
        sys.exit(__doc__)
