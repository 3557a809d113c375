"""Releases: the wheel runs outside the checkout, and scripts/release says what is missing."""

import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from command import ROOT, command_environment
from messages import says

import ftkit

HERE = sysconfig.get_python_version()
VERSIONS = [
    pytest.param(version, marks=pytest.mark.matrix if version == "3.12" != HERE else ())
    for version in ("3.11", "3.12", "3.13")
]
"""That pyproject.toml promises."""


FEW = ("--train.max_steps", "2", "--eval.exact_match", "4", "--eval.max_iters", "1")
"""Of the quick start, which takes minutes otherwise."""


def ended(
    *words: object, cwd: Path, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A program, outside the checkout."""
    environment = {k: v for k, v in command_environment().items() if k != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment | variables,
        timeout=timeout,
    )


def copy_of_checkout(place: Path) -> Path:
    """What git knows of it, with what is changed: files that others have as well."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, listed.split("\0")):
        file = ROOT / name
        if name.split("/")[0] in ("tests", "notebooks", "docs") or not (
            file.is_file() or file.is_symlink()
        ):
            continue
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target, follow_symlinks=False)
    return place


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with this version, ready to be released."""
    place = copy_of_checkout(tmp_path_factory.mktemp("release") / "checkout")
    changelog = place / "CHANGELOG.md"
    text = changelog.read_text().replace("(unreleased)", "(2026-11-30)")
    changelog.write_text(text)
    for words in (
        ["init", "--quiet"],
        ["add", "--all"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "all"],
    ):
        assert ended("git", *words, cwd=place).returncode == 0
    return place


@pytest.fixture(scope="module")
def released(checkout: Path) -> tuple[str, Path]:
    """Output of scripts/release, and the directory of its archives."""
    out = checkout.parent / "archives"
    done = ended(sys.executable, "scripts/release", "--skip_tests", "--out", out, cwd=checkout)
    assert done.returncode == 0, done.stderr
    return done.stdout, out


def interpreter(version: str) -> str | None:
    """A Python of this version: this one, one on the PATH, or one beside this one."""
    if version == HERE:
        return sys.executable
    beside = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}"))
    for found in (*map(str, beside), shutil.which(f"python{version}")):
        # what manages versions puts programs on the PATH that know of no version to start
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


def installed(version: str, wheel: Path, place: Path) -> Path:
    """The ftkit command of a bare environment with the wheel and the libraries of the tests."""
    python = interpreter(version)
    if python is None:
        # A machine need not have every supported version of Python.
        pytest.skip(f"there is no Python {version}")
    if python == sys.executable:
        venv.create(place, with_pip=False)
    else:
        assert ended(python, "-m", "venv", "--without-pip", place, cwd=place.parent).returncode == 0
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    done = ended(sys.executable, "-m", "pip", "--python", place / "bin/python", *install, cwd=place)
    assert done.returncode == 0, done.stderr
    # The libraries, but not the ftkit that is installed beside them as a link to the checkout:
    # a .pth of theirs is not read in a directory that another .pth names.
    libraries = place / f"lib/python{version}/site-packages/libraries.pth"
    libraries.write_text(f"{site.getsitepackages()[0]}\n")
    return place / "bin/ftkit"


@pytest.mark.slow
def test_the_archives_hold_what_the_package_needs_and_no_tests(released: tuple[str, Path]) -> None:
    said, out = released
    name = f"ftkit-{ftkit.__version__}"
    assert sorted(path.name for path in out.iterdir()) == [
        f"{name}-py3-none-any.whl",
        f"{name}.tar.gz",
    ]
    with zipfile.ZipFile(out / f"{name}-py3-none-any.whl") as wheel:
        inside = set(wheel.namelist())
    listed = subprocess.check_output(["git", "ls-files", "ftkit", "recipes"], cwd=ROOT, text=True)
    package = {
        re.sub("^recipes/", "ftkit/utils/embedded/recipes/", file) for file in listed.splitlines()
    }
    package -= {"ftkit/runs/report/README.md", "ftkit/utils/embedded/recipes"}
    assert package <= inside
    others = {file for file in inside - package if not file.startswith(f"{name}.dist-info/")}
    assert others == set()
    assert any(file.endswith("entry_points.txt") for file in inside)
    with tarfile.open(out / f"{name}.tar.gz") as source:
        assert {f"{name}/{file}" for file in ("pyproject.toml", *package)} <= {*source.getnames()}
    assert said.splitlines()[-4:-1] == [
        "to publish:",
        f"  git tag v{ftkit.__version__}",
        f"  git push origin v{ftkit.__version__}",
    ]
    assert said.splitlines()[-1].startswith("  twine upload ")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_explains_itself_in_a_bare_environment(
    version: str, released: tuple[str, Path], tmp_path: Path
) -> None:
    (wheel,) = released[1].glob("*.whl")
    command = installed(version, wheel, tmp_path / "environment")
    said = ended(command, "--version", cwd=tmp_path)
    assert (said.stdout, said.stderr) == (f"ftkit {ftkit.__version__}\n", "")
    python = tmp_path / "environment/bin/python"
    where = ended(python, "-c", "import ftkit; print(ftkit.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(tmp_path))
    said = ended(command, "--help", cwd=tmp_path)
    assert said.returncode == 0 and "finetune" in said.stdout, said.stderr
    said = ended(command, "finetune", "--help", cwd=tmp_path)
    assert said.returncode == 0 and "--train.max_steps N" in said.stdout, said.stderr
    # a recipe is read without the repository, and one that only the repository has is found
    said = ended(command, "finetune", "recipes/quickstart.yaml", "--print_config", cwd=tmp_path)
    assert "Did you mean embedded:quickstart.yaml?" in said.stderr
    said = ended(command, "finetune", "embedded:quickstart.yaml", "--print_config", cwd=tmp_path)
    assert said.returncode == 0 and "out_dir: out/quickstart\n" in said.stdout, said.stderr


@pytest.mark.slow
def test_the_wheel_runs_the_quick_start_in_a_bare_environment(
    released: tuple[str, Path], tmp_path: Path
) -> None:
    """Of the Python of the tests, whose libraries there are."""
    (wheel,) = released[1].glob("*.whl")
    command = installed(HERE, wheel, tmp_path / "environment")
    done = ended(command, "finetune", "embedded:quickstart.yaml", *FEW, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out/quickstart/final/adapter_model.safetensors").is_file()


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_pip_installs_the_wheel_with_its_libraries_and_the_quick_start_runs(
    version: str, released: tuple[str, Path], tmp_path: Path
) -> None:
    """From pip's index, gigabytes of it where that has torch with CUDA alone."""
    (wheel,) = released[1].glob("*.whl")
    python = interpreter(version)
    if python is None:
        # A machine need not have every supported version of Python.
        pytest.skip(f"there is no Python {version}")
    place = tmp_path / "environment"
    assert ended(python, "-m", "venv", place, cwd=tmp_path).returncode == 0
    pip = [place / "bin/python", "-m", "pip", "--no-input", "--no-cache-dir"]
    pinned = ["--constraint", ROOT / "constraints.txt"]
    done = ended(*pip, "install", "--quiet", *pinned, wheel, cwd=tmp_path, timeout=3000)
    assert done.returncode == 0, done.stderr
    done = ended(*pip, "check", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    command = place / "bin/ftkit"
    assert "finetune" in ended(command, "--help", cwd=tmp_path).stdout
    done = ended(command, "finetune", "embedded:quickstart.yaml", *FEW, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out/quickstart/final/adapter_model.safetensors").is_file()
    shutil.rmtree(place)


def refused(checkout: Path, *changes: tuple[str, str, str], tag: str = "") -> str:
    """Output of scripts/release in a changed repository, which is restored afterwards."""
    for file, old, new in changes:
        path = checkout / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))
    if tag:
        ended("git", "tag", tag, cwd=checkout)
    try:
        done = ended(sys.executable, "scripts/release", "--skip_tests", cwd=checkout)
    finally:
        ended("git", "checkout", "--", ".", cwd=checkout)
        ended("git", "tag", "--delete", tag, cwd=checkout)
    assert done.returncode == 1 and not (checkout / "dist").exists()
    return done.stderr


@pytest.mark.extensions
def test_a_version_that_is_not_ready_is_refused_with_all_that_is_missing(checkout: Path) -> None:
    version = ftkit.__version__
    said = refused(checkout, ("CHANGELOG.md", "(2026-11-30)", "(unreleased)"))
    assert f"CHANGELOG.md says (unreleased) of {version}" in said
    assert says(said, "not clean (CHANGELOG.md)")
    said = refused(checkout, ("ftkit/version.py", f'"{version}"', '"99.0.0"'))
    assert says(said, "CHANGELOG.md ... ## 99.0.0 (")
    assert f"{version} is not newer than 10.0.0" in refused(checkout, tag="v10.0.0")
    assert f"{version} is not newer than {version}" in refused(checkout, tag=f"v{version}")


@pytest.mark.extensions
def test_releasing_tags_nothing_and_leaves_the_tree_as_it_was(
    released: tuple[str, Path], checkout: Path
) -> None:
    assert ended("git", "tag", cwd=checkout).stdout == ""
    assert ended("git", "status", "--porcelain", "--ignored", cwd=checkout).stdout == ""
