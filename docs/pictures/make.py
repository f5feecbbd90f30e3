"""Takes the pictures of docs/report.md and the README from a report page: python docs/pictures/make.py REPORT.html

Needs selenium, chromium and chromedriver.
"""

from __future__ import annotations

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
        shoot("routing-light.png", 1150, "#routing")
        show("dark")
        shoot("report-dark.png", 1290)
        driver.execute_script("document.querySelector('#explorer .tok:nth-child(60)')?.click()")
        shoot("explorer-dark.png", 900, "#explore")
        driver.quit()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(__file__).parent)
