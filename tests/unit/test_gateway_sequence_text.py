"""Text and tokens of one sequence, in any split, with any stops."""

from hypothesis import given
from hypothesis import strategies as st

from libs.request.sampling import TokenLogprobs
from services.gateway.generation.text import SequenceText, ShownToken, TextDelta


class ByteDetokenizer:
    """Tokens are bytes; 0 is special and has no text."""

    def __init__(self) -> None:
        self._pending = b""

    def push(self, token_ids: list[int]) -> str:
        self._pending += bytes(token_id for token_id in token_ids if token_id)
        for end in range(len(self._pending), -1, -1):
            try:
                text = self._pending[:end].decode()
            except UnicodeDecodeError:
                continue
            self._pending = self._pending[end:]
            return text
        raise AssertionError("the empty string always decodes")

    def finish(self) -> str:
        return "\ufffd" if self._pending else ""


def run(
    tokens: list[int], stops: tuple[str, ...] = (), min_tokens: int = 0
) -> tuple[SequenceText, list[TextDelta]]:
    text = SequenceText(ByteDetokenizer(), stops=stops, min_tokens=min_tokens, keeps_tokens=True)
    pieces: list[TextDelta] = []
    for number, token in enumerate(tokens):
        text.push(token, TokenLogprobs(-float(number)))
        pieces.append(text.take())
        if text.stopped:
            break
    text.finish()
    return text, [*pieces, text.take()]


def shown(pieces: list[TextDelta]) -> tuple[str, list[ShownToken]]:
    return "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens]


texts = st.text(alphabet="ab é\U0001f600", max_size=20)


@given(text=texts, stops=st.lists(texts.filter(bool), max_size=4))
def test_tokens_joined_are_the_text_and_their_offsets_rise(text: str, stops: list[str]) -> None:
    whole, tokens = shown(run(list(text.encode()), tuple(stops))[1])
    assert whole == text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
    assert "".join(token.text for token in tokens) == whole
    offsets = [token.offset for token in tokens]
    assert offsets == sorted(offsets)
    assert all(whole[token.offset :].startswith(token.text) for token in tokens)


@given(text=texts, stops=st.lists(texts.filter(bool), max_size=4))
def test_each_token_is_shown_once_in_order_and_never_before_its_text(text: str, stops: list[str]) -> None:
    _, pieces = run(list(text.encode()), tuple(stops))
    tokens = shown(pieces)[1]
    assert [token.logprobs for token in tokens] == [TokenLogprobs(-float(n)) for n in range(len(tokens))]
    num_chars = num_chars_of_tokens = 0
    for piece in pieces:
        num_chars += len(piece.text)
        num_chars_of_tokens += sum(len(token.text) for token in piece.tokens)
        assert num_chars_of_tokens <= num_chars


def test_half_a_character_waits_for_its_other_half() -> None:
    pieces = run(list("é!".encode()))[1]
    assert [piece.text for piece in pieces] == ["", "é", "!", ""]


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    whole, tokens = shown(run(list(b"a\xc3"))[1])
    assert whole == "a\ufffd"
    assert "".join(token.text for token in tokens) == whole


def test_a_stop_string_inside_the_first_min_tokens_does_not_end_the_text() -> None:
    text, pieces = run(list(b"xaxbxc"), stops=("x",), min_tokens=3)
    assert shown(pieces)[0] == "xaxb"
    assert text.stopped


def test_a_hidden_token_counts_but_has_no_text() -> None:
    text = SequenceText(ByteDetokenizer(), keeps_tokens=True)
    text.push(ord("a"))
    text.push(ord("b"), hidden=True)
    text.finish()
    piece = text.take()
    assert (piece.text, [token.text for token in piece.tokens]) == ("a", ["a", ""])


def test_without_logprobs_no_tokens_are_kept() -> None:
    text = SequenceText(ByteDetokenizer())
    text.push(ord("a"))
    assert text.take() == TextDelta("a", [])
