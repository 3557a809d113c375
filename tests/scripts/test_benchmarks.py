"""The scripts that measure and draw; the figures they left in scripts/benchmarks."""

import json
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import litgpt.data  # noqa: F401  # sets variables of the environment, which tests must not
import pytest
from command import ROOT

from ftkit.recipe.recipe import Quantization

SCRIPTS = ROOT / "scripts"
FIGURES = SCRIPTS / "benchmarks"


def script(name: str) -> ModuleType:
    spec = spec_from_loader(name, SourceFileLoader(name, str(SCRIPTS / name)))
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def test_the_chart_is_drawn_from_its_rows_and_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart = script("plot_switching_hardware")
    labels = [place.label for place in chart.SESSIONS]
    rows = [(step, chart.UNINTERRUPTED, 1 / step) for step in range(1, 9)]
    rows += [(step, labels[(step - 1) // 2], 1 / step * (1 + 1e-7)) for step in range(1, 9)]
    chart.write_rows(rows, tmp_path / "rows.csv")
    assert chart.read_rows(tmp_path / "rows.csv") == rows
    pictures = [tmp_path / "1.svg", tmp_path / "2.svg"]
    for picture in pictures:
        chart.draw(rows, picture)
    assert pictures[0].read_text() == pictures[1].read_text()
    assert "<svg" in pictures[0].read_text()


def test_the_chart_that_is_shown_keeps_what_is_promised() -> None:
    chart = script("plot_switching_hardware")
    rows = chart.read_rows(chart.OUT.with_suffix(".csv"))
    alone = {step: loss for step, where, loss in rows if where == chart.UNINTERRUPTED}
    moved = {step: loss for step, where, loss in rows if where != chart.UNINTERRUPTED}
    assert moved.keys() == alone.keys()
    assert {where for _, where, _ in rows} == {
        chart.UNINTERRUPTED,
        *(place.label for place in chart.SESSIONS),
    }
    assert all(abs(moved[step] - loss) <= chart.TOLERANCE * loss for step, loss in alone.items())
    assert chart.OUT.with_suffix(".svg").stat().st_size < 200_000


def test_the_chart_of_lost_hosts_is_that_of_its_figures_and_keeps_what_is_promised(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    chart = script("plot_lost_host")
    found = json.loads(chart.DATA.read_text())
    one, other = found["one_device"], found["losing_hosts"]
    assert len(one) == len(other) == chart.STEPS
    assert other == pytest.approx(one, rel=chart.TOLERANCE)
    hosts = [count for _, _, count in chart.sessions(found["restarts"])]
    assert hosts == [2, 1, 2, 1] and len(found["lost_at"]) == 2
    chart.draw(found, tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").stat().st_size == pytest.approx(
        chart.DRAWING.stat().st_size, rel=0.01
    )


def test_steps_are_beside_writing_while_a_save_lasts() -> None:
    benchmark = script("benchmark_checkpoints")
    steps = dict.fromkeys(range(1, 13), 1.0)
    stalls, writes = {1: 0.5, 2: 0.5}, {1: 3.0, 2: 0.9}
    assert benchmark.beside_writing(4, stalls, writes, steps) == {5, 6}


def test_the_figures_that_were_measured_make_tables() -> None:
    benchmark = script("benchmark_checkpoints")
    (file,) = FIGURES.glob("checkpoints-*.json")
    figures = json.loads(file.read_text())
    text = benchmark.tables(figures)
    assert text.count("| fsdp x2 |") == 1
    assert "resumed at step 1,000,000" in text
    assert all(row["ratio"] <= 0.1 for row in figures["stall"])
    assert all(row["ratio"] <= 1.05 for row in figures["memory"])


def test_the_cost_of_measuring_is_that_of_the_measured_steps() -> None:
    benchmark = script("benchmark_memory_measurement")

    def run(times: Any) -> Any:
        seconds = dict(enumerate(times, 1))
        return {"seconds": seconds, "run_s": 40, "steps": [2], "losses": [1.0, 0.5, 0.4]}

    pairs = [(run([9.0, 1.5, 1.0]), run([1.0, 1.0, 1.0])), (run([1, 1.75, 1]), run([5, 1.5, 1]))]
    found = benchmark.cost(pairs)
    assert found["added_s_of_pairs"] == [0.5, 0.25]
    assert found["added_s"] == 0.375
    assert found["below_1_percent_from_s"] == 37.5
    pairs[1][0]["losses"] = [1.0, 0.5, 0.3]
    with pytest.raises(AssertionError, match="losses differ"):
        benchmark.cost(pairs)


@pytest.mark.slow
def test_a_run_learns_the_same_whether_its_memory_is_measured_or_not(tiny_base: Path) -> None:
    benchmark = script("benchmark_memory_measurement")
    keys = benchmark.KEYS | {"checkpoint_dir": str(tiny_base), "train.max_steps": 3}
    runs = [benchmark.step_times([], keys, "lora", measured=on) for on in (True, False)]
    found = benchmark.cost([tuple(runs)])
    assert found["losses_are_equal"] and found["steps"] == 3 and found["measured_steps"]


def test_the_figures_of_measuring_memory_make_a_table() -> None:
    benchmark = script("benchmark_memory_measurement")
    (file,) = FIGURES.glob("memory-measurement-*.json")
    results = json.loads(file.read_text())["results"]
    assert results.keys() == {*benchmark.CASES, "quickstart"}
    assert benchmark.table(results).count("s and more") == len(results)
    assert all(result["losses_are_equal"] for result in results.values())
    shortest = results["quickstart"]
    assert shortest["added_s"] < 0.01 * shortest["run_s"]


def test_every_published_figure_is_beside_its_simulation_in_file_and_document() -> None:
    checking = script("check_published_memory")
    (file,) = FIGURES.glob("published-memory_*.json")
    found = json.loads(file.read_text())
    listed = checking.rows()
    assert [(row.program, row.name) for row in listed] == [checking.key(row) for row in found]
    assert [round(row.published_bytes) for row in listed] == [
        row["published_bytes"] for row in found
    ]
    document = (ROOT / "docs/published-memory.md").read_text()
    assert "\n".join(checking.table(found, markdown=True)) in document


def test_qlora_takes_less_memory_than_lora_and_loads_below_the_target() -> None:
    benchmark = script("benchmark_quantized_loading")
    (file,) = FIGURES.glob("quantized-loading-*.json")
    figures = json.loads(file.read_text())
    lora = {}
    for row in figures["results"]:
        if row["quantize"] is None:
            lora[row["strategy"]] = row
            continue
        loading = row["loading_bytes_of_largest_rank"]
        assert loading < benchmark.TARGET * figures["bf16_bytes"]
        peak = row["peak_bytes_of_largest_rank"]
        assert peak < lora[row["strategy"]]["peak_bytes_of_largest_rank"]
    assert lora.keys() == {strategy for strategy, _ in benchmark.LAYOUTS}
    assert benchmark.table(figures["results"], figures["bf16_bytes"]).count("bnb.nf4") == 8


@pytest.mark.matrix
def test_the_calibration_runs_its_tiny_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate = script("calibrate_memory")
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["calibrate_memory", "--cpu", "--output", str(figures)])
    assert calibrate.main() == 0
    rows = json.loads(figures.read_text())["recipes"]
    assert len(rows) == len(calibrate.TINY)
    assert all(abs(calibrate.requested_error(row)) < 0.02 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def calibrated(predicted: int, reserved: int) -> dict[str, object]:
    """A row of the calibration: 1000 bytes were requested, and given in blocks of 1016."""
    return {
        "model": "tiny",
        "micro_batch_size": 1,
        "settings": {},
        "failure": None,
        "predicted_bytes": predicted,
        "requested_bytes": 1000,
        "allocated_bytes": 1016,
        "reserved_bytes": reserved,
        "device_bytes": reserved + 300,
        "breakdown_bytes": {"unattributed": 24},
    }


def test_the_calibration_fits_constants_and_says_which_predictions_are_far_off() -> None:
    calibrate = script("calibrate_memory")
    good, shy, greedy = calibrated(1010, 1050), calibrated(940, 1000), calibrated(1000, 1300)
    assert [calibrate.is_close(one) for one in (good, shy, greedy)] == [True, False, False]
    constants = calibrate.fitted([good, shy, greedy])
    assert constants["CONTEXT_BYTES"] == 300
    assert constants["WORKSPACE_BYTES"] == 8, "not what blocks are rounded by"
    assert constants["ROUNDING_HIGHEST"] == pytest.approx(0.016)
    assert constants["FRAGMENTATION"] == pytest.approx(0.05)
    assert constants["TENSOR_ERROR"] == pytest.approx(0.06)


@pytest.mark.parametrize(("codes", "expected"), [([0, 3, 0], 0), ([0, 1, 0], 1), ([3, 3, 3], 1)])
def test_a_recipe_that_does_not_fit_or_fails_costs_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    codes: list[int],
    expected: int,
) -> None:
    calibrate = script("calibrate_memory")
    recipes = [(f"model-{code}", 1, {}) for code in codes]  # type: ignore[var-annotated]
    ftkit = tmp_path / "ftkit.py"
    report = {
        "step_memory": {
            "predicted": {"peak_bytes": 1010, "peak_breakdown_bytes": {}},
            "ranks": [{"peak_bytes": 1000, "peak_breakdown_bytes": {"unattributed": 24}}],
        },
        "peak_memory": {"requested_bytes": 1000, "allocated_bytes": 1016, "reserved_bytes": 1050},
        "hardware": {},
        "versions": {},
    }
    ftkit.write_text(
        "import pathlib, sys\n"
        "words = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "code = int(words['--checkpoint_dir'].rpartition('-')[2])\n"
        "out = pathlib.Path(words['--out_dir'])\n"
        "out.mkdir()\n"
        f"(out / 'report.json').write_text({json.dumps(report)!r})\n"
        "print('last words')\n"
        "sys.exit(code)\n"
    )
    monkeypatch.chdir(tmp_path)  # where -m looks first
    monkeypatch.setattr(calibrate, "RECIPES", recipes)
    monkeypatch.setattr(calibrate, "device_uuid", lambda: "1234")
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["calibrate_memory", "--output", str(figures)])
    assert calibrate.main() == expected
    written = json.loads(figures.read_text())
    said = {0: None, 3: "does not fit", 1: "ended with 1:\nlast words\n"}
    assert [row["failure"] for row in written["recipes"]] == [said[code] for code in codes]
    assert bool(written["constants"]) == (0 in codes)
    lines = capsys.readouterr().out
    assert lines.count("predicted") == codes.count(0)
    assert lines.count("does not fit") == codes.count(3)


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_the_calibration_looks_at_the_device_that_runs_whatever_its_number(
    monkeypatch: pytest.MonkeyPatch, kind: Quantization
) -> None:
    calibrate = script("calibrate_memory")

    used = {"GPU-other": 1, f"{kind}-1234": 7}

    class Driver(ModuleType):
        NVMLError = LookupError

        def nvmlInit(self) -> None: ...

        def nvmlDeviceGetHandleByUUID(self, uuid: Any) -> Any:
            if uuid not in used:
                raise self.NVMLError
            return uuid

        def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
            return SimpleNamespace(used=used[handle])

    monkeypatch.setitem(sys.modules, "pynvml", Driver("pynvml"))
    assert calibrate.device_bytes("1234") == 7
    assert calibrate.device_bytes("gone") == 0


def test_the_benchmark_of_corpora_opens_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    benchmark = script("benchmark_corpora")
    benchmark.write_corpus(tmp_path / "corpus", 300_000)
    found = benchmark.open_once(tmp_path / "corpus", windows=1)
    assert found["pieces"] == 3 and found["samples"] > 4
    assert found["seconds"] > 0 and len(found["fingerprint"]) == 64


def test_the_benchmark_of_data_opens_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    benchmark = script("benchmark_data")
    benchmark.write_records(tmp_path / "records.jsonl", 300)
    first, second = (benchmark.open_once(tmp_path / "records.jsonl") for _ in range(2))
    assert first["samples"] == 300 and first["fingerprint"] == second["fingerprint"]
    assert 60 < first["tokens"] / 285 < 200
