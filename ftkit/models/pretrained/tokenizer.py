"""The tokenizer of a base model."""

import base64
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftkit.errors import UserError
from ftkit.models.chat_templates.template import template_of
from ftkit.models.pretrained.model_files import read_json
from ftkit.utils.damaged_files import reading, require_regular
from ftkit.utils.imports import hidden

if TYPE_CHECKING:
    import torch

GENERATION = "generation_config.json"
"""File with the settings of generation, which name the tokens that end an answer."""

# The library runs these steps in Rust without a limit: 30 that each double a text make a billion
# characters of one. In published tokenizers the growth is some hundreds, counted as here.
_MOST_GROWTH = 2**14
"""Largest factor by which the steps of a tokenizer.json may lengthen a text."""
_MOST_UNUSED_IDS = 2**16
"""Most gaps between the ids of a vocabulary, each of which the library lists when it writes it."""
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_LONGEST_NFKC = 18
"""Characters of the longest form of one (U+FDFA)."""
_GROWTH = {
    "NFD": 4,
    "NFC": 3,
    "NFKD": _LONGEST_NFKC,
    "NFKC": _LONGEST_NFKC,
    "Lowercase": 3,
    "BertNormalizer": 12,
    "ByteLevel": 4,
    "Metaspace": 2,
    "Prepend": 2,
}
"""Most characters that each kind of step makes of one."""


class Encoded(NamedTuple):
    """The tokens of a text and their positions in it."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """First character and end of each; bytes of one character share it."""


class Tokenizer:
    """The tokenizer of a base model, as transformers builds it of the files in a directory.

    Which class of transformers it is, and with it the normalizer, the way that texts are cut and
    the tokens that are added to the vocabulary, follows from several files. Other programs read
    them in the same way.
    """

    # LitGPT decides by the names of the directory and of the tokenizer's class whether texts begin
    # with BOS. Here the tokenizer decides, so that a renamed copy behaves like the original.

    def __init__(self, directory: Path) -> None:
        """Build it of tokenizer.json, or else tokenizer.model, and the settings beside them.

        Raises:
            UserError: there is no tokenizer, it cannot be read, it is code in the directory, or it
                has no end-of-text token.
        """
        self.model_name = directory.name
        self._directory = directory
        self._word: int | None = None
        settings = read_json(directory / "tokenizer_config.json")
        vocabulary = directory / "tokenizer.json"
        require_regular(vocabulary)
        is_sentencepiece = not vocabulary.is_file()
        if is_sentencepiece:
            vocabulary = directory / "tokenizer.model"
            require_regular(vocabulary)
        if not vocabulary.is_file():
            raise UserError(
                f"{directory} has no tokenizer. Copy tokenizer.json or tokenizer.model of the "
                "original model there."
            )
        if others := {*(settings.get("fast_tokenizer_files") or ())} - {vocabulary.name}:
            raise UserError(
                f"{directory / 'tokenizer_config.json'} names {min(map(str, others))} as a "
                "tokenizer for some versions of transformers, but ftkit reads tokenizer.json. "
                "Remove fast_tokenizer_files there, and keep the file as tokenizer.json."
            )
        # The Rust library panics on some damaged files, which `reading` turns into a message, too.
        if not is_sentencepiece:
            with reading(vocabulary, "a tokenizer", advice="Download it again."):
                # Building it runs the steps on the added tokens already.
                _require_bounded(json.loads(vocabulary.read_text(encoding="utf-8")), vocabulary)
        is_named = {kind: self._is_named(kind) for kind in ("bos", "eos")}
        with reading(directory, "a tokenizer of transformers", advice="Download it again."):
            self._built = _built(directory, settings)
            self.processor: Any = self._built.backend_tokenizer
            # Left on in the file by whoever saved it after a call with these options.
            self.processor.no_truncation()
            self.processor.no_padding()
            self.bos_id: int | None = self._special_token("bos", is_named=is_named["bos"])
            eos_id = self._special_token("eos", is_named=is_named["eos"])
            # Tried, because no setting says it for all tokenizers; sentencepiece has no rule.
            begins = self.processor.encode("a").ids[:1] == [self.bos_id] or is_sentencepiece
            self.use_bos = begins and self.bos_id is not None
            self._word = self._word_that_loses_its_space()
        if eos_id is None:
            raise UserError(
                f"The tokenizer in {directory} has no end-of-text token, so a model could not "
                'learn to stop. Name it as "eos_token" in tokenizer_config.json.'
            )
        self.eos_id = eos_id
        # The settings come last: they overrule what the files of the vocabulary do.
        if isinstance(add_bos := settings.get("add_bos_token"), bool):
            self.use_bos = add_bos and self.bos_id is not None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in another process what the library does not write."""
        self.__dict__.update(state)
        self.processor.encode_special_tokens = self._built.split_special_tokens

    @property
    def directory(self) -> Path:
        """Directory of its files."""
        return self._directory

    def lacks(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that are no tokens of the vocabulary, or have no embedding."""
        rows = self.rows
        return tuple(
            text
            for text in texts
            if (token := self.vocabulary.get(text)) is None or (rows is not None and token >= rows)
        )

    @cached_property
    def rows(self) -> int | None:
        """Embeddings of the model beside it; None: its settings do not say how many."""
        settings = read_json(self._directory / "config.json")
        of_language = settings.get("text_config")  # of a multimodal model
        found = (of_language if isinstance(of_language, dict) else settings).get("vocab_size")
        return found if isinstance(found, int) else None

    def require_embedded(self, ids: Iterable[int], place: str) -> None:
        """Refuse tokens for which the model has no embedding.

        Args:
            ids: of the tokens.
            place: which texts they are of, for the message.

        Raises:
            UserError: an id is not below the number of embeddings.
        """
        # Most tokenizers have no such token: nothing is looked through.
        if self.rows is None or self.largest_id < self.rows:
            return
        largest = max(ids, default=-1)
        if largest >= self.rows:
            text = self.token_text(largest)
            raise UserError(
                f"{place} has the token {text!r}, whose id in the tokenizer of {self.model_name} "
                f"is {largest:,}, but the model has {self.rows:,} embeddings (ids up to "
                f"{self.rows - 1:,}).\nCopy the tokenizer of this very model into "
                f"{self._directory}, or give the token an embedding that is trained: "
                f"--data.add_tokens {shlex.quote(json.dumps([text], ensure_ascii=False))}"
            )

    def with_tokens(self, texts: Sequence[str]) -> "Tokenizer":
        """Return a copy with further tokens, whose ids follow the largest one.

        Args:
            texts: of the tokens, none of which it has.

        Raises:
            UserError: it is one of sentencepiece, or its ids have gaps.
        """
        if not texts:
            return self
        if not (self._directory / "tokenizer.json").is_file():
            raise UserError(
                f"data.add_tokens is {json.dumps(list(texts))}, but the tokenizer in "
                f"{self._directory} is only a tokenizer.model, which cannot be extended. Write its "
                "tokenizer.json with transformers, or remove it with --data.add_tokens null."
            )
        from tokenizers import AddedToken

        # From its files and not copied, because what was read of the vocabulary is cached.
        found = Tokenizer(self._directory)
        # As they stand in texts, and shown in answers.
        found.processor.add_tokens([AddedToken(text, normalized=False) for text in texts])
        # The library counts tokens, and takes a number for free that a gap has left for another.
        new = [text for text in texts if text not in self.vocabulary]
        if any(found.vocabulary[text] <= self.largest_id for text in new):
            raise UserError(
                f"data.add_tokens is {json.dumps(list(texts))}, but the ids in {self._directory} "
                "have gaps, so new ones would be those of other tokens. Remove it with "
                "--data.add_tokens null."
            )
        if self.rows is not None:
            found.rows = max(self.rows, found.largest_id + 1)
        return found

    def changed_files(self) -> dict[str, bytes]:
        """Files of a tokenizer with further tokens that differ from those in its directory."""
        files = {"tokenizer.json": self.processor.to_str(pretty=True)}
        settings = read_json(self._directory / "tokenizer_config.json")
        if "added_tokens_decoder" in settings:
            # Where there is such a list, transformers takes it for that of all added tokens.
            added = self.processor.get_added_tokens_decoder()
            listed = {str(i): added[i].__getstate__() for i in sorted(added)}
            settings |= {"added_tokens_decoder": listed}
            files["tokenizer_config.json"] = json.dumps(settings, indent=2, ensure_ascii=False)
        return {name: f"{text}\n".encode() for name, text in files.items()}

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary; None if it has no such token."""
        known = self.processor.token_to_id(token)
        return None if known is None else int(known)

    def encode(
        self,
        string: str,
        device: "torch.device | None" = None,
        bos: bool | None = None,
        eos: bool = False,
        max_length: int = -1,
    ) -> "torch.Tensor":
        """Tokenize a text: [length], int32.

        Args:
            string: the text.
            device: of the result.
            bos: begin with BOS, unless the text does. Default: as the model was trained.
            eos: end with EOS, unless the text does.
            max_length: cut to this many tokens, if positive.

        Raises:
            UserError: ``bos`` is requested and the tokenizer has none.
        """
        (tokens,) = self.encode_all([string], bos=bos, eos=eos)
        # Last, so that BOS and EOS count too.
        if max_length > 0:
            tokens = tokens[:max_length]
        import torch  # the supervisor, which compares vocabularies, does without

        return torch.tensor(tokens, dtype=torch.int, device=device)

    def encode_all(
        self, texts: Sequence[str], *, bos: bool | None = None, eos: bool = False
    ) -> list[list[int]]:
        """Tokenize many texts as `encode` does, in less time.

        Special tokens that a text contains are those tokens, and stay. Unlike LitGPT's, removes no
        BOS or EOS.
        """
        bos_id = self.bos_id if (self.use_bos if bos is None else bos) else None
        if bos and bos_id is None:
            raise UserError(f"The tokenizer of {self.model_name} has no begin-of-text token.")
        # Without the tokens that the file's own rules add: ours are those of every text.
        # fast: without offsets, which nothing here reads.
        encodings = self.processor.encode_batch_fast(list(texts), add_special_tokens=False)
        found: list[list[int]] = [encoding.ids for encoding in encodings]
        for tokens in found:
            if bos_id is not None and tokens[:1] != [bos_id]:
                tokens.insert(0, bos_id)
            if eos and tokens[-1:] != [self.eos_id]:
                tokens.append(self.eos_id)
        return found

    def encode_rendered(self, text: str) -> Encoded:
        """Tokenize a text from a chat template, as transformers does.

        Special tokens are those that the text contains, BOS too: nothing is added.
        """
        return self.encode_all_rendered([text])[0]

    def encode_all_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokenize many texts as `encode_rendered` does, in less time."""
        found = self.processor.encode_batch(list(texts), add_special_tokens=False)
        return [Encoded(encoding.ids, encoding.offsets) for encoding in found]

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Texts of bos_token, eos_token and all others that the settings name."""
        # First those that a class of transformers has by itself.
        named: dict[str, Any] = dict(self._built.special_tokens_map)
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            settings = read_json(self._directory / file)
            more = settings.get("extra_special_tokens")
            # The second file overrules the first, and may hold further ones in an object of their
            # own.
            named |= {**settings, **(more if isinstance(more, dict) else {})}
        texts = {
            key: text
            for key, token in named.items()
            if key.endswith("_token") and (text := _text_of(token)) is not None
        }
        # What this tokenizer uses, even if it is only named by an id elsewhere.
        for key, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            if token_id is not None:
                texts[key] = self.token_text(token_id)
        return texts

    @cached_property
    def bos_gap(self) -> str:
        """What stands between BOS and a text in a template, for the tokens that `encode` makes."""
        if self.bos_id is None:
            return ""
        # SentencePiece puts a space before a text, but some tokenizers not behind a special token.
        bos, wanted = self.token_text(self.bos_id), self.encode_rendered("a").ids
        behind = {gap: self.encode_rendered(f"{bos}{gap}a").ids[1:] for gap in ("", " ")}
        return " " if behind[""] != wanted == behind[" "] else ""

    @cached_property
    def named_bos_id(self) -> int | None:
        """Id of BOS if the tokenizer names it; the model's settings may name one too."""
        found: int | None = self._built.bos_token_id
        return found

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens by their text, those that were added included."""
        vocabulary: dict[str, int] = self.processor.get_vocab(with_added_tokens=True)
        return vocabulary

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that are only recognised where a text contains them in full."""
        added = self.processor.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Texts of the added tokens at which the model's settings stop."""
        ends = end_tokens(self._directory)
        return tuple(text for text, token_id in self.added_tokens.items() if token_id in ends)

    @cached_property
    def largest_id(self) -> int:
        """The largest id of a token."""
        return max(self.processor.get_vocab().values())

    @cached_property
    def chat_template(self) -> str | None:
        """Chat template beside the tokenizer; None if there is none.

        Raises:
            UserError: it cannot be read.
        """
        return template_of(self._directory)

    def decode(self, tensor: "torch.Tensor") -> str:
        """Decode tokens, [length], or one token with the space that belongs to it.

        https://github.com/huggingface/transformers/issues/31643
        """
        tokens: list[int] = tensor.reshape(-1).tolist()
        if len(tokens) == 1 and self._word is not None:
            # After a word that loses its own space, the space of the token is kept.
            return self.text_of([self._word, *tokens])[len("a") :]
        return self.text_of(tokens)

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode token ids as transformers does, without special tokens."""
        return str(self._built.decode(list(ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Return the text of a token in the vocabulary."""
        return str(self.processor.id_to_token(token_id))

    def _special_token(self, kind: str, *, is_named: bool) -> int | None:
        """Id of the "bos" or "eos" token, in the first of the files that names one."""
        # By these files, else by the class of transformers or in tokenizer.model.
        of_tokenizer: int | None = getattr(self._built, f"{kind}_token_id")
        if is_named and of_tokenizer is not None:
            return of_tokenizer
        # Only where the tokenizer's own files name none.
        for name in (GENERATION, "config.json"):
            token = read_json(self._directory / name).get(f"{kind}_token_id")
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int) and not isinstance(token, bool):
                return token
        return of_tokenizer

    def _is_named(self, kind: str) -> bool:
        """Whether the tokenizer's files name the "bos" or "eos" token."""
        key, is_named = f"{kind}_token", False
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            file = self._directory / name
            named = read_json(file).get(key)
            if named is not None and _text_of(named) is None:
                raise UserError(
                    f"{file} says that {key} is {str(named)[:40]}, but it has to be a text. "
                    "Download it again."
                )
            is_named = is_named or named is not None
        return is_named

    def _word_that_loses_its_space(self) -> int | None:
        """Return a token that loses its leading space when decoded alone, as words of Llama do."""
        # SentencePiece's mark for a space before a word.
        token = self.processor.token_to_id("▁a")
        return token if token is not None and self.text_of([token]) == "a" else None


def end_tokens(directory: Path) -> frozenset[int]:
    """Return the end tokens that a model's settings name; empty if they name none.

    Raises:
        UserError: a file is not a JSON object.
    """
    settings = read_json(directory / "config.json")
    of_language = settings.get("text_config")
    of_language = of_language if isinstance(of_language, dict) else {}
    # The first that names any: generation_config.json is what transformers' generate reads.
    for known in (read_json(directory / GENERATION), settings, of_language):
        value = known.get("eos_token_id")
        found = value if isinstance(value, list) else [value]
        if ids := frozenset(token for token in found if isinstance(token, int)):
            return ids
    return frozenset()


def _built(directory: Path, settings: Mapping[str, Any]) -> Any:
    """Build the tokenizer of a directory as transformers does, without its own code."""
    # What a directory means would depend on whether this package is installed.
    with hidden("mistral_common"):
        from transformers import AutoTokenizer
        from transformers.utils import logging

        before = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            built = AutoTokenizer.from_pretrained(
                str(directory),
                config=_settings_alone(directory, settings),
                trust_remote_code=False,
                local_files_only=True,
            )
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            built = None
        finally:
            logging.set_verbosity(before)
    # Those without it are programs in Python, which know no positions of tokens in texts.
    if not hasattr(built, "backend_tokenizer"):
        own = "code of its own" if built is None else f"the class {type(built).__name__}"
        raise UserError(
            f"The tokenizer in {directory} is {own}, which ftkit does not run. If its "
            "tokenizer.json makes the same tokens, remove auto_map and tokenizer_class from "
            "tokenizer_config.json."
        )
    return built


def _settings_alone(directory: Path, settings: Mapping[str, Any]) -> Any:
    """What transformers asks a model's settings to choose a class; None: it needs all of them.

    Their own class imports SymPy and torch's distributed tensors, for most of a second.
    """
    from transformers import PreTrainedConfig

    content = read_json(directory / "config.json")
    if not isinstance(settings.get("tokenizer_class"), str) or "auto_map" in {
        **settings,
        **content,
    }:
        return None
    config = PreTrainedConfig()
    config.name_or_path = str(directory)
    for key in ("model_type", "model_name", "tokenizer_class"):
        if isinstance(content.get(key), str):
            setattr(config, key, content[key])
    return config


def _text_of(token: Any) -> str | None:
    """Text of a special token in settings, which may be a string or an object; else None."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _require_bounded(content: Mapping[str, Any], file: Path) -> None:
    """Refuse a tokenizer whose steps can make a text many times longer, or with absurd ids."""
    vocabulary = content["model"].get("vocab", {})
    added = [token["id"] for token in content.get("added_tokens") or ()]
    ids = [*vocabulary.values(), *added] if isinstance(vocabulary, dict) else added
    if ids and max(ids) > len(vocabulary) + len(added) + _MOST_UNUSED_IDS:
        raise UserError(
            f"{file}: a token has the id {max(ids):,}, but the vocabulary has {len(vocabulary):,} "
            "entries. Download it again."
        )
    # Steps of one part run one after the other, so their factors multiply.
    for part in _PARTS:
        growth = 1.0
        for step in _steps(content.get(part)):
            growth *= _growth(step)
            if growth > _MOST_GROWTH:
                raise UserError(
                    f"{file}: the steps of its {part} can make a text more than {_MOST_GROWTH:,} "
                    "times longer, which no valid tokenizer does. Download it again."
                )


def _steps(content: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every step of a part, also those inside others."""
    if isinstance(content, list):
        for item in content:
            yield from _steps(item)
    elif isinstance(content, Mapping):
        yield content
        for item in content.values():
            if isinstance(item, list):
                yield from _steps(item)


def _growth(step: Mapping[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        return _growth_of_replacement(step.get("pattern"), str(step.get("content", "")))
    if kind == "Precompiled":
        return _longest_of_map(str(step.get("precompiled_charsmap") or ""))
    if kind == "Prepend":
        return max(_GROWTH["Prepend"], len(str(step.get("prepend", ""))))
    return _GROWTH.get(str(kind), 1)


def _growth_of_replacement(pattern: Any, content: str) -> float:
    """Growth of a text by a replacement; an expression may also match between two characters."""
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(text, str) and text:
        return max(1.0, len(content) / len(text))
    # An empty match between all characters inserts the content each time.
    return 1.0 + len(content)


def _longest_of_map(encoded: str) -> float:
    """Longest replacement of SentencePiece's map: length of a trie, the trie, and replacements.

    https://github.com/google/sentencepiece/blob/master/src/normalizer.cc
    """
    # The trie's length is in its first four bytes.
    content = base64.b64decode(encoded)
    replacements = content[4 + int.from_bytes(content[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in replacements.split(b"\0")))
