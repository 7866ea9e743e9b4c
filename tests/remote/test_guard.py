"""Which addresses are public, and which step of a redirect may be made.

Oracles: the special registries of IANA as `ipaddress` knows them, and a list of what it takes for
global though nobody reaches it from anywhere. Seen red: NAT64, 6to4, Teredo and multicast taken for
public, 192.0.0.192 taken for public, a private host that leads to the metadata service or to this
machine, a name that leads to the metadata service.
"""

import ipaddress
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.errors import RemoteError
from aprfmt.remote import address_policy
from aprfmt.remote.address_policy import (
    Reach,
    address_reach,
    check_connection,
    is_loopback,
    is_public,
    parse_target,
)

PUBLIC = (
    "1.1.1.1", "8.8.8.8", "93.184.216.34", "100.63.255.255", "100.128.0.1", "172.15.0.1",
    "172.32.0.1", "192.0.1.1", "198.17.0.1", "203.0.114.1", "223.255.255.255",
    "2606:4700:4700::1111", "2a00:1450:4001:81b::200e", "::ffff:8.8.8.8", "64:ff9b::808:808",
)  # fmt: skip
PRIVATE = (
    "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "192.0.0.8", "192.0.0.170", "192.0.0.9",
    "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1",
    "239.255.255.250", "240.0.0.1", "255.255.255.255", "::ffff:10.0.0.1", "::10.0.0.1",
    "64:ff9b::a00:1", "64:ff9b:1::a00:1", "64:ff9b:1:ffff::808:808", "100::1", "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:db8::1", "2002:a00:1::1",
    "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd12:3456::1", "fec0::1", "ff02::1",
    "::ffff:0:8.8.8.8", "4000::1",
)  # fmt: skip
HERE = ("127.0.0.1", "127.255.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::")
METADATA = (
    "169.254.169.254", "169.254.170.2", "169.254.0.1", "100.100.100.200", "168.63.129.16",
    "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "fe80::1", "fe80::1%eth0",
    "::ffff:169.254.169.254", "::169.254.169.254", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe",
    "2002:a9fe:a9fe::1", "::ffff:0:169.254.169.254", "64:ff9b::6464:64c8",
    "2001:0:4136:e378:8000:63bf:5601:5601",
)  # fmt: skip


@pytest.mark.parametrize(("address", "expected"), [
    *((each, Reach.PUBLIC) for each in PUBLIC), *((each, Reach.PRIVATE) for each in PRIVATE),
    *((each, Reach.HERE) for each in HERE), *((each, Reach.METADATA) for each in METADATA),
])  # fmt: skip
def test_from_where_an_address_is_reached(address: str, expected: Reach) -> None:
    assert address_reach(address) == expected
    assert expected == Reach.METADATA or is_public(address) == (expected == Reach.PUBLIC)


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6))
def test_what_the_registries_call_private_is_not_public(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    nat64 = ip in ipaddress.ip_network("64:ff9b::/96")
    if not ip.is_global and not nat64 and not getattr(ip, "ipv4_mapped", None):
        assert not is_public(str(ip))
    if getattr(ip, "ipv4_mapped", None):
        return  # its IPv4 address decides
    if ip.is_multicast or (ip.is_reserved and not nat64) or ip.is_unspecified:
        assert not is_public(str(ip))
    assert is_loopback(str(ip)) <= (address_reach(str(ip)) <= Reach.HERE)


@given(st.ip_addresses(v=4))
def test_an_ipv6_address_is_what_it_leads_to(ip: ipaddress.IPv4Address) -> None:
    for prefix in ("::ffff:", "64:ff9b::"):
        assert is_public(f"{prefix}{ip}") == is_public(str(ip))
    tunnel = ipaddress.IPv6Address((0x2002 << 112) | (int(ip) << 80) | 1)
    assert not is_public(str(tunnel))
    assert (address_reach(str(tunnel)) == Reach.METADATA) == (
        address_reach(str(ip)) == Reach.METADATA
    )


_SAMPLES = {Reach.PUBLIC: "93.184.216.34", Reach.PRIVATE: "10.0.0.7", Reach.HERE: "127.0.0.1",
            Reach.METADATA: "169.254.169.254"}  # fmt: skip


@pytest.mark.parametrize(("came", "to"), list(itertools.product(_SAMPLES, _SAMPLES)))
def test_a_step_never_leads_nearer(came: Reach, to: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_policy.POLICY, "plain_http", True)
    before = parse_target("http://came.example/x", "W"), [_SAMPLES[came]]
    step = parse_target(f"http://{_SAMPLES[to]}/y", "W")
    if to >= came and to != Reach.METADATA:
        check_connection(step, [_SAMPLES[to]], before, "W")
        return
    with pytest.raises(RemoteError, match="W: is redirected from a"):
        check_connection(step, [_SAMPLES[to]], before, "W")


def test_one_address_of_many_is_enough_to_refuse() -> None:
    before = parse_target("https://a.example/x", "W"), ["93.184.216.34", "10.0.0.1"]
    with pytest.raises(RemoteError, match="from a public address to a private one"):
        check_connection(
            parse_target("https://b.example/y", "W"), ["8.8.8.8", "192.168.0.1"], before, "W"
        )


@pytest.mark.parametrize("host", ["meta.example", "2852039166"])
def test_a_name_never_leads_to_a_metadata_service(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_policy.POLICY, "plain_http", True)
    with pytest.raises(RemoteError, match=f"the name {host} leads to an address of a metadata"):
        check_connection(parse_target(f"http://{host}/x", "W"), ["169.254.169.254"], None, "W")
    check_connection(
        parse_target("http://169.254.169.254/x", "W"), ["169.254.169.254"], None, "W"
    )  # it was given


@pytest.mark.parametrize(("host", "right"), [
    ("a", True), ("a.b.", True), ("a_b-c.example", True), ("x" * 63, True), ("x" * 64, False),
    ("a..b", False), (".a", False), ("-a", False), ("a-", False), ("a%b", False), ("::1", True),
    ("fe80::1%eth0", False), ("1:2", False), ("a." * 126 + "b", True), ("a." * 127 + "b", False),
])  # fmt: skip
def test_what_is_a_host(host: str, right: bool) -> None:
    assert address_policy.is_host(host) == right
