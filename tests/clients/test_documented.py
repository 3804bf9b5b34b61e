"""Run the code blocks in docs/clients.md."""

import re
import subprocess

import pytest

from tests.clients.conftest import EXPECTED_COMPLETIONS, HERE, ROOT, Server
from tests.clients.test_node import LIMIT_S, NODE

ADDRESS = "http://localhost:3000"
DOCUMENT = (ROOT / "docs" / "clients.md").read_text()


def blocks(language: str) -> list[str]:
    result = re.findall(rf"```{language}\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert result
    return result


@pytest.mark.parametrize("block", blocks("python"))
def test_python_code_blocks_run(block: str, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block.replace(ADDRESS, server.url), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == EXPECTED_COMPLETIONS["sql"]


@pytest.mark.parametrize("block", blocks("js"))
def test_javascript_code_blocks_run(block: str, server: Server) -> None:
    command = [str(NODE), "--input-type=module", "-e", block.replace(ADDRESS, server.url)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == EXPECTED_COMPLETIONS["sql"]
