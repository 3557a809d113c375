import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import key_words, message_of, says
from orders import make_elastic_order
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from ftkit.data.dataset import DataSets, load_data
from ftkit.data.records.read import read_records
from ftkit.data.records.record import Record
from ftkit.data.rendering import Rendered
from ftkit.data.samples.layout import FILLER, RankLayout
from ftkit.data.samples.loader import collate, train_batches, validation_loader
from ftkit.data.samples.sample_set import Sample, SampleSet
from ftkit.data.samples.sampler import ElasticOrder
from ftkit.data.sources import check_data
from ftkit.errors import UserError
from ftkit.models.chat_templates.prompt_styles import resolve_prompt_style
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.objectives import Preference
from ftkit.recipe.recipe import Component
from ftkit.utils import embedded

litgpt_data = pytest.importorskip("litgpt.data", reason="the data are compared with LitGPT's")
from litgpt.tokenizer import Tokenizer as LitgptTokenizer  # noqa: E402

RECORDS = [
    {"instruction": "Name a colour.", "input": "", "output": "Blue."},
    {"instruction": "Add.", "input": "1 and 2", "output": "The sum is 3."},
    {"instruction": "Grüße übersetzen — 早上好 🎉", "output": "Greetings\n\tto all\u2028of you"},
    {"instruction": "Repeat: " + "the words " * 30, "input": "", "output": "many words " * 20},
    {"instruction": "Null input.", "input": None, "output": "x"},
    {"instruction": "Own system.", "sys_prompt": "You are terse.\n", "output": "Yes.", "id": 7},
]


def write_tokenizer(directory: Path, *, bos: bool = False, padding: bool = False) -> Tokenizer:
    """A byte-level BPE of a few hundred tokens, in the files LitGPT reads."""
    processor = HFTokenizer(models.BPE())
    processor.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    processor.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    processor.train_from_iterator(["### Instruction: the words of an answer"], trainer)
    if padding:
        processor.enable_padding()
    directory.mkdir(exist_ok=True)
    processor.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": bos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(directory)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def numbered(count: int) -> list[dict[str, str]]:
    return [{"instruction": f"Say {i}.", "output": f"{i} " * (1 + i % 7)} for i in range(count)]


def write_json(file: Path, value: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value), encoding="utf-8")
    return file


def json_data(path: Path | str, **options: object) -> Component:
    return Component(class_path="JSON", init_args={"json_path": str(path), **options})


def json_directory(path: Path, train: list[dict], val: list[dict] | None = None) -> Path:  # type: ignore[type-arg]
    write_json(path / "train.json", train)
    write_json(path / "val.json", val or train)
    return path


def val_records(loaded: DataSets) -> list[Record]:
    return list(loaded.parts[0].splits["val"].records)


class TestTokens:
    """Ids and labels are LitGPT's."""

    # Styles change texts, which tokenizers may begin otherwise; lengths cut tokens of any style.
    @pytest.mark.extensions
    @pytest.mark.parametrize(
        ("prompt_style", "max_seq_length", "mask_prompt"),
        [
            *itertools.product(["alpaca"], [4096, 300, 200], [False, True]),
            ("phi-2", 300, True),
            ("llama3", 300, True),
        ],
    )
    @pytest.mark.parametrize("kind", [{}, {"bos": True}, {"bos": True, "padding": True}])
    def test_ids_and_labels_are_those_of_litgpt(
        self,
        tmp_path: Path,
        kind: dict[str, Any],
        prompt_style: str,
        max_seq_length: int,
        mask_prompt: bool,
    ) -> None:
        tokenizer = write_tokenizer(tmp_path / "tokenizer", **kind)
        data = json_data(
            json_directory(tmp_path / "data", RECORDS),
            mask_prompt=mask_prompt,
            prompt_style=prompt_style,
        )
        ours = load_data(data, tokenizer, max_seq_length)
        theirs = litgpt_data.SFTDataset(
            RECORDS,
            LitgptTokenizer(tmp_path / "tokenizer"),
            prompt_style,
            max_seq_length,
            mask_prompt=mask_prompt,
        )
        expected = [(item["input_ids"].tolist(), item["labels"].tolist()) for item in theirs]
        expected = [pair for pair in expected if any(label != -100 for label in pair[1][1:])]
        got = []
        for ids, trained, *_ in (ours.val[i] for i in range(len(ours.val))):
            ((first, end),) = trained.tolist()
            assert end == len(ids)
            got.append((ids.tolist(), [-100] * first + ids[first:].tolist()))
        assert got == expected
        assert ours.val.lengths.tolist() == [len(ids) - 1 for ids, _ in expected]
        labels = [sum(label != -100 for label in labels[1:]) for _, labels in expected]
        assert ours.val.label_counts.tolist() == labels
        assert ours.counts["val"].tokens == sum(len(ids) - 1 for ids, _ in expected)
        assert ours.counts["val"].label_tokens == sum(labels)

    def test_records_that_cannot_be_trained_on_are_left_out_and_counted(
        self, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        records = [
            {"instruction": "a", "output": "kept"},
            {"instruction": "b", "output": ""},
            {"instruction": "c", "output": " \n"},
            {"instruction": "d" * 400, "output": "behind the end"},
            {"instruction": "e", "output": "long " * 100},
        ]
        data = json_data(json_directory(tmp_path, records), mask_prompt=True)
        loaded = load_data(data, tokenizer, max_seq_length=200)
        counts = loaded.counts["val"]
        assert counts.tokens == loaded.val.lengths.sum()
        assert counts.label_tokens == loaded.val.label_counts.sum()
        assert {name: value for name, value in vars(counts).items() if "tokens" not in name} == {
            "records": 5,
            "used": 2,
            "skipped_empty_output": 2,
            "skipped_no_labels": 1,
            "refused": {},
            "samples": 2,
            "truncated": 1,
            "short": 0,
            "dropped": 0,
            "split": 0,
            "split_by_turn": 0,
            "without_reasoning": 0,
            "divided": 0,
        }
        assert [question.instruction for question in loaded.questions] == ["a", "e"]
        assert len(loaded.train) == 2

    def test_a_length_that_leaves_no_labels_is_refused_with_one_that_works(
        self, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        data = json_data(json_directory(tmp_path, numbered(5)), mask_prompt=True)
        with pytest.raises(UserError, match="max_seq_length, which is 10") as error:
            load_data(data, tokenizer, max_seq_length=10)
        works = int(str(error.value).partition("--train.max_seq_length ")[2].split()[0])
        assert len(load_data(data, tokenizer, works).train) > 0
        with pytest.raises(UserError, match=f"--train.max_seq_length {works} or more"):
            load_data(data, tokenizer, works - 1)

    def test_data_without_any_answer_are_refused(
        self, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        data = json_data(json_directory(tmp_path, [{"instruction": "a", "output": ""}]))
        with pytest.raises(UserError, match="1 have no output"):
            load_data(data, tokenizer, 100)

    def test_a_tokenizer_without_an_end_token_is_refused(self, tmp_path: Path) -> None:
        tokenizer = write_tokenizer(tmp_path / "tokenizer")
        tokenizer.eos_id = None
        data = json_data(json_directory(tmp_path / "data", numbered(3)))
        with pytest.raises(UserError, match="names no eos_token"):
            load_data(data, tokenizer, 100)

    def test_progress_is_reported_every_thousand_records(
        self, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        data = json_data(json_directory(tmp_path, numbered(2500), numbered(10)))
        reports = []
        load_data(data, tokenizer, 100, progress=lambda *args: reports.append(args))
        assert reports == [
            *[("train", done, 2500) for done in (0, 1000, 2000, 2500)],
            ("val", 0, 10),
            ("val", 10, 10),
        ]

    @pytest.mark.extensions
    def test_the_fingerprint_depends_on_content_and_not_on_the_path(
        self, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        def fingerprint(name: str, records: list[dict], **options: object) -> str:  # type: ignore[type-arg]
            data = json_data(json_directory(tmp_path / name, records), **options)
            return load_data(data, tokenizer, 1000).fingerprint

        first = fingerprint("a", numbered(9))
        assert fingerprint("b", numbered(9)) == first
        others = [
            fingerprint("c", numbered(8)),
            fingerprint("d", numbered(9), mask_prompt=True),
            fingerprint("e", numbered(9), prompt_style="phi-2"),
        ]
        assert len({first, *others}) == 4

    @pytest.mark.extensions
    @pytest.mark.parametrize(
        ("options", "max_seq_length", "expected"),
        [
            ({}, 4096, "b89525089f8c694808af21ebf2b75b2eda8b4ae7ce6091c5345a6c67aa127922"),
            ({}, 200, "3668d1bfda0602a29c95005c8768d2492d21a5ae394d0370333b51a9ffc3f5e6"),
            (
                {"mask_prompt": True},
                200,
                "31711139277f3bb4edb1bcb105e203703c37c0820e6b7f16cd92ab62f101b653",
            ),
            (
                {"prompt_style": "llama3", "mask_prompt": True},
                4096,
                "15d022e358d6fb4c0c0ace05fd2b7453763d4ba59dc357c1b199dae03b83dd75",
            ),
            (
                {"prompt_style": "phi-2"},
                200,
                "16d90b2a27b5b32317f6e2be4cfaa7fa2e89139b4c528ba2320c1c91617c5c82",
            ),
        ],
    )
    def test_the_fingerprint_of_data_never_changes(
        self,
        tmp_path: Path,
        tokenizer: Tokenizer,
        options: dict[str, Any],
        max_seq_length: int,
        expected: str,
    ) -> None:
        """Pinned: a run started with one version of ftkit must go on with another."""
        data = json_data(json_directory(tmp_path, RECORDS), **options)
        made = load_data(data, tokenizer, max_seq_length)
        kept = load_data(data, tokenizer, max_seq_length)
        assert made.fingerprint == kept.fingerprint == expected

    def test_a_sample_outside_the_set_is_an_error(self) -> None:
        samples = SampleSet.of([Rendered([0, 1, 2], ((0, 3),))])
        for index in (FILLER, 1):
            with pytest.raises(IndexError):
                samples[index]


class TestJson:
    """The reader of records."""

    @pytest.mark.parametrize("class_path", ["JSON", "litgpt.data.JSON", "ftkit.data.JSON"])
    @pytest.mark.parametrize("options", [{}, {"val_split_fraction": 0.3, "seed": 5}])
    @pytest.mark.parametrize("suffix", [".json", ".jsonl"])
    @pytest.mark.filterwarnings("ignore:The `json_path` points to a single file")
    def test_a_single_file_is_split_as_litgpt_splits_it(
        self,
        tmp_path: Path,
        tokenizer: Tokenizer,
        class_path: str,
        options: dict[str, Any],
        suffix: str,
    ) -> None:
        file = write_json(tmp_path / "data.json", numbered(53))
        if suffix == ".jsonl":
            file = tmp_path / "data.jsonl"
            file.write_text("\n".join(json.dumps(record) for record in numbered(53)))
        theirs = litgpt_data.JSON(file, **options)
        theirs.connect(tokenizer, 1, 100)
        theirs.setup()
        data = Component(class_path=class_path, init_args={"json_path": str(file), **options})
        ours = load_data(data, tokenizer, 100)
        for split, expected in (("train", theirs.train_dataset), ("val", theirs.test_dataset)):
            samples: SampleSet = getattr(ours, split)
            got = [samples[i].ids.tolist() for i in range(len(samples))]
            assert got == [item["input_ids"].tolist() for item in expected]

    @pytest.mark.parametrize("suffix", [".json", ".jsonl"])
    def test_a_directory_holds_a_training_and_a_validation_file(
        self, tmp_path: Path, tokenizer: Tokenizer, suffix: str
    ) -> None:
        for split, count in (("train", 5), ("val", 3)):
            lines = [json.dumps(record) for record in numbered(count)]
            text = "\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]"
            (tmp_path / f"{split}{suffix}").write_text(text)
        loaded = load_data(json_data(tmp_path), tokenizer, 100)
        assert (len(loaded.train), len(loaded.val)) == (5, 3)

    def test_embedded_data_are_found_by_name(
        self, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        json_directory(tmp_path / "quickstart" / "data", numbered(4))
        monkeypatch.setattr(embedded, "path", lambda name: tmp_path / name)
        assert len(load_data(json_data("embedded:quickstart"), tokenizer, 100).train) == 4
        for name in ("embedded:quikstart", "embedded:../quickstart", "embedded:"):
            with pytest.raises(UserError, match=r"Try --data.json_path embedded:quickstart"):
                check_data(json_data(name))

    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    def test_marks_line_ends_and_empty_lines_do_not_matter(
        self, tmp_path: Path, newline: str
    ) -> None:
        records = [
            {"instruction": "a\u2028b\u0085c", "output": "line\nend"},
            {"instruction": "ü", "output": "早"},
        ]
        texts = [json.dumps(record, ensure_ascii=False) for record in records]
        lines = newline.join(["", texts[0], "  ", texts[1], ""])
        (tmp_path / "a.jsonl").write_bytes(lines.encode("utf-8-sig"))
        indented = json.dumps(records, indent=1).replace("\n", newline)
        (tmp_path / "a.json").write_bytes(indented.encode("utf-8-sig"))
        assert read_records(tmp_path / "a.jsonl") == records
        assert read_records(tmp_path / "a.json") == records

    @pytest.mark.parametrize(
        ("name", "text", "place", "reason"),
        [
            ("a.json", '[{"instruction": "a", "output": "b"}, 5]', "record 2", "is a number"),
            ("a.json", '[{"instruction": "a"}]', "record 1", "output ... instruction"),
            (
                "a.json",
                '[{"instruction": 1, "output": "a"}]',
                "record 1",
                "instruction is a number",
            ),
            ("a.json", '[{"instruction": "", "output": "", "input": []}]', "1", "input is a list"),
            ("a.json", '[{"instruction": "", "output": "", "input": 5}]', "1", "input is a number"),
            ("a.json", '[{"instruction": "a",\n "output" "b"}]', "line 2, column 11", "':'"),
            ("a.json", '{"instruction": "a", "output": "b"}', "a.json", "holds an object"),
            ("a.json", '{"a": "b"}\n{"a": "b"}', "line 2, column 1", "rename ... .jsonl"),
            ("a.json", "[]", "a.json", "empty list"),
            ("a.jsonl", "\n\n", "a.jsonl", "is empty"),
            ("a.jsonl", '\n\n{"instruction": "a" "output"}', "line 3, column 21", "','"),
            ("a.jsonl", '[{"instruction": "a"}]', "a.jsonl", "renaming it to a.json"),
        ],
    )
    def test_a_bad_file_is_refused_with_place_and_reason(
        self, tmp_path: Path, name: str, text: str, place: str, reason: str
    ) -> None:
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(UserError, match=key_words(file, place, reason)):
            read_records(file)

    @pytest.mark.parametrize(("count", "works"), [(9, 0.5), (15, 0.1)])
    def test_a_split_that_leaves_nothing_is_refused_with_one_that_works(
        self, tmp_path: Path, tokenizer: Tokenizer, count: int, works: float
    ) -> None:
        file = write_json(tmp_path / "a.json", numbered(count))
        with pytest.raises(UserError, match=f"--data.val_split_fraction {works}"):
            load_data(json_data(file), tokenizer, 100)
        assert len(load_data(json_data(file, val_split_fraction=works), tokenizer, 100).val) > 0

    def test_one_record_cannot_be_split(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        with pytest.raises(UserError, match="holds one record"):
            load_data(json_data(write_json(tmp_path / "a.json", numbered(1))), tokenizer, 100)


class TestChecks:
    """Data that are refused before anything heavy is imported."""

    def test_the_checks_import_neither_torch_nor_litgpt(self) -> None:
        code = (
            "import sys, ftkit.data.sources; print('torch' in sys.modules, 'litgpt' in sys.modules)"
        )
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert output.stdout.decode().split() == ["False", "False"]

    @pytest.mark.extensions
    @pytest.mark.parametrize("name", ["Alpaca", "Alpaca2k", "FLAN", "LIMA", "Deita", "LongForm"])
    @pytest.mark.parametrize("package", ["", "litgpt.data."])
    def test_map_style_modules_of_litgpt_are_accepted(self, package: str, name: str) -> None:
        check_data(Component(class_path=package + name, init_args={}))

    @pytest.mark.extensions
    @pytest.mark.parametrize("preference", ["pairs", "labels"])
    def test_modules_of_litgpt_have_no_preferences(self, preference: Preference) -> None:
        data = Component(class_path="litgpt.data.Alpaca", init_args={})
        message = message_of(check_data, data, preference=preference)
        assert says(message, f"data is Alpaca ... no {preference}", "--data JSON")

    @pytest.mark.extensions
    @pytest.mark.parametrize(
        ("class_path", "message"),
        [
            ("litgpt.data.TinyStories", "streams unlabelled text for pretraining"),
            ("LitData", "streams unlabelled text for pretraining"),
            ("alpaca2K", "Try --data Alpaca2k"),
            ("litgpt.data.Alpacca", "Try --data Alpaca"),
            ("litgpt.data.base.SFTDataset", "one of"),
            ("os.system", "Try --data JSON --data.path FILE"),
            ("my.package.Alpaca", "Try --data Alpaca."),
        ],
    )
    def test_other_classes_are_refused(self, class_path: str, message: str) -> None:
        with pytest.raises(UserError, match=key_words(message)) as error:
            check_data(Component(class_path=class_path, init_args={}))
        assert class_path in str(error.value)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"json_pth": "x"}, "data.json_pth ... JSON ... --data.json_path"),
            ({"json_path": None}, "data.json_path is missing"),
            ({"json_path": 5}, "data.json_path is 5"),
            ({"val_split_fraction": -0.1}, "data.val_split_fraction is -0.1 ... between"),
            ({"val_split_fraction": 1.0}, "data.val_split_fraction is 1.0"),
            ({"val_split_fraction": "half"}, "data.val_split_fraction is 'half'"),
            ({"mask_prompt": "false"}, "data.mask_prompt is 'false' ... true or false"),
            ({"ignore_index": 0}, "data.ignore_index is 0 ... -100"),
            ({"seed": -1}, "data.seed is -1"),
            ({"num_workers": 1.5}, "data.num_workers is 1.5"),
        ],
    )
    def test_bad_options_are_refused(
        self, tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        data = json_data(write_json(tmp_path / "a.json", numbered(5)))
        data["init_args"] |= options
        with pytest.raises(UserError, match=key_words(message)):
            check_data(data)

    def test_a_fraction_is_refused_where_there_is_a_validation_file(self, tmp_path: Path) -> None:
        data = json_data(json_directory(tmp_path, numbered(5)), val_split_fraction=0.1)
        with pytest.raises(UserError, match=key_words("val_split_fraction is 0.1 ... directory")):
            check_data(data)

    @pytest.mark.extensions
    def test_options_of_other_modules_are_checked_too(self) -> None:
        data = Component(class_path="Alpaca2k", init_args={"val_split_fraction": 2})
        with pytest.raises(UserError, match=r"data.val_split_fraction is 2"):
            check_data(data)


class TestPromptStyle:
    """Names of prompt styles in recipes."""

    @pytest.mark.extensions
    @pytest.mark.parametrize(
        "style",
        [
            "phi-2",
            "litgpt.prompts.Phi2",
            {"class_path": "litgpt.prompts.Phi2"},
            {"class_path": "litgpt.prompts.ChatML", "init_args": {"system_message": "Be brief."}},
        ],
    )
    def test_names_and_classes_of_litgpt_are_accepted(
        self, tmp_path: Path, tokenizer: Tokenizer, style: str | dict[str, Any]
    ) -> None:
        data = json_data(json_directory(tmp_path, numbered(3)), prompt_style=style)
        loaded = load_data(data, tokenizer, 1000)
        assert loaded.prompt_source.part.rules.prompt_style.class_name in ("Phi2", "ChatML")
        text = tokenizer.decode(torch.from_numpy(loaded.val[0].ids))
        assert text.startswith(loaded.prompt_source.part.rules.prompt_style.apply("Say 0."))

    @pytest.mark.extensions
    @pytest.mark.parametrize(
        ("style", "message"),
        [
            ("alpacca", "data.prompt_style is alpacca ... --data.prompt_style alpaca"),
            ("Llama3", "--data.prompt_style llama3"),
            ("litgpt.prompts.Phi22", "--data.prompt_style phi-2"),
            ("litgpt.prompts.Config", "has to be one of"),
            ({"class_path": "os.system"}, "data.prompt_style is os.system"),
            ({"class_path": "litgpt.prompts.Phi2", "init_args": {"a": 1}}, "Remove the init_args"),
            (5, "data.prompt_style is 5"),
        ],
    )
    def test_anything_else_is_refused(
        self, tmp_path: Path, tokenizer: Tokenizer, style: str | dict[str, Any] | int, message: str
    ) -> None:
        data = json_data(json_directory(tmp_path, numbered(3)), prompt_style=style)
        with pytest.raises(UserError, match=key_words(message)):
            load_data(data, tokenizer, 1000)


class TestModulesOfLitgpt:
    """Records of LitGPT's modules, through the same tokenisation. Nothing is downloaded here."""

    @pytest.fixture(autouse=True)
    def _in_an_empty_directory_without_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_network(*args: object, **kwargs: object) -> None:
            raise ConnectionError("no route to host")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("urllib.request.urlopen", no_network)
        monkeypatch.setattr("datasets.load_dataset", no_network)

    def load(self, name: str, tokenizer: Tokenizer, **init_args: object) -> DataSets:
        data = Component(class_path=f"litgpt.data.{name}", init_args=init_args)
        return load_data(data, tokenizer, 200)

    @pytest.mark.extensions
    @pytest.mark.parametrize("mask_prompt", [False, True])
    @pytest.mark.parametrize("name", ["Alpaca", "AlpacaGPT4"])
    def test_alpaca_is_read_from_its_file(
        self, tokenizer: Tokenizer, name: str, mask_prompt: bool
    ) -> None:
        module = getattr(litgpt_data, name)(mask_prompt=mask_prompt, val_split_fraction=0.1)
        write_json(module.download_dir / module.file_name, numbered(30))
        module.connect(tokenizer, max_seq_length=200)
        module.setup()
        loaded = self.load(name, tokenizer, mask_prompt=mask_prompt, val_split_fraction=0.1)
        assert (len(loaded.train), len(loaded.val)) == (27, 3)
        for i in range(27):
            sample, theirs = loaded.train[i], module.train_dataset[i]
            assert sample.ids.tolist() == theirs["input_ids"].tolist()
            first = int((theirs["labels"] == -100).sum())
            assert sample.trained.tolist() == [[first, len(sample.ids)]]

    @pytest.mark.extensions
    def test_alpaca2k_comes_through_datasets(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import datasets

        table = datasets.Dataset.from_list([record | {"text": "-"} for record in numbered(40)])
        calls = []
        monkeypatch.setattr(
            "datasets.load_dataset",
            lambda *args, **kwargs: calls.append((args, kwargs)) or {"train": table},  # type: ignore[func-returns-value]
        )
        loaded = self.load("Alpaca2k", tokenizer, val_split_fraction=0.5, download_dir="here")
        assert (len(loaded.train), len(loaded.val)) == (20, 20)
        assert calls[0] == (("mhenrichsen/alpaca_2k_test",), {"cache_dir": Path("here")})
        split = table.train_test_split(test_size=0.5, seed=42)
        questions = [question.instruction for question in loaded.questions]
        assert questions == list(split["test"]["instruction"])
        assert loaded.prompt_source.part.rules.prompt_style == resolve_prompt_style("alpaca")

    @pytest.mark.extensions
    def test_conversations_come_through_datasets(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        turns = [[f"Say {i}.", f"{i}"] for i in range(20)]
        monkeypatch.setattr(
            "datasets.load_dataset",
            lambda name, **kwargs: {"train": [{"conversations": turn} for turn in turns]},
        )
        assert len(self.load("LIMA", tokenizer, access_token="hidden").train) == 18
        messages = [{"messages": [{"content": text} for text in turn]} for turn in turns]
        monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: [messages] * 2)
        assert len(self.load("Deita", tokenizer).train) == 20

    @pytest.mark.extensions
    def test_renamed_keys_are_understood(self, tokenizer: Tokenizer) -> None:
        for split in ("train", "test"):
            file = Path(f"data/flan/cola_10templates_{split}.jsonl")
            write_json(file, {"inputs": "Is it?", "targets": "It is.", "task": "cola"})
        loaded = self.load("FLAN", tokenizer, subsets="cola_10templates")
        assert val_records(loaded) == [{"instruction": "Is it?", "output": "It is."}]
        assert loaded.prompt_source.part.rules.prompt_style == resolve_prompt_style("flan")
        for split in ("train", "val"):
            file = Path(f"data/longform/{split}.json")
            write_json(file, [{"input": "Write.", "output": "Written.", "source": "-"}])
        loaded = self.load("LongForm", tokenizer)
        assert val_records(loaded) == [{"instruction": "Write.", "output": "Written."}]

    @pytest.mark.extensions
    @pytest.mark.parametrize(
        ("name", "works"),
        [
            ("Alpaca", "data/alpaca/alpaca_data_cleaned_archive.json"),
            ("Alpaca2k", "copy data/alpaca2k"),
            ("LongForm", "copy data/longform"),
        ],
    )
    def test_without_network_the_error_says_where_to_put_the_data(
        self, tokenizer: Tokenizer, name: str, works: str
    ) -> None:
        with pytest.raises(UserError, match=works) as error:
            self.load(name, tokenizer)
        assert says(str(error.value), f"data is {name} ... ConnectionError")
        assert "--data JSON --data.path FILE" in str(error.value)

    @pytest.mark.extensions
    def test_a_broken_download_has_to_be_deleted(self, tokenizer: Tokenizer) -> None:
        Path("data/alpaca").mkdir(parents=True)
        Path("data/alpaca/alpaca_data_cleaned_archive.json").write_text("404: Not Found")
        with pytest.raises(UserError, match="Delete data/alpaca"):
            self.load("Alpaca", tokenizer)

    @pytest.mark.extensions
    def test_lima_needs_a_token(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(UserError, match="HF_TOKEN"):
            self.load("LIMA", tokenizer, access_token=None)

    @pytest.mark.extensions
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"val_split": 0.5}, "val_split ... Alpaca ... val_split_fraction"),
            ({"prompt_style": "alpacca"}, "--data.prompt_style alpaca"),
            ({"download_dir": 5}, "its options are refused"),
        ],
    )
    def test_options_are_checked_before_anything_is_downloaded(
        self, tokenizer: Tokenizer, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(UserError, match=key_words(message)):
            self.load("Alpaca", tokenizer, **options)


def sample(ids: list[int], *trained: tuple[int, int]) -> Sample:
    return Sample(np.array(ids, dtype=np.int32), np.array(trained, dtype=np.int32))


class TestCollate:
    """Samples become one micro-batch, padded or in a row."""

    def test_every_trained_span_has_its_labels(self) -> None:
        batch = collate([sample([1, 2, 3, 4, 5, 6, 7], (0, 2), (4, 5), (6, 7))], {})
        assert batch["label_indices"].tolist() == [0, 3, 5]
        assert batch["labels"].tolist() == [2, 5, 7]

    def test_label_indices_point_at_the_tokens_before_the_labels(self) -> None:
        samples = [
            sample([5, 6, 7, 8, 9], (3, 5)),
            None,
            sample([1, 2, 3], (0, 3)),
        ]
        batch = collate(samples, divisors={"label_tokens": 40})
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [0, 0, 0, 0], [1, 2, 0, 0]]
        assert batch["label_indices"].tolist() == [2, 3, 8, 9]
        assert batch["labels"].tolist() == [8, 9, 2, 3]
        assert batch["input_ids"].dtype == batch["label_indices"].dtype == torch.int64
        assert batch["labels"].dtype == torch.int64
        assert batch["divisors"]["label_tokens"].dtype == torch.float64
        assert batch["divisors"]["label_tokens"].tolist() == 40
        assert (batch["samples"], batch["tokens"], batch["padded_tokens"]) == (2, 6, 12)

    def test_a_filler_alone_is_one_token_that_counts_for_nothing(self) -> None:
        batch = collate([None], divisors={"label_tokens": 3})
        assert batch["input_ids"].tolist() == [[0]]
        assert batch["label_indices"].shape == batch["labels"].shape == (0,)
        assert (batch["samples"], batch["tokens"], batch["padded_tokens"]) == (0, 0, 1)

    def test_a_row_has_every_sample_once_and_no_padding(self) -> None:
        samples = [
            sample([5, 6, 7, 8, 9], (3, 5)),
            None,
            sample([1, 2, 3], (0, 3)),
        ]
        batch = collate(samples, divisors={"label_tokens": 40}, padding_free=True)
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0, 1, 2]]
        assert batch["sequence_lengths"] == (4, 1, 2)
        assert batch["label_indices"].tolist() == [2, 3, 5, 6]
        assert batch["labels"].tolist() == [8, 9, 2, 3]
        assert batch["input_ids"].dtype == batch["label_indices"].dtype == torch.int64
        assert (batch["samples"], batch["tokens"], batch["padded_tokens"]) == (2, 6, 7)
        assert collate(samples, divisors={"label_tokens": 40})["sequence_lengths"] is None

    def test_the_labels_are_those_that_litgpt_shifts(self, tokenizer: Tokenizer) -> None:
        theirs = litgpt_data.SFTDataset(
            RECORDS, LitgptTokenizer(tokenizer.directory), "alpaca", 200, mask_prompt=True
        )
        kept = [item for item in theirs if (item["labels"][1:] != -100).any()]
        batch = collate(
            [
                sample(
                    item["input_ids"].tolist(),
                    (int((item["labels"] == -100).sum()), len(item["labels"])),
                )
                for item in kept
            ],
            divisors={},
        )
        expected = litgpt_data.get_sft_collate_fn()(kept)
        labels = expected["labels"][:, 1:].flatten()
        assert batch["input_ids"].shape == expected["input_ids"][:, :-1].shape
        assert batch["label_indices"].tolist() == torch.nonzero(labels != -100).flatten().tolist()
        assert batch["labels"].tolist() == labels[labels != -100].tolist()


def make_samples(count: int = 37) -> SampleSet:
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, 20, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = generator.integers(1, 100, offsets[-1]).astype(np.int32)
    spans = np.stack([np.full(count, 2), lengths], axis=1).astype(np.int32)
    return SampleSet(tokens, offsets, spans, np.arange(count + 1))


def make_order(samples: SampleSet, **changes: int) -> ElasticOrder:
    settings = {
        "seed": 1,
        "global_batch_size": 8,
        "micro_batch_size": 3,
        "total_samples": 2 * len(samples),
    }
    return make_elastic_order(samples.lengths, samples.label_counts, **(settings | changes))


def plain(batch: dict) -> dict:  # type: ignore[type-arg]
    return {key: getattr(value, "tolist", lambda v=value: v)() for key, value in batch.items()}


class TestLoaders:
    """Micro-batches of a rank, in order."""

    @pytest.mark.parametrize("start_step", [0, 3, 9, 10])
    def test_a_loader_starts_at_any_step(self, start_step: int) -> None:
        samples = make_samples()
        order = make_order(samples)
        loader = train_batches(samples, order, start_step, 10)
        expected = [
            plain(
                collate(
                    [None if i == FILLER else samples[i] for i in micro_batch],
                    order.divisors(step),
                    is_last_of_step=number == len(order.micro_batches(step)),
                    numbers=micro_batch,
                )
                | {"places": tuple(places.tolist() or [size]), "sequences_of_step": size}
            )
            for step in range(start_step, 10)
            if (size := len(order.samples(step)))
            for number, (micro_batch, places) in enumerate(
                zip(order.micro_batches(step), order.places(step), strict=True), start=1
            )
        ]
        assert [plain(batch) for batch in loader] == expected

    @pytest.mark.parametrize("world_size", [1, 2, 3, 5])
    def test_the_ranks_together_carry_every_target_once(self, world_size: int) -> None:
        samples = make_samples()
        ranks = [make_order(samples, rank=r, world_size=world_size) for r in range(world_size)]
        loaders = [list(train_batches(samples, order, 0, order.total_steps)) for order in ranks]
        assert len({len(batches) for batches in loaders}) == 1
        batches = [batch for batches in loaders for batch in batches]
        assert sum(batch["samples"] for batch in batches) == 2 * len(samples)
        assert sum(batch["tokens"] for batch in batches) == 2 * samples.lengths.sum()
        labels = sum(len(batch["labels"]) for batch in batches)
        assert labels == 2 * samples.label_counts.sum()
        shares = [len(batch["labels"]) / batch["divisors"]["label_tokens"] for batch in batches]
        assert sum(shares) == pytest.approx(ranks[0].total_steps)

    def test_rows_have_the_samples_and_labels_of_padded_micro_batches(self) -> None:
        samples = make_samples()
        padded = list(train_batches(samples, make_order(samples), 0, 10))
        order = make_order(samples, micro_batch_size=8, micro_batch_tokens=30)
        rows = list(train_batches(samples, order, 0, 10))
        assert sum(row["is_last_of_step"] for row in rows) == 10

        def labels(batches: list[dict[str, Any]]) -> list[int]:
            return sorted(label for batch in batches for label in batch["labels"].tolist())

        assert labels(rows) == labels(padded)
        layout = RankLayout(micro_batch_size=4, padding_free=True)
        for row in [*rows, *validation_loader(samples, {}, 30, layout)]:
            assert row["input_ids"].shape == (1, row["tokens"])
            assert sum(row["sequence_lengths"]) == row["tokens"] == row["padded_tokens"]

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    @pytest.mark.parametrize("limit", [2, 10, 100])
    def test_validation_takes_the_first_samples(self, limit: int, world_size: int) -> None:
        samples = make_samples()
        loaders = [
            validation_loader(
                samples,
                {"label_tokens": samples.label_counts},
                limit,
                RankLayout(micro_batch_size=4, rank=rank, world_size=world_size),
            )
            for rank in range(world_size)
        ]
        assert len({len(loader) for loader in loaders}) == 1
        batches = [batch for loader in loaders for batch in loader]
        labels = samples.label_counts[:limit].sum()
        assert sum(len(batch["labels"]) for batch in batches) == labels
        for batch in batches:
            assert batch["divisors"]["label_tokens"].item() == len(batch["labels"])

    def test_a_loader_of_a_run_that_is_already_at_its_end_is_empty(self) -> None:
        samples = make_samples()
        order = make_order(samples, start_step=7, start_samples=2 * len(samples))
        assert order.total_steps == 7
        loader = train_batches(samples, order, start_step=7, end_step=7)
        assert list(loader) == []
