"""Room on the disk for checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saved_runs import recipe

from ftkit.checkpoint.store import check_disk
from ftkit.errors import UserError
from ftkit.utils.console.formatting import bytes_text

GIB = 2**30


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the free space, in GiB."""

    def set_free(gib: float) -> None:
        usage = type("Usage", (), {"free": int(gib * GIB)})()
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)

    return set_free


@pytest.mark.parametrize(
    ("free", "keys", "existing", "left", "fits"),
    [
        (8, {}, 0, 9, True),
        (7.9, {}, 0, 9, False),
        (10, {"checkpoint__keep_best": 1}, 0, 9, True),
        (9, {"checkpoint__keep_best": 1}, 0, 9, False),
        (4, {"checkpoint__keep_last": 1}, 0, 9, True),
        (2, {}, 6 * GIB, 9, True),
        (0, {}, 100 * GIB, 9, True),
        (2, {"checkpoint__keep_last": 1000}, 6 * GIB, 1, True),  # the last step is all to come
        (1.9, {"checkpoint__keep_last": 1000}, 6 * GIB, 1, False),
    ],
)
def test_the_disk_must_hold_the_kept_checkpoints_and_one_more(
    out: Path,
    disk: Callable[[float], None],
    free: float,
    keys: dict[str, Any],
    existing: int,
    left: int,
    fits: bool,
) -> None:
    disk(free)
    if fits:
        check_disk(out, 2 * GIB, recipe(out, **keys).checkpoint, existing, steps_left=left)
        return
    with pytest.raises(UserError) as error:
        check_disk(out, 2 * GIB, recipe(out, **keys).checkpoint, existing, steps_left=left)
    message = str(error.value)
    assert f"has {bytes_text(int(free * GIB))} free" in message and "x 2.0 GiB" in message
    assert "Try --checkpoint.keep_last 1" in message and "another --out_dir" in message


def test_a_disk_too_small_for_one_needs_another(out: Path, disk: Callable[[float], None]) -> None:
    disk(1)
    with pytest.raises(UserError, match=r"need 4\.0 GiB .* Try another --out_dir, or --checkp"):
        check_disk(out, 2 * GIB, recipe(out, checkpoint__keep_last=1).checkpoint, steps_left=9)


def test_small_sizes_are_shown_exactly(out: Path, disk: Callable[[float], None]) -> None:
    disk(2**-10)
    with pytest.raises(UserError) as error:
        check_disk(out, 600 * 2**10, recipe(out).checkpoint, steps_left=9)
    said = (
        "need 2.3 MiB (4 x 0.6 MiB, for checkpoint.keep_last 3 and the one that is being written)"
    )
    assert f"{said}, but the disk of {out} has 1.0 MiB free." in str(error.value)
