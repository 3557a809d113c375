"""`ftkit.preview`: a look at data in a notebook and in a program."""

import json
import re
import sys
from pathlib import Path

import pytest
from looks import look, make_settings, questions, write_records
from messages import key_words

import ftkit
from ftkit.errors import UserError


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    directory = tmp_path_factory.mktemp("preview")
    data = write_records(directory / "records.jsonl", questions(40))
    model = make_settings(directory / "model")
    return {"checkpoint_dir": model, "data": "JSON", "data.path": str(data)}


@pytest.mark.slow
def test_it_has_the_numbers_of_the_command_and_shows_itself(keys: dict[str, object]) -> None:
    seen = ftkit.preview(show=2, **keys)
    expected = look(Path(str(keys["checkpoint_dir"])), Path(str(keys["data.path"])), show=2)
    assert vars(seen) == vars(expected)
    assert seen.sources[0].train.records == 38 and len(seen.samples) == 2
    assert str(seen).startswith("data for model ---")
    assert re.fullmatch(r"<ftkit preview: samples 38, tokens [\d,]+, findings \d+>", repr(seen))
    assert seen._repr_html_().startswith("<div")
    json.dumps(seen.samples[0].ids)


@pytest.mark.slow
def test_recipes_and_keys_are_given_as_to_other_functions(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "recipes/quickstart.yaml"
    seen = ftkit.preview(recipe, show=0, **{"train.max_seq_length": 64})
    assert (seen.base_model, seen.max_seq_length, seen.samples) == ("quickstart", 64, [])


@pytest.mark.slow
def test_bad_input_raises_the_message_of_the_command(keys: dict[str, object]) -> None:
    with pytest.raises(UserError, match=key_words("data.pth ... JSON ... --data.path")):
        ftkit.preview(**keys | {"data.pth": "x"})


@pytest.mark.slow
def test_the_process_itself_loads_no_torch(keys: dict[str, object]) -> None:
    import subprocess

    program = (
        "import ftkit, sys\n"
        f"ftkit.preview(show=0, checkpoint_dir={str(keys['checkpoint_dir'])!r}, data='JSON', "
        f"**{{'data.path': {keys['data.path']!r}}})\n"
        "print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout.splitlines()[-1], ended.stderr) == ("False", "")
