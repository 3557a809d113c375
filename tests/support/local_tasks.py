"""Tasks of the lm-evaluation-harness made on the spot, with their data beside them."""

import json
from pathlib import Path
from typing import Any

import yaml

SUMS: dict[str, Any] = {
    "task": "sums",
    "training_split": "train",
    "fewshot_split": "train",
    "num_fewshot": 6,
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
"""Multiple choice with examples, too long for the tiny model at times."""
LETTERS: dict[str, Any] = {
    "task": "letters",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}\nAnswer: ",
    "doc_to_choice": ["A", "B", "C"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
"""Choices of one token each, behind a space."""
ANSWERS: dict[str, Any] = {
    "task": "answers",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}\n",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "ignore_case": True}],
}
"""Generation."""
TEXTS: dict[str, Any] = {
    "task": "texts",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{(question ~ ' ' ~ choices | join(' ') ~ ' ') * 8}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
"""Perplexity of texts longer than the tiny model's context."""
ALL = (SUMS, LETTERS, ANSWERS, TEXTS)


def write_tasks(directory: Path, *tasks: dict[str, Any], records: int = 7) -> Path:
    """Task files and the records that they ask.

    Args:
        directory: is made; its files are named after the tasks.
        tasks: without their data.
        records: how many there are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "records.jsonl"
    data.write_text("".join(json.dumps(record(i)) + "\n" for i in range(records)))
    for task in tasks:
        settings = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"train": str(data), "test": str(data)}},
            "test_split": "test",
            **task,
        }
        (directory / f"{task['task']}.yaml").write_text(yaml.safe_dump(settings))
    return directory


def record(number: int) -> dict[str, Any]:
    first, second = 3 * number % 7, number + 2
    return {
        "question": f"What is {first} plus {second}?",
        "choices": [str(first + second), str(first), "none of these " * (number % 3 + 1)],
        "answer": number % 3,
    }
