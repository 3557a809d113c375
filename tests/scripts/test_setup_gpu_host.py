"""scripts/setup_gpu_host, on a machine of stand-ins: what it finds, installs and refuses."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import ROOT
from messages import says

TOOLS = ["bash", "env", "dirname", "grep", "id"]

FUNCTIONS = """
state={state}
note() {{ echo "$*" >>"$state/calls"; }}
make() {{
  printf '%s\\n' '#!{bash}' '. {state}/functions' "$2" >"{bin}/$1"
  chmod +x "{bin}/$1"
}}
"""
NVIDIA_SMI = """
[[ $* == --list-gpus ]] && printf 'GPU %s: NVIDIA A100\\n' {gpus} && exit
printf 'NVIDIA A100 80GB PCIe, 81920 MiB, 580.95.05\\n'
"""
PYTHON = "exit 0"
APT_GET = """
note apt-get "$@"
[[ $* == *" --yes "* ]] || exit 0
for package in "${{@:3}}"; do
  case $package in
    docker.io) make docker '{docker}' ;;
    nvidia-container-toolkit) make nvidia-ctk 'note nvidia-ctk "$@"; touch "$state/runtime"' ;;
    python3-venv) make python3 '{python}' ;;
    *) make "$package" '' ;;
  esac
done
"""
DOCKER = """
case $1 in
  info) [[ -e $state/runtime ]] && echo "map[nvidia:{} runc:{}]" ;;
  run) note docker "$@"; . "$state/torch" ;;
  *) note docker "$@" ;;
esac
"""
SETUP_ENV = """
note setup_env "$@"
mkdir -p .venv/bin
cp "$state/torch" .venv/bin/python
"""


class Host:
    """A machine with nothing but a shell on its PATH, and what a test puts there."""

    def __init__(self, root: Path, user: str = "cc") -> None:
        self.state = root / "state"
        self.bin = root / "bin"
        self.clone = root / "clone"
        for directory in (self.state, self.bin, self.clone / "scripts"):
            directory.mkdir(parents=True)
        shutil.copy(ROOT / "scripts/setup_gpu_host", self.clone / "scripts")
        for tool in (*TOOLS, "mkdir", "cp", "touch", "chmod"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        (self.state / "functions").write_text(
            FUNCTIONS.format(state=self.state, bin=self.bin, bash=shutil.which("bash"))
        )
        self.sees(2)
        self.put("scripts/setup_env", SETUP_ENV, into=self.clone)
        self.put("nvidia-smi", NVIDIA_SMI.format(gpus="0 1"))
        self.put("id", f"[[ $1 == -u ]] && echo 1000 || echo {user}")
        self.put("sudo", 'note sudo "$1"; exec "$@"')
        for tool in ("curl", "sed", "systemctl"):
            self.put(tool, f'note {tool} "$@"')
        self.put(
            "usermod",
            'note usermod "$@"; make id "[[ \\$1 == -u ]] && echo 1000 || echo cc docker"',
        )
        self.put("apt-get", APT_GET.format(docker=DOCKER, python=PYTHON))

    def sees(self, gpus: int) -> None:
        """Make torch see this many GPUs."""
        self.put("torch", f"echo {gpus}", into=self.state)

    def put(self, name: str, text: str, into: Path | None = None) -> None:
        """A stand-in, where `note` writes a call down and `make` puts another stand-in there."""
        file = (into or self.bin) / name
        file.unlink(missing_ok=True)
        file.write_text(f"#!{shutil.which('bash')}\n. {self.state}/functions\n{text}\n")
        file.chmod(0o755)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shutil.which("bash"), self.clone / "scripts/setup_gpu_host", *options],  # type: ignore[list-item]
            capture_output=True,
            text=True,
            env={"PATH": str(self.bin), "HOME": str(self.state)},
        )

    def calls(self) -> list[str]:
        file = self.state / "calls"
        calls = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [call for call in calls if not call.startswith("sudo ")]

    def files(self) -> dict[str, int]:
        return {
            str(path): path.lstat().st_mtime_ns
            for directory in (self.bin, self.state, self.clone)
            for path in directory.rglob("*")
        }


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
TOOLS_INSTALLED = [
    "apt-get update",
    "apt-get install --yes git g++ python3-dev python3-venv",
    "setup_env --notebook",
]
CONTAINER_INSTALLED = [
    "apt-get update",
    "apt-get install --yes docker.io",
    "usermod --append --groups docker cc",
    "curl ... gpgkey",
    "curl ... nvidia-container-toolkit.list",
    "sed ... /etc/apt/sources.list.d/nvidia-container-toolkit.list",
    "apt-get update",
    "apt-get install --yes nvidia-container-toolkit",
    "nvidia-ctk runtime configure --runtime=docker",
    "systemctl restart docker",
]
CONTAINER_CHECKED = [
    "docker build --tag ftkit .",
    f"docker run --rm --gpus all ftkit .venv/bin/python -c {COUNT_GPUS}",
]


def shortened(calls: list[str]) -> list[str]:
    """The part of long calls that differs."""
    return [
        f"{call.split()[0]} ... {call.split('/')[-1] if 'curl' in call else call.split()[-1]}"
        if call.startswith(("curl", "sed"))
        else call
        for call in calls
    ]


def test_a_bare_machine_gets_the_tools_and_the_environment(host: Host) -> None:
    run = host.run()
    assert run.returncode == 0, run.stdout + run.stderr
    assert host.calls() == TOOLS_INSTALLED
    assert "GPU: NVIDIA A100 80GB PCIe, 81920 MiB, 580.95.05" in run.stdout
    assert "torch sees 2 of 2 GPUs" in run.stdout
    assert run.stdout.endswith("next: scripts/serve_notebook\n")


def test_run_again_it_installs_nothing(host: Host) -> None:
    host.run()
    host.calls()
    run = host.run()
    assert run.returncode == 0, run.stdout + run.stderr
    assert host.calls() == ["setup_env --notebook"]


def test_with_container_it_gets_docker_and_the_toolkit_of_nvidia_once(host: Host) -> None:
    run = host.run("--container")
    assert run.returncode == 0, run.stdout + run.stderr
    assert shortened(host.calls()) == CONTAINER_INSTALLED + CONTAINER_CHECKED
    assert "log in again" in run.stdout
    assert run.stdout.endswith("next: scripts/serve_notebook --container\n")

    assert host.run("--container").returncode == 0
    assert host.calls() == CONTAINER_CHECKED


@pytest.mark.parametrize("options", [[], ["--container"]])
def test_a_dry_run_says_all_that_a_run_does_and_changes_nothing(
    host: Host, options: list[Any]
) -> None:
    files = host.files()
    said = host.run(*options, "--dry_run")
    assert said.returncode == 0, said.stderr
    assert host.files() == files
    done = host.run(*options)
    assert done.returncode == 0
    *announced, checked = commands(said.stdout)
    assert announced == commands(done.stdout)
    assert checked.endswith("python -c '" + COUNT_GPUS + "'")
    assert len(announced) >= len(host.calls()) - 1


def commands(stdout: str) -> list[str]:
    return [line.strip() for line in stdout.splitlines() if line.startswith("  ")]


def test_without_a_driver_it_stops_and_a_dry_run_says_so_first(host: Host) -> None:
    host.put("nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    run = host.run()
    assert run.returncode == 1
    assert says(run.stderr, "NVIDIA driver ... NVIDIA-SMI")
    assert "ubuntu-drivers install" in run.stderr
    assert host.calls() == []
    dry = host.run("--dry_run")
    assert says(dry.stderr, "NVIDIA driver")


@pytest.mark.parametrize("options", [[], ["--container"]])
def test_a_gpu_that_torch_does_not_see_is_an_error(host: Host, options: list[Any]) -> None:
    host.sees(1)
    run = host.run(*options)
    assert run.returncode == 1
    assert "torch sees 1 of 2 GPUs." in run.stderr


def test_packages_that_could_not_be_installed_are_named(host: Host) -> None:
    host.put("apt-get", "exit 0")
    run = host.run()
    assert run.returncode == 1
    assert says(run.stderr, "git, g++ ... missing")
    (host.bin / "apt-get").unlink()
    run = host.run()
    assert run.returncode == 1
    assert says(run.stderr, "no apt-get")
    assert says(run.stderr, "git g++ python3-dev python3-venv")


def test_the_image_is_built_by_the_script_that_everybody_uses() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "RUN scripts/setup_env --notebook --cuda" in text
    assert "pip install" not in text
    copies = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    copied = {name for names in copies for name in names}
    for name in copied:
        assert (ROOT / name).exists(), name
    needed = {"constraints.txt", "ftkit/__init__.py", "pyproject.toml"}
    needed |= {"scripts/setup_env", "scripts/uv_pip.py"}
    assert needed <= copied


def test_the_dockerfile_is_clean() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    assert linter.exists(), "scripts/setup_env --dev installs it"
    run = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
