"""Recognizes the processes of a server by their title, or by their command until they have set the title."""

import psutil

COMMANDS = {
    "server": "lorax_server.scale.server_main",  # for replicas
    "engine": "spawn_main",
    "sandbox": "lorax_server.sandbox.worker",
    "tracker": "multiprocessing.resource_tracker",
}


def has_role(process: psutil.Process, role: str) -> bool:
    """Return True if the process runs as `lorax: ROLE`, and False if it has exited."""
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return f"lorax: {role}" in command or COMMANDS[role] in command
