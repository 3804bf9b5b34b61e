"""Write the README screenshot of the playground: `python -m tests.browser.screenshot`."""

import sys

from playwright.sync_api import expect, sync_playwright

from tests.browser.install import MISSING, find_chromium
from tests.browser.playground import Playground, launch, open_playground
from tests.demo.server import SCREENSHOT, serving_demo

VIEW = {"width": 1440, "height": 1000}


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
    """Take a screenshot of the first example with a token popup in the second column."""
    playground.open()
    playground.at("#send").click()
    playground.wait()
    expect(playground.at("#residency-note")).to_contain_text("0 requests running")
    tokens = playground.at(".column").nth(1).locator(".token")
    tokens.nth(min(3, tokens.count() - 1)).hover()
    playground.page.screenshot(path=SCREENSHOT, full_page=True)


if __name__ == "__main__":
    main()
