"""ftkit watch --serve: runs in a browser, for those who have the link, and nothing else."""

import dataclasses
import errno
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import CHROMIUM, Page, browser
from checkpoints import save
from command import command_environment, command_line
from compared_runs import at_work, make_run, note_in_ranks, with_terms
from messages import key_words, says

from ftkit.checkpoint.store import Store
from ftkit.cli.app import run
from ftkit.data.records.media import ShownMedium
from ftkit.errors import UserError
from ftkit.extensions.watch.live_page import PageServer, RunSnapshots, thinned
from ftkit.runs.checkpoints import CheckpointEntry, entry_of
from ftkit.runs.report.answers import AnsweredExample
from ftkit.runs.report.metrics import ValidationWriter
from ftkit.runs.report.report import write_report
from ftkit.runs.system_metrics import SystemWriter

TOKEN = "0f" * 24
EVIL = "<img src=x onerror=window.evil=1><script>window.evil=1</script>"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Directory of the runs."""
    path = tmp_path / "out"
    path.mkdir()
    return path


@pytest.fixture
def server(out: Path) -> Iterator[PageServer]:
    with PageServer(RunSnapshots(out, copy_at=None), 0, TOKEN, 0.2) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def answer(
    server: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[HTTPResponse, str]:
    """Response of the server and its body; Host is the right one unless it is given."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def cookie(server: PageServer) -> str:
    return f"ftkit-{server.server_port}={TOKEN}"


def fetched(server: PageServer, path: str) -> Any:
    response, text = answer(server, path, Cookie=cookie(server))
    assert response.status == 200, text
    return json.loads(text)


class TestWhoMayLook:
    """This machine alone, with the token; nobody may change anything."""

    def test_the_link_gives_a_cookie_that_pages_elsewhere_cannot_use_or_read(
        self, server: PageServer
    ) -> None:
        response, text = answer(server, f"/?token={TOKEN}")
        assert (response.status, TOKEN in text) == (200, False)
        assert response.headers["Set-Cookie"] == (
            f"{cookie(server)}; HttpOnly; SameSite=Strict; Path=/"
        )
        assert answer(server, "/", Cookie=cookie(server))[0].headers["Set-Cookie"] is None

    @pytest.mark.parametrize("path", ["/", "/runs.json", "/run.json?run=a", "/page.js", "/x"])
    @pytest.mark.parametrize("wrong", ["", "0e" * 24, "é", TOKEN[:-1]])
    def test_without_the_token_nothing_is_shown(
        self, server: PageServer, out: Path, path: str, wrong: str
    ) -> None:
        make_run(out / "a")
        sent = f"ftkit-{server.server_port}={wrong}".encode().decode("latin-1")
        response, text = answer(server, path, Cookie=sent)
        assert response.status == 403
        assert says(text, "ftkit watch ... token")

    def test_a_wrong_token_in_the_link_gives_no_cookie(self, server: PageServer) -> None:
        response, _ = answer(server, f"/?token={TOKEN[:-1]}")
        assert (response.status, response.headers["Set-Cookie"]) == (403, None)

    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost:1", "[::1]:80", ""])
    def test_a_name_that_was_made_to_lead_here_is_refused(
        self, server: PageServer, host: str
    ) -> None:
        response, _ = answer(server, "/runs.json", Cookie=cookie(server), Host=host)
        assert response.status == 403

    @pytest.mark.parametrize(
        "more", ["Host: evil.example", "Content-Length: 3", "Transfer-Encoding: chunked"]
    )
    def test_bytes_after_a_request_are_not_another_request(
        self, server: PageServer, more: str
    ) -> None:
        port = server.server_port
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            sent = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie(server)}\r\n"
            connection.sendall(f"{sent}{more}\r\n\r\nabc{sent}\r\n".encode())
            answers = connection.makefile("rb").read()
        assert re.findall(rb"HTTP/1.1 (\d+)", answers) in ([b"400"], [b"403"])

    def test_silent_clients_do_not_block_others(self, server: PageServer) -> None:
        silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(30)]
        assert answer(server, "/", Cookie=cookie(server))[0].status == 200
        for connection in silent:
            connection.close()

    def test_localhost_is_this_machine(self, server: PageServer) -> None:
        host = f"localhost:{server.server_port}"
        assert answer(server, "/", Cookie=cookie(server), Host=host)[0].status == 200

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
    def test_a_page_is_only_looked_at(self, server: PageServer, method: str) -> None:
        assert answer(server, "/runs.json", method, Cookie=cookie(server))[0].status == 405

    def test_head_has_no_content(self, server: PageServer) -> None:
        response, text = answer(server, "/", "HEAD", Cookie=cookie(server))
        assert (response.status, text) == (200, "")
        assert int(response.headers["Content-Length"]) > 100

    @pytest.mark.parametrize("path", ["/../recipe.yaml", "/a/report.json", "//etc/passwd", "/page"])
    def test_no_request_names_a_file(self, server: PageServer, out: Path, path: str) -> None:
        make_run(out / "a")
        assert answer(server, path, Cookie=cookie(server))[0].status == 404
        name = f"/run.json?run={path}"
        assert answer(server, name, Cookie=cookie(server))[0].status == 404

    def test_nothing_foreign_is_loaded_and_nothing_is_kept(self, server: PageServer) -> None:
        headers = answer(server, "/", Cookie=cookie(server))[0].headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "http" not in policy and "frame-ancestors 'none'" in policy
        assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")

    def test_it_listens_on_the_loopback_address_alone(self, server: PageServer) -> None:
        assert server.socket.getsockname()[0] == "127.0.0.1"


class TestWhatIsTold:
    """Numbers and texts of runs."""

    def test_an_empty_directory_has_no_runs_until_one_begins(
        self, server: PageServer, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ftkit.extensions.watch.live_page._LOOK_INTERVAL_S", 0.0)
        assert fetched(server, "/runs.json") == {
            "runs": [], "left_out": [], "comparison": "", "losses": [],
        }  # fmt: skip
        make_run(out / "a", "failed", steps=5)
        (found,) = fetched(server, "/runs.json")["runs"]
        assert (found["name"], found["state"], found["steps"]) == ("a", "failed", 5)

    def test_a_run_is_shown_with_curves_memory_checkpoints_and_report(
        self, server: PageServer, out: Path
    ) -> None:
        make_run(out / "a", final_loss=0.5)
        make_run(out / "b", "failed")
        save(Store(out / "a" / "checkpoints"), 10, saved_at="2026-01-02T03:04:50Z")
        with SystemWriter(out / "a/system.csv", ("device0_power_w",), None) as rows:
            rows.write(1, 1000.0, {"device0_power_w": 250.0})
            rows.write(2, 1060.0, {"device0_power_w": 300.0})
        found = fetched(server, "/run.json?run=a")
        charts = {chart["title"]: chart for chart in found["charts"]}
        assert charts["Loss"]["unit"] == "nats per label token"
        training, validation = charts["Loss"]["series"]
        assert [x for x, _ in training["points"]] == list(range(1, 41))
        assert [x for x, _ in validation["points"]] == [10, 20, 30, 40]
        assert charts["Power"]["series"] == [
            {"name": "device0", "points": [[0.0, 250.0], [1.0, 300.0]]}
        ]
        memory = {part["name"]: part for part in found["memory"]}
        assert sum(part["measured"][0] for part in memory.values()) == 11 * 2**30
        assert memory["gradients"]["measured"] == memory["gradients"]["predicted"] == [
            2**30, "1.0 GiB",
        ]  # fmt: skip
        assert memory["reserved, not used"]["predicted"] == [0, ""]
        assert ">10</td>" in found["checkpoints"] and "all 2 epochs done" in found["report"]
        assert "data.json does not exist" in fetched(server, "/run.json?run=b")["report"]
        both = fetched(server, "/runs.json")
        assert [one["name"] for one in both["losses"]] == ["a", "b"]
        assert both["comparison"].count("<tr") == 3

    def test_a_run_at_work_shows_what_the_memory_of_its_measured_steps_was(
        self, server: PageServer, out: Path
    ) -> None:
        report = make_run(out / "a", "failed", steps=30, write=False)
        note_in_ranks(out / "a", dataclasses.replace(report, peak_memory=None))
        with at_work(out / "a"):
            found = fetched(server, "/run.json?run=a")
        assert found["state"] == "running"
        memory = {part["name"]: part["measured"] for part in found["memory"]}
        assert memory["gradients"] == [2**30, "1.0 GiB"]
        assert sum(size for size, _ in memory.values()) == 10 * 2**30

    def test_the_example_of_a_run_at_work_is_shown_with_its_picture(
        self, server: PageServer, out: Path
    ) -> None:
        picture = ShownMedium(
            kind="image", name="a.png", size="2 x 2", first=0, end=4, picture="data:image/png,a"
        )
        example = AnsweredExample(instruction="<image>what", before="no idea", media=[picture])
        report = make_run(out / "a", "failed", steps=30, write=False)
        note_in_ranks(out / "a", dataclasses.replace(report, examples=[example]))
        with at_work(out / "a"):
            shown = fetched(server, "/run.json?run=a")["example"]
        assert '<img src="data:image/png,a"' in shown
        assert "[image a.png, 2 x 2, 4 tokens]" in shown and "no idea" in shown
        write_report(dataclasses.replace(report, examples=[example]), out / "a")
        found = fetched(server, "/run.json?run=a")
        assert not found["example"], "an ended run has it in its report"
        assert '<img src="data:image/png,a"' in found["report"]

    def test_a_set_to_validate_on_has_a_curve_beside_the_validation(
        self, server: PageServer, out: Path
    ) -> None:
        make_run(out / "a")
        with ValidationWriter(out / "a/validation.csv", sources=["code"]) as rows:
            rows.write(step=10, samples=10, val_loss=2.0, of_sources={})
            rows.write(step=20, samples=20, val_loss=1.0, of_sources={"code": 0.5})
        (chart,) = (c for c in fetched(server, "/run.json?run=a")["charts"] if c["title"] == "Loss")
        assert chart["series"][1:] == [
            {"name": "validation", "noisy": False, "points": [[10.0, 2.0], [20.0, 1.0]]},
            {"name": "code", "noisy": False, "points": [[20.0, 0.5]]},
        ]

    def test_a_run_that_was_killed_and_one_that_has_just_begun_are_shown(
        self, server: PageServer, out: Path
    ) -> None:
        note_in_ranks(out / "killed", make_run(out / "killed", "failed", steps=20, write=False))
        (out / "new" / ".run").mkdir(parents=True)
        with at_work(out / "new"):
            found = fetched(server, "/runs.json")
        assert [(one["name"], one["state"]) for one in found["runs"]] == [("killed", "killed")]
        assert found["left_out"] == [f"{out / 'new'} has not measured anything yet"]

    def test_an_unreadable_directory_is_an_error_on_the_page(
        self, server: PageServer, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def steps(store: Store) -> list[int]:  # to root, everything is readable
            raise PermissionError(errno.EACCES, "Permission denied", str(store.directory))

        make_run(out / "a")
        monkeypatch.setattr(Store, "steps", steps)
        response, text = answer(server, "/run.json?run=a", Cookie=cookie(server))
        assert response.status == 500
        assert "Permission denied" in text and "a/checkpoints" in text

    def test_long_curves_are_thinned_and_numbers_that_are_none_left_out(self) -> None:
        points = [(float(i), 1.0 if i % 2 else 3.0) for i in range(4000)]
        found = thinned([*points, (4000.0, float("nan")), (4001.0, float("inf"))])
        assert len(found) == 400
        assert {tuple(values) for _, *values in found} == {(2.0, 1.0, 3.0)}  # mean, least, most
        assert thinned(points[:5]) == points[:5]

    def test_only_new_rows_of_a_running_run_are_read(
        self, server: PageServer, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ftkit.extensions.watch.live_page._LOOK_INTERVAL_S", 0.0)
        make_run(out / "a", "failed")
        make_run(out / "b")
        read: list[str] = []

        def number(column: str, cell: str) -> float:
            read.append(column)
            return float(cell or 0)

        monkeypatch.setattr("ftkit.runs.report.metrics._number", number)
        fetched(server, "/runs.json")
        assert len(read) == 2 * 40 * 7
        fetched(server, "/runs.json")
        with (out / "a/metrics.csv").open("a") as rows:
            rows.write("41,656,0.25,0.1,,2000,4000.0\n")
        a, b = fetched(server, "/runs.json")["losses"]
        assert len(read) == (2 * 40 + 1) * 7
        assert (a["points"][-1], b["points"][-1][0]) == ([41.0, 0.25], 40.0)

    def test_a_checkpoint_is_read_once_while_it_is_there(
        self, server: PageServer, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_run(out / "a")
        store = Store(out / "a" / "checkpoints")
        read: list[str] = []

        def entry(path: Path) -> CheckpointEntry:
            read.append(path.name)
            return entry_of(path)

        monkeypatch.setattr("ftkit.extensions.watch.live_page.entry_of", entry)
        save(store, 10)
        save(store, 20)
        for _ in range(2):
            assert fetched(server, "/run.json?run=a")["checkpoints"].count("<tr") == 3
        assert sorted(read) == [store.path(10).name, store.path(20).name]
        shutil.rmtree(store.path(20))
        assert fetched(server, "/run.json?run=a")["checkpoints"].count("<tr") == 2
        save(store, 20)
        fetched(server, "/run.json?run=a")
        assert read[2:] == [store.path(20).name]

    def test_of_many_runs_those_are_drawn_that_began_last(
        self, server: PageServer, out: Path
    ) -> None:
        for i in range(12):
            report = make_run(out / f"{i:02}", write=False)
            began = f"2026-01-{i + 1:02}T00:00:00Z"
            write_report(dataclasses.replace(report, started_at=began), out / f"{i:02}")
        found = fetched(server, "/runs.json")
        assert len(found["runs"]) == 12
        assert [one["name"] for one in found["losses"]] == [f"{i:02}" for i in range(2, 12)]

    def test_hours_of_samples_have_an_axis_in_hours(self, server: PageServer, out: Path) -> None:
        make_run(out / "a")
        with SystemWriter(out / "a/system.csv", ("host_memory_bytes",), None) as rows:
            for hour in range(5):
                rows.write(1, 1e9 + 3600 * hour, {"host_memory_bytes": 2.0**30})
        (chart,) = (
            c for c in fetched(server, "/run.json?run=a")["charts"] if c["title"] == "Memory"
        )
        assert chart["x"] == "hours"
        assert chart["series"][0]["points"] == [[float(hour), 1.0] for hour in range(5)]


class TestCommand:
    """The command around it."""

    def test_it_prints_a_link_and_ctrl_c_ends_it(self, out: Path) -> None:
        make_run(out / "a")
        with subprocess.Popen(
            command_line("watch", out, "--serve"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=command_environment(),
        ) as process:  # fmt: skip
            assert process.stdout is not None
            link = process.stdout.readline()
            found = re.match(
                r"http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{48}) shows (.+)\. ", link
            )
            assert found is not None, link
            connection = HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
            connection.request("GET", f"/?token={found[2]}")
            assert connection.getresponse().status == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert "Traceback" not in process.stdout.read()

    def test_a_port_in_use_is_one_message(self, out: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(UserError) as error:
                run(["watch", str(out), "--serve", str(port)])
        assert says(str(error.value), f"--serve is {port} ... Address already in use ... --serve 0")

    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            (["nowhere", "--serve", "0"], "nowhere is not a directory."),
            ([".", "--serve", "0", "--once"], "Leave one of the two out"),
            ([".", "--serve", "web"], "--serve is 'web' ... whole number"),
        ],
    )
    def test_a_page_that_cannot_be_served_is_refused(self, argv: list[str], said: str) -> None:
        with pytest.raises(UserError, match=key_words(said)):
            run(["watch", *argv])


@contextmanager
def watching(out: Path, port: int | None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the link that it prints."""
    with subprocess.Popen(
        command_line("watch", out, "--serve", port, "--interval", "0.2s"),
        stdout=subprocess.PIPE, text=True, env=command_environment(),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()[0]
        finally:
            process.kill()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
class TestInABrowser:
    """The page itself."""

    @pytest.fixture
    def page(self, tmp_path: Path, server: PageServer) -> Iterator[Page]:
        with browser(tmp_path / "profile") as opened:
            opened.open(f"http://127.0.0.1:{server.server_port}/?token={TOKEN}")
            yield opened

    def test_a_run_that_trains_is_followed_and_its_end_is_shown(
        self, page: Page, server: PageServer, out: Path
    ) -> None:
        page.wait_for("document.body.innerText.includes('There is no run in')")
        assert page.value("location.search + document.cookie") == ""
        report = make_run(out / "a", "failed", steps=10, write=False)
        note_in_ranks(out / "a", report)
        with at_work(out / "a"):
            page.wait_for("document.querySelectorAll('svg polyline.curve').length >= 3")
            label = "document.querySelector('svg').getAttribute('aria-label')"
            assert page.value(label).startswith("Loss by step: training from 2.221 to ")
            page.wait_for("document.querySelector('.legend').innerText.includes('(step 10)')")
            with (out / "a/metrics.csv").open("a") as rows:
                rows.write("11,176,0.25,0.1,,2000,4000.0\n")
            page.wait_for("document.querySelector('.legend').innerText.includes('0.25 (step 11)')")
            assert page.value("document.body.innerText.includes('running')")
        write_report(dataclasses.replace(report, exit_reason=EVIL), out / "a")
        for path in sorted((out / "a/.run").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        page.wait_for(f"document.body.innerText.includes({json.dumps(EVIL)})")

    def test_text_of_runs_is_text(self, page: Page, server: PageServer, out: Path) -> None:
        for name in ("a<img src=x onerror=window.evil=1>", "b"):
            report = make_run(out / name, checkpoint_dir=EVIL, optimizer__lr=EVIL)
            changed = dataclasses.replace(report, exit_reason=EVIL, warnings=[EVIL])
            write_report(changed, out / name)
        header = "step,samples,loss,lr,grad_norm,tokens,tokens_per_s,samples/"
        (out / "b/metrics.csv").write_text(f"{header}{EVIL}\n1,2,3.0,0.1,,5,6,7\n")
        (out / "b/system.csv").write_text(f"step,time_s,{EVIL}_bytes\n1,1,1\n2,2,2\n")
        page.wait_for("document.querySelectorAll('nav a').length == 3")
        page.wait_for("!!document.querySelector('section.comparison')")
        page.value("location.hash = 'b'")
        page.wait_for("document.body.innerText.includes('Report')")
        page.wait_for("document.querySelector('.legend').innerText.includes('(step 1)')")
        assert EVIL in page.value("document.body.innerText")
        assert page.value("document.querySelectorAll('img, main script').length") == 0
        assert page.value("window.evil") is None

    @pytest.mark.parametrize("width", [1400, 400])
    def test_everything_fits_the_window_and_values_show_under_the_pointer(
        self, page: Page, server: PageServer, out: Path, width: int
    ) -> None:
        page.resize(width, dark=width == 400)
        make_run(out / "a")
        page.wait_for("document.querySelectorAll('svg polyline.curve').length >= 3")
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
        page.wait_for(
            "[...document.querySelectorAll('svg')].every(picture => Math.abs("
            "picture.viewBox.baseVal.width - picture.getBoundingClientRect().width) < 3)"
        )
        page.value(
            "{const box = document.querySelector('svg').getBoundingClientRect();"
            "document.querySelector('svg').dispatchEvent(new PointerEvent('pointermove',"
            "{clientX: box.left + box.width / 2, clientY: box.top + 50}))}"
        )
        said = page.wait_for("document.querySelector('.legend').innerText")
        step = re.search(r"\(step (\d+)\)", said)
        assert step is not None and 15 < int(step[1]) < 26, said

    def test_runs_of_different_models_are_not_drawn_on_one_scale(
        self, page: Page, server: PageServer, out: Path
    ) -> None:
        for name, model in (("a", "small"), ("b", "small"), ("c", "large")):
            make_run(out / name, checkpoint_dir=model)
        page.wait_for("document.querySelectorAll('svg').length == 2")
        heads = "[...document.querySelectorAll('main .head h2')].map(head => head.textContent)"
        assert page.value(heads) == ["Training loss of small", "Training loss of large"]
        curves = (
            "[...document.querySelectorAll('svg')]"
            ".map(picture => picture.querySelectorAll('.curve').length)"
        )
        assert page.value(curves) == [2, 1]

    def test_results_of_a_comparison_are_seen_without_scrolling(
        self, page: Page, server: PageServer, out: Path
    ) -> None:
        page.resize(1200)
        for name in ("first-run-of-pairs", "second-run-of-pairs"):
            with_terms(make_run(out / name), out / name)
        page.wait_for("!!document.querySelector('section.comparison th')")
        ends = page.value(
            "Object.fromEntries([...document.querySelectorAll('section.comparison th')]"
            ".map(head => [head.textContent, head.getBoundingClientRect().right]))"
        )
        assert {"time", "tokens/s", "peak memory"} <= ends.keys()
        assert max(ends[label] for label in ("time", "tokens/s", "peak memory")) < 1200
        table = "document.querySelector('section.comparison table').parentElement"
        # What does not fit is behind it, and can be scrolled to.
        assert page.value(f"{table}.scrollWidth > {table}.clientWidth")

    def test_losses_may_be_logarithmic_smoothed_and_taken_out(
        self, page: Page, server: PageServer, out: Path
    ) -> None:
        make_run(out / "a")
        legend = "document.querySelector('.legend').innerText"
        page.wait_for(f"{legend}.includes('training 0.505 (step 40)')")
        labels = (
            "[...document.querySelector('svg').querySelectorAll('text')].map(t => t.textContent)"
        )
        assert {"0.5", "1.5"} <= set(page.value(labels))
        page.value("document.getElementById('log').click()")
        page.wait_for(f"!{labels}.includes('1.5')")
        assert {"0.5", "1", "2"} <= set(page.value(labels))
        page.value(
            "{const one = document.getElementById('smoothing'); one.value = 0.9;"
            "one.dispatchEvent(new Event('input'))}"
        )
        # Each value counts 0.9 as much as the one after it.
        losses = [0.5 + 2 * math.exp(-6 * step / 40) for step in range(1, 41)]
        weights = [0.9 ** (40 - step) for step in range(1, 41)]
        mean = sum(w * v for w, v in zip(weights, losses, strict=True)) / sum(weights)
        page.wait_for(f"{legend}.includes('training 0.505, smoothed {mean:.4g} (step 40)')")
        assert page.value(f"{legend}.includes('validation 0.605 (step 40)')")
        page.value("document.querySelector('.legend button').click()")
        curves = "document.querySelector('svg').querySelectorAll('polyline').length"
        assert page.value(curves) == 1
        pressed = "document.querySelector('.legend button').getAttribute('aria-pressed')"
        assert page.value(pressed) == "false"
        page.value("document.querySelector('.legend button').click()")
        assert page.value(curves) == 3  # raw, smoothed, and the validation

    def test_a_run_that_is_removed_is_shown_no_more(
        self, page: Page, server: PageServer, out: Path
    ) -> None:
        for name in ("a", "b", "c %"):
            make_run(out / name)
        page.wait_for("document.querySelectorAll('nav a').length == 4")
        page.value("location.hash = '%'")  # no address
        page.value("location.hash = 'c%20%25'")
        page.wait_for("document.title.startsWith('c % - ')")
        shutil.rmtree(out / "c %")
        page.wait_for("!!document.querySelector('section.comparison')")
        assert page.value("document.querySelectorAll('nav a').length") == 3

    def test_a_killed_command_is_noticed_and_another_shows_the_page_again(
        self, page: Page, out: Path
    ) -> None:
        make_run(out / "a")
        said = "document.getElementById('connection').innerText"
        with watching(out, 0) as (process, link):
            page.open(link)
            page.wait_for(f"{said}.startsWith('looked at')")
            process.kill()
            page.wait_for(f"{said}.startsWith('ftkit watch does not answer')")
            assert page.value("document.querySelectorAll('svg').length") == 3  # what it last said
        port = urlsplit(link).port
        with watching(out, port) as (_, link):
            page.wait_for(f"{said}.includes('Open the link that ftkit watch has printed')")
            page.open(link)
            page.wait_for(f"{said}.startsWith('looked at')")
