"""Plans in a notebook."""

import pytest
from messages import key_words

from ftkit.errors import UserError
from ftkit.extensions.notebook import plans

MODEL = "random:pythia-14m"


@pytest.mark.slow
def test_in_a_notebook_a_plan_shows_itself_alone_and_among_others() -> None:
    keys = {"checkpoint_dir": MODEL, "train.max_seq_length": 64}
    found = plans.plan(command="finetune_full", gpu="t4", name="<b2>", **keys)
    assert found.fits
    alone, together = (shown._repr_html_() for shown in (found, plans.Plans([found, found])))
    assert f"plan: full on {MODEL}" in alone and "fits" in alone
    assert together.count("&lt;b2&gt;") == 2 and "<b2>" not in together
    with pytest.raises(UserError, match=key_words("train.max_stepz")):
        plans.plan(**keys, **{"train.max_stepz": 1})
    with pytest.raises(UserError, match=key_words("command is 'full' ... finetune")):
        plans.plan(command="full", **keys)
    assert plans.plan(**keys).plan.recipe.method == "lora"
