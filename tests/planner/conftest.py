"""Drives the built planner page in a headless Chromium, from a file, beside the native command line.

LOGITLESS_PLANNER names the page's folder (scripts/planner), LOGITLESS_CLI the `logitless` binary; both are built by
`./scripts/test planner`.
"""

import json
import os
import pathlib
import shutil
import subprocess
import time

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

WIDE = 1280  # pixels


def from_environment(name, what):
    value = os.environ.get(name)
    if not value:
        pytest.skip(f"{name} does not name {what}")
    return pathlib.Path(value).resolve()


@pytest.fixture(scope="session")
def native():
    """Returns native(*arguments) -> (JSON or None, message on stderr)."""
    binary = from_environment("LOGITLESS_CLI", "the logitless binary")

    def call(*arguments):
        process = subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=60)
        message = process.stderr.removeprefix("logitless: error: ").strip()
        return json.loads(process.stdout) if process.stdout else None, message

    return call


class Planner:
    """An open page; its numbers are read from the screen."""

    def __init__(self, driver, folder):
        self.driver = driver
        self.address = folder.joinpath("index.html").as_uri()

    def open(self, hash=""):
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#{hash}")
        self.wait("return window.planner !== undefined")

    def go(self, hash):
        """Changes the state of the open page."""
        self.run("location.hash = arguments[0]", hash)
        self.wait("return location.hash.replace(/^#/, '') === arguments[0] && planner.state !== null", hash)
        # The event comes after the change.
        self.wait("return hashOfState(stateFromHash(location.hash)) === document.documentElement.dataset.shown")

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, script, *arguments):
        end = time.monotonic() + 20
        while not self.run(script, *arguments):
            assert time.monotonic() < end, (script, arguments)
            time.sleep(0.02)

    def at(self, id):
        return self.driver.find_element(By.ID, id)

    def text(self, id):
        return self.at(id).text

    def texts(self, selector):
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)

    def result(self):
        return self.run("return planner.result")

    def hash(self):
        return self.run("return location.hash.replace(/^#/, '')")

    def arguments(self):
        """Returns the arguments of the displayed command."""
        return self.run("return planArguments(planner.state)")

    def rows(self):
        """Returns the exact numbers behind the cells of the table of plans."""
        return self.run(
            """return [...document.querySelectorAll('#plans tbody tr')].map(row => Object.fromEntries([
                 ['plan', row.dataset.plan], ['chosen', row.classList.contains('chosen')],
                 ...[...row.querySelectorAll('[data-key]')].map(
                   cell => [cell.dataset.key, JSON.parse(cell.dataset.value)])]))"""
        )

    def bar(self, id):
        return self.run("return JSON.parse(document.querySelector(`#bar-${arguments[0]} .bytes`).dataset.value)", id)

    def screen(self, width, height=900, dark=False):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@pytest.fixture(scope="session")
def page():
    folder = from_environment("LOGITLESS_PLANNER", "the folder of the built page")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    planner = Planner(driver, folder)
    planner.screen(WIDE)
    planner.open()
    yield planner
    problems = [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    driver.quit()
    assert problems == []


@pytest.fixture(autouse=True)
def wide_screen(page):
    page.screen(WIDE)
    page.open()
