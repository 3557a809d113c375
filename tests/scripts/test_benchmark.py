"""scripts/benchmark: what is counted, and the tables of ftkit beside other programs."""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from command import ROOT
from messages import says

SCRIPTS = ROOT / "scripts"


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(SCRIPTS)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarking"]:
        del sys.modules[name]


def measured(*ended_s: float, tokens: int = 100, **values: Any) -> Any:
    """A run whose steps ended then."""
    from benchmarking.figures import Measured, Step

    steps = [Step(ended_s=at, loss=10 - at, tokens=tokens) for at in ended_s]
    return Measured(steps=steps, host_bytes=3 * 2**30, imports_bytes=2**30, **values)


def test_the_first_two_steps_and_what_came_before_are_not_counted() -> None:
    run = measured(10, 15, 16, 17, 19)
    assert run.window_s == 4
    assert run.tokens_per_s == 75
    assert run.step_s == pytest.approx(4 / 3)
    # What the reference computed before is for all steps, and three of five are counted.
    assert dataclasses.replace(run, reference_s=10).window_s == 4 + 6


def with_durations(run: Any, *durations_s: float) -> Any:
    """The run, with what its program says of the durations of its steps."""
    pairs = zip(run.steps, durations_s, strict=True)
    steps = [dataclasses.replace(step, duration_s=duration_s) for step, duration_s in pairs]
    return dataclasses.replace(run, steps=steps)


@pytest.mark.parametrize(
    ("slowed", "window_s", "counted"),
    [
        ([], 9.0, 3),
        ([2], 9.0, 3),
        ([4], 4.0, 2),
        ([3, 5, 9], 5.0, 1),
        ([3, 4, 5], 9.0, 3),  # no other would remain
    ],
)
def test_slowed_steps_are_not_counted_and_the_others_take_as_long_as_their_program_says(
    slowed: list[int], window_s: float, counted: int
) -> None:
    run = measured(1, 2, 3, 8, 11, slowed=slowed)
    steps = [dataclasses.replace(s, cpu_s=2 * s.ended_s) for s in run.steps]
    run = dataclasses.replace(run, steps=steps)
    # Between the ends of steps, where the program tells no duration.
    assert run.window_s == window_s and len(run.window) == counted
    assert run.tokens_per_s == pytest.approx(100 * counted / window_s)
    assert run.step_cpu_s == pytest.approx(2 * window_s / counted)
    of_program = with_durations(run, 9, 9, 0.5, 2.5, 1.5)
    assert of_program.window_s == pytest.approx(window_s / 2)
    assert of_program.step_cpu_s == run.step_cpu_s
    before = dataclasses.replace(run, reference_s=10)
    assert before.window_s == pytest.approx(window_s + 2 * counted)


def test_what_is_not_counted_in_one_program_is_not_counted_in_any_of_the_round() -> None:
    from benchmarking.figures import by_program, in_pairs

    ours, theirs = measured(1, 2, 3, 8, 11, slowed=[4]), measured(1, 2, 5, 7, 8)
    rows = [
        {"round": number, "program": name, "measured": dataclasses.asdict(run)}
        for number, name, run in (
            (1, "ftkit", dataclasses.replace(ours, slowed=[3])),
            (0, "trl", theirs),
            (0, "ftkit", ours),
            (1, "trl", theirs),
        )
    ]
    runs = by_program(rows)
    assert [run.window_s for run in runs["ftkit"]] == [4, 8]
    assert [run.window_s for run in runs["trl"]] == [4, 3]
    pair = {"on": dataclasses.asdict(ours), "off": dataclasses.asdict(theirs)}
    assert [[run.window_s for run in side] for side in in_pairs([pair], ("off", "on"))] == [
        [4], [4]
    ]  # fmt: skip
    assert in_pairs([], ("off", "on")) == ([], [])


def test_figures_of_before_are_read_as_they_were() -> None:
    from benchmarking.figures import by_program

    run = dataclasses.asdict(measured(1, 2, 3, 8))
    del run["slowed"]
    for step in run["steps"]:
        del step["duration_s"]
    (found,) = by_program([{"round": 0, "program": "ftkit", "measured": run}])["ftkit"]
    assert found.window_s == 6


def report_of(durations_s: list[float], *, left_out: list[int], **values: Any) -> Any:
    """What a report says of a run with such steps, whose own window leaves out some."""
    in_window = [s for number, s in enumerate(durations_s, 1) if number not in left_out]
    speed = {"window_steps": len(in_window), "window_s": sum(in_window), "compiled_graphs": None}
    followed = values.pop("followed", None)
    ranks = None if followed is None else SimpleNamespace(ranks=[SimpleNamespace(step=followed)])
    return SimpleNamespace(throughput=SimpleNamespace(**speed | values), step_memory=ranks)


DURATIONS_S = [9.0, 3.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.05, 1.15]


@pytest.mark.parametrize(
    ("steps", "report", "slowed"),
    [
        (13, {"followed": 7, "left_out": [1, 2, 3, 7]}, [7]),
        (13, {"followed": 3, "left_out": [1, 2, 3]}, [3]),
        # The second step as well, which is never counted.
        (13, {"followed": 12, "left_out": [1, 2, 3, 12]}, [12]),
        (11, {"followed": 11, "left_out": [1, 2, 11]}, [11]),
        # The second step needed as much as a later one, which the report does not name.
        (13, {"followed": 2, "left_out": [1, 2, 3, 12]}, [2, 12]),
        (11, {"followed": 2, "left_out": [1, 2, 11]}, [2, 11]),
        (13, {"followed": 2, "left_out": [1, 2, 3]}, [2]),
        (4, {"followed": 2, "left_out": [1, 2]}, [2]),
        # No other step remains, so that none is left out.
        (2, {"followed": 2, "left_out": []}, [2]),
        # A model that is compiled: none is followed.
        (13, {"left_out": [1, 2, 3], "compiled_graphs": 5}, [1, 2, 3]),
        (13, {"left_out": [1, 2, 3, 10, 11], "compiled_graphs": 7}, [1, 2, 3, 10, 11]),
        (13, {"left_out": [1, 2, 3]}, []),
    ],
)
def test_slowed_steps_follow_from_the_report(
    steps: int, report: dict[str, Any], slowed: list[int]
) -> None:
    from benchmarking.ftkit_run import slowed_steps

    durations_s = DURATIONS_S[:steps]
    run = with_durations(measured(*range(1, steps + 1)), *durations_s)
    assert slowed_steps(report_of(durations_s, **report), run.steps) == slowed


def test_a_report_without_a_speed_tells_what_it_names() -> None:
    from benchmarking.ftkit_run import slowed_steps

    report = report_of([], left_out=[], followed=4)
    report.throughput = None
    assert slowed_steps(report, measured(1, 2, 3, 4, 5).steps) == [4]


def test_tables_say_what_is_not_counted() -> None:
    from benchmarking.peers.command import markdown

    figures = peers_figures()
    assert "the first 2 steps are not counted" in markdown(figures)
    figures["runs"][0]["measured"]["slowed"] = [3]
    assert "the first 2 steps and those in which ftkit followed memory" in markdown(figures)


def test_memory_is_that_of_the_gpu_or_else_what_imports_do_not_hold() -> None:
    run = measured(1, 2, 3)
    assert run.peak_bytes == 2 * 2**30
    assert dataclasses.replace(run, allocated_bytes=7).peak_bytes == 7


def test_a_run_without_a_window_is_not_whole() -> None:
    assert not measured(1, 2).is_whole
    assert measured(1, 2, 3).is_whole
    assert not dataclasses.replace(measured(1, 2, 3), failure="exit code 1").is_whole


def test_steps_follow_from_running_totals_and_the_first_ones_can_be_left_out() -> None:
    from benchmarking.figures import padding_of, steps_of

    totals = [(10, 16), (30, 40), (60, 80)]
    events: list[tuple[float, dict[str, Any]]] = [
        (float(n), {"step": n, "loss": 1 / n, "total_tokens": real, "total_positions": all_})
        for n, (real, all_) in enumerate(totals, 1)
    ]
    events.append((9.0, {"device_memory": None}))
    assert [step.tokens for step in steps_of(events)] == [10, 20, 30]
    assert [(step.ended_s, step.tokens) for step in steps_of(events, skip=1)] == [(2, 20), (3, 30)]
    assert padding_of(events) == 0.25
    assert padding_of(events[-1:]) is None


def test_ratios_are_of_runs_of_the_same_round() -> None:
    from benchmarking.figures import Measured, paired_ratio

    slow, fast = measured(1, 2, 4), measured(1, 2, 3)
    failed = Measured(failure="exit code 1")
    ours, theirs = [fast, failed, slow], [slow, slow, slow]
    assert paired_ratio(ours, theirs, "tokens_per_s") == 1.5
    assert paired_ratio([failed], [slow], "tokens_per_s") is None


def test_records_have_the_requested_lengths_and_every_word_is_a_token(
    tmp_path: Path,
) -> None:
    from benchmarking import workload
    from tokenizers import Tokenizer

    (record,) = workload.make_records([(5, 3)])
    assert workload.tokens_of(record) == 9
    workload.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = record["instruction"] + record["output"] + workload.SPECIAL_TOKENS[2]
    ids = tokenizer.encode(text).ids
    assert len(ids) == 9 and ids[-1] == 2
    words = re.findall(r"w(\d+)", text)
    assert ids[:-1] == [int(word) for word in words]


def test_lengths_are_those_of_short_instructions() -> None:
    from benchmarking.peers.programs import padding_in_order
    from benchmarking.workload import LONGEST, alpaca_lengths, make_records

    lengths = [prompt + answer + 1 for prompt, answer in alpaca_lengths(5000)]
    assert 125 < sum(lengths) / len(lengths) < 141
    assert max(lengths) <= LONGEST
    assert alpaca_lengths(10) == alpaca_lengths(10)
    records = make_records(alpaca_lengths(4000))
    shares = [padding_in_order(records, size) for size in (1, 4, 8)]
    assert shares == pytest.approx([0, 0.36, 0.48], abs=0.01)


def test_answers_with_labels_and_pairs_are_counted_sequence_by_sequence() -> None:
    from benchmarking import workload

    labelled = workload.make_labelled([(5, 3)] * 6)
    assert [one["label"] for one in labelled] == [True, True, False] * 2
    assert all(workload.tokens_of_each(one) == [9] for one in labelled)
    (pair,) = workload.make_pairs([(5, 3), (7, 4)])
    assert workload.tokens_of_each(pair) == [9, 10] and workload.tokens_of(pair) == 19
    (short,) = workload.make_pairs([(5, 3), (7, 4)], longest_prompt=1)
    assert workload.tokens_of_each(short) == [5, 6]
    assert (short["chosen"], short["rejected"]) == (pair["chosen"], pair["rejected"])


def test_trl_begins_with_the_numbers_that_ftkit_draws(tmp_path: Path) -> None:
    import torch
    from adapters import build, export, lora_recipe
    from benchmarking.ftkit_run import SEED
    from benchmarking.peers.cases import LORA_ALPHA, LORA_RANK, TINY_CASES
    from benchmarking.peers.programs import start_of
    from benchmarking.workload import SIZES, make_model
    from safetensors.torch import load_file

    from ftkit.models.pretrained.base_model import open_base

    make_model(tmp_path / "model", SIZES["llama-1m"], torch.float32)
    base = open_base(str(tmp_path / "model"))
    recipe = lora_recipe(base, lora_query=True, lora_r=LORA_RANK, lora_alpha=LORA_ALPHA, seed=SEED)
    adapter = export(build(base, recipe), base, recipe, tmp_path / "adapter")
    expected = {
        name.replace(".weight", ".default.weight"): value
        for name, value in load_file(adapter / "adapter_model.safetensors").items()
        if ".lora_A." in name
    }
    case = next(case for case in TINY_CASES if case.method == "lora")
    found = start_of(case, tmp_path / "model")
    assert found.keys() == expected.keys() and len(found) == 4
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_program_that_shuffles_gets_a_file_from_which_it_draws_the_records_in_order() -> None:
    from benchmarking import workload

    records = workload.make_records([(2, 1)] * 40)
    for order in (workload.order_of_ftkit(40, 1337), workload.order_of_litgpt(40, 42)):
        assert sorted(order) == list(range(40)) != order
        file = workload.in_file_order(records, order)
        assert [file[place] for place in order] == records


def test_a_run_with_a_wrong_token_count_is_not_a_result() -> None:
    from benchmarking.peers.programs import with_counted_tokens
    from benchmarking.workload import make_records

    records = make_records([(5, 4)] * 6)
    for counted in (20, 18):  # with the last token of each of two samples, and without
        run = with_counted_tokens(measured(1, 2, 3, tokens=counted), records, 2)
        assert [step.tokens for step in run.steps] == [20, 20, 20] and run.is_whole
    run = with_counted_tokens(measured(1, 2, 3, tokens=19), records, 2)
    assert says(run.failure, "19 tokens in step 1 ... 20")


def test_the_sizes_are_what_their_names_say() -> None:
    from benchmarking.workload import SIZES

    units = {"m": 1e6, "b": 1e9}
    for name, size in SIZES.items():
        number = name.partition("-")[2]
        said = float(number[:-1]) * units[number[-1]]
        assert size.parameters == pytest.approx(said, rel=0.15)


def test_what_litgpt_logs_becomes_a_line_for_each_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarking.peers import litgpt_run
    from benchmarking.watch import MARK

    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    assert litgpt_run.MARK == MARK
    lines = litgpt_run.StepLines(2)
    lines.log({"time": 1.0, "lengths": 512})
    for step, loss, tokens in ((0, 9.5, 50), (1, 9.4, 100), (1, 9.3, 150), (2, 9.2, 200)):
        lines.log({"loss": loss, "step": step, "total_tokens": tokens})
    said = [json.loads(line.removeprefix(MARK)) for line in capsys.readouterr().out.splitlines()]
    steps = [(row["step"], row["loss"], row["total_tokens"]) for row in said if "step" in row]
    assert steps == [(1, 9.4, 100), (2, 9.2, 200)]
    assert "device_memory" in said[-1] and ended == [0]


def test_output_of_a_watched_process_is_separate_from_its_records(
    tmp_path: Path,
) -> None:
    from benchmarking.watch import MARK, watch

    program = (
        "import time, sys\n"
        "block = bytearray(40 * 2**20)\n"
        f"print({MARK!r} + '{{\"step\": 1}}'); print('hello'); time.sleep(0.3); sys.exit(4)"
    )
    seen = watch([sys.executable, "-c", program], limit_s=60, directory=tmp_path)
    assert (seen.exit_code, seen.output) == (4, "hello\n")
    ((_, event),) = seen.events
    assert event.keys() == {"step", "cpu_s"} and event["step"] == 1
    assert event["cpu_s"] >= 0
    assert seen.host_bytes > 40 * 2**20


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    from benchmarking.watch import watch

    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert watch(words, limit_s=0.2, directory=tmp_path).exit_code is None


def test_a_benchmark_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    from benchmarking.watch import watch

    started = tmp_path / "pid"
    program = (
        f"import os, time, pathlib; pathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)"
    )

    def look() -> list[Any]:
        if started.exists() and started.read_text():
            raise KeyboardInterrupt
        return []

    with pytest.raises(KeyboardInterrupt):
        watch([sys.executable, "-c", program], limit_s=60, directory=tmp_path, look=look)
    assert not psutil.pid_exists(int(started.read_text()))


def test_rows_of_metrics_are_read_once_and_only_whole(tmp_path: Path) -> None:
    from benchmarking.figures import steps_of
    from benchmarking.ftkit_run import Rows

    file = tmp_path / "metrics.csv"
    rows = Rows(file)
    assert rows.new() == []
    file.write_text("step,loss,tokens,tokens_per_s\n1,10.5,100,50\n2,9.")
    first = {"step": 1, "loss": 10.5, "total_tokens": 100, "duration_s": 2}
    assert rows.new() == [first]
    file.write_text("step,loss,tokens,tokens_per_s\n1,10.5,100,50\n2,9.5,20,80\n")
    second = {"step": 2, "loss": 9.5, "total_tokens": 120, "duration_s": 0.25}
    assert rows.new() == [second]
    steps = steps_of([(3.0, first), (3.5, second)])
    assert [(step.ended_s, step.duration_s) for step in steps] == [(3, 2), (3.5, 0.25)]


def peers_figures(**failures: str) -> dict[str, Any]:
    """Figures of one round in which ftkit is three times as fast as LitGPT."""
    from benchmarking.peers.cases import CPU_CASES

    case = CPU_CASES[0]
    times = {"ftkit": (1.0, 2.0, 3.0), "litgpt": (1.0, 2.0, 5.0), "trl best": (1.0, 2.0, 4.0)}
    runs = [
        {
            "round": 0,
            "case": case.name,
            "program": program,
            "load_average": 0.1,
            "measured": dataclasses.asdict(
                measured(*ended_s, first_step_s=1.0, failure=failures.get(program))
            ),
        }
        for program, ended_s in times.items()
    ]
    return {
        "cases": {case.name: dataclasses.asdict(case)},
        "runs": runs,
        "warm_up_steps": 2,
        "hardware": {"cpu": "a CPU", "physical_cores": 2},
        "versions": {"litgpt": {"torch": "2.13.0"}},
    }


def test_the_table_of_programs_shows_goals_reached_and_missed() -> None:
    from benchmarking.peers.command import markdown

    text = markdown(peers_figures())
    row = next(line for line in text.splitlines() if line.startswith("| ftkit"))
    assert "| 3.00 |" in row and "| 1.00 |" in row
    assert "reached: 2.5 x LitGPT's tokens/s (3.00)" in text
    assert "missed: 0.5 x its memory (1.00)" in text
    assert "reached: faster than TRL's best" in text


def test_a_round_that_was_cut_off_is_not_counted_as_a_whole_one() -> None:
    from benchmarking.peers.command import markdown

    figures = peers_figures()
    again = figures["runs"][0] | {"round": 1}
    assert "Medians of 1 rounds" in markdown(figures)
    assert "Medians of 1 to 2 rounds" in markdown(figures | {"runs": [*figures["runs"], again]})


def test_a_program_that_failed_has_a_row_with_its_last_words() -> None:
    from benchmarking.peers.command import markdown

    text = markdown(peers_figures(litgpt="ValueError: no"))
    assert "| litgpt | ValueError: no |" in text
    assert "reached" not in text and "missed" not in text


def objective_figures(case: Any, *, apart: float) -> dict[str, Any]:
    """Figures of a case in which ftkit is twice as fast as TRL, and losses differ by so much."""
    own = measured(1.0, 2.0, 3.0, padding_fraction=0.0)
    steps = [dataclasses.replace(one, loss=one.loss * (1 + apart)) for one in own.steps]
    steps[2] = dataclasses.replace(steps[2], ended_s=4.0)
    other = dataclasses.replace(own, steps=steps, padding_fraction=0.25)
    runs = [
        {"round": 0, "case": case.name, "program": program, "measured": dataclasses.asdict(run)}
        for program, run in (("ftkit", own), ("trl", other))
    ]
    return peers_figures() | {"cases": {case.name: dataclasses.asdict(case)}, "runs": runs}


def test_an_objective_has_a_row_with_its_speed_and_losses_beside_trl() -> None:
    from benchmarking.peers.cases import CPU_CASES
    from benchmarking.peers.command import markdown

    case = next(case for case in CPU_CASES if case.objective == "dpo")
    (row,) = [
        line
        for line in markdown(objective_figures(case, apart=2e-7)).splitlines()
        if line.startswith(f"| {case.name}")
    ]
    assert row.split(" | ")[1:] == [
        "100", "2.00", "2.00 GiB", "1.00", "25%", "2e-07", "equal |"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("objective", "apart", "failed"),
    [("dpo", 2e-7, False), ("dpo", 2e-4, True), ("orpo", 2e-4, False)],
)
def test_the_comparison_fails_if_a_loss_of_the_same_definition_differs(
    objective: str, apart: float, failed: bool
) -> None:
    from benchmarking.peers.cases import CPU_CASES
    from benchmarking.peers.command import exit_code

    case = next(case for case in CPU_CASES if case.objective == objective)
    assert exit_code(objective_figures(case, apart=apart)) == int(failed)


def test_the_chosen_cases_are_those_that_were_promised() -> None:
    from benchmarking.peers.cases import CPU_CASES, DEFAULT_PROGRAMS, OBJECTIVES, PROGRAMS

    named = {(c.method, c.precision, c.micro_batch_size, c.global_batch_size) for c in CPU_CASES}
    assert named >= {(m, p, 8, 8) for m in ("full", "lora") for p in ("32-true", "bf16-true")}
    assert named >= {(m, "32-true", 4, 16) for m in ("full", "lora")}
    supervised = [case for case in CPU_CASES if case.objective == "sft"]
    assert all(case.steps == 12 for case in supervised if case.global_batch_size == 8)
    assert {case.objective for case in CPU_CASES} == set(OBJECTIVES), "each is compared"
    assert set(DEFAULT_PROGRAMS) <= set(PROGRAMS)


def test_a_lever_that_cannot_run_here_has_a_row_that_says_why() -> None:
    from benchmarking.levers import row_cells

    off = dataclasses.asdict(measured(1, 2, 4, first_step_s=1.0))
    on = dataclasses.asdict(measured(1, 2, 3, first_step_s=2.0))
    cells = row_cells("compile", "full", [{"off": off, "on": on}])
    assert cells[:5] == ["compile", "full", "50", "100", "2.00"]
    refused = row_cells("kernels", "full", [{"refused": "needs a GPU"}])
    assert refused[2] == "needs a GPU" and len(refused) == len(cells)
    failed = on | {"failure": "train.padding_free is not a key of a recipe"}
    said = row_cells("padding_free", "full", [{"off": off, "on": failed}])
    assert said[2] == "train.padding_free is not a key of a recipe"


def test_every_lever_is_listed_once_and_can_be_chosen_by_its_name() -> None:
    from benchmarking.levers import LEVERS, chosen

    names = [lever.name for lever in LEVERS]
    assert len(set(names)) == len(names)
    assert [(one.name, method) for one, method in chosen(["padding_free"], ["lora"])] == [
        ("padding_free", "lora")
    ]


def test_scaling_varies_one_thing_at_a_time() -> None:
    from benchmarking.scaling import MACHINES, points

    machine = MACHINES["cpu"]
    found = list(points(machine, ranks=2))
    for point in found:
        usual = (point.model == machine.model, point.length == machine.length, not point.keys)
        assert usual.count(False) <= 1
    assert {point.name for point in found if point.axis == "ranks"} == {
        "single", "ddp x2", "fsdp x2", "deepspeed x2"
    }  # fmt: skip


def test_the_table_of_scaling_has_a_part_for_each_axis() -> None:
    from benchmarking.scaling import markdown

    run = dataclasses.asdict(measured(1, 2, 3, first_step_s=1.0))
    rows = [
        {"round": 0, "axis": axis, "name": name, "x": 1, "measured": run}
        for axis, name in (("length", "64 tokens"), ("ranks", "single"))
    ]
    text = markdown(
        {
            "runs": rows,
            "method": "full",
            "machine": {"precision": "32-true"},
            "warm_up_steps": 2,
            "hardware": {"cpu": "a CPU", "gpus": []},
        }
    )
    assert text.index("**length**") < text.index("| 64 tokens | 100 |") < text.index("**ranks**")
    assert "**size**" not in text


@pytest.mark.parametrize(
    ("costs", "each", "grown"),
    [
        ((5.0, 5.9, 14.9), ("10 ms", "10 ms"), "1.0"),
        ((5.0, 5.099, 15.0), ("1.1 ms", "11 ms"), "10.0"),
        ((5.0, 5.0, 5.09), ("0 ps", "100 us"), ""),  # the start varies by more
    ],
)
def test_growth_is_that_of_the_cost_of_one_more(
    costs: tuple[float, ...], each: tuple[str, str], grown: str
) -> None:
    from benchmarking.growth import markdown

    row = {"axis": "layers", "run": "", "failure": None, "host_bytes": 2**30}
    sizes = zip((10, 100, 1000), costs, strict=True)
    runs = [row | {"size": size, "cpu_s": cpu_s, "round": 0} for size, cpu_s in sizes]
    failed = {"size": 10_000, "failure": "no end", "cpu_s": 900.0}
    text = markdown({"runs": [*runs, runs[0] | failed], "hardware": {"cpu": "a CPU"}})
    assert [line.split(" | ")[3:5] for line in text.splitlines()[2:5]] == [
        ["", ""], [each[0], ""], [each[1], grown]
    ]  # fmt: skip
    assert "10,000" not in text


def test_the_document_on_performance_names_every_file_of_figures_and_no_other() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    named = set(re.findall(r"`([^`/\s]+\.json)`", text)) - {"FILE.json"}
    assert named == {file.name for file in (SCRIPTS / "benchmarks").glob("*.json")}


COMMANDS = ("peers", "levers", "scaling", "growth", "images", "implementations")
PLACES = {"peers": "peers", "objectives": "peers"} | {name: name for name in COMMANDS[1:]}
"""Commands of scripts/benchmark by the places of their tables."""
FIGURES = [
    (command, file)
    for place, command in PLACES.items()
    for file in (SCRIPTS / "benchmarks").glob(f"{place}-*.json")
]


@pytest.mark.parametrize(("command", "file"), FIGURES)
def test_the_tables_of_the_document_are_those_of_committed_figures(
    command: str, file: Path
) -> None:
    from benchmarking import growth, images, implementations, levers, scaling
    from benchmarking.command import DOCUMENT, with_tables
    from benchmarking.peers import command as peers

    modules = (peers, levers, scaling, growth, images, implementations)
    module = dict(zip(COMMANDS, modules, strict=True))[command]
    text = module.markdown(json.loads(file.read_text()))
    document = DOCUMENT.read_text()
    assert text in document
    assert with_tables(document, text, file.name) == document


@pytest.mark.parametrize("place", PLACES)
def test_new_tables_take_the_place_of_the_old_ones(place: str) -> None:
    from benchmarking.command import DOCUMENT, with_tables

    document = DOCUMENT.read_text()
    changed = with_tables(document, "| a table |", f"{place}-new.json")
    assert changed.count(f"| a table |\n\nFigures: `{place}-new.json`.") == 1
    others = [line for line in changed.splitlines() if line in document]
    assert [line for line in others if line.startswith("#")] == [
        line for line in document.splitlines() if line.startswith("#")
    ]
    assert with_tables(changed, "| a table |", f"{place}-new.json") == changed


def figures_of_images(*, apart: float = 2e-7, waiting: float = 0.002) -> dict[str, Any]:
    """Figures of a round in which ftkit is twice as fast as TRL, and losses differ by so much."""
    from benchmarking.images import USUAL

    own = measured(1.0, 2.0, 3.0)
    steps = [dataclasses.replace(one, loss=one.loss * (1 + apart)) for one in own.steps]
    steps[2] = dataclasses.replace(steps[2], ended_s=4.0)
    other = dataclasses.replace(own, steps=steps, host_bytes=5 * 2**30)
    runs = [
        {"round": 0, "method": "full", "program": "ftkit", "waiting": waiting, "measured": own},
        {"round": 0, "method": "full", "program": "trl", "measured": other},
    ]
    return {
        "scene": dataclasses.asdict(USUAL),
        "runs": [row | {"measured": dataclasses.asdict(row["measured"])} for row in runs],
        "warm_up_steps": 2,
        "hardware": {"cpu": "a CPU", "physical_cores": 2},
        "versions": {"trl": "1.16.0"},
    }


def test_images_have_a_row_with_speed_memory_and_losses_beside_trl() -> None:
    from benchmarking.images import markdown

    text = markdown(figures_of_images())
    own, other = [line.split(" | ") for line in text.splitlines() if "GiB" in line]
    assert own[:6] == ["| ftkit", "8.00", "2.00", "", "1.00 s", "0.2%"]
    assert own[9:12] == ["2.00 GiB", "0.50", ""]
    assert other[1] == "4.00" and other[-1] == "2e-07 |"


@pytest.mark.parametrize(("wrong", "code"), [({}, 0), ({"apart": 1e-4}, 1), ({"waiting": 0.06}, 1)])
def test_the_benchmark_of_images_fails_if_losses_differ_or_steps_wait(
    wrong: dict[str, float], code: int
) -> None:
    from benchmarking.images import exit_code

    assert exit_code(figures_of_images(**wrong)) == code


def test_a_row_of_two_implementations_has_speed_memory_and_losses_of_both() -> None:
    from benchmarking.implementations import COLUMNS, row_cells

    runs = {
        name: dataclasses.asdict(measured(*ended_s, first_step_s=1.0))
        for name, ended_s in (("litgpt", (1, 2, 3)), ("transformers", (1, 2, 4)))
    }
    scene = {"model": "llama-34m", "precision": "32-true"}
    row = {"pair": 0, "method": "full", "scene": scene, **runs}
    cells = dict(zip(range(len(COLUMNS)), row_cells([row]), strict=True))
    assert [cells[n] for n in range(6)] == ["llama-34m", "full", "32-true", "100", "50", "0.50"]
    assert [cells[n] for n in (6, 7)] == ["1,000 ms", "2,000 ms"]
    assert [cells[n] for n in (8, 9, 10)] == ["2.00 GiB", "2.00 GiB", "1.00"]
    assert [cells[n] for n in (13, 14, 15)] == ["9.0000", "6.0000", "2e-01"]
    failed = row_cells([row | {"litgpt": runs["litgpt"] | {"failure": "no"}}])
    assert failed[3] == "no" and len(failed) == len(COLUMNS)


@pytest.mark.matrix
def test_two_implementations_are_measured_on_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarking import implementations
    from benchmarking.command import run

    monkeypatch.chdir(ROOT)
    out = tmp_path / "implementations.json"
    arguments = SimpleNamespace(
        show=None,
        tiny=True,
        pairs=1,
        steps=None,
        limit_s=600,
        out=out,
        write=False,
        go_on=False,
        models=tmp_path / "models",
    )
    assert run(implementations, arguments) == 0
    pairs = json.loads(out.read_text())["pairs"]
    assert [pair["scene"]["model"] for pair in pairs] == ["gemma2-1m", "qwen3-1m"]
    for pair in pairs:
        ours, theirs = ([s["loss"] for s in pair[n]["steps"]] for n in ("litgpt", "transformers"))
        assert len(ours) == 4
        # LoRA begins with other numbers: the implementations name its layers differently.
        assert theirs[0] == pytest.approx(ours[0], rel=1e-5)
        assert theirs == pytest.approx(ours, rel=1e-5 if pair["method"] == "full" else 1e-3)
    assert (tmp_path / "implementations.md").read_text().strip() in capsys.readouterr().out
    assert (tmp_path / "implementations.svg").exists()


@pytest.mark.parametrize(
    ("name", "whole", "failed"),
    [
        ("runs", {"measured": {"failure": None}}, {"measured": {"failure": "no memory"}}),
        ("pairs", {"refused": "needs a GPU"}, {"on": {"failure": None}, "off": {"failure": "no"}}),
    ],
)
def test_runs_that_failed_are_done_again(
    tmp_path: Path, name: str, whole: dict[str, Any], failed: dict[str, Any]
) -> None:
    from benchmarking.command import begun, keep

    options = SimpleNamespace(out=tmp_path / "figures.json", go_on=True)
    keep({name: [whole, failed]}, options)
    assert begun(options, {}) == {name: [whole]}


# Outside the matrix: tables of pairs here, and a part that runs through in test_gpu_suite.py.
@pytest.mark.matrix
def test_levers_are_measured_in_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarking import levers
    from benchmarking.command import run

    monkeypatch.chdir(ROOT)
    arguments = SimpleNamespace(
        show=None,
        tiny=True,
        pairs=1,
        only=["activation_checkpointing", "kernels"],
        methods=["full"],
        steps=None,
        limit_s=120,
        models=tmp_path / "models",
        out=tmp_path / "levers.json",
        write=False,
        go_on=False,
    )
    monkeypatch.setattr(
        levers,
        "LEVERS",
        [one for one in levers.LEVERS if one.name in ("activation_checkpointing", "kernels liger")],
    )
    assert run(levers, arguments) == 0
    figures = json.loads(arguments.out.read_text())
    ran, refused = sorted(figures["pairs"], key=lambda row: row["lever"])
    assert len(ran["on"]["steps"]) == 4
    assert ran["on"]["failure"] is None and ran["off"]["failure"] is None
    assert refused["refused"] == "needs a GPU"
    assert (tmp_path / "levers.md").read_text().strip() in capsys.readouterr().out
    assert (tmp_path / "levers.svg").exists()
