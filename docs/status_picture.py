"""Draws docs/images/status-light.png and status-dark.png: the page of a real fleet that has lost shards.

Run: python docs/status_picture.py, with Debian's chromium and chromium-driver installed.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from selenium import webdriver

import dprims
from dprims.cli._status_web import StatusServer
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.exceptions import PeerLost
from dprims.status import Observer
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.testing.faults import Fault
from dprims.testing.servers import RedisServer
from dprims.testing.weights import ToySink, ToySource

IMAGES = Path(__file__).parent / "images"
STAGES, SHARDS, LIMIT_S = 2, 6, 60.0


def main() -> None:
    """One shard dies in a refit and is left out; another one has just died when the picture is taken."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1180,900"):
        options.add_argument(argument)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        backend = stack.enter_context(dprims.connect(server.url))
        policy = stack.enter_context(contextlib.closing(LocalPolicy(ToySource, 8, 512, stages=STAGES)))
        sizes = (1,) * SHARDS
        generation = stack.enter_context(
            contextlib.closing(
                LocalGeneration(ToySink, STAGES, 8, 512, shard_sizes=sizes, train_world_size=STAGES)
            )
        )
        sync = stack.enter_context(
            CollectiveWeightSynchronizer(policy, generation, backend=server.url, roster_ttl_s=3.0)
        )
        sync.init_communicator(LIMIT_S)
        sync.sync_weights()
        strike = Fault(action="kill", phase="bucket", bucket=0)
        generation.process(3).call_now("arm", strike).result(LIMIT_S)
        with contextlib.suppress(PeerLost):
            sync.sync_weights()
        sync.refit()
        generation.process(5).kill()

        page = StatusServer(Observer(backend), "127.0.0.1", 0, 0.3)
        page.start()
        stack.callback(page.close)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
        stack.callback(browser.quit)
        browser.get(page.url)
        deadline = time.monotonic() + LIMIT_S
        while not browser.execute_script("return document.querySelector('.shard.lost')"):
            if time.monotonic() > deadline:
                raise TimeoutError("the page shows no lost shard")
            time.sleep(0.1)
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            browser.save_screenshot(str(IMAGES / f"status-{scheme}.png"))


if __name__ == "__main__":
    main()
