"""Run the JSON-Schema-Test-Suite (draft 2020-12): for each accepted schema, valid instances can be generated and
invalid instances cannot."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from lorax_server.errors import InputError
from lorax_server.structured_output.grammars import from_json_schema
from lorax_server.structured_output.matcher import GrammarError, compile_matcher
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.text.tokenizer import TextTokenizer
from tests.models.tiny import make_tokenizer

SUITE = Path(__file__).with_name("json-schema-test-suite.json.gz")
# Valid instances that cannot be generated, because each value has only one spelling.
OTHER_ORDER = ("allOf", "valid", "same object with different property order is valid")
OTHER_NUMBER = "float"  # 1.0 for 1
UNSUPPORTED_KEYWORDS = {
    *(
        "$dynamicAnchor",
        "$dynamicRef",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
    ),
    *("minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
}


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(make_tokenizer().backend_tokenizer, {}, {})


@pytest.fixture(scope="module")
def vocabulary(tokenizer: TextTokenizer) -> Vocabulary:
    return Vocabulary.from_table(tokenizer.token_table())


def is_accepted(compiled: LLMatcher, tokenizer: TextTokenizer, instance: Any) -> bool:
    matcher = compiled.deep_copy()
    ids = tokenizer.encode(json.dumps(instance, ensure_ascii=False, separators=(",", ":")), add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def has_other_spelling(keyword: str, group: str, test: str) -> bool:
    """Return True if a valid instance has another spelling: another key order, or 1.0 instead of 1."""
    is_number = OTHER_NUMBER in test or "[0.0]" in test or "[1.0]" in test
    is_order = test == OTHER_ORDER[2] or (keyword == "allOf" and group.startswith("allOf") and test in OTHER_ORDER)
    return (keyword in ("const", "enum", "type") and is_number) or is_order


def test_json_schema_test_suite_results_are_as_expected(
    vocabulary: Vocabulary, tokenizer: TextTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for keyword, groups in json.loads(gzip.decompress(SUITE.read_bytes())).items():
        for group in groups:
            try:
                compiled = compile_matcher(vocabulary, from_json_schema(group["schema"]).grammar)
            except (GrammarError, InputError) as error:
                counts["rejected"] += 1
                rejected[re.split(r"[.'(]", str(error).removeprefix("failed to compile JSON schema: "))[0]] += 1
                continue
            for test in group["tests"]:
                counts["cases"] += 1
                result = is_accepted(compiled, tokenizer, test["data"])
                where = f"{keyword}: {group['description']}: {test['description']}"
                if result and not test["valid"]:
                    pytest.fail(f"{where}: is invalid, but can be generated")
                if not result and test["valid"]:
                    # In the test suite `format` is only an annotation, but a grammar enforces it.
                    is_known = keyword == "format" or has_other_spelling(
                        keyword, group["description"], test["description"]
                    )
                    assert is_known, f"{where}: is valid, but cannot be generated"
                    counts["other spelling"] += 1
    with capsys.disabled():
        print(f"\nJSON-Schema-Test-Suite: {dict(counts)}; rejected:")
        for reason, count in rejected.most_common():
            print(f"{count:4} {reason}")
    assert counts["cases"] > 500
    assert counts["other spelling"] < 30


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED_KEYWORDS))
def test_unsupported_keyword_error_names_keyword(keyword: str, vocabulary: Vocabulary) -> None:
    number = keyword.endswith("Contains")
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {keyword: 1 if number else {"type": "string"}}}}
    with pytest.raises(GrammarError, match=keyword.replace("$", r"\$")):
        compile_matcher(vocabulary, from_json_schema(schema).grammar)


def test_unsupported_format_error_names_format(vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match="Unknown format: iri"):
        compile_matcher(vocabulary, from_json_schema({"type": "string", "format": "iri"}).grammar)
