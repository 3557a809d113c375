"""Where the time of the tests goes: a report at their end, and a file of it.

`scripts/test` prints the report, so that growth shows in the log of any run. It fails on no
duration: machines differ, and one that is busy is slower, which its speed at the top tells.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from descendants import children

LONGEST = 10
"""Files, tests and fixtures shown."""
SPEED_S = 0.2
"""How long the speed of the machine is measured."""


class Cost(NamedTuple):
    """Seconds on the clock, and of processors: in processes that were waited for too."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


def add(costs: Iterable[Cost]) -> Cost:
    """Sum of costs."""
    pairs = list(costs)
    return Cost(sum(pair.wall_s for pair in pairs), sum(pair.cpu_s for pair in pairs))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption(
        "--report-durations", action="store_true", help="show at the end where the time went"
    )
    group.addoption(
        "--durations-file", type=Path, metavar="FILE", help="write the time of each test as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("report_durations") or config.getoption("durations_file"):
        config.pluginmanager.register(Recorder(config), "recorder")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Report(config), "report")


def loops_per_s() -> float:
    """Speed of this machine at this moment: how often a core runs a fixed loop of Python."""
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < SPEED_S:
        total = 0
        for number in range(20_000):
            total += number * number % 7
        count += 1
    return count / passed


def cpu_s() -> float:
    """Seconds of processors that this process has used, with its children.

    Those that still run count as well: servers that start the processes of many tests.
    """
    seconds = sum(os.times()[:4])
    for child in children(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(psutil.Process(child).cpu_times()[:4])
    return seconds


class Recorder:
    """Measures in each process that runs tests; reports of tests carry it to where all meet."""

    def __init__(self, config: pytest.Config) -> None:
        self._output = getattr(config, "workeroutput", {})
        self._cpu_s = cpu_s()
        self._fixtures_s: Counter[str] = Counter()
        self._inner_s = 0.0
        self.process = self._output.setdefault("process", {"files_s": {}})
        self.process["start_s"] = time.time() - psutil.Process().create_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self.process["collection_s"] = time.perf_counter() - start
            self._cpu_s = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        start = time.perf_counter()
        report = yield
        if isinstance(collector, pytest.Module):
            self.process["files_s"][collector.nodeid] = time.perf_counter() - start
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        start, outer_s, self._inner_s = time.perf_counter(), self._inner_s, 0.0
        try:
            return (yield)
        finally:
            passed = time.perf_counter() - start
            # A fixture that it asks for while it runs has its own line.
            name = f"{fixturedef.argname} ({fixturedef.baseid or '.'})"
            self._fixtures_s[name] += passed - self._inner_s
            self._inner_s = outer_s + passed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._cpu_s = self._cpu_s, cpu_s()
        # Attributes of a report travel with it between processes.
        vars(report).update(cpu_s=self._cpu_s - before, fixtures_s=dict(self._fixtures_s))
        self._fixtures_s.clear()
        return report

    @pytest.hookimpl(tryfirst=True)  # before it is sent
    def pytest_sessionfinish(self) -> None:
        self.process["cpu_s"] = cpu_s()


class Report:
    """Adds up what all processes have measured."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._start = time.perf_counter()
        self._speeds = [loops_per_s()]
        self.phases: dict[str, dict[str, Cost]] = defaultdict(dict)
        self.fixtures_s: Counter[str] = Counter()
        self.fixtures_used: Counter[str] = Counter()
        self.processes: dict[str, dict[str, Any]] = {}

    def pytest_report_header(self) -> str:
        return f"this machine: {self._speeds[0]:.0f} loops/s, {os.cpu_count()} cores"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = Cost(report.duration, getattr(report, "cpu_s", 0.0))
        self.phases[report.nodeid][report.when] = cost
        for name, seconds in getattr(report, "fixtures_s", {}).items():
            self.fixtures_s[name] += seconds
            self.fixtures_used[name] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a process of xdist has measured; one that crashed has sent nothing."""
        output = getattr(node, "workeroutput", {})
        self.processes[node.gateway.id] = output.get("process", {})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._speeds.append(loops_per_s())
        recorder: Recorder = self._config.pluginmanager.get_plugin("recorder")
        self.processes["main"] = recorder.process
        if self._config.getoption("report_durations"):
            terminalreporter.section("durations")
            for line in self.lines():
                terminalreporter.write_line(line)
        if file := self._config.getoption("durations_file"):
            file.write_text(json.dumps(self.content(), indent=1) + "\n")

    def tests(self) -> dict[str, Cost]:
        """Cost of each test without its set-up, which may serve others."""
        return {
            name: add(cost for when, cost in phases.items() if when != "setup")
            for name, phases in self.phases.items()
        }

    def content(self) -> dict[str, Any]:
        """What the file has."""
        return {
            "loops_per_s": self._speeds,
            "wall_s": time.perf_counter() - self._start,
            "processes": self.processes,
            "fixtures_s": dict(self.fixtures_s.most_common()),
            "tests": {
                name: {when: cost._asdict() for when, cost in phases.items()}
                for name, phases in self.phases.items()
            },
        }

    def lines(self) -> list[str]:
        """What is shown."""
        tests = {name: add(phases.values()) for name, phases in self.phases.items()}
        files = _grouped(tests, lambda name: name.partition("::")[0])
        counts = Counter(map(_folder, tests))
        folders = _grouped(tests, lambda name: f"{_folder(name)} ({counts[_folder(name)]} tests)")
        set_up_s = {
            f"{name}, {_times(self.fixtures_used[name])}": Cost(seconds)
            for name, seconds in self.fixtures_s.items()
        }
        before, after = self._speeds
        passed_s, all_tests = time.perf_counter() - self._start, add(tests.values())
        speed = f"{before:.0f} loops/s before the tests, {after:.0f} after them"
        tests_took = f"{all_tests.wall_s:.0f} s, {all_tests.cpu_s:.0f} s of processors"
        return [
            f"this machine: {speed}; {os.cpu_count()} cores",
            f"{passed_s:.0f} s passed; the tests took {tests_took}",
            *self._processes(),
            *table("by folder", folders, len(folders)),
            *table("set-up by fixture", set_up_s),
            *table("slowest files", files),
            *table("slowest tests, without set-up", self.tests()),
        ]

    def _processes(self) -> list[str]:
        lines = ["", "   start  collect      CPU  s, by process"]
        for name, numbers in self.processes.items():
            keys = ("start_s", "collection_s", "cpu_s")
            columns = "".join(f"{numbers.get(key, 0.0):8.1f} " for key in keys)
            lines.append(f"{columns} {name}")
        files_s: Counter[str] = Counter()
        for numbers in self.processes.values():
            files_s.update(numbers.get("files_s", {}))
        costs = {file: Cost(seconds) for file, seconds in files_s.items()}
        return [*lines, *table("slowest to import, with what they are the first to import", costs)]


def _folder(test: str) -> str:
    """First folder below that of all tests."""
    return "/".join(Path(test.partition("::")[0]).parts[:2])


def _grouped(costs: Mapping[str, Cost], group: Callable[[str], str]) -> dict[str, Cost]:
    """Sums of the costs whose names are of one group."""
    members: dict[str, list[Cost]] = defaultdict(list)
    for name, cost in costs.items():
        members[group(name)].append(cost)
    return {name: add(of_group) for name, of_group in members.items()}


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def table(title: str, costs: Mapping[str, Cost], count: int = LONGEST) -> list[str]:
    """Lines of the largest costs; without a column of processors where none are known."""
    shown = sorted(costs.items(), key=lambda pair: pair[1].wall_s, reverse=True)[:count]
    with_cpu = any(cost.cpu_s for _, cost in shown)
    lines = ["", f"    wall {'     CPU ' if with_cpu else ''} s, {title}"]
    for name, cost in shown:
        cpu = f"{cost.cpu_s:8.1f} " if with_cpu else ""
        lines.append(f"{cost.wall_s:8.1f} {cpu} {name}")
    return lines
