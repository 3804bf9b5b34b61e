"""Only `kernels/` may check device types. Other code uses `Ops` and `kernels.device`."""

import re
from pathlib import Path

import lorax_server

ROOT = Path(lorax_server.__file__).parent
FORBIDDEN = re.compile(r"device\.type|\.is_cuda|isinstance\([\w.]*\bops\b|\bops is (not )?reference")
# Modules that select a device or pass it to a library.
SELECTION = {
    "distributed.py",
    "models/padded_lm.py",
    "models/pretrained.py",
    "worker/executor.py",
    "worker/padded_runner.py",
}


def test_only_kernels_check_device_type() -> None:
    result = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in ROOT.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if FORBIDDEN.search(line) and path.relative_to(ROOT).parts[0] != "kernels"
    }
    assert {place for place in result if place.split(":")[0] not in SELECTION} == set()
