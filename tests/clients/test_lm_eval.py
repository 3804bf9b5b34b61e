"""`lm_eval` with `local-completions`: token ID prompts, generation and log likelihoods.

guidellm is not tested, because it requires torch with CUDA.
"""

from typing import Any

import datasets
import pytest
import requests
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.clients.conftest import EXPECTED_COMPLETIONS, LENGTH, PROMPT, ROOT, UNKNOWN_MODEL, Question, Server

CHOICES = ["SELECT NULL", EXPECTED_COMPLETIONS["sql"], EXPECTED_COMPLETIONS["redact"]]


def read_tests(**_: Any) -> dict[str, Any]:
    return {
        "test": datasets.Dataset.from_list(
            [{"prompt": PROMPT, "choices": CHOICES, "right": EXPECTED_COMPLETIONS["sql"]}]
        )
    }


TASK = {"custom_dataset": read_tests, "test_split": "test", "doc_to_text": "{{prompt}}", "target_delimiter": ""}
WRITE = {
    **TASK,
    "task": "write",
    "output_type": "generate_until",
    "doc_to_target": "{{right}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": LENGTH, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}
CHOOSE = {
    **TASK,
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_target": 1,
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}],
}


def evaluate(server: Server, model: str, *tasks: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the metrics per task and the server responses."""
    reached = {
        "model": model,
        "base_url": f"{server.v1}/completions",
        "tokenizer": str(ROOT / "lorax_server" / "demo" / "model"),
        "add_bos_token": True,
        "max_length": 512,
        "max_retries": 1,
    }
    result: Any = simple_evaluate(
        model="local-completions",
        model_args=reached,
        tasks=list(tasks),
        task_manager=TaskManager(include_defaults=False),  # loading all default tasks is slow
        bootstrap_iters=0,
    )
    return result["results"], {name: samples[0]["filtered_resps"] for name, samples in result["samples"].items()}


def request_logprob(server: Server, question: Question, choice: str) -> float:
    """Return the log probability of a text after the prompt."""
    body = {"model": question.model, "prompt": PROMPT + choice, "echo": True, "logprobs": 1, "max_tokens": 0}
    scores: list[float] = server.post("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
    return sum(scores[question.completion.prompt_tokens :])


def test_generation_and_multiple_choice_tasks_run(server: Server, question: Question) -> None:
    results, answers = evaluate(server, question.model, WRITE, CHOOSE)
    assert answers["write"] == [question.completion.text]
    assert results["write"]["exact_match,none"] == (question.model == "sql")
    scores = [score for score, _ in answers["choose"]]
    assert scores == pytest.approx([request_logprob(server, question, choice) for choice in CHOICES], abs=1e-3)
    assert results["choose"]["acc,none"] == (max(scores) == scores[1])


def test_is_greedy_is_false_for_unlikely_text(server: Server) -> None:
    _, answers = evaluate(server, "sql", CHOOSE)
    assert [is_greedy for _, is_greedy in answers["choose"]] == [False, True, False]


def test_unknown_model_raises_client_error(server: Server) -> None:
    with pytest.raises(requests.HTTPError, match="404"):
        evaluate(server, UNKNOWN_MODEL, WRITE)
