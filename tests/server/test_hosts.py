import pytest

from lorax_server.server.hosts import Hosts


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("LocalHost:3000", True),
        ("127.0.0.1:80", True),
        ("[::1]:80", True),
        ("[::1]", True),
        ("localhost:", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:3000", False),
        ("evil.example:localhost", False),
        ("localhost:80:80", False),
        ("evil@localhost", False),
        ("localhost@evil", False),
        ("http://localhost", False),
        ("localhost/", False),
        ("localhost evil", False),
        ("localhost,evil", False),
        ("[::1", False),
        ("::1", False),
        ("[localhost]", False),
        ("192.168.0.1", False),
        ("0.0.0.0", False),
        ("2130706433", False),
        ("127.1", False),
        ("localhost:\u0661", False),
        ("", False),
        (":3000", False),
        ("\x00", False),
        ("a" * 60_000, False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hosts_of_a_server_for_this_machine(host: str, is_allowed: bool) -> None:
    for bound in ("127.0.0.1", "::1", "localhost"):
        assert Hosts(bound, ()).allow(host) is is_allowed


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "is_allowed"),
    [
        ("127.0.0.5", (), "127.0.0.5:1", True),
        ("127.0.0.1", ("api.example.com",), "API.example.com", True),
        ("127.0.0.1", ("api.example.com",), "x.api.example.com", False),
        ("127.0.0.1", ("[2001:db8::1]",), "[2001:db8::1]:80", True),
        ("127.0.0.1", ("*",), "evil.example", True),
        ("0.0.0.0", (), "anything.example", True),  # meant for others, by whatever name
        ("10.0.0.1", (), "anything.example", True),
        ("0.0.0.0", ("api.example.com",), "anything.example", False),
        ("0.0.0.0", ("api.example.com",), "10.0.0.7:3000", True),  # one of the machine's own, as probes name it
        ("::", ("api.example.com",), "[2001:db8::7]", True),
        ("10.0.0.1", ("api.example.com",), "10.0.0.1", True),
        ("10.0.0.1", ("api.example.com",), "10.0.0.2", False),
    ],
)
def test_hosts_of_other_servers(bound: str, allowed: tuple[str, ...], host: str, is_allowed: bool) -> None:
    assert Hosts(bound, allowed).allow(host) is is_allowed
