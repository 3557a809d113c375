"""The tokenizer in a GGUF file, as the files that Hugging Face keeps beside a model."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ftkit.errors import UserError
from ftkit.extensions.gguf.header import GgufHeader
from ftkit.utils.damaged_files import reading

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Kinds of tokens that do not result from merging; 1 is a word, 5 is not used."""
_SPACE = "▁"
"""Character that SentencePiece writes for a space."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

# Words of upper and of lower case; llama.cpp writes the same with lookaheads.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASES = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASES}|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_GPT4O_NAMES = ("gpt-4o", "llama4", "kanana2", "talkie")
_WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken", "glm4")
"""Rules by which a word that is a token is taken before anything is merged."""
_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Rules that split digits one by one, and the rest as GPT-2 does."""
_GPT2_NAMES = ("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "mellum", "default")
_PATTERNS = {
    **dict.fromkeys((*_LLAMA3_NAMES, "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(_QWEN2_NAMES, _QWEN2),
    **dict.fromkeys(_GPT4O_NAMES, _GPT4O),
    "tekken": _TEKKEN,
    "qwen35": _QWEN35,
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
}
"""Patterns that split texts before tokens are merged, by tokenizer.ggml.pre."""
_WRITTEN = ("gpt-2", "smollm", "qwen2", "llama-bpe", "dbrx", "tekken", "gpt-4o", "qwen35")
"""Names that are written, one for each way of splitting texts."""


def tokenizer_files(header: GgufHeader) -> dict[str, bytes]:
    """Return the tokenizer's files, chat template and generation settings, by file name.

    Raises:
        UserError: there is no tokenizer in the file, ftkit cannot rebuild it exactly, or it is
            damaged.
    """
    expected = "a tokenizer that llama.cpp has written"
    with reading(f"checkpoint_dir {header.file}", expected, advice="Convert the file again."):
        return _files_of(header)


def _files_of(header: GgufHeader) -> dict[str, bytes]:
    tokens = header.texts("tokenizer.ggml.tokens")
    # Vocabularies become mappings from texts to ids.
    if len(set(tokens)) != len(tokens):
        raise header.error("its vocabulary has a token twice")
    kinds = header.numbers("tokenizer.ggml.token_type", len(tokens)) or [1] * len(tokens)
    special = _special_tokens(header, tokens)
    if "eos" not in special:
        raise header.error("its tokenizer has no end-of-text token")
    model = header.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(header, tokens)
    elif model == "llama":
        # Where the file says nothing, Llama's SentencePiece begins texts with BOS.
        tokenizer, adds_bos = _sentencepiece(header, tokens, kinds, special.get("unknown")), True
    else:
        raise UserError(
            f"checkpoint_dir {header.file} has a tokenizer of the kind {model}, which ftkit does "
            "not read from GGUF; it reads gpt2 and llama. Give the original model."
        )
    adds_bos = header.flag("tokenizer.ggml.add_bos_token", adds_bos) and "bos" in special
    _add_tokens(tokenizer, tokens, kinds, special)
    if adds_bos:
        _begin_with(tokenizer, tokens[special["bos"]], special["bos"])
    settings = {
        # The generic class: everything else is in tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        # Decoding would remove spaces before punctuation.
        "clean_up_tokenization_spaces": False,
    }
    settings |= {
        f"{theirs}_token": tokens[special[name]]
        for name, theirs in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
        if name in special
    }
    # Chat models end turns with EOT, texts with EOS; either ends an answer.
    ends = sorted({special[name] for name in ("eos", "eot") if name in special})
    generation = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    if "bos" in special:
        generation["bos_token_id"] = special["bos"]
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": _as_json(settings),
        "generation_config.json": _as_json(generation),
    }
    if template := header.text("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode()
    return files


def _special_tokens(header: GgufHeader, tokens: Sequence[str]) -> dict[str, int]:
    """Ids of the special tokens, by their names in the header."""
    found = {}
    for name in ("bos", "eos", "eot", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in header.metadata:
            found[name] = header.integer(key)
            if found[name] >= len(tokens):
                raise header.error(f"its {key} is {found[name]} of {len(tokens):,} tokens")
    return found


def rule_of(tokenizer: Any) -> str | None:
    """Return llama.cpp's name of the rule that splits texts; None if it has none.

    Args:
        tokenizer: a `tokenizers.Tokenizer` over bytes.
    """
    found = _steps(tokenizer.pre_tokenizer)
    for rule in _WRITTEN:
        is_same = found == _steps(_cut(rule))
        if is_same and tokenizer.model.ignore_merges == takes_whole_words(rule):
            return rule
    return None


def takes_whole_words(rule: str) -> bool:
    """Return whether a word that is a token is taken before anything is merged."""
    return rule in _WHOLE_WORDS


def _steps(cut: Any) -> list[dict[str, Any]]:
    """Steps of a pre-tokenizer, without options that change no token."""

    def flat(content: Mapping[str, Any]) -> list[dict[str, Any]]:
        if content["type"] == "Sequence":
            return [step for part in content["pretokenizers"] for step in flat(part)]
        return [{key: value for key, value in content.items() if key != "trim_offsets"}]

    # Pickling returns its JSON, the only way to read a pre-tokenizer's settings.
    return [] if cut is None else flat(json.loads(cut.__getstate__()))


def _cut(rule: str) -> Any:
    """Build the pre-tokenizer of a known rule."""
    from tokenizers import Regex, pre_tokenizers

    pattern = _PATTERNS.get(rule)
    cut: list[Any] = []
    if pattern is not None:
        cut = [pre_tokenizers.Split(Regex(pattern), "isolated")]
    elif rule in _DIGIT_NAMES:
        cut = [pre_tokenizers.Digits(individual_digits=True)]
    # Its own expression is that of GPT-2, for rules that have no pattern here.
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    return pre_tokenizers.Sequence([*cut, level])


def _byte_level(header: GgufHeader, tokens: Sequence[str]) -> tuple[Any, bool]:
    """Build a byte-level tokenizer; also return whether texts begin with BOS by default."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    rule = header.text("tokenizer.ggml.pre") or "default"
    if rule not in _PATTERNS and rule not in (*_DIGIT_NAMES, *_GPT2_NAMES):
        raise UserError(
            f"checkpoint_dir {header.file} has a tokenizer that cuts texts by the rule {rule}, "
            "which ftkit does not know. Give the original model."
        )
    merges = _pairs(header, header.texts("tokenizer.ggml.merges"))
    whole_words = takes_whole_words(rule)
    tokenizer = Tokenizer(_bpe(header, models, tokens, merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = _cut(rule)
    tokenizer.decoder = decoders.ByteLevel()
    # llama.cpp does not normalise, but the original tokenizers do.
    if rule in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    # llama.cpp's own defaults, where a file does not say it.
    return tokenizer, rule in (*_LLAMA3_NAMES, "tekken")


def _sentencepiece(
    header: GgufHeader, tokens: Sequence[str], kinds: Sequence[int], unknown: int | None
) -> Any:
    """Build a SentencePiece tokenizer, whose merges follow from the scores of its tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.numbers("tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise header.error("it has no tokenizer.ggml.scores")
    aside = (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    words = {
        token: score
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind not in aside
    }
    tokenizer = Tokenizer(
        _bpe(
            header,
            models,
            tokens,
            _merges_by_score(words),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            # Characters without a token become the tokens of their bytes.
            byte_fallback=True,
        )
    )
    # SentencePiece puts a space before a text, and takes it away again in decoding.
    begins = header.flag("tokenizer.ggml.add_space_prefix", True)
    prepended = [normalizers.Prepend(_SPACE)] if begins else []
    tokenizer.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", _SPACE)])
    stripped = [decoders.Strip(" ", 1, 0)] if begins else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return tokenizer


def _merges_by_score(words: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merges of pairs of tokens, best result first."""
    found = [
        (score, left, right)
        for word, score in words.items()
        for cut in range(1, len(word))
        if (left := word[:cut]) in words and (right := word[cut:]) in words
    ]
    # Of equal scores the longest left part first, as transformers' converter sorts them.
    found.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in found]


def _pairs(header: GgufHeader, merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space:
            raise header.error("its tokenizer.ggml.merges are not pairs of tokens")
        pairs.append((left, right))
    return pairs


def _bpe(
    header: GgufHeader,
    models: Any,
    tokens: Sequence[str],
    merges: list[tuple[str, str]],
    **options: Any,
) -> Any:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # tokenizers raises plain Exception
        raise header.error(f"its tokenizer is not valid ({error})") from None


def _add_tokens(
    tokenizer: Any, tokens: Sequence[str], kinds: Sequence[int], special: Mapping[str, int]
) -> None:
    """Add the tokens that are recognised wherever a text contains them."""
    from tokenizers import AddedToken

    control = {number for number, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN)}
    # Special tokens count, whatever kind the file gives them.
    control |= set(special.values())
    added = [AddedToken(tokens[i], normalized=False, special=True) for i in sorted(control)]
    # normalized=False: a special token in a text is matched as it stands.
    tokenizer.add_special_tokens(added)
    # User-defined tokens are recognised in texts too, but decoding does not leave them out.
    own = [i for i, kind in enumerate(kinds) if kind == _USER_DEFINED and i not in control]
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i in own])


def _begin_with(tokenizer: Any, token: str, number: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, number)]
    )


def _as_json(settings: Mapping[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
