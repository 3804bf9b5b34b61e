"""Messages about a body of the wrong form, in words that do not speak of this server's types."""

from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.server.http.problems import INVALID, OPENAI_PREFIX, Problem

# Fields that may have several forms. If a value has none of them, pydantic reports an error for each.
FORMS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts",
    "tool_choice": "a string or an object",
    "guided_json": "an object, or a string that holds one",
}


def describe_shape(errors: Sequence[Any], path: str) -> Problem:
    """Describe the first field that is wrong."""
    is_openai = path.startswith(OPENAI_PREFIX)
    forms = FORMS if is_openai else {}
    location = _locate(errors[0], forms)
    errors = [error for error in errors if _locate(error, forms) == location]
    # A value may be of the right form and wrong in another way: too long, too large.
    error = next((error for error in errors if not _is_of_type(error)), errors[0])
    is_formless = _is_of_type(error) and location and location[-1] in forms
    message = f"Input should be {forms[location[-1]]}" if is_formless else error["msg"]
    if not is_openai:
        name = ".".join(map(str, location)) or "body"
        return Problem(422, "validation", f"{INVALID}{name}: {message}")
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")
    code = "invalid_type" if _is_of_type(error) else "invalid_value"
    if error["type"] == "missing":
        code = "missing_required_parameter"
    return Problem(400, "validation", f"{name or 'body'}: {message}", code, param=name or None)


def _locate(error: Mapping[str, Any], forms: Mapping[str, str]) -> list[Any]:
    """Return the path of a field, without the names of types that follow one with several forms."""
    location = list(error["loc"])
    if location and location[0] in ("body", "query", "path"):
        del location[0]
    end = next((index + 1 for index, step in enumerate(location) if step in forms), None)
    return location[:end]


def _is_of_type(error: Mapping[str, Any]) -> bool:
    return str(error["type"]).endswith("_type")
