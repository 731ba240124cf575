"""The status page in a real browser, while a fleet loses a shard and takes it back."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

import dprims
from dprims.cli._status_web import StatusServer
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.exceptions import PeerLost
from dprims.status import Observer
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.testing.faults import Fault
from dprims.testing.servers import RedisServer
from dprims.testing.weights import ToySink, ToySource

from .helpers.services import LIMIT_S, until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

STAGES, SHARDS = 2, 3
LOSSES = (["serving", "lost", "serving"], ["serving", "absent", "serving"])


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[WebDriver]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium, "no chromium; apt-get install chromium"
    assert driver, "no chromedriver; apt-get install chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless=new",
        "--no-sandbox",  # root's Chromium has none
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        "--window-size=1200,1000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        browser.set_page_load_timeout(LIMIT_S)
        yield browser
        assert browser.get_log("browser") == [], "the page complained"
    finally:
        browser.quit()


class Page:
    """The page as a person reads it."""

    def __init__(self, browser: WebDriver, url: str) -> None:
        self.browser = browser
        browser.get(url)

    def leave(self) -> None:
        """Stop asking, before the server ends."""
        self.browser.get("about:blank")

    def read(self, script: str) -> Any:
        return self.browser.execute_script(f"return {script}")

    def states(self) -> list[str]:
        return list(self.read("[...document.querySelectorAll('.shard')].map(one => one.dataset.state)"))

    def text(self, selector: str) -> str:
        return str(self.read(f"document.querySelector({selector!r})?.textContent ?? ''"))

    def log(self) -> list[str]:
        """What the page has seen change, the oldest first."""
        return list(
            reversed(
                self.read("[...document.querySelectorAll('#log li span:last-child')].map(s => s.textContent)")
            )
        )

    def waits_for(self, what: str, condition: Any) -> None:
        until(condition, f"{what} on the page; it shows {self.states()}", 60.0)

    def background(self, dark: bool) -> str:
        """The page's background, for someone who prefers dark or light pages."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        return str(self.read("getComputedStyle(document.body).backgroundColor"))


@contextlib.contextmanager
def serving(backend: dprims.Backend, interval: float = 0.2) -> Iterator[StatusServer]:
    server = StatusServer(Observer(backend), "127.0.0.1", 0, interval)
    server.start()
    try:
        yield server
    finally:
        server.close()


def test_the_page_shows_a_shard_that_is_lost_and_comes_back(
    private_redis: RedisServer, browser: WebDriver
) -> None:
    with (
        contextlib.closing(LocalPolicy(ToySource, stages=STAGES)) as policy,
        contextlib.closing(
            LocalGeneration(ToySink, STAGES, shard_sizes=(1,) * SHARDS, train_world_size=STAGES)
        ) as generation,
        CollectiveWeightSynchronizer(
            policy, generation, backend=private_redis.url, refit_timeout_s=60.0, roster_ttl_s=3.0
        ) as sync,
        dprims.connect(private_redis.url) as backend,
        serving(backend) as server,
    ):
        page = Page(browser, server.url)
        page.waits_for("an empty backend", lambda: "No fleet has a leader" in page.text("#fleets"))
        sync.init_communicator(timeout=LIMIT_S)
        page.waits_for("a fleet that waits for its weights", lambda: page.states() == ["returning"] * SHARDS)
        sync.sync_weights()
        page.waits_for("a first sync", lambda: page.states() == ["serving"] * SHARDS)
        assert page.text("[data-what=version]") == "1"
        assert "refit leader pid" in page.text(".head")
        assert page.text("#locks td") == "refit/leader"
        assert page.read("document.querySelectorAll('#rosters tbody tr').length") == STAGES + SHARDS

        generation.process(1).call_now("arm", Fault(action="kill", phase="bucket", bucket=0)).result(LIMIT_S)
        with pytest.raises(PeerLost):
            sync.sync_weights()
        # by the roster first, or by what its leader says
        page.waits_for("the loss", lambda: page.states() in LOSSES)
        page.waits_for("the outage", lambda: "SIGKILL" in page.text("[data-what=outage]"))
        assert page.text("[data-what=why]").endswith(
            ("left the roster", "dropped out of a refit that failed")
        )

        report = sync.refit()
        assert report.members == (0, 2)
        page.waits_for("the end of the outage", lambda: page.text("[data-what=outage]") == "")
        page.waits_for("the recovery", lambda: page.states() == ["serving", "absent", "serving"])
        assert "1 failed: PeerLost" in page.text("[data-what=last-outage]")
        assert "not in the roster" in page.text("[data-what=why]")

        generation.restart(1)
        sync.refit()
        page.waits_for("the return", lambda: page.states() == ["serving"] * SHARDS)
        assert page.text("[data-what=version]") == "3"
        log = page.log()
        absent, over, serves = (
            next(place for place, line in enumerate(log) if line.endswith(change))
            for change in ("shard 1 absent", "the outage is over", "shard 1 serving")
        )
        assert max(absent, over) < serves, log  # one look of the page may see the first two at once
        assert page.background(dark=True) != page.background(dark=False)
        page.leave()


def test_what_others_wrote_is_text(private_redis: RedisServer, browser: WebDriver) -> None:
    label = "<img src=x onerror=\"document.title='broken'\"> </script><b>&amp;"
    with dprims.connect(private_redis.url) as backend, serving(backend) as server:
        lock = dprims.DistributedLock(f"{label}1", backend, label=label)
        roster = dprims.Roster("<i>r", backend)
        with lock:
            roster.join("<u>member", {"<s>": label})
            page = Page(browser, server.url)
            page.waits_for("the lock", lambda: label in page.text("#locks"))
            page.waits_for("the roster", lambda: "<u>member" in page.text("#rosters"))
            assert page.read("document.title") == "dprims status"
            assert (
                page.read(
                    "document.querySelectorAll('#locks img, #locks b > b, #rosters u, #rosters i').length"
                )
                == 0
            )
            page.leave()
        roster.leave()


def test_a_backend_that_goes_away_is_said_and_comes_back(
    private_redis: RedisServer, browser: WebDriver
) -> None:
    with dprims.connect(f"{private_redis.url}?timeout=0.5") as backend, serving(backend) as server:
        page = Page(browser, server.url)
        page.waits_for("the backend", lambda: "updated" in page.text("#live"))
        private_redis.kill()
        page.waits_for("the trouble", lambda: "BackendUnavailable" in page.text("#banner"))
        assert "What is shown is old" in page.text("#banner")
        private_redis.start()
        page.waits_for("the end of it", lambda: page.read("document.getElementById('banner').hidden"))
        page.leave()
        assert [one for one in browser.get_log("browser") if "503" not in one["message"]] == []


def test_a_thousand_shards_are_drawn_at_once(private_redis: RedisServer, browser: WebDriver) -> None:
    from .test_status_cli import SHARDS as MANY
    from .test_status_cli import big_fleet

    with dprims.connect(private_redis.url) as backend:
        big_fleet(backend, "dprims")
        with serving(backend, interval=60.0) as server:
            page = Page(browser, server.url)
            page.waits_for("all shards", lambda: len(page.states()) == MANY)
            assert page.states().count("absent") == 11
            width = page.read("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert width == 0, "the page is wider than the window"
            shard = browser.find_element(By.CSS_SELECTOR, "[data-shard='100']")
            assert shard.get_attribute("title") == "shard 100: absent, not in the roster; seats 104"
            page.leave()
