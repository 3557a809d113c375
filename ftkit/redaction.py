"""What foreign text loses before it is shown, logged or stored: secrets and terminal escapes.

Keys, values, names and paths of files, answers and messages of libraries go through `shown`, the
one place where both are removed; errors of the user and everything that is displayed do so by
themselves.

Messages of libraries quote the urls they requested, so whole texts are searched, not only values
that are known to be urls. Text is redacted before it is cut: half a url is not recognised.
"""

import io
import re
from contextlib import suppress
from functools import lru_cache
from typing import TextIO

REMOVED = "***"
# Command strings with their whole content (a title, a link), control sequences, other escapes; then
# control characters but the line feed, and characters that reorder or hide text around them.
_UNPRINTABLE = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]{0,9999}(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]{0,999}[ -/]{0,999}[@-~]"
    r"|\x1b[ -/]{0,9}[0-Z\\^-~]"
    r"|[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Bytes of a file name that are not UTF-8, which no stream can write."""
_OF_SERVICE = (
    r"(?:hf|hub|huggingface|access|auth|api|bearer|refresh|session|security|github|gitlab|gh|git"
    r"|wandb|slack|telegram|discord|service|login|sas|mlflow|comet|swanlab|neptune|private"
    r"|personal)"
)
"""What stands before `token` in names of secrets; tokens of a vocabulary have other names."""
_NAME = (
    r"(?:[\w.-]{0,99}(?:api_?key|passw(?:or)?d|passphrase|credentials?|webhook(?:_url)?"
    r"|(?:access|secret|private|account|encryption|signing|ssh|deploy)_key(?:_id)?|_secret"
    rf"|{_OF_SERVICE}_?token)|secret)"
)
_SECRET = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?<![\w.-])(?P<key>[\"']?(?:--)?{_NAME}[\"']?\s?(?:[:=]|\bis)\s?)"
    # a text in quotes, what an equals sign assigns, or the rest of a line of YAML that is one word
    r"(?:(?P<quote>[\"'])[^\"'\n]+(?P=quote)|(?<==)[^\s\"',}\]]+|(?<=: )[^\s\"',:]+(?=[ \t]*$))",
    re.IGNORECASE | re.MULTILINE,
)
"""A secret behind its name, in JSON, Python or a shell."""
_LINE = re.compile(
    rf"^([ \t]*(?:- )?[\"']?{_NAME}[\"']?[ \t]*:[ \t]+)(?!{re.escape(REMOVED)})[^\n]+",
    re.IGNORECASE | re.MULTILINE,
)
"""A line of YAML with a secret, of which errors show a part."""
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
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}"  # the Hugging Face hub
    r"|sk-(?=[\w-]{0,99}\d)[\w-]{20,}"  # OpenAI, Anthropic and others
    r"|wandb_v1_[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|xox[abeoprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}|AIza[\w-]{35}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"  # a JSON web token
)
"""Tokens that are known by their form."""
_HEX = re.compile(r"[0-9a-f]{40}")
"""An older key of Weights & Biases. A commit looks the same, so the name of the key decides."""


def printable(text: str) -> str:
    """The text without terminal escape sequences and control characters, except line feeds.

    Answers of a model, records of a data set and keys of a file can hold anything.
    """
    # Tabs are control characters, but separate words: they become spaces.
    text = _UNPRINTABLE.sub("", text.expandtabs(4))
    return _SURROGATE.sub("?", text)


def shown(text: str) -> str:
    """The text as it may be shown, logged or stored: printable, and without secrets."""
    # In this order: an escape inside a secret would hide it.
    return redacted(printable(text))


def is_secret(name: str, value: object = "") -> bool:
    """Return whether a key or an option holds a secret, by its name.

    Flags, numbers and names of tokens of a vocabulary (`pad_token`, `max_tokens`) are none.

    Args:
        name: of the key, without its group.
        value: of the key, a text or nothing.
    """
    if not isinstance(value, str | None):
        return False
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_")
    if re.search(r"(?:^|_)(?:key|wandb|token)$", name, re.IGNORECASE) and _HEX.fullmatch(
        value or ""
    ):
        return True
    return _SECRET.fullmatch(name) is not None


# A report has the same texts each time that it is written, in every phase of a run.
@lru_cache(maxsize=1000)
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
    text = _LINE.sub(rf"\g<1>{REMOVED}", text)
    text = _ASSIGNED.sub(rf"\g<key>{REMOVED}", text)
    return _TOKEN.sub(REMOVED, text)


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
