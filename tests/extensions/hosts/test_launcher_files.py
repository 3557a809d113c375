"""Files for launchers in docs/launchers: each starts ftkit as its launcher does.

SkyPilot and the client of Kubernetes read theirs where they are installed; see CONTRIBUTING.md.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import ROOT
from hosts import Host, network
from runs import TIMEOUT_S
from torch.distributed.run import parse_args

from ftkit.cli.app import run
from ftkit.extensions.hosts.slurm import NEAR_THE_LIMIT
from ftkit.runs.report.report import read_report

LAUNCHERS = ROOT / "docs/launchers"
SLURM = (LAUNCHERS / "slurm.sbatch").read_text()
SKYPILOT = yaml.safe_load((LAUNCHERS / "skypilot.yaml").read_text())
SERVICE, JOB = yaml.safe_load_all((LAUNCHERS / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
NODE_0, NODE_1 = "10.213.7.1", "10.213.7.2"
"""Where the hosts of tests are."""
STAND_IN = """#!/bin/bash
printf '%s\\0' "$@" >called
"""


def of_slurm(node: int, recipe: Path, out_dir: Path) -> tuple[str, list[str], dict[str, str]]:
    """Script, arguments and variables on a node that has one process."""
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NAME": "ftkit",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
        "SLURM_NODELIST": "host[1-2]",
        "MASTER_ADDR": NODE_0,  # else by the name of the first node
    }
    return SLURM, [str(recipe), str(out_dir)], variables


def of_skypilot(node: int, recipe: Path, out_dir: Path) -> tuple[str, list[str], dict[str, str]]:
    """Script, words and variables of SkyPilot's file; some variables are SkyPilot's own."""
    variables = {
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NODE_IPS": f"{NODE_0}\n{NODE_1}",
        "SKYPILOT_NUM_NODES": str(SKYPILOT["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    }
    own = SKYPILOT["envs"] | {"RECIPE": str(recipe), "OUT_DIR": str(out_dir)}
    return SKYPILOT["run"], [], variables | own


def of_kubernetes(node: int, recipe: Path, out_dir: Path) -> tuple[str, list[str], dict[str, str]]:
    """Script, words and variables of Kubernetes' file, with the index that the job gives a pod."""
    assert CONTAINER["command"] == ["bash", "-c"]
    (script,) = CONTAINER["args"]
    own = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
    own |= {"RECIPE": str(recipe), "OUT_DIR": str(out_dir), "GPUS": "1"}
    return script, [], own | {"JOB_COMPLETION_INDEX": str(node)}


def make_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


CASES = pytest.mark.parametrize("case", [of_slurm, of_skypilot, of_kubernetes])


@CASES
def test_a_launcher_starts_a_command_that_is_understood(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs that it calls note their words; torchrun's own parser and ftkit's read them."""
    bin_dir = tmp_path / ".venv/bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    for program in ("srun", "torchrun"):
        make_program(bin_dir / program, STAND_IN)
    recipe = ROOT / "recipes/tiny-llama-lora.yaml"
    script, words, variables = case(1, recipe, tmp_path / "out")
    command = ["bash", "-c", script, "bash", *words]
    subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | variables)
    called = (tmp_path / "called").read_text().split("\0")[:-1]
    if case is of_slurm:
        assert called.pop(0) == "--kill-on-bad-exit=0"
        assert called.pop(0) == "ftkit"
    else:
        options = parse_args(called)
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "1", 1)
        master = NODE_0 if case is of_skypilot else "ftkit-0.ftkit"
        assert (options.master_addr, options.master_port) == (master, 29500)
        assert options.module and options.training_script == "ftkit"
        called = options.training_script_args
    assert called[1:] == [
        *(str(recipe), "--out_dir", str(tmp_path / "out")),
        *("--num_nodes", "auto", "--resume", "auto"),
    ]
    monkeypatch.chdir(tmp_path)
    assert run([*called, "--print_config"]) == 0


def test_slurm_gives_a_run_time_to_save_and_starts_it_again() -> None:
    options = re.findall(r"^#SBATCH (\S+)$", SLURM, re.MULTILINE)
    name = NEAR_THE_LIMIT.name.removeprefix("SIG")
    assert f"--signal={name}@180" in options  # to the processes of srun, not to the script
    assert {"--requeue", "--open-mode=append", "--nodes=2"} <= set(options)
    assert len(options) == SLURM.count("#SBATCH")


@pytest.mark.parametrize(
    ("code", "newest", "again"),
    [
        (0, "200", False),
        (1, "200", True),
        (137, "200", True),  # of srun, which gave up a node
        (1, "100", False),  # it would fail there again
        (1, "", False),
        (2, "200", False),
        (3, "200", False),
        (138, "200", False),  # the run itself has seen to it
    ],
)
def test_a_run_that_was_lost_after_a_save_is_requeued(
    code: int, newest: str, again: bool, tmp_path: Path
) -> None:
    bin_dir = tmp_path / ".venv/bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    table = "step  epoch  state\n  50   1.0  damaged\n {step}   2.0  complete\n"
    (tmp_path / "table").write_text(table.format(step=100) if newest else "")
    (tmp_path / "later").write_text(table.format(step=newest) if newest else "")
    make_program(bin_dir / "ftkit", "#!/bin/bash\ncat table\n")
    make_program(bin_dir / "srun", f"#!/bin/bash\nmv later table\nexit {code}\n")
    make_program(bin_dir / "scontrol", '#!/bin/bash\necho "$@" >requeued\n')
    command = ["bash", "-c", SLURM, "bash", "recipe.yaml", "out"]
    environment = os.environ | {"SLURM_JOB_ID": "7"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == "requeue 7\n" * again


def test_the_parts_of_the_file_for_kubernetes_belong_together() -> None:
    job = JOB["metadata"]["name"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"job-name": job}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert f"--master_addr {job}-0.{POD['subdomain']} " in CONTAINER["args"][0]
    variables = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
    assert JOB["spec"]["completionMode"] == "Indexed"
    assert int(variables["NODES"]) == JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    assert variables["GPUS"] == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    wait_s = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert wait_s < POD["terminationGracePeriodSeconds"]
    assert {volume["name"] for volume in POD["volumes"]} == {
        mount["name"] for mount in CONTAINER["volumeMounts"]
    }


@pytest.mark.parametrize(("part", "model"), [(SERVICE, "V1Service"), (JOB, "V1Job")])
def test_the_client_of_kubernetes_knows_every_field(part: dict[str, Any], model: str) -> None:
    """It refuses values of wrong types, and leaves out fields that it does not know."""
    client = pytest.importorskip("kubernetes.client")
    read = getattr(client, model).from_dict(part)
    assert client.ApiClient().sanitize_for_serialization(read) == part


def test_skypilot_reads_its_file() -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(LAUNCHERS / "skypilot.yaml"))
    (resources,) = task.resources
    assert (task.num_nodes, task.run) == (2, SKYPILOT["run"])
    assert (resources.accelerators, resources.use_spot) == ({"H100": 8}, True)
    assert task.envs == SKYPILOT["envs"]


@pytest.mark.slow
@pytest.mark.matrix
@CASES
def test_a_launcher_on_two_hosts_starts_one_run(
    case: Any, tiny_base: Path, tiny_data: Path, tmp_path: Path
) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    make_program(srun, '#!/bin/bash\nexec "${@:2}"\n')  # on each node its own, after the option
    recipe = tmp_path / "recipe.yaml"
    small = {
        "checkpoint_dir": str(tiny_base),
        "accelerator": "cpu",
        "precision": "32-true",
        "data": {"class_path": "JSON", "init_args": {"json_path": str(tiny_data)}},
        "train": {"max_steps": 4, "global_batch_size": 4, "lr_warmup_steps": 1},
        "eval": {"max_iters": 1, "max_new_tokens": 3},
    }
    recipe.write_text(yaml.safe_dump(small))
    out_dir = tmp_path / "out"

    def start(host: Host, node: int) -> Any:
        host.knows("ftkit-0.ftkit", NODE_0)
        script, words, variables = case(node, recipe, out_dir)
        variables["PATH"] = f"{srun.parent}:{os.environ['PATH']}"
        return host.shell(script, tmp_path, words, **variables)

    with network(2) as (_, hosts):
        assert [host.address for host in hosts] == [NODE_0, NODE_1]
        started = [start(host, node) for node, host in enumerate(hosts)]
        for process in started:
            process.wait(timeout=2 * TIMEOUT_S)
        ended = [(process.returncode, *process.communicate()) for process in started]
        assert [code for code, _, _ in ended] == [0, 0], ended
        for host in hosts:
            host.ends()
    report = read_report(out_dir)
    assert report.outcome == "completed"
    assert report.resolved and report.resolved.world_size == 2
