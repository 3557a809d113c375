"""Answers token by token: equal to those without a cache, sampled, shown in whole characters."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm
from command import ROOT, command_environment
from fixed_shapes import compile_shapes
from sentencepiece import SentencePieceTrainer
from tiny import make_llama
from tokenizers import Tokenizer as Processor
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ftkit.evaluation.loading import load_result
from ftkit.evaluation.result import find_result
from ftkit.models.generation import Sampling, TextStream, answer_greedily, answer_in_tokens
from ftkit.models.language_model import LanguageModel
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Quantization
from ftkit.utils.embedded import path

PROMPT = torch.tensor([0, 20, 30, 40, 50])
LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -9.0])


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "tiny", initializer_range=0.5)


@pytest.fixture(scope="module")
def model(base_dir: Path) -> LanguageModel:
    cpu = torch.device("cpu")
    return load_result(find_result(str(base_dir)), device=cpu, dtype=torch.float32).model


def answer(
    model: LanguageModel,
    prompt: Any = PROMPT,
    *,
    stop: Any = (),
    longest: Any = 12,
    **sampling: Any,
) -> list[int]:
    return list(
        answer_in_tokens(
            model,
            prompt,
            stop_ids=stop,
            max_new_tokens=longest,
            sampling=Sampling(**sampling),
        )
    )


def without_cache(model: LanguageModel, count: int) -> list[int]:
    tokens = PROMPT.tolist()
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), torch.tensor([len(tokens) - 1]))
            tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


# --- Tokens ---------------------------------------------------------------------------------------


def spied_calls(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Sizes of the caches, and of the tokens in each pass."""
    found: set[tuple[Any, ...]] = set()
    body = type(model.body)

    def start_cache(self: Any, *size: int, real: Any = body.start_cache) -> None:
        found.add(("cache", *size))
        real(self, *size)

    def hidden_cached(self: Any, *inputs: Any, real: Any = body.hidden_cached) -> Any:
        given = (tuple(one.shape) for one in inputs if one is not None)  # there are no media
        found.add(("pass", *given, tuple(self.cos.shape)))
        return real(self, *inputs)

    monkeypatch.setattr(body, "start_cache", start_cache)
    monkeypatch.setattr(body, "hidden_cached", hidden_cached)
    return found


@pytest.mark.slow
def test_few_shapes_give_the_same_answers(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that compiles programs for each shape, their number does not grow with prompts.

    The CPU takes its part.
    """
    prompts = [torch.arange(20, 20 + length) % 400 for length in (1, 3, 20, 70, 100, 63, 64, 65)]
    longest = 24

    def answers() -> list[list[int]]:
        one_by_one = [answer(model, prompt, longest=longest) for prompt in prompts]
        sampled = answer(model, prompts[2], longest=longest, temperature=1.0)
        together = [
            ids.tolist()
            for few in (prompts, prompts[2:4], prompts[4:6])
            for ids in answer_greedily(model, few, stop_ids=[-1], max_new_tokens=longest)
        ]
        return [*one_by_one, sampled, *together]

    usual = answers()
    compile_shapes(monkeypatch)
    found = spied_calls(model, monkeypatch)
    assert answers() == usual
    assert {tuple(size) for kind, *size in found if kind == "cache"} <= {
        (rows, length) for rows in (1, 2, 8) for length in (128, 256)
    }
    # A prompt and a token of each of two widths, for each number of rows.
    assert len({kind for kind in found if kind[0] == "pass"}) <= 3 * 2 * 2 + 2


def test_temperature_0_takes_the_most_likely_token(model: LanguageModel) -> None:
    assert answer(model) == without_cache(model, 12)
    (batch,) = answer_greedily(model, [PROMPT], stop_ids=[-1], max_new_tokens=12)
    assert answer(model) == batch.tolist()


@pytest.mark.slow
def test_ranks_that_would_choose_other_tokens_give_the_answer_of_rank_0(
    model: LanguageModel, base_dir: Path, tmp_path: Path
) -> None:
    whole = answer(model)
    eos_id = whole[-1]
    expected = whole[: whole.index(eos_id)]
    assert len(expected) > 3
    script = ROOT / "tests/support/answering_ranks.py"
    words = [sys.executable, script, base_dir, tmp_path / "answer", tmp_path / "store"]
    log = tmp_path / "log"
    with log.open("w") as file:
        ranks = [
            warm.SERVER.start(
                [*map(str, words), str(rank), str(eos_id)], command_environment(), log=file
            )
            for rank in (0, 1)
        ]
    try:
        for rank in ranks:
            rank.wait(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], log.read_text()
    for rank in (0, 1):
        assert json.loads((tmp_path / f"answer-{rank}.json").read_text()) == expected


def test_a_rank_that_answers_with_others_takes_the_tokens_of_rank_0(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = answer_of_one(model)
    hook = model.register_forward_hook(lambda module, inputs, logits: -logits)
    try:
        assert answer_of_one(model) != said
        tokens = iter(said)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "broadcast", lambda newest, src: newest.fill_(next(tokens)))
        assert answer_of_one(model) == said
    finally:
        hook.remove()


def answer_of_one(model: LanguageModel) -> list[int]:
    (tokens,) = answer_greedily(model, [PROMPT], stop_ids=[-1], max_new_tokens=12)
    return tokens.tolist()


def test_an_answer_takes_one_forward_pass_for_each_token(model: LanguageModel) -> None:
    passes: list[object] = []
    hook = model.register_forward_hook(lambda *_: passes.append(None))
    try:
        for longest in (1, 3):
            passes.clear()
            answer_greedily(model, [PROMPT], stop_ids=[-1], max_new_tokens=longest)
            assert len(passes) == longest
    finally:
        hook.remove()


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(model: LanguageModel) -> None:
    whole = answer(model)
    stop = whole[5]
    assert answer(model, stop=[stop]) == whole[: whole.index(stop)]


def test_of_several_stop_tokens_the_first_to_come_ends_each_answer(model: LanguageModel) -> None:
    prompts = [PROMPT, torch.tensor([0, 60, 70])]
    wholes = [answer(model, prompt) for prompt in prompts]
    stops = {wholes[0][5], wholes[1][3]}
    expected = [answer(model, prompt, stop=stops) for prompt in prompts]
    assert all(len(answered) < 12 for answered in expected)
    found = answer_greedily(model, prompts, stop_ids=stops, max_new_tokens=12)
    assert [tokens.tolist() for tokens in found] == expected


def test_an_answer_that_need_not_go_on_ends_and_the_others_continue(model: LanguageModel) -> None:
    prompts = [PROMPT, torch.tensor([0, 60, 70])]
    wholes = [answer(model, prompt) for prompt in prompts]

    never = next(token for token in range(1, 99) if all(token not in whole for whole in wholes))

    def found(goes_on: Callable[[int, list[int]], bool]) -> list[list[int]]:
        answers = answer_greedily(
            model, prompts, stop_ids=[never], max_new_tokens=12, goes_on=goes_on
        )
        return [tokens.tolist() for tokens in answers]

    assert found(lambda *_: True) == wholes
    assert found(lambda row, ids: row == 1 or ids != wholes[0][:3]) == [wholes[0][:3], wholes[1]]
    assert found(lambda row, ids: len(ids) < 2 + row) == [wholes[0][:2], wholes[1][:3]]


def test_an_answer_ends_where_the_context_does(model: LanguageModel) -> None:
    long = torch.full((250,), 7)
    assert len(answer(model, long, longest=100)) == 256 - 250


def test_an_answer_follows_from_prompt_and_seed(model: LanguageModel) -> None:
    first = answer(model, temperature=2.0, seed=1)
    torch.rand(10)
    assert answer(model, temperature=2.0, seed=1) == first
    assert answer(model, temperature=2.0, seed=2) != first


@pytest.mark.extensions
def test_an_answer_broken_off_leaves_no_cache(model: LanguageModel) -> None:
    tokens = answer_in_tokens(model, PROMPT, stop_ids=(), max_new_tokens=9, sampling=Sampling())
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    body: Any = model.body
    assert body.cache is None
    assert answer(model) == without_cache(model, 12)


def test_drawing_does_not_disturb_the_global_generator(model: LanguageModel) -> None:
    state = torch.get_rng_state()
    answer(model, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)


# --- Sampling -------------------------------------------------------------------------------------


def drawn(count: int = 4000, **settings: Any) -> torch.Tensor:
    """How often each token is drawn, as a share."""
    sampling = Sampling(**settings)
    generator = sampling.generator()
    tokens = [sampling.choose(LOGITS, generator) for _ in range(count)]
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_by_their_probability(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(dim=0)
    assert (drawn(temperature=temperature) - expected).abs().max() < 0.03


def test_top_k_leaves_the_k_most_likely() -> None:
    expected = torch.tensor([-torch.inf, 3.0, -torch.inf, 2.0, -torch.inf])
    assert (drawn(temperature=1.0, top_k=2) - expected.softmax(dim=0)).abs().max() < 0.03
    assert drawn(100, temperature=9.0, top_k=1)[1] == 1
    assert (drawn(100, temperature=9.0, top_k=1000) > 0).all()


def test_top_p_leaves_the_fewest_that_reach_the_probability() -> None:
    chances = LOGITS.softmax(dim=0)  # sorted: 1, 3, 2, 0, 4
    two = float(chances[1] + chances[3])
    assert (drawn(temperature=1.0, top_p=two - 0.01) > 0).tolist() == [0, 1, 0, 1, 0]
    assert (drawn(temperature=1.0, top_p=two + 0.01) > 0).tolist() == [0, 1, 1, 1, 0]
    assert drawn(100, temperature=1.0, top_p=0.01)[1] == 1


# --- Text -----------------------------------------------------------------------------------------

TEXTS = [
    "Nora Lake met Ben Hill.",
    "Grüße, 東京 und 🙂🙃!",
    "  two spaces\n\nand lines\ttabs",
    "🏳️‍🌈",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("which", ["tiny", "quickstart"])
def test_pieces_are_whole_characters_and_make_up_the_text(
    tiny_base: Path, text: str, which: str
) -> None:
    tokenizer = Tokenizer(tiny_base if which == "tiny" else path("quickstart") / "model")
    stream = TextStream(tokenizer)
    ids = tokenizer.encode(text, bos=False)
    pieces = [stream.add(token) for token in ids.tolist()]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.rest() == tokenizer.processor.decode(ids.tolist())
    assert len(pieces) > 1


def write_vocabulary(kind: str, directory: Path) -> Tokenizer:
    """A tokenizer that spells most characters in several tokens, byte by byte."""
    if kind == "sentencepiece":
        SentencePieceTrainer.train(
            sentence_iterator=iter(["Nora Lake met Ben Hill, lines and spaces"] * 9),
            model_prefix=str(directory / "tokenizer"),
            model_type="bpe",
            vocab_size=290,
            byte_fallback=True,
            minloglevel=2,
        )
        return Tokenizer(directory)
    if kind == "byte fallback":  # Llama's
        words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        words += ["▁", "a", "e", "n", "m", "t", "▁B", "▁and"]
        processor = Processor(
            models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
        )
        processor.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        processor.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    else:
        words = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        processor = Processor(models.BPE({word: i for i, word in enumerate(words)}, []))
        processor.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        processor.decoder = decoders.ByteLevel()
    processor.add_special_tokens(["</s>"])
    processor.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Tokenizer(directory)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte fallback", "byte level", "sentencepiece"])
def test_characters_of_many_tokens_come_whole(
    kind: Quantization, text: str, tmp_path: Path
) -> None:
    tokenizer = write_vocabulary(kind, tmp_path)
    ids = tokenizer.encode(text, bos=False).tolist()
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) + stream.rest() == tokenizer.processor.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces or text.isascii()


def test_bytes_that_are_no_character_do_not_end_an_answer(tmp_path: Path) -> None:
    """Decoded whole, they would also take the newline back that was shown."""
    tokenizer = write_vocabulary("byte fallback", tmp_path)
    ids = [tokenizer.token_id(word) for word in ("a", "<0x0A>", "<0x9F>", "▁and")]
    assert tokenizer.processor.decode(ids) == "a\ufffd\ufffd and"
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in ids] == ["a", "\n", "", "\ufffd and"]
    assert stream.rest() == ""


def test_half_a_character_at_the_end_is_shown_as_such(tiny_base: Path) -> None:
    tokenizer = Tokenizer(tiny_base)
    stream = TextStream(tokenizer)
    *ids, _ = tokenizer.encode("a 🙂", bos=False).tolist()
    assert "".join(map(stream.add, ids)).strip() == "a"
    assert set(stream.rest()) == {"\ufffd"}
