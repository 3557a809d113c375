"""Network interfaces: what is refused before a run, and what is said where nothing is reached."""

import socket
from pathlib import Path

import pytest
from command import command_environment, command_line
from messages import says
from runs import TIMEOUT_S, command_of, start

from ftkit.errors import UserError
from ftkit.extensions.hosts.connections import reached_within
from ftkit.launch.interfaces import GLOO, NCCL, check_interfaces


@pytest.mark.parametrize(
    ("communication", "variable", "value", "finds"),
    [
        ("nccl", NCCL, "lo", True),
        ("nccl", NCCL, "l", True),  # the beginning of a name is enough
        ("nccl", NCCL, "eth9,l", True),
        ("nccl", NCCL, "=l", False),
        ("nccl", NCCL, "=lo", True),
        ("nccl", NCCL, "^eth9", True),
        ("nccl", NCCL, "eth9", False),
        ("nccl", GLOO, "l", False),  # gloo wants it whole, beside nccl too
        ("gloo", GLOO, "eth9", False),
        ("gloo", GLOO, "lo", True),
        ("gloo", NCCL, "eth9", True),  # nobody reads it
        (None, GLOO, "eth9", True),
    ],
)
def test_a_missing_interface_is_refused_by_the_name_of_its_variable(
    communication: str | None,
    variable: str,
    value: str,
    finds: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    if finds:
        check_interfaces(communication)
        return
    with pytest.raises(UserError) as refused:
        check_interfaces(communication)
    assert str(refused.value).startswith(f"${variable} is {value}, but {socket.gethostname()} has ")
    assert "There are: lo (127.0.0.1" in str(refused.value)


def test_a_wait_is_reported_once_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ftkit.extensions.hosts.connections._CONNECT_S", 0)
    monkeypatch.setattr("ftkit.extensions.hosts.connections._BETWEEN_TRIES_S", 0)
    monkeypatch.setattr(
        "ftkit.extensions.hosts.connections._reason_not_reached", lambda *_: "no answer"
    )
    reasons: list[str] = []
    assert reached_within(0.1, "10.0.0.1", 29500, reasons.append) == "no answer"
    assert reasons == ["no answer"]


def test_a_process_that_does_not_reach_rank_0_reports_the_address_in_one_line(
    common: list[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    variables = {
        "TORCHELASTIC_RUN_ID": "run",
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    impatient = "from ftkit.extensions.hosts import torchrun\ntorchrun.CONNECT_S = 1"
    line = command_line(*command_of(tmp_path / "out", common), before=impatient)
    process = start(line, tmp_path, command_environment() | variables)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("ftkit: ") and err.count("\n") == 1, err
    assert says(err, f"127.0.0.1:{port} ... {socket.gethostname()} ... 1 s (")
    for name in ("Connection refused", "MASTER_ADDR", f"${GLOO}", f"${NCCL}"):
        assert name in err
    assert list(tmp_path.iterdir()) == []
