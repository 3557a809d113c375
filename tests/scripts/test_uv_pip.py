"""scripts/uv_pip.py: uv installs from where pip is set to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from uv_pip import pip_settings, uv_arguments, uv_variables

PASSWORD = "wjs83"


@pytest.mark.parametrize(
    ("setting", "value", "variable", "expected"),
    [
        ("index-url", "https://mirror/simple", "UV_DEFAULT_INDEX", "https://mirror/simple"),
        ("extra-index-url", "\nfile:///a\nfile:///b", "UV_INDEX", "file:///a file:///b"),
        ("find-links", "/wheels https://b/c", "UV_FIND_LINKS", "/wheels,https://b/c"),
        ("cert", "/ca.pem", "SSL_CERT_FILE", "/ca.pem"),
        ("client-cert", "/me.pem", "SSL_CLIENT_CERT", "/me.pem"),
        ("trusted-host", "a b:8080", "UV_INSECURE_HOST", "a b:8080"),
        ("proxy", "http://proxy:3128", "ALL_PROXY", "http://proxy:3128"),
        ("default-timeout", "180", "UV_HTTP_TIMEOUT", "180"),
        ("no-cache-dir", "1", "UV_NO_CACHE", "1"),
        ("no-cache-dir", "off", "UV_NO_CACHE", None),
        ("progress-bar", "off", "UV_PROGRESS_BAR", None),
    ],
)
def test_a_setting_of_pip_becomes_a_variable_of_uv(
    setting: str, value: str, variable: str, expected: str | None
) -> None:
    assert uv_variables({setting: value}).get(variable) == expected


def test_settings_that_uv_does_not_have_are_named_without_their_values() -> None:
    with pytest.raises(ValueError, match="only-binary, src") as caught:
        uv_variables({"src": PASSWORD, "only-binary": PASSWORD, "quiet": "1"})
    assert PASSWORD not in str(caught.value)


def test_the_environment_has_precedence_over_files_and_install_over_global() -> None:
    listing = (
        ":env:.retries='1'\ndownload.cert='no'\nglobal.cert='a'\nglobal.find-links='/a\\n/b'\n"
        "global.retries='2'\nglobal.timeout='3'\ninstall.timeout='4'\n"
    )
    expected = {"cert": "a", "find-links": "/a\n/b", "retries": "1", "timeout": "4"}
    assert pip_settings(listing) == expected


def test_certificates_are_those_of_pip_or_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    assert uv_variables({})["UV_SYSTEM_CERTS"] == "true"
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/requests.pem")
    assert uv_variables({})["SSL_CERT_FILE"] == "/requests.pem"
    assert uv_variables({"cert": "/pip.pem"})["SSL_CERT_FILE"] == "/pip.pem"


def test_arguments_of_pip_are_those_of_uv_with_the_constraints_of_its_settings() -> None:
    arguments = ["install", "--constraint", "mine", "--index-url", "https://cpu", "torch"]
    words = uv_arguments(arguments, {"constraint": "a.txt b.txt"})
    assert words[:4] == ["pip", "install", "--python", sys.executable]
    options = " ".join(words)
    assert "--default-index https://cpu torch" in options
    for file in ("mine", "a.txt", "b.txt"):
        assert f"--constraint {file}" in options


def run_uv_pip(place: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a stand-in for uv, which prints its index and arguments."""
    uv = place / "uv"
    uv.write_text('#!/bin/sh\necho "index $UV_DEFAULT_INDEX"\necho "arguments $*"\n')
    uv.chmod(0o755)
    (place / "uv.py").write_text(f"def find_uv_bin() -> str:\n    return {str(uv)!r}\n")
    outside_pip = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    return subprocess.run(
        [sys.executable, ROOT / "scripts/uv_pip.py", "install", "torch"],
        capture_output=True,
        text=True,
        env=outside_pip | {"PYTHONPATH": str(place), "PIP_CONFIG_FILE": os.devnull} | environment,
    )


def test_addresses_with_passwords_are_passed_where_no_list_of_processes_shows_them(
    tmp_path: Path,
) -> None:
    url = f"https://me:{PASSWORD}@mirror/simple"
    index, arguments = run_uv_pip(tmp_path, PIP_INDEX_URL=url).stdout.splitlines()
    assert index == f"index {url}"
    assert arguments.endswith(" torch")
    assert PASSWORD not in arguments


def test_a_setting_without_equivalent_ends_before_uv_starts(tmp_path: Path) -> None:
    run = run_uv_pip(tmp_path, PIP_ONLY_BINARY=":all:")
    assert (run.returncode, run.stdout) == (1, "")
    assert "only-binary" in run.stderr
