"""Passwords and tokens in urls: one function takes them out of all that is shown or stored."""

import io
import json
import subprocess
from pathlib import Path

import httpx
import pytest
from command import command_environment, command_line
from rich.table import Table
from rich.text import Text

from ftkit.errors import DoesNotFit, UserError
from ftkit.redaction import is_secret, redacted, redacted_output, shown
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import RankError
from ftkit.utils.console.display import Display
from ftkit.utils.console.terminal import SafeConsole, labelled_grid
from ftkit.utils.damaged_files import DamagedFile, reading, traceback_log
from ftkit.utils.json_values import for_json, without_tokens
from ftkit.utils.process import print_line
from ftkit.utils.progress import print_next, print_notice
from ftkit.utils.yaml_files import dump_yaml, parse_yaml

SECRET = "p4ssw0rd"
SECRETS = {
    "a hub's mirror": f"HF_ENDPOINT=http://user:{SECRET}@mirror.example",
    "a token as the user": f"https://{SECRET}@mirror.example/api",
    "a proxy": f"HTTPS_PROXY=https://me:{SECRET}@proxy.example:3128",
    "a proxy without a scheme": f"proxy me:{SECRET}@proxy.example:3128 refused",
    "a SOCKS proxy": f"socks5h://me:{SECRET}@127.0.0.1:1080",
    "an endpoint of S3": f"AWS_ENDPOINT_URL=http://key:{SECRET}@minio.example:9000/bucket",
    "MLflow": f"MLFLOW_TRACKING_URI=https://u:{SECRET}@mlflow.example/api/2.0",
    "MLflow's database": f"mysql+pymysql://u:{SECRET}@db.example/mlflow",
    "W&B": f"WANDB_BASE_URL=https://u:{SECRET}@wandb.example",
    "an @ in the password": f"http://u:a@{SECRET}@host",
    "a slash in the password": f"http://u:a/{SECRET}@host/x",
    "a # in the password": f"http://u:a#{SECRET}@host/x",
    "a quote in the password": f"http://u:a'{SECRET}@host/x",
    "percent signs": f"http://u:%20{SECRET}@host",
    "capital letters": f"HTTP://U:{SECRET}@HOST",
    "no user": f"redis://:{SECRET}@host:6379/0",
    "an IPv6 host": f"http://u:{SECRET}@[::1]:8080/",
    "in quotes": f"Cannot connect to 'http://u:{SECRET}@host/' (refused)",
    "in JSON": json.dumps({"url": f"http://u:{SECRET}@host", "at": "me@example"}),
    "two urls": f"http://u:{SECRET}@a,http://u:{SECRET}@b",
    "a signed url of S3": f"https://b.example/k?X-Amz-Date=1&X-Amz-Signature={SECRET}&x=1",
    "its session": f"https://b.example/k?X-Amz-Security-Token={SECRET}",
    "its credential": f"https://b.example/k?X-Amz-Credential={SECRET}/20260101/eu/s3",
    "a signed url of Google": f"https://b.example/k?X-Goog-Signature={SECRET}",
    "a token of Azure": f"https://a.example/c/b?sv=2024&sig={SECRET}&se=2030",
    "a token": f"https://a.example/?token={SECRET}",
    "an access token": f"https://a.example/#access_token={SECRET}",
    "an API key": f"https://a.example/?a=1&api_key={SECRET}",
    "a key of Google": f"https://a.example/v1?key={SECRET}",
    "a connection string": f"AccountName=a;AccountKey={SECRET};EndpointSuffix=x",
    "a header": f"{{'Authorization': 'Bearer {SECRET}'}}",
}
HARMLESS = [
    "https://huggingface.co/org/name",
    "http://localhost:8080/a/b@main",
    "s3://bucket/out/lora",
    "ssh://git@github.com/me/it",
    "az://container/prefix",
    "data.url is https://a.example/?page=2&tokenizer=bpe#top",
    "me@example.com wrote at 12:30",
    "optimizer.lr: 0.001 -> 0.002",
    "rank 1: node2:29500 refused",
    "org/name@refs/convert/parquet: train",
]
everywhere = pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)


NAMES_OF_SECRETS = (
    "wandb_api_key", "hf_token", "hub_token", "HF_TOKEN", "swanlab_lark_secret", "db.password",
    "client_secret", "aws_secret_access_key", "github_token", "apiKey", "lark_webhook_url",
)  # fmt: skip
NO_SECRETS = (
    "pad_token", "eos_token", "bos_token", "max_tokens", "max_new_tokens", "add_tokens", "tokens",
    "train.label_tokens", "image_token", "tokenizer", "key", "secrets", "sort_key", "eot_token",
    "user_token", "token",
)  # fmt: skip
TOKENS = (
    f"hf_{'aB3' * 11}", f"sk-proj-{'aB3' * 9}", f"ghp_{'aB3' * 12}", f"glpat-{'aB3' * 7}",
    f"xoxb-{'123' * 5}", f"wandb_v1_{'aB3' * 8}", f"eyJ{'aB3' * 5}.eyJ{'aB3' * 5}.{'aB3' * 5}",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_SECRETS)
@pytest.mark.parametrize(
    "form",
    [
        "{name}: {secret}", "  - {name}: two words {secret}", '{{"{name}": "{secret}"}}',
        "{name}={secret}", "--{name}={secret}", "{{'{name}': 'two {secret}', 'b': 1}}",
        "{name} is '{secret}', but must be a list",
        # as PyYAML shows the line with an error
        'while scanning\n    {name}: "two {secret}\n    ^',
    ],
)  # fmt: skip
def test_a_secret_is_known_by_the_name_in_front_of_it(name: str, form: str) -> None:
    text = form.format(name=name, secret=SECRET)
    assert SECRET not in redacted(text) and name in redacted(text)
    assert is_secret(name.rpartition(".")[2], SECRET)


@pytest.mark.parametrize("name", NO_SECRETS)
def test_names_of_tokens_of_a_vocabulary_are_no_secrets(name: str) -> None:
    for text in (f"{name}: </s>", f"{name}='</s>'", f'{{"{name}": "word"}}', f"{name} is 'x'"):
        assert redacted(text) == text
    assert not is_secret(name, "</s>")


def test_flags_and_numbers_are_no_secrets() -> None:
    assert not is_secret("hf_use_auth_token", True) and not is_secret("api_key", 0)


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_known_by_its_form(token: str) -> None:
    assert redacted(f"datasets: {token} and more") == "datasets: *** and more"


def test_a_commit_is_no_key_of_weights_and_biases() -> None:
    digits = "0123456789abcdef" * 2 + "01234567"
    assert redacted(f"org/base@{digits}") == f"org/base@{digits}"
    assert is_secret("wandb_key", digits) and not is_secret("model_revision", digits)


ESCAPES = {
    "colour": "\x1b[31m", "cursor": "\x1b[2J\x1b[H", "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\", "device": "\x1bPq#0\x1b\\", "reset": "\x1bc",
    "C1 colour": "\x9b31m", "C1 title": "\x9d0;owned\x9c", "bell": "\x07", "backspace": "\x08\x08",
    "return": "\r", "override": "\u202e", "isolate": "\u2066", "mark": "\u200f", "line": "\u2028",
    "half a character": "\ud800",
}  # fmt: skip


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES)
def test_an_escape_is_taken_out_with_its_content(escape: str) -> None:
    for text in (str(UserError(f"a{escape}b")), shown(f"a{escape}b")):
        assert text.replace("?", "") == "ab"
    broken = f"hf_{'aB3' * 6}{escape}{'aB3' * 6}"
    if escape != "\ud800":
        assert shown(broken) == "***"


@pytest.mark.parametrize("escape", ["colour", "title", "override"])
def test_foreign_text_moves_nothing_on_a_terminal(
    escape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"x{ESCAPES[escape]}y"
    table = Table(text, title=text)
    table.add_row(text)
    with Display(tmp_path) as display:
        display.message(text)
        display.warning(text)
        display.show_text(text)
        display.show(table)
        display.notice(labelled_grid([(text, text)]))
    print_line(text)
    print_notice(text)
    print_next(text)
    captured = capsys.readouterr()
    for said in (captured.out, captured.err, (tmp_path / "run.log").read_text()):
        assert "xy" in said and ESCAPES[escape] not in said
    dumped = dump_yaml({text: text})
    assert dumped.isascii() and parse_yaml(dumped) == {text: text}


def test_a_table_on_a_terminal_keeps_its_own_colours_alone() -> None:
    stream = io.StringIO()
    SafeConsole(file=stream, force_terminal=True, color_system="standard").print(
        Text("a\x1b[2Jb", "red")
    )
    assert stream.getvalue() == "\x1b[31mab\x1b[0m\n"


@everywhere
def test_a_secret_is_taken_out_of_a_text_and_the_rest_stays(text: str) -> None:
    assert SECRET not in redacted(text)
    assert "***" in redacted(text)
    assert redacted(redacted(text)) == redacted(text)


def test_the_host_is_not_redacted() -> None:
    assert redacted(f"http://user:{SECRET}@host:8080/a?token={SECRET}&b=1") == (
        "http://***@host:8080/a?token=***&b=1"
    )


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_stay_as_they_are(text: str) -> None:
    kept = text.replace("&tokenizer=bpe", "&tokenizer=***")
    assert redacted(text) == kept


@pytest.mark.parametrize(
    "unit", ["a:", "a_key: ", "\x1b]", "hf_", "http://", "a:b@", "?token", "?a-", "x@", "://a:"]
)
def test_the_time_is_linear_in_the_text(unit: str) -> None:
    text = unit * (400_000 // len(unit)) + "@h:1"
    assert len(redacted(text)) <= len(text)  # minutes if it were not linear


@everywhere
def test_it_is_taken_out_of_all_messages(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    found = [str(UserError(text)), str(DoesNotFit(text))]
    print_line(text)
    print_notice(text)
    with Display(tmp_path) as display:
        display.message(text)
        display.warning(text)
        display.show_text(text)
        with display.phase(text):
            pass
    with pytest.raises(DamagedFile) as damaged, reading("file", "a url"):
        raise ValueError("x" * 190 + f" {text}")
    found += [str(damaged.value), traceback_log().read_text(), (tmp_path / "run.log").read_text()]
    captured = capsys.readouterr()
    found += [captured.out, captured.err, *without_tokens(["ftkit", "--data.path", text])]
    found.append(json.dumps(for_json({"recipe": {"data": [text]}})))
    error = RankError(kind="failed", message=text, happened_at_s=0.0)
    directory = RunDirectory(tmp_path).rank(0)
    directory.path.mkdir(parents=True)
    error.write(directory)
    found += [error.to_text(), directory.error.read_text()]
    assert not [said for said in found if SECRET in said]
    assert "***" in captured.out and "***" in captured.err


def test_what_libraries_write_to_a_standard_stream_is_searched_too() -> None:
    file = io.BytesIO()
    before = io.TextIOWrapper(file, encoding="utf-8", write_through=True)
    stream = redacted_output(before)
    print(f"Retrying http://u:{SECRET}@host", file=stream)
    del stream
    print("again", file=before)  # as after contextlib.redirect_stderr
    assert file.getvalue() == b"Retrying http://***@host\nagain\n"
    assert redacted_output(plain := io.StringIO()) is plain


def test_an_error_of_a_library_that_quotes_its_proxy_is_shown_without_the_password() -> None:
    url = f"http://u:{SECRET}@proxy.example:3128"
    error = httpx.ProxyError(f"407 from {url}")
    assert SECRET not in str(UserError(f"the hub is not reached: {error}"))


@pytest.mark.parametrize("variable", ["HF_ENDPOINT", "HTTPS_PROXY"])
def test_a_command_that_cannot_reach_the_hub_prints_no_password(
    variable: str, tmp_path: Path
) -> None:
    url = f"http://user:{SECRET}@127.0.0.1:9"
    environment = command_environment() | {variable: url, "HF_HUB_OFFLINE": "0"}
    ended = subprocess.run(
        command_line("download", "org/name"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert ended.returncode == 2, ended.stderr
    assert SECRET not in ended.stdout + ended.stderr
    assert "cannot be reached" in ended.stderr


def test_line_ends_stay_and_tabs_become_spaces() -> None:
    assert shown("a\x1b[1;31mb\r\nc\td\x07") == "ab\nc   d"
