"""Removal of passwords and tokens from texts that are shown, logged or stored.

Messages of libraries quote the urls they requested, so whole texts are searched, not only values
that are known to be urls. Text is redacted before it is cut: half a url is not recognised.
"""

import io
import re
from contextlib import suppress
from typing import TextIO

REMOVED = "***"
# Lengths are bounded, so that the time is linear in the text whatever it holds.
_SCHEME = r"\b[a-z][a-z0-9+.-]{0,30}://"
_USER = re.compile(rf"({_SCHEME})([^\s\"<>/?#]{{1,999}})@", re.IGNORECASE)
"""The part of a url before its host, up to the last @: passwords may hold that unescaped."""
# Digits up to a slash are a port: http://host:8080/name@version has no password.
_PASSWORD = re.compile(
    rf"({_SCHEME})[^\s\"<>/?#:@]{{0,99}}:(?!\d+[/?#])[^\s\"<>@]{{1,999}}@", re.IGNORECASE
)
"""User and password in a url whose password has an unescaped / or #, which no library accepts."""
_PROXY = re.compile(r"(?<![\w.%+/-])[\w.%+-]{1,99}:[^\s\"<>/@]{1,999}@(?=[\w.-]{1,99}:\d)")
"""User and password of a proxy without a scheme."""
_PARAMETER = re.compile(
    r"([?&;#](?:[\w.-]{0,99}(?:token|signature|secret|password|passwd|api_?key|credential)"
    r"[\w.-]{0,99}|sig|key)=)[^&;#\s\"'<>]+",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(r"((?:AccountKey|SharedAccessSignature)=)[^;\s\"'<>]+", re.IGNORECASE)
"""Secrets in a connection string of Azure."""
_HEADER = re.compile(
    r"(\bAuthorization[\"']?\s?[:=]\s?[\"']?(?:Bearer|Basic)\s)[^\s\"']+", re.IGNORECASE
)
# Access tokens of the Hugging Face hub.
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


def redacted(text: str) -> str:
    """The text without secrets: users and passwords in urls, signatures and tokens.

    A user without a password is kept in urls other than http and https, as in ssh://git@host: it is
    only a name.
    """
    if "@" in text:
        text = _USER.sub(_without_user, text)
        text = _PASSWORD.sub(rf"\g<1>{REMOVED}@", text)
        text = _PROXY.sub(f"{REMOVED}@", text)
    text = _PARAMETER.sub(rf"\g<1>{REMOVED}", text)
    text = _ASSIGNMENT.sub(rf"\g<1>{REMOVED}", text)
    text = _HEADER.sub(rf"\g<1>{REMOVED}", text)
    return _HUB_TOKEN.sub(REMOVED, text)


class _RedactedOutput(io.TextIOWrapper):
    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
        self._stream = stream

    def close(self) -> None:
        """Flush: the buffer belongs to the stream, which is used again where this one goes."""
        self.flush()

    def write(self, text: str, /) -> int:
        # Where the reader has gone or the disk is full, a message is lost, and never a run.
        with suppress(OSError):
            super().write(redacted(text))
        # The length of the caller's text, all of which is done with.
        return len(text)


def redacted_output(stream: TextIO) -> TextIO:
    """A standard stream that redacts what libraries and tracebacks write to it as well.

    Each write is searched by itself, as loggers and tracebacks write a message at once. What
    another process writes to the same file is not seen.
    """
    if not isinstance(stream, io.TextIOWrapper):  # replaced by somebody else, as in notebooks
        return stream
    return _RedactedOutput(stream)


def _without_user(found: re.Match[str]) -> str:
    # In http urls a token may stand alone, as in https://TOKEN@github.com.
    is_secret = ":" in found[2] or found[1].lower() in ("http://", "https://")
    return f"{found[1]}{REMOVED}@" if is_secret else found[0]
