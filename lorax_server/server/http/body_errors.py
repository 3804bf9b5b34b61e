"""Words for what is wrong with a body's form, in words that do not speak of our types."""

from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.server.http.problems import OPENAI_PREFIX, Problem, wrong_field

# Fields that may have several forms. Of a value that has none of them pydantic tells what is wrong with it as each.
FORMS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts",
    "tool_choice": "a string or an object",
}


def describe_shape(errors: Sequence[Any], path: str) -> Problem:
    """The first mistake."""
    forms = FORMS if path.startswith(OPENAI_PREFIX) else {}
    where = _place(errors[0]["loc"], forms)
    same = [error for error in errors if _place(error["loc"], forms) == where]
    # A value may be of the right form and wrong in another way: too long, too large.
    error = next((each for each in same if not _is_of_type(each)), same[0])
    is_formless = _is_of_type(error) and where and where[-1] in forms
    message = f"Input should be {forms[where[-1]]}" if is_formless else error["msg"]
    return wrong_field(path, _name(where, path), message, _code(error))


def _place(location: Sequence[Any], forms: Mapping[str, str]) -> list[Any]:
    """Find the place of a field, without the names of types that come after one with several forms."""
    where: list[Any] = []
    for step in location[1:] if location and location[0] in ("body", "query", "path") else location:
        where.append(step)
        if step in forms:
            break
    return where


def _name(where: Sequence[Any], path: str) -> str:
    """As OpenAI writes it, or as LoRAX's routes always have."""
    if not path.startswith(OPENAI_PREFIX):
        return ".".join(map(str, where))
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where).lstrip(".")


def _is_of_type(error: Mapping[str, Any]) -> bool:
    return str(error["type"]).endswith("_type")


def _code(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "missing_required_parameter"
    return "invalid_type" if _is_of_type(error) else "invalid_value"
