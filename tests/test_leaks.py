"""The leak detection plugin, run on tests that leak."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

CONFTEST = """
import tests.leaks
tests.leaks.GRACE_S = 0.5
pytest_plugins = ["tests.leaks"]

def pytest_unconfigure():
    for found in (*tests.leaks.find_processes(), *tests.leaks.find_orphans()):
        found.key.kill()
"""

TESTS = """
import os, socket, subprocess, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
import pytest

KEPT = []  # or the garbage collector would tidy up
FOREVER = [sys.executable, "-c", "import time; time.sleep(60)"]

def wait_long(): time.sleep(60)

def test_thread(): threading.Thread(target=wait_long, name="the lost one", daemon=True).start()
def test_process(): KEPT.append(subprocess.Popen(FOREVER))
def test_socket():
    KEPT.append(socket.create_server(("127.0.0.1", 0)))
    print("its port", KEPT[-1].getsockname()[1])
def test_connection(): KEPT.extend(socket.socketpair())
def test_folder(): tempfile.mkdtemp(prefix="lost-")
def test_file_of_a_child():
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkstemp(prefix='lost-too-')"], check=True)

def test_short_grace(): threading.Thread(target=time.sleep, args=(0.02,)).start()
def test_tidy(tmp_path):
    with tempfile.TemporaryDirectory(), socket.socket(), ThreadPoolExecutor(1) as pool: pool.submit(int).result()
    subprocess.run([sys.executable, "-c", ""], check=True)
"""

SHARED = """
import socket, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import pytest

KEPT = []

@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool

@pytest.fixture(scope="session")
def server():
    with socket.create_server(("127.0.0.1", 0)) as server: yield server

@pytest.fixture(scope="module")
def untidy():
    KEPT.append(socket.socket())
    return KEPT

def test_what_a_fixture_of_the_session_holds(server): pass
def test_what_a_fixture_of_the_module_makes_later(pool): pool.submit(int).result()
def test_after_those(): pass
def test_with_an_untidy_fixture(untidy): pass
def test_with_a_thread_beside_it(pool): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(77)'])"
def test_an_orphan(): subprocess.run([sys.executable, "-c", ORPHAN], check=True)
def test_the_last_one(): pass
"""


def run(folder: Path, tests: str) -> dict[str, str]:
    """Run tests, and return the reported leaks of each; empty for passed tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "test_it.py"]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_DEBUG_TEMPROOT": str(folder)}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **alone}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    result = dict.fromkeys(re.findall(r"^test_it.py::(\w+) PASSED", done.stdout, re.M), "")
    return result | dict(re.findall(r"ERROR at teardown of (\w+) _+\nleft behind:\n((?:  .*\n)+)", done.stdout))


@pytest.mark.slow
def test_leaked_resources_are_reported_by_name(tmp_path: Path) -> None:
    left = run(tmp_path, TESTS)
    said = {
        "test_thread": r"thread 'the lost one' \(runs wait_long, at .*test_it.py:\d+\)",
        "test_process": r"process \d+: .*python\S* -c import time; time.sleep\(60\)",
        "test_socket": r"socket \d+ \(AF_INET, at \('127.0.0.1', \d+\)\)",
        "test_connection": r"socket \d+ \(AF_UNIX, from no address to its pair\)",
        "test_folder": r"temporary file \S+/lost-\w+ \(a folder\)",
        "test_file_of_a_child": r"temporary file \S+/lost-too-\w+",
    }
    assert {name for name, text in left.items() if text} == said.keys()
    for name, pattern in said.items():
        assert re.fullmatch(rf"(  {pattern}\n)+", left[name]), left[name]
    assert left.keys() > {"test_short_grace", "test_tidy"}


@pytest.mark.slow
def test_fixture_leaks_are_reported_after_module(tmp_path: Path) -> None:
    left = run(tmp_path, SHARED)
    *before, last = left
    assert not any(left[name] for name in before)
    assert last == "test_the_last_one"
    orphan, of_fixture, of_test = left[last].splitlines()
    assert re.fullmatch(r"  process \d+: .*time.sleep\(77\)", orphan)
    assert re.fullmatch(r"  socket .*, made by untidy", of_fixture)
    assert re.fullmatch(r"  thread .*, made by test_with_a_thread_beside_it", of_test)


def test_leak_detection_is_active(request: pytest.FixtureRequest) -> None:
    assert request.config.pluginmanager.hasplugin("tests.leaks")
