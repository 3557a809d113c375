"""The report: complete or absent on disk, free of tokens, and readable whatever was reached."""

import ast
import dataclasses
import inspect
import io
import itertools
import json
import math
import mmap
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from messages import says
from rich.console import Console

from ftkit.data.records.media import ShownMedium
from ftkit.errors import UserError
from ftkit.recipe.parsing import recipe_as_dict
from ftkit.recipe.recipe import Component, LoraRecipe, Recipe
from ftkit.runs.report import report as report_module
from ftkit.runs.report.answers import AnsweredExample, AnswerScore, ExactMatch
from ftkit.runs.report.meters import ThroughputMeter
from ftkit.runs.report.report import (
    Checkpoints,
    DataCounts,
    ExpertLoad,
    Files,
    Loss,
    PeakMemory,
    PhaseTimes,
    Progress,
    RankMemory,
    Report,
    Resolved,
    Resumed,
    Source,
    Spread,
    StepTimes,
    Throughput,
    Tokens,
    read_report,
    write_report,
)
from ftkit.runs.report.table import render, report_as_html, summary_text
from ftkit.strategies import step_memory as memory_module
from ftkit.strategies.step_memory import Breakdown, RankStepMemory, StepMemory, StepMoments
from ftkit.utils import hardware as hardware_module
from ftkit.utils.console.formatting import (
    age_text,
    bytes_text,
    duration_text,
    marked,
    number_text,
    percent_text,
    shortened,
    shortened_within,
)
from ftkit.utils.hardware import Hardware, InstalledGpu
from ftkit.utils.json_values import without_tokens

GIB = 2**30
TOKEN = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEF"

FAILED = Report(
    outcome="failed",
    exit_reason="data.json does not exist",
    exit_code=1,
    phase="set_up",
    started_at="2026-11-20T21:30:00Z",
    finished_at="2026-11-20T21:30:02Z",
)

COMPLETED = Report(
    outcome="completed",
    exit_reason="all 3 epochs done",
    exit_code=0,
    phase="saving",
    started_at="2026-11-20T21:30:00Z",
    finished_at="2026-11-20T22:32:00Z",
    command=["ftkit", "finetune_lora", "--config", "lora.yaml"],
    method="lora",
    recipe=recipe_as_dict(LoraRecipe(checkpoint_dir="TinyLlama/TinyLlama_v1.1")),
    resolved=Resolved(
        base_model="TinyLlama/TinyLlama_v1.1",
        accelerator="cuda",
        device="NVIDIA A100-SXM4-80GB",
        devices=4,
        world_size=4,
        strategy="fsdp",
        precision="bf16-mixed",
        quantize="bnb.nf4",
        optimizer="torch.optim.AdamW",
        parameters=1_104_554_048,
        trainable_parameters=4_505_600,
        max_seq_length=512,
        global_batch_size=16,
        micro_batch_size=4,
        micro_steps_per_step=1,
        total_steps=300,
        warmup_steps=100,
        samples_per_epoch=1600,
    ),
    versions={"ftkit": "0.1.0", "python": "3.11.9"},
    hardware=Hardware(
        cpu="AMD EPYC 7763",
        physical_cores=64,
        logical_cores=128,
        memory_bytes=1024 * GIB,
        gpus=[InstalledGpu(name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * GIB)] * 4,
        driver="580.65",
        cuda="13.0",
    ),
    phases_s=PhaseTimes(set_up=12.3, training=3480.0, validation=130.0, saving=4.1, total=3720.0),
    step_s=StepTimes(
        data=0.004, forward=3.1, backward=7.9, optimizer=0.45, other=0.1, total=11.554
    ),
    data={
        "train": DataCounts(
            records=1610,
            used=1600,
            skipped_empty_output=7,
            skipped_no_labels=3,
            truncated=41,
            tokens=410_000,
            label_tokens=120_000,
        ),
        "validation": DataCounts(records=100, used=100, tokens=26_000, label_tokens=7_000),
    },
    progress=Progress(steps=300, samples=4800, epochs=3.0),
    tokens=Tokens(real=1_230_000, label=360_000, padded=41_000, padding_fraction=41 / 1271),
    throughput=Throughput(
        tokens_per_s=12_345.6,
        samples_per_s=48.2,
        steps_per_s=0.0866,
        window_steps=297,
        window_s=3430.0,
        tokens_per_s_per_device=3086.4,
        mfu=0.412,
        device_utilization=0.93,
        energy_wh=12.5,
        cpu_utilization=0.04,
    ),
    peak_memory=PeakMemory.of(
        [
            RankMemory(
                rank=rank,
                allocated_bytes=31 * GIB + rank,
                reserved_bytes=36 * GIB,
                rss_bytes=6 * GIB,
                host_bytes=800 * 2**20,
            )
            for rank in range(4)
        ]
    ),
    step_memory=StepMemory(
        ranks=[
            RankStepMemory(
                rank=rank,
                step=41,
                peak_bytes=31 * GIB + rank,
                peak_breakdown_bytes=Breakdown(
                    parameters=4 * GIB,
                    gradients=3 * GIB,
                    optimizer_state=8 * GIB,
                    activations=12 * GIB,
                    temporaries=4 * GIB,
                    unattributed=rank,
                ),
                moments_bytes=StepMoments(
                    before_forward=Breakdown(parameters=12 * GIB),
                    after_forward=Breakdown(parameters=29 * GIB),
                    after_backward=Breakdown(parameters=15 * GIB),
                    after_optimizer=Breakdown(parameters=12 * GIB),
                ),
            )
            for rank in range(4)
        ]
    ),
    loss=Loss(
        first=2.4131,
        last=1.1023,
        validation_first=2.3801,
        validation_last=1.2044,
        validation_best=1.1987,
        perplexity=math.exp(1.2044),
    ),
    exact_match=ExactMatch(samples=64, before=0.125, after=0.8125),
    scores=[
        AnswerScore(name="rouge_l", samples=32, before=0.0521, after=0.9133),
        AnswerScore(name="rouge_l", samples=1, after=1, file="mine.py", sha256="00"),
    ],
    examples=[
        AnsweredExample(
            instruction="Name the capital of the country.",
            input="France",
            expected="Paris",
            before="The capital\nof the country is the capital of the country is",
            after="Paris",
        )
    ],
    warnings=["the warm-up (100 steps) is a third of the run"],
    files=Files(final="final", metrics="metrics.csv", validation="validation.csv", log="run.log"),
)


def text_of(report: Report, width: int = 80, **options: object) -> str:
    """Text that `render` writes to a file."""
    console = Console(file=io.StringIO(), width=width)
    console.print(render(report, **options))
    return console.file.getvalue()  # type: ignore[attr-defined]


class TestFile:
    @pytest.mark.parametrize("report", [COMPLETED, FAILED], ids=["completed", "failed"])
    def test_a_report_reads_back_equal(self, report: Report, tmp_path: Path) -> None:
        path = write_report(report, tmp_path / "new" / "run")
        assert path.name == "report.json"
        assert read_report(path) == report
        assert read_report(path.parent) == report

    def test_the_keys_are_the_names_of_the_fields(self, tmp_path: Path) -> None:
        report = dataclasses.replace(COMPLETED, numbers={"open_files": 12.0})
        content = json.loads(write_report(report, tmp_path).read_text())
        assert content == json.loads(json.dumps(dataclasses.asdict(report)))
        assert content["schema_version"] == 2
        assert content["outcome"] == "completed"
        assert content["phases_s"]["set_up"] == 12.3

    def test_parts_that_were_not_reached_are_null(self, tmp_path: Path) -> None:
        content = json.loads(write_report(FAILED, tmp_path).read_text())
        assert "numbers" not in content  # none is declared
        assert content["throughput"] is None
        assert content["loss"] is None

    @pytest.mark.parametrize("module", [report_module, memory_module])
    def test_every_field_is_defined_in_the_string_below_it(self, module: Any) -> None:
        undefined = [
            f"{section.name}.{ast.unparse(field.target)}"
            for section in ast.parse(inspect.getsource(module)).body
            if isinstance(section, ast.ClassDef)
            for field, below in itertools.pairwise([*section.body, ast.Pass()])
            if isinstance(field, ast.AnnAssign) and not isinstance(below, ast.Expr)
        ]
        assert undefined == []

    def test_numbers_that_are_not_finite_become_null(self, tmp_path: Path) -> None:
        report = dataclasses.replace(
            FAILED, loss=Loss(first=2.0, last=math.nan, perplexity=math.inf)
        )
        content = json.loads(write_report(report, tmp_path).read_text())
        assert content["loss"]["last"] is None
        assert content["loss"]["perplexity"] is None

    def test_a_write_that_fails_leaves_the_old_report_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_report(FAILED, tmp_path)

        def no_space(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", no_space)
        with pytest.raises(OSError, match="No space left"):
            write_report(COMPLETED, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
        assert read_report(tmp_path) == FAILED

    def test_a_report_from_before_the_memory_of_steps_is_read(self, tmp_path: Path) -> None:
        content = json.loads(write_report(COMPLETED, tmp_path).read_text())
        del content["step_memory"]
        content["schema_version"] = 1
        (tmp_path / "report.json").write_text(json.dumps(content))
        before = dataclasses.replace(COMPLETED, schema_version=1, step_memory=None)
        assert read_report(tmp_path) == before

    def test_unknown_keys_of_this_version_are_passed_over(self, tmp_path: Path) -> None:
        content = json.loads(write_report(COMPLETED, tmp_path).read_text())
        content["energy"] = {"joules": 5}
        content["loss"]["median"] = 1.5
        (tmp_path / "report.json").write_text(json.dumps(content))
        assert read_report(tmp_path) == COMPLETED

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ('{"schema_version": 3, "result": 5}', "schema_version 3"),
            ("{}", "no schema_version"),
            ("[1, 2]", "no schema_version"),
            ('{"schema_version": 1', "is damaged: JSONDecodeError"),
            ("[" * 100_000, "nested too deeply"),
            ("1" * 5_000, "is damaged"),
            ('{"schema_version": 1}', "is damaged"),
            (json.dumps({**dataclasses.asdict(FAILED), "exit_code": "one"}), "is damaged"),
            (json.dumps({**dataclasses.asdict(FAILED), "outcome": "great"}), "is damaged"),
            (json.dumps({**dataclasses.asdict(FAILED), "loss": [1.0]}), "is damaged"),
        ],
    )
    def test_a_damaged_report_or_one_of_another_version_is_refused(
        self, content: str, reason: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "report.json"
        path.write_text(content)
        with pytest.raises(UserError, match=reason) as raised:
            read_report(path)
        assert str(path) in str(raised.value)

    def test_a_missing_report_is_a_user_error(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"report\.json cannot be read"):
            read_report(tmp_path)


class TestTokens:
    """An access token reaches no file."""

    def test_the_recipe_in_the_report_never_has_an_access_token(self) -> None:
        recipe = Recipe(
            checkpoint_dir="x",
            access_token="my secret",
            data=Component(class_path="litgpt.data.LIMA", init_args={"access_token": "my secret"}),
        )
        content = recipe_as_dict(recipe)
        assert "access_token" not in content
        assert content["data"] == {"class_path": "litgpt.data.LIMA", "init_args": {}}
        assert "my secret" not in json.dumps(content)

    def test_the_recipe_keeps_its_defaults(self) -> None:
        content = recipe_as_dict(LoraRecipe(checkpoint_dir="x"))
        assert content["train"]["global_batch_size"] == 16
        assert content["out_dir"] == "out/finetune/lora"

    @pytest.mark.parametrize(
        "argv",
        [
            ["--access_token", "my-secret"],
            ["--access_token=my-secret"],
            ["--data.access_token", "my-secret"],
            ["--data.init_args.access_token=my-secret"],
            ["--data", '{"class_path": "X", "init_args": {"access_token": "my-secret"}}'],
            ["--data", "{class_path: X, init_args: {access_token: my-secret}}"],
            ["--exit_reason", f"got {TOKEN}"],
        ],
    )
    def test_the_command_shows_no_token(self, argv: list[str]) -> None:
        shown = without_tokens(["ftkit", "finetune", *argv, "--seed", "3"])
        assert "my-secret" not in " ".join(shown)
        assert TOKEN not in " ".join(shown)
        assert len(shown) == len(argv) + 4
        assert shown[-2:] == ["--seed", "3"]

    def test_other_arguments_stay_as_they_were(self) -> None:
        argv = ["ftkit", "finetune", "--train.max_tokens=3", "--out_dir", "out/hf_model"]
        assert without_tokens(argv) == argv

    def test_a_hub_token_is_never_written_wherever_it_stands(self, tmp_path: Path) -> None:
        report = dataclasses.replace(
            FAILED,
            exit_reason=f"401 for {TOKEN}",
            recipe={"access_token": "my secret", "data": {"url": f"https://{TOKEN}@hub"}},
            warnings=[TOKEN],
        )
        written = write_report(report, tmp_path).read_text()
        assert TOKEN not in written
        assert "my secret" not in written


class TestThroughput:
    """The window: training steps without the first few."""

    def test_the_first_three_steps_lie_outside_the_window(self) -> None:
        meter = ThroughputMeter()
        for duration_s in (60.0, 5.0, 5.0):
            meter.add(duration_s=duration_s, tokens=999, samples=9)
        for step in range(10):
            meter.add(duration_s=0.5, tokens=100, samples=4, micro_steps=2 + step % 2)
        assert meter.result(world_size=4) == Throughput(
            tokens_per_s=200.0,
            samples_per_s=8.0,
            steps_per_s=2.0,
            window_steps=10,
            window_s=5.0,
            tokens_per_s_per_device=50.0,
            micro_steps_per_step=2.5,
        )

    def test_steps_of_unequal_length_are_weighed_by_their_time(self) -> None:
        meter = ThroughputMeter()
        for duration_s, tokens in ((1.0, 100), (3.0, 700), (4.0, 800)):
            meter.add(duration_s=duration_s, tokens=tokens, samples=2)
        speed = meter.result(world_size=1)
        assert speed.tokens_per_s == pytest.approx(1600 / 8)
        assert speed.samples_per_s == pytest.approx(6 / 8)

    @pytest.mark.parametrize(
        ("steps", "window_steps"),
        [(1, 1), (2, 2), (3, 3), (4, 3), (7, 6), (8, 6), (11, 9), (12, 9), (100, 97)],
    )
    def test_never_more_than_a_quarter_of_the_steps_is_left_out(
        self, steps: int, window_steps: int
    ) -> None:
        meter = ThroughputMeter()
        for _ in range(steps):
            meter.add(duration_s=1.0, tokens=10, samples=1)
        assert meter.result(world_size=1).window_steps == window_steps
        assert meter.result(world_size=1).tokens_per_s == pytest.approx(10)

    def test_steps_with_memory_tracking_do_not_count_for_speed(self) -> None:
        meter = ThroughputMeter()
        for step in range(25):
            followed = step in (1, 20)
            meter.add(
                duration_s=4.0 if followed else 0.5,
                tokens=100,
                samples=4,
                parts_s={"forward": 3.0 if followed else 0.25, "backward": 0.25},
                follows_memory=followed,
            )
        speed = meter.result(world_size=1)
        assert (speed.window_steps, speed.window_s, speed.tokens_per_s) == (21, 10.5, 200.0)
        assert meter.step_times() == StepTimes(forward=0.25, backward=0.25, total=0.5)

    def test_of_two_steps_the_one_without_memory_tracking_gives_the_speed(self) -> None:
        meter = ThroughputMeter()
        for duration_s in (1.0, 5.0):
            meter.add(duration_s=duration_s, tokens=10, samples=1, follows_memory=duration_s == 5.0)
        assert meter.result(world_size=1).window_steps == 1
        assert meter.result(world_size=1).tokens_per_s == 10

    def test_steps_that_compiled_do_not_count_for_speed_and_their_graphs_are_counted(self) -> None:
        meter = ThroughputMeter()
        for step in range(20):
            graphs = {0: 5, 12: 4}.get(step, 0)
            meter.add(
                duration_s=30.0 if graphs else 0.5, tokens=100, samples=4, compiled_graphs=graphs
            )
        speed = meter.result(world_size=1)
        assert (speed.window_steps, speed.tokens_per_s, speed.compiled_graphs) == (16, 200.0, 9)

    @pytest.mark.parametrize(("steps", "window_steps"), [(1, 1), (2, 2), (4, 3)])
    def test_where_the_memory_of_all_was_followed_they_are_the_speed(
        self, steps: int, window_steps: int
    ) -> None:
        meter = ThroughputMeter()
        for _ in range(steps):
            meter.add(duration_s=2.0, tokens=10, samples=1, follows_memory=True)
        assert meter.result(world_size=1).window_steps == window_steps
        assert meter.result(world_size=1).tokens_per_s == 5

    def test_before_the_first_step_there_is_no_speed(self) -> None:
        assert ThroughputMeter().result(world_size=1) is None


class TestPeakMemory:
    def test_the_maxima_are_over_the_ranks(self) -> None:
        memory = PeakMemory.of(
            [
                RankMemory(rank=0, allocated_bytes=5, reserved_bytes=9, rss_bytes=1),
                RankMemory(rank=1, allocated_bytes=7, reserved_bytes=8, rss_bytes=3),
            ]
        )
        assert (memory.allocated_bytes, memory.reserved_bytes, memory.rss_bytes) == (7, 9, 3)
        assert memory.host_bytes is None


class TestMachine:
    """Hardware of the run."""

    def test_host_memory_is_read_from_proc(self, tmp_path: Path) -> None:
        status = tmp_path / "status"
        status.write_text(
            "Name:\tpython\nVmHWM:\t  9000 kB\nVmRSS:\t  8000 kB\n"
            "RssAnon:\t  5000 kB\nRssFile:\t  2000 kB\nRssShmem:\t  1000 kB\n"
        )
        assert hardware_module.host_memory(status) == (8000 * 1024, 6000 * 1024, 9000 * 1024)

    def test_host_memory_without_proc_comes_from_the_system(self, tmp_path: Path) -> None:
        without = hardware_module.host_memory(tmp_path / "absent")
        assert without.rss_bytes == pytest.approx(hardware_module.host_memory().rss_bytes, rel=0.2)
        assert without.peak_rss_bytes >= without.rss_bytes

    def test_new_memory_shows(self) -> None:
        before = hardware_module.host_memory().rss_anon_plus_shmem_bytes
        # Not of malloc, which may hand out again what another test has returned.
        with mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
            block.write(os.urandom(len(block)))
            after = hardware_module.host_memory().rss_anon_plus_shmem_bytes
            assert after >= before + len(block) // 2

    def test_the_machine_is_described_without_its_name(self) -> None:
        found = hardware_module.hardware()
        assert found.cpu
        assert found.logical_cores >= 1  # type: ignore[operator]
        assert found.memory_bytes > 0  # type: ignore[operator]
        assert os.uname().nodename not in dataclasses.asdict(found).values()

    def test_without_the_nvidia_library_there_are_no_gpus(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert hardware_module.hardware().gpus == []

    def test_gpus_come_from_nvml(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", TWO_GPUS)
        found = hardware_module.hardware()
        assert found.gpus == [
            InstalledGpu(name="NVIDIA H200", memory_bytes=141 * GIB),
            InstalledGpu(name="NVIDIA GB10", memory_bytes=None),
        ]
        assert (found.driver, found.cuda) == ("580.65", "13.2")

    def test_versions_are_those_installed(self) -> None:
        found = hardware_module.versions()
        assert {"python", "torch", "lightning", "litgpt"} <= set(found)
        assert "deepspeed" not in found or found["deepspeed"]


class NvmlError(Exception):
    """Raised by every call of the library."""


def no_memory_on_the_second(handle: int) -> SimpleNamespace:
    if handle == 1:
        raise NvmlError("Not Supported")
    return SimpleNamespace(total=141 * GIB)


TWO_GPUS = SimpleNamespace(
    NVMLError=NvmlError,
    nvmlInit=lambda: None,
    nvmlShutdown=lambda: None,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetName=lambda handle: [b"NVIDIA H200", "NVIDIA GB10"][handle],
    nvmlDeviceGetMemoryInfo=no_memory_on_the_second,
    nvmlSystemGetDriverVersion=lambda: "580.65",
    nvmlSystemGetCudaDriverVersion_v2=lambda: 13020,
)


class TestTable:
    """The report as a table."""

    def test_micro_batches_of_a_number_of_tokens_show_how_full_they_were(self) -> None:
        assert COMPLETED.resolved and COMPLETED.throughput
        speed = dataclasses.replace(
            COMPLETED.throughput,
            tokens_per_s_per_device=3000.0,
            steps_per_s=0.2,
            micro_steps_per_step=3.75,
        )
        tokens = dataclasses.replace(COMPLETED.resolved, micro_batch_tokens=4096)
        report = dataclasses.replace(COMPLETED, throughput=speed)
        assert "micro-batches" not in text_of(report)
        shown = " ".join(text_of(dataclasses.replace(report, resolved=tokens), width=120).split())
        assert says(shown, "3.75 in a step ... 4,000 tokens ... 4,096")

    def test_a_completed_run_shows_every_measurement(self) -> None:
        shown = " ".join(text_of(COMPLETED, width=120, out_dir=Path("out/run")).split())
        for expected in (
            "ftkit lora on TinyLlama/TinyLlama_v1.1",
            "completed all 3 epochs done",
            "4,505,600 of 1,104,554,048 trained (0.408 %)",
            "4 x NVIDIA A100-SXM4-80GB, fsdp, bf16-mixed, base weights bnb.nf4",
            "300 steps, 3 epochs, 4,800 samples, 1,230,000 tokens",
            "1 h 02 min: set-up 12.3 s, training 58 min, validation 2 min 10 s, saving 4.1 s",
            "12,346 tokens/s (3,086 per device), 48.2 samples/s, MFU 41.2 %, GPU busy 93 %",
            "11.6 s: data 4 ms, forward 3.1 s, backward 7.9 s, optimizer 450 ms, other 100 ms",
            "padding 3.23 % of computed positions",
            "31.0 GiB allocated, 36.0 GiB reserved, 800 MiB host (largest of 4 ranks)",
            "31.0 GiB at its peak (step 41, rank 3): parameters 4.0 GiB",
            "before forward 12.0 GiB, after forward 29.0 GiB",
            "loss 2.4131 -> 1.1023",
            "2.3801 -> 1.2044, best 1.1987, perplexity 3.33",
            "12.5 % -> 81.2 % of 64 answers",
            "ROUGE-L 0.0521 -> 0.913 on 32 answers",
            "rouge_l 1 on 1 answer ",
            "example Name the capital of the country. France",
            "expected Paris",
            r"before The capital\nof the country is",
            "after Paris",
            "train data of 1,610 records: 7 left out (empty output), 3 left out (answer lies",
            "41 cut to max_seq_length",
            "warning the warm-up (100 steps) is a third of the run",
            "result out/run/final",
        ):
            assert expected in shown
        assert "validation data" not in shown

    def test_experts_and_the_loss_of_their_routers_have_a_line_each(self) -> None:
        load = ExpertLoad.of_choices([0, 2], [[30, 70], [45, 55]])
        assert COMPLETED.loss is not None
        loss = dataclasses.replace(COMPLETED.loss, router_aux_loss=1.25)
        report = dataclasses.replace(COMPLETED, expert_load=load, loss=loss)
        shown = " ".join(text_of(report, width=120).split())
        assert (
            "experts 2 in each of 2 layers: 30 % to 70 % of choices (even: 50 %), "
            "layer 0 is the least even"
        ) in shown
        assert says(shown, "router loss 1.2500")

    def test_choices_of_ranks_add_up(self) -> None:
        parts = [
            ExpertLoad.of_choices([1], [[1, 2, 4]]),
            None,
            ExpertLoad.of_choices([1], [[9, 0, 5]]),
        ]
        assert ExpertLoad.of_ranks(parts) == ExpertLoad.of_choices([1], [[10, 2, 9]])
        assert ExpertLoad.of_ranks([None, None]) is None
        assert ExpertLoad.of_choices([], []) is None

    def test_a_run_that_failed_at_once_shows_its_reason_and_nothing_empty(self) -> None:
        shown = text_of(FAILED)
        assert says(shown, "failed ... data.json does not exist")
        assert "None" not in shown
        assert len(shown.splitlines()) == 2

    def test_out_of_memory_shows_how_far_it_came(self) -> None:
        report = dataclasses.replace(
            COMPLETED,
            outcome="out_of_memory",
            exit_reason="rank 2: CUDA out of memory, 2.0 GiB wanted",
            exit_code=3,
            phase="training",
            throughput=None,
            step_s=None,
            tokens=None,
            exact_match=None,
            scores=[],
            examples=[],
            files=Files(log="run.log"),
            loss=Loss(first=2.4131),
            progress=Progress(steps=1, samples=16, epochs=0.01),
        )
        shown = text_of(report)
        assert says(shown, "out of memory ... rank 2 ... 2.0 GiB")
        assert "(during training)" in shown
        assert "1 step, 0.01 epochs, 16 samples  " in shown
        assert "loss           2.4131  " in shown
        assert "throughput" not in shown
        assert "result" not in shown

    def test_a_session_shows_where_it_continued_and_what_it_saved(self) -> None:
        report = dataclasses.replace(
            COMPLETED,
            outcome="stopped",
            exit_reason="100 steps done (--stop_after)",
            phase="saving",
            progress=Progress(steps=300, samples=4800, epochs=3.0),
            tokens=Tokens(real=410_000, label=120_000, padded=0, padding_fraction=0.0),
            resumed=Resumed(
                from_step=200,
                checkpoint="checkpoints/step-00000200",
                strategy="ddp",
                world_size=2,
                changes=["optimizer.lr: 0.001 -> 0.002"],
            ),
            checkpoints=Checkpoints(
                saved=4,
                failed=1,
                last="checkpoints/step-00000300",
                last_bytes=3 * GIB,
                stall_s=Spread(mean=0.25, max=0.5),
                write_s=Spread(mean=4.0, max=6.0),
            ),
        )
        lines = text_of(report, width=160, out_dir=Path("out/run")).splitlines()
        shown = {line[:13].strip(): line[13:].strip() for line in lines}
        assert shown["stopped"] == "100 steps done (--stop_after)"
        assert shown["continued"] == (
            "from step 200, written by ddp on 2 ranks, checkpoints/step-00000200"
        )
        assert shown["trained"] == "300 steps, 3 epochs, 4,800 samples"
        assert shown["this session"] == "100 steps, 410,000 tokens"
        assert shown["checkpoints"] == (
            "4 saved, 1 failed, 3.0 GiB each, training paused for 250 ms (longest 500 ms), "
            "written in 4.0 s (longest 6.0 s)"
        )
        assert shown["changed"] == "optimizer.lr: 0.001 -> 0.002"
        assert shown["checkpoint"] == "out/run/checkpoints/step-00000300"

    def test_a_run_that_ended_before_its_second_validation_shows_no_progress_of_it(self) -> None:
        loss = Loss(first=4.7, last=0.01).with_validation(0, 4.4207)
        sources = {"a.json": Source(samples=3, validation_first=4.25, validation_last=4.25)}
        report = dataclasses.replace(COMPLETED, loss=loss, sources=sources)
        shown = " ".join(text_of(report).split())
        assert "validation 4.4207 before training, perplexity 83.2 " in shown
        assert "3 samples, validation 4.2500 before training" in shown
        loss = loss.with_validation(10, 4.4207)
        report = dataclasses.replace(COMPLETED, loss=loss, sources=sources)
        shown = " ".join(text_of(report).split())
        assert "validation 4.4207 -> 4.4207" in shown and "4.2500 -> 4.2500" in shown

    @pytest.mark.parametrize(
        ("steps", "samples", "text"),
        [(1, 1, "\n1 step of 1 sample ("), (106_125, 32, "\n106,125 steps of 32 samples (")],
    )
    def test_steps_are_counted_in_words(self, steps: int, samples: int, text: str) -> None:
        known = COMPLETED.resolved
        assert known is not None
        resolved = dataclasses.replace(known, total_steps=steps, global_batch_size=samples)
        assert text in summary_text(resolved, "lora")

    def test_sections_with_nothing_in_them_have_no_row(self) -> None:
        report = dataclasses.replace(
            FAILED,
            resolved=Resolved(),
            phases_s=PhaseTimes(),
            step_s=StepTimes(),
            loss=Loss(),
            peak_memory=PeakMemory.of([RankMemory(rank=0)]),
            exact_match=ExactMatch(samples=4),
            files=Files(),
        )
        assert text_of(report).split() == text_of(FAILED).split()

    @pytest.mark.parametrize("width", [20, 80, 200])
    @pytest.mark.parametrize("report", [COMPLETED, FAILED], ids=["completed", "failed"])
    def test_lines_fit_the_width_in_plain_ascii(self, report: Report, width: int) -> None:
        shown = text_of(report, width=width)
        assert shown.isascii() or width < 80
        assert "\x1b" not in shown
        assert max(map(len, shown.splitlines())) <= width

    @pytest.mark.parametrize("width", [60, 80, 200])
    def test_no_number_is_torn_from_its_unit(self, width: int) -> None:
        shown = text_of(COMPLETED, width=width)
        assert re.search(r"\d *\n +(B|[KMG]iB|ms|s)\b", shown) is None
        assert re.search(r"\n +[KMG]iB, *\n", shown) is None

    def test_answers_are_shown_with_the_white_space_that_counts(self) -> None:
        example = AnsweredExample(instruction="a", expected="Take  it", after="\n\n\tTake\nit ")
        report = dataclasses.replace(COMPLETED, examples=[example])
        shown = text_of(report, width=100)
        assert r"Take \sit" in shown and r"\n\n\tTake\nit\s" in shown
        assert marked(r"a\nb") == r"a\\nb", "a backslash is no mark"

    def test_the_media_of_an_example_stand_beside_its_answers(self) -> None:
        media = [
            ShownMedium(
                kind="image",
                name=f"<b>{number}.png",
                size="640 x 480",
                first=1,
                end=301,
                picture=f"data:image/jpeg;base64,{number}",
            )
            for number in range(2)
        ]
        example = AnsweredExample(
            instruction="what", expected="a", before="b", after="a", media=media, further_media=3
        )
        report = dataclasses.replace(COMPLETED, examples=[example])
        shown = text_of(report, width=100)
        for number in range(2):
            assert f"[image <b>{number}.png, 640 x 480, 300 tokens]" in shown
        assert "and 3 more" in shown
        assert "base64" not in shown
        page = report_as_html(report)
        assert re.findall(r'<img src="([^"]*)"', page) == [one.picture for one in media]
        assert "[image &lt;b&gt;1.png, 640 x 480, 300 tokens]" in page
        assert "<b>1.png" not in page

    def test_answers_cannot_write_to_the_terminal(self) -> None:
        report = dataclasses.replace(
            FAILED,
            exit_reason="bad\x1b[2J",
            warnings=["\x1b]0;title\x07 [red]kept[/red]"],
            examples=[AnsweredExample(instruction="a\x1b[31mb", after="\x9b1m" + "x" * 900)],
        )
        shown = text_of(report)
        assert "\x1b" not in shown
        assert "\x9b" not in shown
        assert "[red]kept[/red]" in shown
        assert shown.count("x") < 300


class TestWords:
    """Numbers for people."""

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0, "0 ms"),
            (0.0123, "12 ms"),
            (0.9994, "999 ms"),
            (0.9996, "1.0 s"),
            (3.24, "3.2 s"),
            (59.94, "59.9 s"),
            (59.96, "1 min 00 s"),
            (130, "2 min 10 s"),
            (3480, "58 min"),
            (3599.6, "1 h 00 min"),
            (3720, "1 h 02 min"),
            (360_000, "100 h 00 min"),
        ],
    )
    def test_durations(self, seconds: float, text: str) -> None:
        assert duration_text(seconds) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (-5, "0 s"),
            (59.9, "59 s"),
            (60, "1 min"),
            (3599, "59 min"),
            (3600, "1 h"),
            (47.9 * 3600, "47 h"),
            (48 * 3600, "2 days"),
            (10_000 * 86400, "10,000 days"),
        ],
    )
    def test_ages(self, seconds: float, text: str) -> None:
        assert age_text(seconds) == text

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (12_345, "12 KiB"),
            (400_000, "0.4 MiB"),
            (812 * 2**20, "812 MiB"),
            (GIB - 1, "1.0 GiB"),
            (int(3.2 * GIB), "3.2 GiB"),
            (2000 * GIB, "2,000.0 GiB"),
        ],
    )
    def test_bytes(self, count: int, text: str) -> None:
        assert bytes_text(count) == text

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (12_345.6, "12,346"),
            (99.97, "100"),
            (98.24, "98.2"),
            (3.333, "3.33"),
            (0, "0"),
            (7, "7"),
        ],
    )
    def test_numbers(self, value: float, text: str) -> None:
        assert number_text(value) == text

    @pytest.mark.parametrize(
        ("fraction", "text"), [(0.412, "41.2 %"), (0, "0 %"), (1, "100 %"), (0.004079, "0.408 %")]
    )
    def test_percentages(self, fraction: float, text: str) -> None:
        assert percent_text(fraction) == text

    def test_shortened_text_is_one_line_within_the_limit(self) -> None:
        assert shortened("a\n  b") == "a b"
        assert len(shortened("word " * 100)) <= 240
        assert shortened("word " * 100).endswith(" ...")

    def test_a_long_question_keeps_its_beginning_and_its_end(self) -> None:
        assert shortened_within("a\n  b") == "a b"
        text = shortened_within(f"first {'word ' * 100} last")
        assert text.startswith("first word") and text.endswith("word last")
        assert len(text) <= 240
