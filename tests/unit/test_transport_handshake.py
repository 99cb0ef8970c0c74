"""The handshake: both sides prove that they know the secret, and nothing that is altered gets through."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.transport import handshake
from libs.transport.credits import LinkLimits
from libs.transport.handshake import Identity
from libs.transport.port import HandshakeRefused

SERVER = Identity(kind="ucx", incarnation="server-1", secret=b"shared", limits=LinkLimits(window_frames=7))
CLIENT = Identity(kind="ucx", incarnation="client-1", secret=b"shared", limits=LinkLimits(window_frames=9))


def _unaltered(_number: int, packet: bytes) -> bytes:
    return packet


def shake(
    client: Identity = CLIENT, server: Identity = SERVER, expected: str = "", alter=_unaltered
) -> tuple[handshake.Side, handshake.Side, bytes, bytes]:
    """All four packets; `alter` sees each on its way."""
    hello = handshake.client_hello(client)
    at_server, answer = handshake.answer_hello(server, alter(1, hello))
    at_client = handshake.check_answer(client, hello, alter(2, answer), expected)
    at_client, proof = handshake.prove(client, at_client, b"the client's offer")
    at_server, client_offer = handshake.check_proof(server, at_server, alter(3, proof))
    accepted = handshake.welcome(server, at_server, b"the server's offer")
    return at_client, at_server, handshake.check_welcome(client, at_client, alter(4, accepted)), client_offer


def test_both_sides_learn_the_incarnation_limits_and_offer_of_the_other() -> None:
    at_client, at_server, server_offer, client_offer = shake(expected="server-1")
    assert (at_client.peer.incarnation, at_client.peer.limits.window_frames) == ("server-1", 7)
    assert (at_server.peer.incarnation, at_server.peer.limits.window_frames) == ("client-1", 9)
    assert (server_offer, client_offer) == (b"the server's offer", b"the client's offer")


def test_a_client_refuses_a_server_that_does_not_know_the_secret() -> None:
    with pytest.raises(HandshakeRefused, match="the server does not know our shared secret"):
        shake(server=msgspec.structs.replace(SERVER, secret=b"other"))


def test_a_server_refuses_a_client_that_does_not_know_the_secret() -> None:
    hello = handshake.client_hello(CLIENT)
    at_server, _ = handshake.answer_hello(SERVER, hello)
    liar = msgspec.structs.replace(CLIENT, secret=b"other")
    _, proof = handshake.prove(liar, handshake.Side(at_server.peer, at_server.transcript), b"")
    with pytest.raises(HandshakeRefused, match="'client-1' does not know our shared secret"):
        handshake.check_proof(SERVER, at_server, proof)


@given(st.integers(1, 4), st.integers(0), st.integers(1, 255))
def test_no_packet_passes_with_any_byte_altered(number: int, position: int, difference: int) -> None:
    def alter(at: int, packet: bytes) -> bytes:
        if at != number:
            return packet
        changed = bytearray(packet)
        changed[position % len(changed)] ^= difference
        return bytes(changed)

    with pytest.raises(HandshakeRefused):
        shake(alter=alter)


@given(st.integers(1, 4), st.binary(max_size=300))
def test_garbage_instead_of_any_packet_is_refused(number: int, garbage: bytes) -> None:
    with pytest.raises(HandshakeRefused):
        shake(alter=lambda at, packet: garbage if at == number else packet)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_packets_of_an_earlier_handshake_are_refused(number: int) -> None:
    recorded: dict[int, bytes] = {}
    shake(alter=lambda at, packet: recorded.setdefault(at, packet))
    with pytest.raises(HandshakeRefused):
        shake(alter=lambda at, packet: recorded[at] if at == number else packet)


def test_a_servers_own_proof_sent_back_to_it_does_not_make_a_client() -> None:
    hello = handshake.client_hello(CLIENT)
    at_server, answer = handshake.answer_hello(SERVER, hello)
    proof = msgspec.msgpack.decode(answer, type=handshake.Answer).proof
    reflected = msgspec.msgpack.encode(handshake.Proof(b"", proof))
    with pytest.raises(HandshakeRefused):
        handshake.check_proof(SERVER, at_server, reflected)


def test_another_incarnation_than_expected_is_refused_by_name() -> None:
    with pytest.raises(HandshakeRefused, match="expected server-0, but server-1 answers"):
        shake(expected="server-0")


def test_another_kind_of_transport_is_refused() -> None:
    with pytest.raises(HandshakeRefused, match="speaks 'shm', this side 'ucx'"):
        shake(client=msgspec.structs.replace(CLIENT, kind="shm"))


def test_another_protocol_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 2)
    hello = handshake.client_hello(CLIENT)
    monkeypatch.undo()
    with pytest.raises(HandshakeRefused, match="version 2 of the peer is not ours, 1"):
        handshake.answer_hello(SERVER, hello)


def test_a_refusal_is_told_with_its_reason() -> None:
    with pytest.raises(HandshakeRefused, match="refused by the peer: not today"):
        shake(alter=lambda at, packet: handshake.refusal("not today") if at == 2 else packet)
