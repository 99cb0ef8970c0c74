"""Who is there, proven both ways: challenge and response over a shared secret. Pure: bytes in, bytes out.

    client                          server
    Hello (nonce)           ->
                            <-      Answer (its Hello, proof over both)
    Proof (offer, proof)    ->
                            <-      Welcome (offer, proof)

A Refusal may stand in for any of these. Proofs are HMAC-SHA256 over all that was said so far, keyed with the
secret, which never travels. An offer is what the carrier needs to join (addresses, tokens); a server spends
nothing on a stranger before it has the Proof.
"""

import hmac
import secrets
from typing import NamedTuple, TypeVar

import msgspec

from libs.transport.credits import LinkLimits
from libs.transport.port import HandshakeRefused

PROTOCOL_VERSION = 1
MAX_PACKET_BYTES = 16 << 10
NONCE_BYTES = 16


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One side: its incarnation, what it shares with its peers, what it accepts."""

    kind: str
    incarnation: str
    secret: bytes
    limits: LinkLimits = LinkLimits()


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who I say I am. `nonce` makes every proof good for one handshake only."""

    version: int
    kind: str
    incarnation: str
    nonce: bytes
    limits: LinkLimits


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The server's Hello, encoded, and its proof."""

    hello: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The client's offer and proof."""

    offer: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The Link stands. The server's offer and proof."""

    offer: bytes
    proof: bytes


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """No Link, and why."""

    reason: str


class Side(NamedTuple):
    """What one side keeps between packets."""

    peer: Hello
    transcript: bytes


Packet = Answer | Hello | Proof | Refusal | Welcome
P = TypeVar("P", Hello, Answer, Proof, Welcome)
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)


def refusal(reason: str) -> bytes:
    """The packet that refuses."""
    return _encode(Refusal(reason))


def client_hello(me: Identity) -> bytes:
    """Packet 1."""
    return _encode(_hello(me))


def answer_hello(me: Identity, packet: bytes) -> tuple[Side, bytes]:
    """The server takes packet 1 and makes packet 2. Raises HandshakeRefused."""
    peer = _expect(packet, Hello)
    _check(me, peer)
    own = _encode(_hello(me))
    transcript = _join(packet, own)
    return Side(peer, transcript), _encode(Answer(own, _mac(me.secret, b"answer", transcript)))


def check_answer(me: Identity, hello: bytes, packet: bytes, expected_peer: str) -> Side:
    """The client takes packet 2 and knows its peer. Raises HandshakeRefused."""
    answer = _expect(packet, Answer)
    transcript = _join(hello, answer.hello)
    if not hmac.compare_digest(answer.proof, _mac(me.secret, b"answer", transcript)):
        raise HandshakeRefused("the server does not know our shared secret; both sides need the same one")
    peer = _expect(answer.hello, Hello)
    _check(me, peer)
    if expected_peer and peer.incarnation != expected_peer:
        raise HandshakeRefused(f"expected {expected_peer}, but {peer.incarnation} answers at this address")
    return Side(peer, transcript)


def prove(me: Identity, side: Side, offer: bytes) -> tuple[Side, bytes]:
    """The client makes packet 3."""
    transcript = _join(side.transcript, offer)
    return Side(side.peer, transcript), _encode(Proof(offer, _mac(me.secret, b"proof", transcript)))


def check_proof(me: Identity, side: Side, packet: bytes) -> tuple[Side, bytes]:
    """The server takes packet 3: the client is proven, here is its offer. Raises HandshakeRefused."""
    proof = _expect(packet, Proof)
    transcript = _join(side.transcript, proof.offer)
    if not hmac.compare_digest(proof.proof, _mac(me.secret, b"proof", transcript)):
        raise HandshakeRefused(f"{side.peer.incarnation[:80]!r} does not know our shared secret")
    return Side(side.peer, transcript), proof.offer


def welcome(me: Identity, side: Side, offer: bytes) -> bytes:
    """The server makes packet 4."""
    return _encode(Welcome(offer, _mac(me.secret, b"welcome", _join(side.transcript, offer))))


def check_welcome(me: Identity, side: Side, packet: bytes) -> bytes:
    """The client takes packet 4: here is the server's offer. Raises HandshakeRefused."""
    accepted = _expect(packet, Welcome)
    if not hmac.compare_digest(
        accepted.proof, _mac(me.secret, b"welcome", _join(side.transcript, accepted.offer))
    ):
        raise HandshakeRefused("the welcome is not of the server that we greeted")
    return accepted.offer


def _hello(me: Identity) -> Hello:
    return Hello(PROTOCOL_VERSION, me.kind, me.incarnation, secrets.token_bytes(NONCE_BYTES), me.limits)


def _check(me: Identity, peer: Hello) -> None:
    if peer.version != PROTOCOL_VERSION:
        raise HandshakeRefused(f"protocol version {peer.version} of the peer is not ours, {PROTOCOL_VERSION}")
    if peer.kind != me.kind:
        raise HandshakeRefused(f"the peer speaks {peer.kind!r}, this side {me.kind!r}")
    if len(peer.nonce) != NONCE_BYTES:
        raise HandshakeRefused(f"a nonce of {len(peer.nonce)} bytes instead of {NONCE_BYTES}")


def _expect(packet: bytes, kind: type[P]) -> P:
    try:
        decoded = _decoder.decode(packet)
    except msgspec.DecodeError as error:
        raise HandshakeRefused(f"undecodable {kind.__name__}: {error}") from error
    if isinstance(decoded, Refusal):
        raise HandshakeRefused(f"refused by the peer: {decoded.reason[:200]}")
    if not isinstance(decoded, kind):
        raise HandshakeRefused(f"{type(decoded).__name__} where {kind.__name__} is due")
    return decoded


def _join(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"kvmesh-link:" + label + b":" + transcript, "sha256")
