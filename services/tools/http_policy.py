"""Pure: what http_fetch may ask. Hosts are allowed by name; addresses that are not public only when listed as such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

SETTING: Final = "ROOST_TOOLS_HTTP_HOSTS"
PORTS: Final = {"http": 80, "https": 443}

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class Refused(Exception):
    """The address may not be asked; the text is for the model."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The list. `port` None in a host's row stands for the scheme's own port."""

    hosts: frozenset[tuple[str, int | None]]
    networks: tuple[tuple[Network, int | None], ...]


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect."""

    scheme: str
    host: str
    port: int


def parse_allowed(text: str) -> Allowed:
    """Read the setting: `host`, `host:port`, address, `[v6]:port`, network. Raises ValueError naming the entry at fault."""
    hosts: set[tuple[str, int | None]] = set()
    networks: list[tuple[Network, int | None]] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        network = _network(entry)
        if network is not None:
            networks.append((network, None))
            continue
        parts = urlsplit(f"//{entry}")
        if parts.hostname is None or parts.path or parts.query or "*" in entry or "@" in entry:
            raise ValueError(f"{SETTING}: {entry!r} is not a host, host:port, address or network")
        network = _network(parts.hostname)
        if network is not None:
            networks.append((network, parts.port))
        else:
            hosts.add((parts.hostname.rstrip("."), parts.port))
    return Allowed(frozenset(hosts), tuple(networks))


def _network(text: str) -> Network | None:
    try:
        return ip_network(text.strip("[]"), strict=False)
    except ValueError:
        return None


def target(url: str, allowed: Allowed) -> Target:
    """Check scheme, host and port of an address. Raises Refused."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as broken:
        raise Refused(f"{url[:200]!r} is not a web address: {broken}") from broken
    if parts.scheme not in PORTS or not parts.hostname:
        raise Refused(f"{url[:200]!r} is not a web address (http or https)")
    if parts.username is not None or parts.password is not None:
        raise Refused("an address with a user name or password is not allowed")
    host = parts.hostname.rstrip(".")
    found = Target(parts.scheme, host, port or PORTS[parts.scheme])
    literal = _literal(host)
    listed = (
        _is_listed(literal, found, allowed)
        if literal is not None
        else any(name == host and found.port in _ports(listed_port) for name, listed_port in allowed.hosts)
    )
    if not listed:
        raise Refused(f"host {host} port {found.port} is not on the list of allowed hosts ({SETTING})")
    return found


def _ports(port: int | None) -> tuple[int, ...]:
    return (port,) if port is not None else tuple(PORTS.values())


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_listed(address: Address, found: Target, allowed: Allowed) -> bool:
    return any(
        address.version == network.version and address in network and found.port in _ports(port)
        for network, port in allowed.networks
    )


def pinned(found: Target, addresses: Sequence[str], allowed: Allowed) -> str:
    """The address to connect to, of those the name resolved to. Raises Refused if none is allowed."""
    for text in addresses:
        address = ip_address(text.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        real = mapped if mapped is not None else address
        if (real.is_global and not real.is_multicast) or _is_listed(real, found, allowed):
            return str(real)
    raise Refused(
        f"host {found.host} resolves to {', '.join(addresses[:4]) or 'nothing'}, which is not a public address; "
        f"list the address itself in {SETTING} to allow it"
    )
