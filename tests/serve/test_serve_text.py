"""Text as it comes is the text of all tokens, whatever characters and stop strings they cut."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from weft.serve.text import NO_CHARACTER, Characters, Text


def decode(tokens) -> str:
    """A token a byte."""
    return bytes(tokens).decode(errors="replace")


@given(st.binary(max_size=40))
@example(b"\xff" * 3 + "€".encode())
def test_all_that_is_said_is_the_text_of_all_tokens(data):
    characters = Characters(decode)
    said = [characters.add(token) for token in data] + [characters.end()]
    assert "".join(said) == decode(data)


@given(st.text(max_size=20), st.data())
def test_no_half_characters_are_said(text, data):
    """Of tokens that are whole characters nothing is held, and none is ever replaced."""
    characters = Characters(decode)
    said = [characters.add(token) for token in text.encode()]
    assert "".join(said) == text.rstrip(NO_CHARACTER) or text.endswith(NO_CHARACTER)
    assert NO_CHARACTER in text or not any(NO_CHARACTER in one for one in said)


def test_spaces_that_a_decoder_strips_at_the_beginning_stay_between_words():
    """Bytes of a character are tokens too, and a run of them is decoded as a whole."""
    words = ("▁so", "▁it", "<0xE2>", "<0x82>", "<0xAC>")
    words = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="▁so"))
    spaces, ends = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    steps = [spaces, decoders.ByteFallback(), decoders.Fuse(), ends]
    tokenizer.decoder = decoders.Sequence(steps)
    tokens = [0, 1, 2, 3, 4, 2, 3, 4, 1]
    characters = Characters(tokenizer.decode)
    said = [characters.add(token) for token in tokens]
    assert said == ["so", " it", "", "", "€", "", "", "€", " it"]
    assert "".join(said) == tokenizer.decode(tokens)


def stopped(text: str, stops: list[str]) -> str:
    """Cut by the stop string that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


@given(st.text("abé", max_size=20), STOPS, st.randoms())
def test_stop_strings_are_found_however_tokens_cut_them(text, stops, draw):
    """Tokens of one to three bytes; what was said is never taken back."""
    data, pieces = text.encode(), []
    while data:
        size = draw.randint(1, 3)
        pieces.append(data[:size])
        data = data[size:]
    one = Text(lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"), stops)
    said = ""
    for i in range(len(pieces)):
        said += one.add(i)
        assert stopped(text, stops).startswith(said)
        if one.has_stopped:
            break
    said += "" if one.has_stopped else one.end()
    assert said == stopped(text, stops)
    assert one.has_stopped == any(stop in text for stop in stops)
