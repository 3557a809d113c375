"""Models that give sequences scores, or vectors: a language model with a new output layer, or none.

Files are those of transformers' AutoModelForSequenceClassification, whose scores are those of the
last token of a sequence that is not padding; with vectors, those of AutoModel.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD, SCORE
from ftkit.models.meta_device import on_meta_device
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.model_files import TOKENIZER_CONFIG
from ftkit.recipe.objectives import ScoreLabels

_PADDING = ("pad_token", "unk_token", "bos_token")
"""Keys of tokens that may stand for padding, the first best."""


def as_scored(base: BaseModel, scores: ScoreLabels) -> BaseModel:
    """Return a model whose output layer gives scores; one that has them keeps it.

    Raises:
        UserError: transformers has no such model, or it gives other scores.
    """
    if (own := base.architecture.scores) is not None:
        if own == scores:
            return base
        # One score is learned on, whatever it has meant, and so is a vector, wherever it was.
        if len(own.names) == len(scores.names) <= 1:
            return replace(base, architecture=base.architecture.with_scores(scores))
        raise UserError(
            f"checkpoint_dir {base.name} is {own.noun} whose scores are {_listed(own)}, but "
            f"those of the objective are {_listed(scores)}. Choose the model that it was made of, "
            f"or an objective with its scores: {json.dumps(own.objective)}."
        )
    architecture = base.architecture.with_scores(scores)
    found = replace(base, architecture=architecture, tied=not scores.names, source=base)
    name = architecture.class_name
    if not name or base.architecture.rest_shapes or not _has_our_names(found, name):
        raise UserError(
            f"checkpoint_dir {base.name}: transformers has no model of this architecture "
            f"({base.architecture.class_name or base.architecture.name}) that gives sequences "
            f"{'scores' if scores.names else 'vectors'}, so {scores.noun} could not be saved. "
            "Choose another model."
        )
    return found


def _listed(scores: ScoreLabels) -> str:
    first = ", ".join(scores.names[:5])
    return f"{first} and {len(scores.names) - 5} more" if len(scores.names) > 5 else first


def _has_our_names(base: BaseModel, class_name: str) -> bool:
    """Return whether a class of transformers has the parameters of a model with scores."""
    import transformers

    settings = base.settings or base.architecture.settings_in("hf")
    naming = base.architecture.naming_in("hf")
    if settings is None or naming is None:
        return False
    fields = {key: value for key, value in settings.items() if key != "auto_map"}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    scores = base.architecture.scores
    assert scores is not None
    if scores.names:
        config.num_labels = len(scores.names)
    with on_meta_device():
        model = getattr(transformers, class_name)(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours = base.architecture.parameter_shapes(tied=False)
    # Others have further layers below their scores, or call them classifier.
    return shapes.get(f"{SCORE}.weight") == ours.get(HEAD) and shapes.keys() == {
        naming.stored_in(name)[0] for name in ours
    }


def padding_token(base: BaseModel, stop_ids: Collection[int]) -> str:
    """Choose a token for padding that no sequence ends with.

    Transformers takes the score of the last token that is not padding. Where padding is the end
    token, as in many tokenizers, that would be the token before the end.

    Args:
        base: with its tokenizer.
        stop_ids: tokens that end answers.
    """
    tokenizer = base.tokenizer
    ends = {*stop_ids, tokenizer.eos_id}
    named = [tokenizer.special_tokens.get(key) for key in _PADDING]
    for text in (*named, *tokenizer.added_tokens):
        known = None if text is None else tokenizer.token_id(text)
        if text is not None and known is not None and known not in ends:
            return text
    # Any other: answers end with an end token. The last ones are the rarest.
    size = base.architecture.untied_shapes[base.architecture.embedding][0]
    for token in range(size - 1, -1, -1):
        text = tokenizer.token_text(token) if token not in ends else None
        if text is not None and tokenizer.token_id(text) == token:
            return text
    raise UserError(f"The tokenizer of {base.name} has no token for padding. Add a pad_token.")


def tokenizer_settings(
    base: BaseModel, own: Mapping[str, bytes], stop_ids: Collection[int]
) -> dict[str, Any]:
    """Settings of the tokenizer of a model with scores, with its token for padding.

    Args:
        base: the model.
        own: files beside its weights, by name.
        stop_ids: tokens that end answers.
    """
    settings = json.loads(own.get(TOKENIZER_CONFIG, b"{}"))
    return {**settings, "pad_token": padding_token(base, stop_ids)}


def score_settings(base: BaseModel, others: Mapping[str, bytes]) -> dict[str, Any]:
    """Entries of config.json by which transformers loads a model with scores.

    Args:
        base: the model.
        others: files that are written beside the weights, by name.
    """
    named = json.loads(others.get(TOKENIZER_CONFIG, b"{}")).get("pad_token")
    text = named if isinstance(named, str) else padding_token(base, ())
    scores = base.architecture.scores
    assert scores is not None
    found = {
        "architectures": [base.architecture.class_name],
        "pad_token_id": base.tokenizer.token_id(text),
    }
    if not scores.names:
        return found
    return found | {
        "id2label": {str(number): name for number, name in enumerate(scores.names)},
        "label2id": {name: number for number, name in enumerate(scores.names)},
        **({"problem_type": scores.problem_type} if scores.problem_type else {}),
    }
