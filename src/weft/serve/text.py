"""Text of tokens as they come: never half a character, nothing of a stop string or behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What decoders put where bytes are no character, or not yet. One has four bytes at most, so at a
# text's end so many of these, or of tokens, may become another character with the next token.
NO_CHARACTER, OPEN = "\ufffd", 3


class Characters:
    """Tokens to text, said as soon as it is settled; all that is said is `decode` of all tokens.

    A token's text may depend on those before it (a space that begins a text, bytes of one
    character): those whose text came last are decoded with it again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self.tokens: list[int] = []  # from which on text is decoded
        self.said = 0  # characters of their text
        self.last = 0  # tokens whose text is settled

    def add(self, token: int) -> str:
        self.tokens.append(token)
        text = self.decode(self.tokens)
        num_open = len(text) - len(text.rstrip(NO_CHARACTER))
        if len(self.tokens) - self.last > OPEN:
            num_open = min(num_open, OPEN)
        new = text[self.said : max(len(text) - num_open, self.said)]
        self.said += len(new)
        if new and not num_open:
            self.tokens, self.last = self.tokens[self.last :], len(self.tokens) - self.last
            self.said = len(self.decode(self.tokens))
        return new

    def end(self) -> str:
        """What was held back: bytes of which no character became."""
        return self.decode(self.tokens)[self.said :]


class Text:
    """Text of one request. Once it `has_stopped`, at the stop string that ended first, it is over.

    What may be the beginning of a stop string is held back until it is known.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.characters, self.stops = Characters(decode), stops
        self.held = ""
        self.has_stopped = False

    def add(self, token: int) -> str:
        return self._say(self.characters.add(token))

    def end(self) -> str:
        """The rest, where there are no more tokens."""
        said = self._say(self.characters.end())
        said, self.held = said + self.held, ""
        return said

    def _say(self, new: str) -> str:
        text = self.held + new
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self.stops if stop in text]
        if found:
            end, length = min(found)
            self.has_stopped, self.held = True, ""
            return text[: end + length]
        num_held = max((self._begun(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _begun(self, text: str, stop: str) -> int:
        """How much of the text's end is a beginning of `stop`."""
        most = min(len(stop) - 1, len(text))
        return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
