"""Run `uv pip` in this environment with pip's settings, which uv does not read.

usage: uv_pip.py install [OPTION OF PIP ...] [PACKAGE ...]

Settings from pip's files and from `PIP_...` variables are passed on in the environment, where the
list of processes does not show the passwords in their addresses. If uv has no equivalent of a
setting, the exit code is 1; scripts/setup_env then installs with pip.
"""

import ast
import os
import subprocess
import sys

VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-cache-dir": "UV_NO_CACHE",
    "proxy": "ALL_PROXY",
    "retries": "UV_HTTP_RETRIES",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""Settings of pip, and uv's variables of the same meaning."""
IRRELEVANT = {
    "break-system-packages",
    "cache-dir",
    "config-file",
    "disable-pip-version-check",
    "no-color",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "verbose",
}
"""Settings of pip that do not affect what is installed, nor from where."""


def pip_settings(listing: str) -> dict[str, str]:
    """Return the settings of `pip install` by their names, from the output of `pip config list`.

    Variables of the environment take precedence over the section `install`, that over `global`.
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in sections:
            sections[section][key] = ast.literal_eval(value)
    return sections["global"] | sections["install"] | sections[":env:"]


def uv_variables(settings: dict[str, str]) -> dict[str, str]:
    """Return pip's settings, except constraints, as environment variables of uv.

    Raises:
        ValueError: uv has no equivalent of a setting.
    """
    if unknown := sorted(settings.keys() - VARIABLES.keys() - IRRELEVANT - {"constraint"}):
        raise ValueError(f"uv has no equivalent of pip's settings: {', '.join(unknown)}")
    # pip takes the best version of all indexes; uv by default stops at the first with the name.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"):
        variables["SSL_CERT_FILE"] = bundle
    for setting, name in VARIABLES.items():
        if setting in settings:
            separator = "," if setting == "find-links" else " "
            variables[name] = separator.join(settings[setting].split())
    if variables.get("UV_NO_CACHE", "").lower() in ("0", "false", "no", "off"):
        del variables["UV_NO_CACHE"]
    if "SSL_CERT_FILE" not in os.environ | variables:
        variables["UV_SYSTEM_CERTS"] = "true"  # as pip has done since 24.2
    return variables


def uv_arguments(arguments: list[str], settings: dict[str, str]) -> list[str]:
    """Return arguments of pip as `uv pip` takes them, with the constraints of pip's settings."""
    command, *options = arguments
    # uv's own --index-url would yield to UV_DEFAULT_INDEX.
    options = ["--default-index" if word == "--index-url" else word for word in options]
    for file in settings.get("constraint", "").split():
        options += ["--constraint", file]
    return ["pip", command, "--python", sys.executable, "--no-progress", *options]


def main() -> None:
    """Replace this process by uv."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(pip, stdout=subprocess.PIPE, text=True, check=True).stdout
    settings = pip_settings(listing)
    try:
        variables = uv_variables(settings)
    except ValueError as error:
        sys.exit(f"uv_pip: {error}")
    from uv import find_uv_bin

    uv = find_uv_bin()
    os.execve(uv, [uv, *uv_arguments(sys.argv[1:], settings)], os.environ | variables)


if __name__ == "__main__":
    main()
