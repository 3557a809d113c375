"""Imports of the package are declared in pyproject.toml; tools have one pinned version."""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires

import yaml
from command import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTIONS = packages_distributions()
"""Distributions by the modules that they install."""
NEEDS_EXTRA = {
    "ftkit/extensions/harness/harness.py": "tasks",
    "ftkit/extensions/publish/torchao_model.py": "torchao",
    "ftkit/extensions/torchao/layers.py": "torchao",
}
"""Modules that are only imported where this extra is installed."""
OPTIONAL = {"litgpt"}
"""Installed beside the package, since its bounds exclude today's libraries; only imported where it
is there, see tests/extensions/litgpt/test_without_litgpt.py."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normalized(re.split(r"[^\w.-]", one)[0]) for one in requirements}


def third_party(nodes: Iterator[ast.AST]) -> set[str]:
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    return modules - sys.stdlib_module_names - {"ftkit"}


def distributions(module: str) -> set[str]:
    """Names of the distributions that install a module; that of the module if none is installed."""
    return {normalized(name) for name in DISTRIBUTIONS.get(module, [module])}


def test_what_a_module_imports_when_it_is_imported_is_a_dependency() -> None:
    required = names(PROJECT["dependencies"]) | OPTIONAL
    undeclared = set()
    for file in sorted((ROOT / "ftkit").rglob("*.py")):
        path = str(file.relative_to(ROOT))
        declared = required | names(EXTRAS[NEEDS_EXTRA[path]] if path in NEEDS_EXTRA else [])
        for module in third_party(iter(ast.parse(file.read_text()).body)):
            if not distributions(module) & declared:
                undeclared.add((path, module))
    assert undeclared == set()


def test_pre_commit_has_the_version_of_ruff_that_is_tested() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in repos}
    pins = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert revisions == {"ruff-pre-commit": f"v{pins['ruff']}"}
    hooks = [hook["id"] for repo in repos for hook in repo["hooks"]]
    assert hooks == ["ruff-check", "ruff-format"]


def test_the_workflow_runs_the_scripts_that_everybody_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert commands == ["scripts/check --static", ".ci/run"]
    for command in commands:
        assert (ROOT / command.split()[0]).stat().st_mode & 0o100, command
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in jobs)


def test_the_imports_of_litgpt_without_its_dependencies_are_ours() -> None:
    """The set-up installs it without its libraries."""
    without_extras = [one for one in requires("litgpt") or [] if "extra ==" not in one]
    assert names(without_extras) <= names(PROJECT["dependencies"])
    modules = ("data", "lora", "model", "prompts", "scripts.convert_hf_checkpoint", "tokenizer")
    for module in modules:
        importlib.import_module(f"litgpt.{module}")
