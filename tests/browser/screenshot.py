"""Write the README screenshot of the playground: `python -m tests.browser.screenshot`."""

import sys

from playwright.sync_api import expect, sync_playwright

from lorax_server.cli.demo import DEMO_NAME
from tests.browser.install import MISSING, find_chromium
from tests.browser.playground import DEVICE, Playground, launch, open_playground
from tests.demo.server import SCREENSHOT, serving_demo

VIEW = {"width": 1440, "height": 900}


def main() -> None:
    path = find_chromium()
    if path is None:
        sys.exit(MISSING)
    SCREENSHOT.parent.mkdir(exist_ok=True)
    look = {"viewport": VIEW, "color_scheme": "light", "reduced_motion": "reduce"}
    with (
        serving_demo() as demo,
        sync_playwright() as playwright,
        launch(playwright, path) as browser,
        open_playground(browser, demo.url, **look) as playground,
    ):
        _take(playground)
    print(f"{SCREENSHOT.name}: {SCREENSHOT.stat().st_size:,} bytes")


def _take(playground: Playground) -> None:
    """Take a screenshot of the first example's completions."""
    playground.open()
    playground.at("#examples button").first.click()
    playground.at("#send").click()
    playground.wait()
    for model in playground.selected():
        if model != DEMO_NAME:
            expect(playground.chip(model)).to_have_attribute("data-state", DEVICE)
    playground.page.screenshot(path=SCREENSHOT)


if __name__ == "__main__":
    main()
