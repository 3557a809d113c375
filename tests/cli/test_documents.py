"""Command lines in documents are ones that the command understands."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import warm
import yaml
from command import ROOT, command_environment, command_line
from local_tasks import ALL as LOCAL_TASKS
from local_tasks import write_tasks
from plugins import documented, opened, write_documented
from runs import TIMEOUT_S
from tiny import make_data, make_labelled, make_pairs

import ftkit.planning.command  # noqa: F401 (libraries set environment variables)
from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.recipe.recipe import FINETUNE
from ftkit.runs.report.report import read_report

DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "recipes/README.md",
    ROOT / "notebooks/README.md",
    *(ROOT / ".github").rglob("*.md"),
]
NOT_UNDERSTOOD = re.compile(
    r"is not an? (option|command|key)|needs a value|is missing: |does not belong|but must be|"
    r"does not exist\. (Did|Check)"
)


def command_lines(text: str) -> list[str]:
    """Those of `ftkit` in blocks of code, each on one line; what a command prints is none."""
    blocks = re.findall(r"^```(bash|console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands: list[str] = []
    for kind, block in blocks:
        lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        prompt = "$ " if kind == "console" else ""
        commands += [line.removeprefix(prompt) for line in lines if line.startswith(prompt)]
    return [command for command in commands if command.startswith("ftkit ")]


SEEDS = ROOT / "docs/seeds.md"
"""A table of commands."""
LINES = sorted(
    {line for file in DOCUMENTS for line in command_lines(file.read_text())}
    | {*re.findall(r"`(ftkit [^`]+)`", SEEDS.read_text())} - {"ftkit import", "ftkit plan"}
)


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_of_a_document_lead_to_existing_files_and_headings(file: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not link.startswith(("http:", "https:")):
            path, _, anchor = link.partition("#")
            target = file.parent / path if path else file
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link


def test_documents_show_every_kind_of_command() -> None:
    shown = {line.split()[1] for line in LINES}
    assert shown >= {"finetune", "finetune_full", "plan", "sweep", "compare", "checkpoints"}
    assert shown >= {"download", "generate", "evaluate", "merge", "export", "push"}


@pytest.mark.extensions
@pytest.mark.parametrize("line", LINES)
def test_a_command_line_in_a_document_is_understood(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is trained, fetched or written; runs that it names need not be there."""
    monkeypatch.setattr("ftkit.extensions.hub.models.download", lambda *_, **__: tmp_path)
    monkeypatch.setattr("ftkit.planning.command.plan_all", lambda *_, **__: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    there = [tmp_path / "recipes"]
    if "--plugin" in line:
        monkeypatch.setattr(
            "ftkit.cli.app.open_plugin", lambda named: named and opened(Path(named))
        )
        there.append(write_documented(tmp_path / "my.py", *documented()))
    name, *words = shlex.split(line, comments=True)[1:]
    if name in FINETUNE:
        own = f"recipes/tiny-llama-{FINETUNE[name]}.yaml"
        words = [own if word.startswith("out/") else word for word in words]
        words.append("--print_config")
    elif name == "sweep":
        words.append("--dry_run")
    try:
        code, refusal = run([name, *words]), ""
    except UserError as error:
        code, refusal = 2, str(error)
    assert not NOT_UNDERSTOOD.search(refusal)
    if name in (*FINETUNE, "sweep", "plan", "download"):
        assert (code, refusal) == (0, "")
    assert sorted(tmp_path.iterdir()) == sorted(there)


# --- All of them, for real ------------------------------------------------------------------------

BASES = ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", "TinyLlama/TinyLlama_v1.1")
BASES += tuple(f"openlm-research/open_llama_{size}" for size in ("3b", "7b", "13b"))
BASES += tuple(f"HuggingFaceTB/SmolLM2-{size}" for size in ("135M", "1.7B"))
"""Models that documents and recipes name, beside MODEL."""
DATA = {"class_path": "JSON", "init_args": {"json_path": "my.json", "mask_prompt": True}}
SMALL = {
    "train": {"max_steps": 2, "global_batch_size": 8, "lr_warmup_steps": 1, "max_seq_length": 200},
    "eval": {"max_new_tokens": 3, "max_iters": 1, "exact_match": 0},
}
"""What makes a recipe short; a sweep has one run of five."""
BEFORE = [
    "ftkit finetune --config recipes/quickstart.yaml",
    "ftkit finetune --config recipes/quickstart.yaml --quantize bnb.nf4 --out_dir out/qlora",
    "ftkit finetune --config recipes/tiny-llama-lora.yaml --out_dir out/finetune/lora",
    "ftkit finetune --config recipes/tiny-llama-lora.yaml --out_dir out/lora",
    "ftkit finetune_full --config recipes/tiny-llama-full.yaml --out_dir out/full",
    "ftkit finetune_full recipes/tiny-llama-full.yaml --out_dir out/finetune/full --stop_after 1",
]
"""What the documents take for done: runs that their lines name."""
OF_A_HUB = ("ftkit download", "ftkit push", "openai/gsm8k")
SHOWN_ELSEWHERE = (
    *("--serve", "--tasks hellaswag", "--accelerator tpu", "--accelerator cuda"),
    *("Qwen2.5-VL", "--image"),
)
"""One does not end, one is refused, others need devices or a model that sees:
tests/extensions/watch/test_live_page.py, tests/evaluation, tests/utils/accelerators,
tests/simulated_card, tests/extensions/images."""
READS_RUNS = {"generate", "evaluate", "merge", "export", "compare", "checkpoints"}


def make_place(place: Path, tiny_base: Path) -> None:
    """A directory as the reader has it, but with small models, few data and short recipes."""
    for name in BASES:
        shutil.copytree(tiny_base, place / "checkpoints" / name)
    shutil.copytree(tiny_base, place / "MODEL")
    kept = ROOT / "tests/extensions/foreign_checkpoints/checkpoints"
    shutil.copytree(kept / "gpt-neox", place / "neox")
    shutil.copytree(kept / "base", place / "neox-hf")
    shutil.copytree(ROOT / "tests/extensions/neox_data/orders/corpora", place / "corpora")
    make_data(place / "my.json", 20)
    chat = [{"role": "user", "content": "red?"}, {"role": "assistant", "content": "blue"}]
    (place / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 20)
    for name, rows in (("pairs", make_pairs(20)), ("labelled", make_labelled(40))):
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    metric = "def names_found(answer, expected, record):\n    return expected in answer\n"
    (place / "metrics.py").write_text(metric)
    write_documented(place / "my.py", *documented())
    (place / "sums.json").write_text(
        json.dumps([{"prompt": "<sum>1</sum>", "completion": "1"}] * 20)
    )
    (place / "opposites.jsonl").write_text('{"instruction": "red?", "output": "blue"}\n')
    (place / "capitals.csv").write_text("question,answer\nred?,blue\n")
    write_tasks(place / "tasks", *LOCAL_TASKS)
    (place / "questions.txt").write_text("Who is Lena?\nWho is Max?\n")
    asked = [{"instruction": f"Who is {name}?"} for name in ("Lena", "Max")]
    (place / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    for source in (ROOT / "recipes").rglob("*.yaml"):
        file = place / source.relative_to(ROOT)
        file.parent.mkdir(parents=True, exist_ok=True)
        recipe = yaml.safe_load(source.read_text())
        if "runs" not in recipe:
            if "objective" not in recipe:  # which needs records of its own
                recipe["data"] = DATA
            for part, values in SMALL.items():
                recipe[part] = recipe.get(part, {}) | values
        else:
            recipe["runs"] = recipe["runs"][::5]
        file.write_text(yaml.safe_dump(recipe))


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([ROOT / "README.md"], id="README", marks=pytest.mark.slow),
        pytest.param(DOCUMENTS, id="all", marks=pytest.mark.matrix),
    ],
)
def test_the_command_lines_of_documents_run(
    files: list[Path], tmp_path: Path, tiny_base: Path
) -> None:
    """Every line as it stands there; what reads runs comes when there are some.

    Lines that need a hub are shown with one in tests/models/pretrained/test_hub.py,
    tests/data/records/test_hub.py and tests/extensions/publish/test_push.py.
    """
    make_place(tmp_path, tiny_base)
    lines = [*BEFORE, *(line for file in files for line in command_lines(file.read_text()))]
    lines.sort(key=lambda line: line.split()[1] in READS_RUNS)
    failed = {}
    others = (*OF_A_HUB, *SHOWN_ELSEWHERE)
    for line in dict.fromkeys(line for line in lines if not any(n in line for n in others)):
        words = shlex.split(line, comments=True)[1:]
        command, environment = command_line(*words), command_environment()
        started = warm.SERVER.start(command, environment, cwd=tmp_path)
        out, err = started.communicate(timeout=TIMEOUT_S)
        if started.returncode:
            failed[line] = f"exit code {started.returncode}\n{out}{err}"
    assert not failed, "\n\n".join(f"{line}\n{what}" for line, what in failed.items())
    if files != DOCUMENTS:
        return
    assert {file.name for file in tmp_path.iterdir()} >= {"comparison.html", "single_gpu.html"}
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2
    assert {"merged", "merged-qlora", "lit"} <= {file.name for file in (tmp_path / "out").iterdir()}
    report = read_report(tmp_path / "out/finetune/full")
    assert report.progress is not None and report.progress.steps == 2
    assert report.resolved is not None and report.resolved.world_size == 4
