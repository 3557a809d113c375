"""The best checkpoint of a run, among checkpoints that are made by hand."""

from pathlib import Path

from checkpoints import safetensors, save

from ftkit.checkpoint.store import Store, best_checkpoint

SHARD = safetensors(100)


def candidates(
    directory: Path, losses: dict[int, float | None], last_step: int = 99
) -> tuple[Store, int]:
    store = Store(directory)
    for step, loss in losses.items():
        save(
            store,
            step,
            {"shard-00000-of-00001.safetensors": safetensors(100)},
            validation_loss=loss,
        )
    return store, last_step


def nothing(problem: str) -> None:
    raise AssertionError(problem)


def test_the_lowest_loss_is_the_best_and_of_equal_ones_the_newest(tmp_path: Path) -> None:
    own = candidates(tmp_path, {10: 2.0, 20: 1.0, 30: 1.0, 40: 1.5, 50: None})
    assert best_checkpoint([own], None, nothing) == (30, 0)
    assert best_checkpoint([own], (1.0, 60), nothing) == (60, -1), "the state of now"
    assert best_checkpoint([own], (1.2, 60), nothing) == (30, 0)


def test_without_a_validation_there_is_none(tmp_path: Path) -> None:
    own = candidates(tmp_path, {10: None})
    assert best_checkpoint([own], None, nothing) is None


def test_a_loss_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    own = candidates(tmp_path, {10: 2.0})
    for value in (float("nan"), float("inf"), -float("inf")):
        assert best_checkpoint([own], (value, 60), nothing) == (10, 0)


def test_a_branch_counts_earlier_checkpoints_of_its_origin_only(
    tmp_path: Path,
) -> None:
    own = candidates(tmp_path / "branch", {30: 2.0})
    origin = candidates(tmp_path / "origin", {10: 1.0, 20: 1.5, 30: 0.5}, last_step=20)
    assert best_checkpoint([own, origin], None, nothing) == (10, 1)


def test_a_damaged_checkpoint_gives_a_warning_and_the_next_best(tmp_path: Path) -> None:
    own = candidates(tmp_path, {10: 2.0, 20: 1.0})
    (shard,) = Store(tmp_path).path(20).glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    told: list[str] = []
    assert best_checkpoint([own], None, told.append) == (10, 0)
    (line,) = told
    assert "cannot be used" in line and str(shard) in line
