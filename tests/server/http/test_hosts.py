from pathlib import Path

import pytest

from lorax_server.config import EngineConfig, ModelConfig, ServerConfig
from lorax_server.server.http.hosts import AllowedHosts, client_network
from lorax_server.server.run import bind_port


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
def test_loopback_server_checks_host(host: str, is_allowed: bool) -> None:
    for bound in ("127.0.0.1", "::1", "localhost"):
        assert AllowedHosts(bound, ()).is_allowed(host) is is_allowed


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "is_allowed"),
    [
        ("127.0.0.5", (), "127.0.0.5:1", True),
        ("127.0.0.1", ("api.example.com",), "API.example.com", True),
        ("127.0.0.1", ("api.example.com",), "x.api.example.com", False),
        ("127.0.0.1", ("[2001:db8::1]",), "[2001:db8::1]:80", True),
        ("127.0.0.1", ("*",), "evil.example", True),
        ("0.0.0.0", (), "anything.example", True),  # public: any name is allowed
        ("10.0.0.1", (), "anything.example", True),
        ("0.0.0.0", ("api.example.com",), "anything.example", False),
        ("0.0.0.0", ("api.example.com",), "10.0.0.7:3000", True),  # one of the machine's own, as probes name it
        ("::", ("api.example.com",), "[2001:db8::7]", True),
        ("10.0.0.1", ("api.example.com",), "10.0.0.1", True),
        ("10.0.0.1", ("api.example.com",), "10.0.0.2", False),
    ],
)
def test_public_server_allows_configured_hosts(
    bound: str, allowed: tuple[str, ...], host: str, is_allowed: bool
) -> None:
    assert AllowedHosts(bound, allowed).is_allowed(host) is is_allowed


@pytest.mark.parametrize(
    ("bound", "address"),
    [
        ("localhost.localdomain", "127.0.0.1"),
        ("ip6-localhost", "::1"),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1"),
        ("laptop", "127.0.1.1"),  # as many systems call themselves
    ],
)
def test_name_resolving_to_loopback_is_checked(bound: str, address: str) -> None:
    hosts = AllowedHosts(bound, (), address)
    assert not hosts.is_allowed("evil.example")
    assert all(map(hosts.is_allowed, ("localhost:3000", "127.0.0.1", f"[{bound}]:1" if ":" in bound else f"{bound}:1")))


def test_ipv4_mapped_unspecified_address_allows_all_hosts() -> None:
    assert AllowedHosts("::ffff:0.0.0.0", ()).is_allowed("anything.example")
    assert AllowedHosts("::ffff:0.0.0.0", ("api.example.com",)).is_allowed("10.0.0.7:3000")


@pytest.mark.parametrize("name", ["localhost", "127.1"])
def test_socket_address_decides_host_check(name: str) -> None:
    config = ServerConfig(EngineConfig(ModelConfig(Path("nowhere"))), "base", host=name, port=0)
    with bind_port(config) as listener:
        assert not AllowedHosts(name, (), listener.getsockname()[0]).is_allowed("evil.example")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("1.2.3.4", "1.2.3.5", False),
        ("::ffff:1.2.3.4", "1.2.3.4", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),  # one customer has all of these addresses
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
        ("no address", "1.2.3.4", False),
    ],
)
def test_client_network_groups_addresses(one: str, other: str, is_same: bool) -> None:
    assert (client_network(one) == client_network(other)) is is_same
