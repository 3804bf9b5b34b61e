"""Find Chromium for the browser tests. `make browser` installs Debian's package if it is missing.

The headless shell is preferred: it uses a third of the CPU time. The script never fails. Without a browser, the tests
are skipped.
"""

import os
import shutil
import subprocess
import sys

PACKAGES = ("chromium-headless-shell", "chromium")  # older systems have only the second
NAMES = (*PACKAGES, "chromium-browser", "google-chrome")
MISSING = (
    f"there is no Chromium: `apt-get install {PACKAGES[0]}` as root, or set CHROMIUM to the path of one "
    f"(looked for {', '.join(NAMES)})"
)
APT_OPTIONS = ("-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20")  # fail fast without a network
UPDATE = ("apt-get", "update", "--quiet", *APT_OPTIONS)
INSTALL = ("apt-get", "install", "--quiet", "--yes", "--no-install-recommends", *APT_OPTIONS)
INSTALL_TIMEOUT_S = 600


def find_chromium() -> str | None:
    """Return the path to a working Chromium. On some systems the command is only a stub."""
    given = os.environ.get("CHROMIUM")
    paths = [given] if given else [path for name in NAMES if (path := shutil.which(name))]
    return next((path for path in paths if _runs(path)), None)


def _runs(path: str) -> bool:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _install() -> None:
    if _run(*UPDATE):
        any(_run(*INSTALL, package) for package in PACKAGES)  # the first available package


def _run(*command: str) -> bool:
    print("browser:", *command, flush=True)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, timeout=INSTALL_TIMEOUT_S, check=False)
    return done.returncode == 0


def main() -> None:
    if find_chromium():
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        try:
            _install()
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"browser: {error}", file=sys.stderr)
    if not find_chromium():
        print(f"browser: {MISSING}; tests in a browser will be skipped", file=sys.stderr)


if __name__ == "__main__":
    main()
