"""scripts/serve_notebook: a real Jupyter server, used by another process."""

import base64
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import websocket
from command import ROOT
from messages import says
from notebook_cells import SINGLE_GPU, cells, read_notebook
from remote_kernel import COLAB, Server, run_cells
from runs import wait_for

from ftkit.runs.report.report import read_report

FOREIGN = "https://example.org"
OPEN_TO_ALL = """
c.ServerApp.ip = "0.0.0.0"
c.ServerApp.token = c.IdentityProvider.token = c.PasswordIdentityProvider.token = ""
c.ServerApp.allow_origin = "*"
c.ServerApp.allow_remote_access = True
c.ServerApp.disable_check_xsrf = True
c.ServerApp.root_dir = "/"
"""


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


class Clone:
    """The scripts in a directory of their own, with this Python as their environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log"
        (root / "scripts").mkdir(parents=True)
        for name in ("serve_notebook", "colab_links", "notebook_server.py"):
            shutil.copy(ROOT / "scripts" / name, root / "scripts" / name)
        write_script(root / "scripts/setup_env", 'echo "setup_env $*" >>calls')
        write_script(root / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
        user = root / "home/.jupyter/jupyter_server_config.py"
        user.parent.mkdir(parents=True)
        user.write_text(OPEN_TO_ALL)

    def start(self, *options: str, **environment: str) -> "subprocess.Popen[str]":
        kept = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
        with self.log.open("w") as log:
            return subprocess.Popen(
                [self.root / "scripts/serve_notebook", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=kept | {"HOME": str(self.root / "home"), "PYTHONPATH": str(ROOT)} | environment,
                process_group=0,
            )

    def end(self, *options: str, **environment: str) -> tuple[int, str]:
        """Start it where it cannot go on: exit code, output."""
        return self.start(*options, **environment).wait(timeout=120), self.log.read_text()


def of_clone(root: Path, origin: str | None, *command: str) -> "subprocess.CompletedProcess[str]":
    """Output of a script in a clone with the notebooks, at the branch work."""
    if not (root / "notebooks").exists():
        shutil.copytree(ROOT / "notebooks", root / "notebooks")
        subprocess.run(["git", "init", "--quiet", "--initial-branch", "work", root], check=True)
    subprocess.run(["git", "-C", root, "remote", "remove", "origin"], capture_output=True)
    if origin is not None:
        subprocess.run(["git", "-C", root, "remote", "add", "origin", origin], check=True)
    script = [sys.executable, root / "scripts" / command[0], *command[1:]]
    return subprocess.run(script, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def process_and_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple["subprocess.Popen[str]", Server, Clone]]:
    clone = Clone(tmp_path_factory.mktemp("served") / "clone")
    of_clone(clone.root, "https://github.com/someone/ftkit.git", "colab_links")
    port = free_port()
    process = clone.start("--port", str(port))

    def url() -> re.Match[str] | None:
        assert process.poll() is None, clone.log.read_text()
        return re.search(
            r"^  (http://127\.0\.0\.1:\d+)/lab\?token=(\w+)$", clone.log.read_text(), re.M
        )

    try:
        wait_for(lambda: url() is not None and "5_chat.ipynb" in clone.log.read_text())
        found = url()
        assert found[1] == f"http://127.0.0.1:{port}"  # type: ignore[index]
        yield process, Server(url=found[1], token=found[2]), clone  # type: ignore[index]
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture
def server(process_and_server: tuple["subprocess.Popen[str]", Server, Clone]) -> Server:
    return process_and_server[1]


def test_it_sets_up_jupyter_and_prints_how_to_connect(
    process_and_server: tuple["subprocess.Popen[str]", Server, Clone],
) -> None:
    _, server, clone = process_and_server
    assert (clone.root / "calls").read_text() == "setup_env --notebook\n"
    port = server.url.rpartition(":")[2]
    assert f"  ssh -N -L {port}:127.0.0.1:{port} " in clone.log.read_text()
    assert len(server.token) >= 32
    links = re.findall(r"^https://colab\S+ftkit/blob/work/(\S+)$", clone.log.read_text(), re.M)
    assert len(links) == 8 and all((clone.root / link).is_file() for link in links)


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        ("https://github.com/someone/a-fork.git", "someone/a-fork"),
        ("git@github.com:someone/a.fork.git", "someone/a.fork"),
        ("https://github.com/someone/ftkit", "someone/ftkit"),
        ("https://git.example.org/someone/ftkit.git", None),
        (None, None),
    ],
)
def test_of_a_clone_from_github_it_knows_where_colab_opens_its_notebooks(
    clone: Clone, origin: str | None, place: str | None
) -> None:
    links = of_clone(clone.root, origin, "colab_links").stdout.split()
    if place is None:
        assert links == []
        return
    there = f"https://colab.research.google.com/github/{place}/blob/work/"
    assert all(link.startswith(there) for link in links)
    named = [clone.root / link.removeprefix(there) for link in links]
    assert named == sorted((clone.root / "notebooks").glob("*.ipynb")) and len(named) == 8


def test_links_to_colab_are_the_only_change_to_notebooks(
    clone: Clone,
) -> None:
    for owner in ("someone", "another"):  # a fork replaces the links of where it comes from
        origin = f"git@github.com:{owner}/ftkit.git"
        links = of_clone(clone.root, origin, "colab_links", "--write").stdout.split()
        for notebook, link in zip(
            sorted((clone.root / "notebooks").glob("*.ipynb")), links, strict=True
        ):
            before = read_notebook(ROOT / "notebooks" / notebook.name)
            now = read_notebook(notebook)
            now_first, before_first = now.cells[0].source, before.cells[0].source
            badge = re.findall(r"^\[!\[Open in Colab\]\(.*?\)\]\((.*)\)$", now_first, re.MULTILINE)
            assert badge == [link] and owner in link
            title, _, rest = now_first.partition("\n\n[![Open")
            assert title == before_first.split("\n")[0]
            assert rest.partition("\n\n")[2] == before_first.partition("\n\n")[2]
            now.cells[0].source = before_first
            assert now == before


def test_without_github_no_link_can_be_put_into_notebooks(clone: Clone) -> None:
    refused = of_clone(clone.root, None, "colab_links", "--write")
    assert refused.returncode == 1 and says(refused.stderr, "git remote set-url origin")


def test_it_runs_code_for_another_process_in_the_environment_of_the_project(
    process_and_server: tuple["subprocess.Popen[str]", Server, Clone],
) -> None:
    _, server, clone = process_and_server
    outputs = run_cells(
        server,
        [
            "x = 6 * 7",
            "x",
            "import sys, shutil, os; print(sys.executable, shutil.which('python'), os.getcwd())",
            "1 / 0",
        ],
    )
    assert outputs[0] == []
    assert outputs[1][0]["data"]["text/plain"] == "42"
    executable = clone.root / ".venv/bin/python"
    assert outputs[2][0]["text"].split() == [sys.executable, str(executable), str(clone.root)]
    assert outputs[3][0]["ename"] == "ZeroDivisionError"


@pytest.mark.matrix
def test_the_first_notebook_runs_remotely_and_its_outputs_come_back(
    process_and_server: tuple["subprocess.Popen[str]", Server, Clone],
) -> None:
    _, server, clone = process_and_server
    program = cells(SINGLE_GPU)
    outputs = dict(zip(program, run_cells(server, program), strict=True))
    shown = [output for cell in outputs.values() for output in cell]
    assert not [output for output in shown if output["output_type"] == "error"]
    for cell in ("lab.plans", "comparison = lab.compare()\ncomparison"):
        assert "14-13b-lora" in outputs[cell][-1]["data"]["text/html"]
    picture = outputs["comparison.plot()"][-1]["data"]["image/png"]
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    runs = sorted((clone.root / "out/single_gpu").iterdir())
    assert len(runs) == 14
    assert {read_report(run / "report.json").outcome for run in runs} == {"completed"}


def test_it_lets_the_page_of_colab_read_its_answers(server: Server) -> None:
    headers = {"Origin": COLAB}
    answer = server.request("GET", "/api/kernelspecs", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == COLAB
    assert answer.headers["Access-Control-Allow-Credentials"] == "true"
    preflight = headers | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    before = httpx.options(f"{server.url}/api/kernels", headers=preflight, trust_env=False)
    assert before.status_code == 200
    assert before.headers["Access-Control-Allow-Origin"] == COLAB


@pytest.mark.parametrize("token", ["wrong", "0" * 48])
def test_without_its_token_nothing_is_shown_and_nothing_runs(server: Server, token: str) -> None:
    assert httpx.get(f"{server.url}/api/contents", trust_env=False).status_code == 403
    assert server.request("GET", "/api/contents", token=token).status_code == 403
    assert server.request("POST", "/api/kernels", token=token, json={}).status_code == 403
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        server.connect(str(uuid.uuid4()), COLAB, token=token)
    assert refused.value.status_code == 403


def test_a_page_of_another_origin_is_refused_even_with_the_token(server: Server) -> None:
    headers = {"Origin": FOREIGN}
    answer = server.request("GET", "/api/contents", headers=headers)
    assert answer.status_code == 404
    assert "Access-Control-Allow-Origin" not in answer.headers
    posted = server.request("POST", "/api/kernels", headers=headers, json={"name": "python3"})
    assert posted.status_code == 404
    assert server.request("GET", "/api/kernels").json() == []
    kernel = server.request("POST", "/api/kernels", json={"name": "python3"}).json()["id"]
    try:
        with pytest.raises(websocket.WebSocketBadStatusException) as refused:
            server.connect(kernel, FOREIGN)
        assert refused.value.status_code == 403
    finally:
        server.request("DELETE", f"/api/kernels/{kernel}")


def test_it_answers_to_no_other_name(server: Server) -> None:
    answer = server.request("GET", "/api/contents", headers={"Host": "notebooks.example.org"})
    assert answer.status_code == 403


def test_it_listens_on_the_loopback_address_alone(
    process_and_server: tuple["subprocess.Popen[str]", Server, Clone],
) -> None:
    process, _, _ = process_and_server
    listening = {
        connection.laddr.ip
        for connection in psutil.Process(process.pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_another_address_is_refused_before_anything_starts(clone: Clone, address: str) -> None:
    code, said = clone.end("--ip", address)
    assert code == 2
    assert f"--ip is {address}, but" in said
    assert not (clone.root / "calls").exists()


@pytest.mark.parametrize("port", ["0", "65536", "8888x", ""])
def test_a_bad_port_is_refused(clone: Clone, port: str) -> None:
    code, said = clone.end("--port", port)
    assert code == 2
    assert f"--port is {port}, but" in said


def test_a_port_in_use_is_refused(
    process_and_server: tuple["subprocess.Popen[str]", Server, Clone], clone: Clone
) -> None:
    port = process_and_server[1].url.rpartition(":")[2]
    code, said = clone.end("--port", port)
    assert code == 1
    assert f"port {port} is not available" in said
    assert "token=" not in said


def test_a_gpu_that_torch_does_not_see_is_named(clone: Clone) -> None:
    write_script(clone.root / "bin/nvidia-smi", "echo NVIDIA A100")
    (clone.root / "stand-in/torch").mkdir(parents=True)
    (clone.root / "stand-in/torch/__init__.py").write_text(
        "from types import SimpleNamespace\n"
        "__version__ = '2.13.0'\n"
        "cuda = SimpleNamespace(device_count=lambda: 0)\n"
    )
    path = f"{clone.root / 'bin'}:{os.environ['PATH']}"
    code, said = clone.end(PATH=path, PYTHONPATH=str(clone.root / "stand-in"))
    assert code == 1
    assert says(said, "torch 2.13.0 ... NVIDIA A100")


def test_in_a_container_it_starts_the_same_script_on_the_network_of_the_host(clone: Clone) -> None:
    write_script(clone.root / "bin/nvidia-smi", "echo NVIDIA A100")
    write_script(clone.root / "bin/docker", 'echo "docker $*" >>calls')
    path = f"{clone.root / 'bin'}:{os.environ['PATH']}"
    assert clone.end("--container", "--port", "9999", PATH=path)[0] == 0
    built, run = (clone.root / "calls").read_text().splitlines()
    assert built == "docker build --tag ftkit ."
    assert " --network host " in run
    assert " --gpus all " in run
    assert "--publish" not in run
    assert f" --volume {clone.root}/out:/ftkit/out " in run
    assert run.endswith(" ftkit scripts/serve_notebook --port 9999 --ip 127.0.0.1")
    assert (clone.root / "out").is_dir()
