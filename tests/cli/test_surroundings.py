"""Where a command runs: closed, full and broken streams; no home, no name, no temporary files."""

import os
import subprocess
from pathlib import Path

import pytest
from command import command_environment, command_line
from messages import says
from runs import command_of, rows

from ftkit.runs.report.report import read_report

PLAN = ("plan", "--checkpoint_dir", "embedded:quickstart", "--data", "JSON")
PLAN = (*PLAN, "--data.path", "embedded:quickstart")
COMBINATIONS = ("<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-")
STRANGER = "unshare -U --map-user=54321 --map-group=54321"
"""A user id that has no entry in /etc/passwd."""
needs_namespaces = pytest.mark.skipif(
    bool(subprocess.run([*STRANGER.split(), "true"], capture_output=True, check=False).returncode),
    reason="no user namespaces",
)


def shell(
    redirected: str, *words: object, cwd: Path, before: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ftkit by a shell that redirects its streams; those that are not closed are pipes."""
    line = command_line(*words)
    text = f'{before} "$@" {redirected}'
    return subprocess.run(
        ["bash", "-c", text, "bash", *line],
        env=command_environment() if env is None else env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


# --- Streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("redirected", COMBINATIONS)
def test_a_closed_stream_changes_no_exit_code(redirected: str, tmp_path: Path) -> None:
    ended = shell(redirected, "finetune", "--nonsense", cwd=tmp_path)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stdout + ended.stderr
    if "2>" not in redirected:
        assert says(ended.stderr, "nonsense")


@pytest.mark.parametrize(
    "redirected",
    [
        pytest.param("<&- >&- 2>&-", marks=pytest.mark.slow),
        pytest.param(">/dev/full 2>/dev/full", marks=pytest.mark.matrix),
    ],
)
def test_a_run_is_complete_whatever_its_streams_are(
    redirected: str, common: list[str], tmp_path: Path
) -> None:
    out_dir = tmp_path / "out"
    ended = shell(redirected, *command_of(out_dir, common), cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert read_report(out_dir).outcome == "completed"
    assert [row["step"] for row in rows(out_dir)] == [str(step) for step in range(1, 6)]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [["--version"], ["finetune", "--checkpoint_dir", "m", "--print_config"]]
)
def test_a_result_that_cannot_be_written_is_said(
    words: list[str], unbuffered: str, tmp_path: Path
) -> None:
    environment = command_environment() | {"PYTHONUNBUFFERED": unbuffered}
    ended = shell(">/dev/full", *words, cwd=tmp_path, env=environment)
    assert ended.returncode == 1
    assert says(ended.stderr, "ftkit: standard output ... No space left on device")
    assert ended.stderr.count("\n") == 1


def test_a_message_that_cannot_be_written_keeps_its_exit_code(tmp_path: Path) -> None:
    for redirected in ("2>/dev/full", "2> >(true)"):
        assert shell(redirected, "finetune", "--nonsense", cwd=tmp_path).returncode == 2


# --- Directories ----------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    directory = tmp_path / "tmp"
    directory.mkdir(mode=0o777)
    return directory


def alone(temporary: Path, **variables: str) -> dict[str, str]:
    """An environment without a user's own variables."""
    kept = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "HF_ENDPOINT")
    known = {name: value for name, value in command_environment().items() if name in kept}
    return known | {"TMPDIR": str(temporary)} | variables


@needs_namespaces
@pytest.mark.slow
def test_a_user_without_name_and_home_has_caches_of_this_machine(
    temporary: Path, tmp_path: Path
) -> None:
    ended = shell("", *PLAN, cwd=tmp_path, before=STRANGER, env=alone(temporary))
    assert ended.returncode == 0, ended.stderr
    own = temporary / "ftkit-54321"
    assert says(ended.stderr, f"no home directory ... {own} ... Set HOME or FTKIT_CACHE_DIR")
    assert own.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [temporary]  # nothing such as ./~


@needs_namespaces
@pytest.mark.parametrize(
    ("home", "cache", "said"),
    [
        ("read-only", "", "cannot be written"),
        ("read-only/missing", "", "cannot be written"),
        ("read-only", "cache", ""),
        ("writable", "", ""),
        ("writable/missing", "", ""),
    ],
)
def test_caches_go_elsewhere_only_where_the_home_cannot_be_written(
    home: str, cache: str, said: str, temporary: Path, tmp_path: Path
) -> None:
    for name, mode in (("read-only", 0o555), ("writable", 0o755)):
        (tmp_path / name).mkdir(mode=mode)
    show = (
        "import getpass, os\n"
        "from ftkit.utils.home import provide_directories\nprovide_directories()\n"
        "names = ('HOME', 'USER', 'FTKIT_CACHE_DIR', 'XDG_CACHE_HOME')\n"
        "print([os.environ.get(name) for name in names], getpass.getuser())"
    )
    variables = {"HOME": str(tmp_path / home)}
    variables |= {"FTKIT_CACHE_DIR": str(tmp_path / cache)} if cache else {}
    line = [*STRANGER.split(), command_line()[0], "-c", show]
    ended = subprocess.run(
        line, env=alone(temporary, **variables), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    own = temporary / "ftkit-54321"
    changed = home.startswith("read-only")
    expected = [
        str(own) if home == "read-only/missing" else str(tmp_path / home),
        "54321",
        str(tmp_path / cache) if cache else str(own / "ftkit") if changed else None,
        str(own) if changed else None,
    ]
    assert ended.stdout.strip() == f"{expected} 54321"
    assert says(ended.stderr, said) if said else not ended.stderr


@needs_namespaces
@pytest.mark.parametrize("kind", ["link", "open to others", "file"])
def test_a_directory_that_others_may_have_made_is_not_used(
    kind: str, temporary: Path, tmp_path: Path
) -> None:
    own = temporary / "ftkit-54321"
    if kind == "link":
        own.symlink_to(tmp_path)
    elif kind == "file":
        own.touch()
    else:
        own.mkdir()
        own.chmod(0o777)
    ended = shell(
        "", "data", "embedded:quickstart", cwd=tmp_path, before=STRANGER, env=alone(temporary)
    )
    assert ended.returncode == 2
    assert says(ended.stderr, f"{own} ... Set HOME")


@needs_namespaces
def test_without_room_for_temporary_files_the_variable_is_named(tmp_path: Path) -> None:
    # Read-only, because Python tries them all, and the current directory.
    read_only = "mount --bind $d $d && mount -o remount,ro,bind $d"
    places = f"/tmp /var/tmp /usr/tmp {tmp_path}"
    script = f'for d in {places}; do [ -d $d ] && {read_only}; done; cd {tmp_path} && exec "$@"'
    line = ["unshare", "-Ur", "-m", "bash", "-c", script, "bash"]
    ended = subprocess.run(
        [*line, *command_line("data", "embedded:quickstart")],
        env=command_environment() | {"TMPDIR": "/proc"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert says(ended.stderr, "Temporary files ... Set TMPDIR")
    assert "Traceback" not in ended.stderr


@pytest.mark.extensions
def test_a_path_of_a_user_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    ended = shell("", "plan", "~nobody-of-this-name/model", cwd=tmp_path, env=dict(os.environ))
    assert ended.returncode == 2
    assert says(ended.stderr, "~ ... in full")
