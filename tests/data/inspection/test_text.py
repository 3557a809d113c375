"""The text of an inspection: every token, trained ones in brackets, control characters escaped."""

import dataclasses
from collections.abc import Sequence
from html.parser import HTMLParser

import pytest
from messages import says
from rich.cells import cell_len

from ftkit.data.inspection.display import (
    MOST_TOKENS,
    InspectionText,
    inspection_fragment,
    inspection_page,
    visible,
)
from ftkit.data.inspection.inspection import (
    Answer,
    Bar,
    Duplicates,
    Finding,
    Inspection,
    LeftOut,
    Lengths,
    ShownSample,
    SourceNumbers,
    SplitNumbers,
    Weights,
)
from ftkit.data.records.keys import UnusedKeys
from ftkit.data.records.media import MediaNumbers, ShownMedium
from ftkit.utils.console.terminal import plain_text

LENGTHS = Lengths(
    samples=10, shortest=3, median=5, p90=8, p99=9, longest=40, over=2,
    bars=[
        Bar(first=1, last=5, samples=6, over=0),
        Bar(first=6, last=10, samples=2, over=1),
        Bar(first=11, last=40, samples=2, over=2),
    ],
)  # fmt: skip
SPLIT = SplitNumbers(
    records=12, used=10, left_out=[LeftOut(reason="no output", records=2, example='{"a": 1}')],
    samples=10, truncated=2, dropped=0, short=0, split=0, split_by_turn=0,
    tokens=50, trained_tokens=20, weights=None, labels={}, lost_tokens=32,
    lengths=LENGTHS,
)  # fmt: skip
SOURCE = SourceNumbers(
    name="chats", where="data/chats.jsonl", records="12 conversations (messages)",
    shape="messages", template="chatml", train_on="assistant", overlong="truncate", per_epoch=10,
    train=SPLIT, val=SPLIT, unused=UnusedKeys(names=("id", "source"), more=3),
)  # fmt: skip
HOSTILE = "\x1b[31m<script>alert(1)</script>\x07\u202e"


def make_sample(
    texts: Sequence[str],
    trained: str,
    *,
    answer: Answer | None = None,
    label: str | None = None,
    shared: int = 0,
) -> ShownSample:
    """A sample whose tokens are trained where there is an x, and with weight 0.5 at a 2."""
    return ShownSample(
        source="chats",
        number=4,
        answer=answer,
        label=label,
        shared=shared,
        ids=list(range(len(texts))),
        texts=list(texts),
        trained=[mark in "x2" for mark in trained],
        weights=[{"x": 1.0, "2": 0.5}.get(mark, 0.0) for mark in trained],
        special=[text.startswith("<|") for text in texts],
    )


CHAT = make_sample(
    ["<|user|>", "\n", "Hello", " you", "\n\n", "<|bot|>", "Hi", "!", "<|end|>", "\n"], ".....:xxx."
)


def make_inspection(*samples: ShownSample, findings: Sequence[Finding] = ()) -> Inspection:
    return Inspection(
        base_model="tiny", max_seq_length=8, model_context=256, sources=[SOURCE], lengths=LENGTHS,
        duplicates=Duplicates(
            train=1, val=0, val_in_train=2, train_examples=["Hello"], val_in_train_examples=["Ho"]
        ),
        findings=list(findings), samples=list(samples),
    )  # fmt: skip


def token_lines(sample: ShownSample, width: int = 80) -> list[str]:
    lines = plain_text(InspectionText(make_inspection(sample)), width).splitlines()
    titles = ("training sample 4: ", "training pair 4, ")
    title = next(i for i, line in enumerate(lines) if line.startswith(titles))
    end = next(i for i, line in enumerate(lines) if line.startswith("findings"))
    return lines[title + 1 : end - 1]


def test_what_is_trained_is_in_brackets_and_tokens_are_apart() -> None:
    assert token_lines(CHAT) == [
        "<|user|>·↵·",
        "Hello· you·↵",
        "↵·",
        "<|bot|>⟦Hi·!·<|end|>⟧↵",
    ]


def test_both_answers_of_a_pair_follow_their_prompt() -> None:
    prompt = ["<|user|>", "Red", "?", "\n"]
    chosen = make_sample([*prompt, "Yes", "<|end|>"], "....xx", answer="chosen")
    rejected = make_sample([*prompt, "No", "<|end|>"], "....xx", answer="rejected", shared=4)
    text = plain_text(InspectionText(make_inspection(chosen, rejected)))
    assert "training pair 4, chosen: 6 tokens, 2 trained" in text
    assert "training pair 4, rejected: 6 tokens, 2 trained" in text
    assert token_lines(chosen) == ["<|user|>·Red·?·↵", "⟦Yes·<|end|>⟧"]
    assert token_lines(rejected) == [
        "... 4 tokens of the prompt, as above ...",
        "⟦No·<|end|>⟧",
    ]
    page = inspection_page(make_inspection(chosen, rejected))
    assert page.count(">Red<") == 1 and "4 tokens of the prompt, as above" in page


def test_the_label_of_an_answer_is_beside_its_number() -> None:
    prompt, answer = ["<|user|>", "Red", "?", "\n"], ["Yes", "<|end|>"]
    labels = ("desirable", "undesirable")
    samples = [make_sample(prompt + answer, "....xx", label=label) for label in labels]
    numbers = dataclasses.replace(SPLIT, labels={"desirable": 7, "undesirable": 3})
    source = dataclasses.replace(SOURCE, train=numbers)
    seen = dataclasses.replace(make_inspection(*samples), sources=[source])
    text, page = plain_text(InspectionText(seen)), inspection_page(seen)
    for shown in (text, page):
        assert says(shown, "7 desirable ... 3 undesirable")
        assert "training sample 4, desirable: 6 tokens, 2 trained" in shown
        assert "training sample 4, undesirable: 6 tokens" in shown


def test_tokens_of_one_weight_share_brackets() -> None:
    sample = make_sample(["Hm", ",", " red", "!", "\n", "<|end|>"], "22xx..")
    assert token_lines(sample) == ["⟦0.5: Hm·,⟧⟦ red·!⟧↵·", "<|end|>"]
    assert "<sup>0.5: </sup>" in inspection_page(make_inspection(sample))
    numbers = dataclasses.replace(SPLIT, weights=Weights(least=0.5, most=2, mean=1.25))
    source = dataclasses.replace(SOURCE, train=numbers)
    seen = dataclasses.replace(make_inspection(sample), sources=[source])
    text = plain_text(InspectionText(seen), 120)
    assert "with weights from 0.5 to 2, mean 1.25" in text and "0.5: with weight 0.5" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_and_hold_every_character(width: int) -> None:
    words = [f" word{i}" for i in range(100)] + ["早上好" * 30]
    sample = make_sample(words, "." * 50 + "x" * 51)
    lines = token_lines(sample, width)
    assert max(map(cell_len, lines)) <= width
    joined = "".join(lines).replace("·", "").replace("⟦", "").replace("⟧", "")
    assert joined.replace(" ", "") == "".join(words).replace(" ", "")
    assert not any(line.startswith("word") for line in lines), "a space stays with its word"


def test_the_middle_of_a_very_long_sample_is_left_out_and_counted() -> None:
    sample = make_sample(["x"] * (MOST_TOKENS + 700), "x" * (MOST_TOKENS + 700))
    text = "".join(token_lines(sample))
    assert "... 700 tokens ..." in text and text.count("x") == MOST_TOKENS
    assert inspection_fragment(make_inspection(sample)).count('title="') == MOST_TOKENS + 700


def test_characters_that_do_not_show_are_written_out() -> None:
    assert visible("a\tb\x1b[0m\u200bc\u202e") == r"a\tb\x1b[0m\u200bc\u202e"
    assert visible("Grüße 早上好 🎉") == "Grüße 早上好 🎉"


def test_a_terminal_without_these_characters_gets_others() -> None:
    from rich.console import Console

    console = Console(width=80, color_system=None, legacy_windows=False)
    options = dataclasses.replace(console.options, encoding="ascii")
    lines = console.render_lines(InspectionText(make_inspection(CHAT)), options)
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert "<|bot|>[[Hi|!|<|end|>]]\\n" in text
    assert "#" * 20 in text and "xx" in text
    assert text.isascii()


def test_records_and_samples_that_are_not_used_are_left_out_in_one_word() -> None:
    numbers = dataclasses.replace(SPLIT, dropped=3, short=4)
    source = dataclasses.replace(SOURCE, train=numbers)
    text = plain_text(
        InspectionText(dataclasses.replace(make_inspection(), sources=[source])), width=200
    )
    assert "3 left out (longer than max_seq_length)" in text
    assert "4 left out (fewer tokens than data.min_tokens)" in text
    assert "2 left out: no output" in text


def test_numbers_say_what_they_mean_for_the_limit() -> None:
    text = plain_text(InspectionText(make_inspection()))
    assert "12 conversations (messages)" in text
    assert says(text, "10 of 12 records ... 10 samples, 2 cut off")
    assert "2 left out: no output" in text and 'such as {"a": 1}' in text
    assert says(text, "50 tokens, 20 ... 40 % ... 32 more")
    assert says(text, "train.max_seq_length 8 ... 20 % ... 40")
    assert "11-40 ░░░░░░░░░░░░░ 2 (2 too long)" in text
    assert says(text, "2 of 10 samples ... train")
    assert "No problems found." in text


class Strict(HTMLParser):
    """Notes what a page holds, and that every element ends."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Strict:
    parser = Strict()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def test_nothing_of_a_record_becomes_code_of_a_page_or_of_a_terminal() -> None:
    finding = Finding(kind="bos_twice", severity="warning", text=HOSTILE, advice=HOSTILE)
    hostile = dataclasses.replace(
        make_inspection(make_sample([HOSTILE, HOSTILE], ".x"), findings=[finding]),
        base_model=HOSTILE,
        sources=[dataclasses.replace(SOURCE, where=HOSTILE, template=HOSTILE)],
    )
    text = plain_text(InspectionText(hostile))
    assert "\x1b" not in text and "\x07" not in text
    parser = read(inspection_page(hostile))
    assert "script" not in parser.tags
    assert (
        not {name for name in parser.names if name.startswith("on")}
        | {"src", "href"} & parser.names
    )
    assert r"\x1b[31m<script>" in parser.text


def test_a_page_loads_nothing_and_is_made_for_light_and_dark() -> None:
    found = inspection_page(make_inspection(CHAT))
    parser = read(found)
    assert found.isascii()
    assert parser.tags.isdisjoint({"script", "link", "img", "iframe"})
    assert "prefers-color-scheme: dark" in found and "default-src 'none'" in found
    assert "Hi!<|end|>" in parser.text


def test_a_cell_has_no_style_sheet() -> None:
    parser = read(inspection_fragment(make_inspection(CHAT)))
    assert parser.tags.isdisjoint({"script", "style", "link", "html"})


def _with_medium(first: int, count: int, behind: int) -> ShownSample:
    """A sample with a medium of some tokens between texts."""
    texts = ["<|user|>"] * first + ["<|pad|>"] * count + ["what"] * behind
    medium = ShownMedium(
        kind="image", name="a <b>\x1b.png", size="640 x 480", first=first, end=first + count,
        picture="data:image/jpeg;base64,AAAA",
    )  # fmt: skip
    trained = "." * (first + count) + "x" * behind
    return dataclasses.replace(make_sample(texts, trained), media=[medium])


def test_a_medium_is_one_mark_in_the_place_of_its_tokens() -> None:
    sample = _with_medium(1, 300, 2)
    assert token_lines(sample) == [
        r"<|user|>·[image a <b>\x1b.png, 640 x 480, 300 tokens]⟦what·what⟧"
    ]
    page = inspection_page(make_inspection(sample))
    assert "<|pad|>" not in page and "&lt;|pad|&gt;" not in page
    assert '<img src="data:image/jpeg;base64,AAAA"' in page
    assert r"image a &lt;b&gt;\x1b.png, 640 x 480, 300 tokens" in page


def test_media_leave_room_for_the_tokens_of_a_long_sample() -> None:
    lines = token_lines(_with_medium(2, MOST_TOKENS * 2, 4))
    assert not any("tokens ..." in line for line in lines)
    (line,) = token_lines(_with_medium(0, 10, MOST_TOKENS * 2))[:1]
    assert line.startswith("[image")
    text = " ".join(token_lines(_with_medium(2, 10, MOST_TOKENS * 2)))
    assert f"... {MOST_TOKENS + 3:,} tokens ..." in text


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("kind", "one_text", "several"),
    [("image", "1 image", "3 images"), ("audio", "1 piece of audio", "3 pieces of audio")],
)
def test_numbers_of_media_are_among_those_of_their_split(
    kind: str, one_text: str, several: str
) -> None:
    numbers = MediaNumbers(
        kind=kind, count=3, least_tokens=4, median_tokens=9, most_tokens=30, share=0.25
    )
    source = dataclasses.replace(SOURCE, train=dataclasses.replace(SPLIT, media=[numbers]))
    seen = dataclasses.replace(make_inspection(CHAT), sources=[source])
    words = f"{several} ... 4 to 30 tokens ... median 9 ... 25 %"
    assert says(plain_text(InspectionText(seen), 120), words)
    assert says(inspection_page(seen), words)
    one = dataclasses.replace(numbers, count=1, most_tokens=4)
    assert one.text == f"{one_text} of 4 tokens; 25 % of all tokens"
