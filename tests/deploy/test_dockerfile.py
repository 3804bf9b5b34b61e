"""Checks the Dockerfile as text, and runs its commands in a clean environment. No image is built."""

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest

from lorax_server.cli.flags import FLAGS
from lorax_server.cli.settings import parse
from lorax_server.config import ServerConfig
from lorax_server.files.disk_cache import CACHE_VARIABLE
from tests.deploy.dockerfile import ROOT, all_instructions, read_stages, values, variables, words

STAGES = read_stages()
TARGETS = ("cpu", "cuda")
KNOWN = {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "USER"}
PREFIX, SOURCES = "/opt/lorax", "/src"
START_S = 180


def test_last_build_stage_needs_no_gpu() -> None:
    assert set(TARGETS) <= set(STAGES)
    assert list(STAGES)[-1] == "cpu"
    for stage in STAGES.values():
        assert stage.base in STAGES or stage.base == "python:${PYTHON}-slim-bookworm"
        assert {word for word, _ in stage.instructions} <= KNOWN


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_without_root_and_sources(target: str) -> None:
    instructions = all_instructions(STAGES, target)
    assert instructions[-1] == ("USER", "10001")
    (user,) = (rest for rest in values(instructions, "RUN") if "useradd" in rest)
    assert "--uid 10001" in user
    assert values(instructions, "COPY") == [f"--from=build-{target} {PREFIX} {PREFIX}"]


@pytest.mark.parametrize("target", TARGETS)
def test_caches_are_on_volume(target: str) -> None:
    instructions = all_instructions(STAGES, target)
    (volume,) = values(instructions, "VOLUME")
    environ = variables(instructions)
    assert {"HOME", "HUGGINGFACE_HUB_CACHE", CACHE_VARIABLE} <= set(environ)
    for name in ("HOME", "HUGGINGFACE_HUB_CACHE", CACHE_VARIABLE):
        assert Path(environ[name]).is_relative_to(volume)
    assert any(
        f"install --directory --owner=lorax --group=lorax {volume}" in run for run in values(instructions, "RUN")
    )


@pytest.mark.parametrize("target", TARGETS)
def test_entry_point_flags_are_valid(target: str) -> None:
    instructions = all_instructions(STAGES, target)
    (entry,) = values(instructions, "ENTRYPOINT")
    init, _, program, command, *flags = words(entry)
    assert (init, program, command) == ("tini", "lorax", "serve")
    assert any("apt-get install" in run and " tini " in run for run in values(instructions, "RUN"))
    parsed = parse(flags, variables(instructions), "serve")
    config = parsed.make_config(None)
    assert config.host == "0.0.0.0"
    assert values(instructions, "EXPOSE") == [str(config.port)] == [str(ServerConfig.port)]
    assert parsed.cache == Path(variables(instructions)["HUGGINGFACE_HUB_CACHE"])
    assert not parsed.warnings
    ours = {name for flag in FLAGS for name in flag.variables}
    set_by_us = {name for name in variables(instructions) if name.startswith(("LORAX_", "HUGGING"))}
    assert set_by_us <= ours | {CACHE_VARIABLE}
    assert parse([*flags, "--hostname", "127.0.0.1"], {}, "serve").make_config(None).host == "127.0.0.1"


@pytest.mark.parametrize("target", TARGETS)
def test_image_has_health_check(target: str) -> None:
    (check,) = values(all_instructions(STAGES, target), "HEALTHCHECK")
    options, _, command = check.partition("CMD ")
    assert {"--interval=15s", "--timeout=5s", "--start-period=20m", "--retries=4"} == set(options.split())
    python, flag, code = words(command)
    assert (python, flag) == ("python", "-c")
    ast.parse(code)
    assert "/health" in code


def test_image_versions_match_constraints() -> None:
    pinned = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    installs = [rest for stage in STAGES.values() for rest in values(stage.instructions, "RUN") if "torch==" in rest]
    assert len(installs) == 2
    assert all(install.split()[-1] == pinned[0] for install in installs)
    assert f"torch=={pinned[0].removeprefix('torch==')}" in (ROOT / "Makefile").read_text()
    python = re.search(r"^ARG PYTHON=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert python is not None
    assert f"Python :: {python[1]}" in (ROOT / "pyproject.toml").read_text()


def test_copied_files_exist_and_context_is_minimal() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = set()
    for stage in STAGES.values():
        for rest in values(stage.instructions, "COPY"):
            if not rest.startswith("--from"):
                copied |= set(rest.split()[:-1])
    assert kept == copied
    assert all((ROOT / name).exists() for name in kept)
    left_out = [line for line in lines if line.startswith("**/")]
    assert any(fnmatch("lorax_server/kernels/cpu/_neon.so", line) for line in left_out)


def test_apt_package_lists_are_removed() -> None:
    for stage in STAGES.values():
        for rest in values(stage.instructions, "RUN"):
            assert ("apt-get install" in rest) == rest.endswith("rm -rf /var/lib/apt/lists/*")


# --- Run --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)  # two minutes on an idle machine
def test_image_commands_install_healthy_server(tmp_path: Path) -> None:
    """Run the commands of the CPU image outside Docker, except apt and user commands, which need root."""
    prefix, sources = tmp_path / "lorax", tmp_path / "src"
    sources.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    environ = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environ.pop("PYTHONPATH", None)
    environ["PIP_NO_COMPILE"] = "1"  # slow, and most installed modules are never imported
    environ |= {"CC": write_fast_compiler(programs, "cc"), "CXX": write_fast_compiler(programs, "c++")}
    for word, rest in all_instructions(STAGES, "build-cpu"):
        if word == "COPY":
            copy(rest.split()[:-1], sources)
        elif word == "RUN" and "apt-get" not in rest:
            command = rest.replace(PREFIX, str(prefix))
            done = subprocess.run(
                ["sh", "-ec", command], cwd=sources, env=environ, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    kernels = {path.name.split(".")[0] for path in prefix.rglob("lorax_server/kernels/cpu/_*.so")}
    assert kernels in ({"_neon"}, {"_avx2", "_avx512"})  # pip does not report kernels that could not be compiled
    (tags,) = prefix.rglob("lorax_server-*.dist-info/WHEEL")
    assert "Tag: py3-none-linux_" in tags.read_text()
    check_serving(prefix, tmp_path, find_port())


def write_fast_compiler(folder: Path, compiler: str) -> str:
    """Write a compiler wrapper without optimization, which is six times as fast."""
    path = folder / f"hasty-{compiler}"
    path.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    path.chmod(0o755)
    return str(path)


def copy(names: list[str], target: Path) -> None:
    """Copy the files that Docker would copy, without build outputs."""
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, target)


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_serving(prefix: Path, folder: Path, port: int) -> None:
    instructions = all_instructions(STAGES, "cpu")
    (entry,), (check,) = values(instructions, "ENTRYPOINT"), values(instructions, "HEALTHCHECK")
    data = folder / "data"
    data.mkdir()
    environ = {name: value.replace("/data", str(data)) for name, value in variables(instructions).items()}
    environ |= {"PATH": f"{prefix}/bin{os.pathsep}{os.environ['PATH']}", "PORT": str(port), "OMP_NUM_THREADS": "1"}
    program, *flags = words(entry)[2:]  # without the init
    log = (folder / "log").open("w")
    server = subprocess.Popen([prefix / "bin" / program, *flags], env=environ, cwd=data, stderr=log, stdout=log)
    try:
        ask = [str(prefix / "bin/python"), *words(check.partition("CMD ")[2])[1:]]
        end = time.monotonic() + START_S
        while subprocess.run(ask, env=environ, capture_output=True, check=False).returncode != 0:
            assert server.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, (folder / "log").read_text()[-2000:]
            time.sleep(0.25)  # polling slows down the start
        assert any((data / "lorax").iterdir())
    finally:
        server.terminate()
        assert server.wait(60) == 0
        log.close()
