"""Markdown in the playground: formatting, and text that must stay text."""

import pytest
from playwright.sync_api import Page

from tests.browser.playground import Playground

pytestmark = pytest.mark.slow

RENDER = """async (texts) => {
    const { renderMarkdown } = await import(new URL("markdown.js", location));
    const body = document.createElement("div");
    for (const text of texts) renderMarkdown(body, text);
    body.querySelectorAll("button").forEach((button) => button.remove());
    return body.innerHTML;
}"""
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'
CODE = '<div class="code"><div class="code-head"><span>{}</span></div><pre tabindex="0"><code>{}</code></pre></div>'
CASES = [
    ("One\ntwo\n\nThree", "<p>One<br>two</p><p>Three</p>"),
    ("# A *b*\n## C", '<h4 data-level="1">A <em>b</em></h4><h5 data-level="2">C</h5>'),
    ("**a** __b__ *c* _d_ ~~e~~ ***f***", None),
    ("snake_case_name 2 * 3 * 4 count(*) x", "<p>snake_case_name 2 * 3 * 4 count(*) x</p>"),
    ("`a*b*` ``c`d``", "<p><code>a*b*</code> <code>c`d</code></p>"),
    (r"\*a\* \\ \_", r"<p>*a* \ _</p>"),
    ("```py\na < b\n\n# c\n```\nEnd", CODE.format("py", "a &lt; b\n\n# c") + "<p>End</p>"),
    ("~~~\nunclosed", CODE.format("code", "unclosed")),
    ("- a\n- b\n  - c\n\n    more\n- d", "<ul><li>a</li><li>b<ul><li>c<p>more</p></li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("- a\n1. b", '<ul><li>a</li></ul><ol start="1"><li>b</li></ol>'),
    ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"),
    ("***\na", "<hr><p>a</p>"),
    ("[a](https://b.c/d_(e)) [m](mailto:a@b.c)", None),
    ("[a](javascript:alert(1)) [b](data:x)", "<p>[a](javascript:alert(1)) [b](data:x)</p>"),
    ("![alt](https://a.b/c.png)", f'<p><a href="https://a.b/c.png" {LINK}>alt</a></p>'),
    ("See https://a.b/c.", f'<p>See <a href="https://a.b/c" {LINK}>https://a.b/c</a>.</p>'),
    ("<b>a</b> &amp; <script>", "<p>&lt;b&gt;a&lt;/b&gt; &amp;amp; &lt;script&gt;</p>"),
    ("", ""),
]
EXPECTED = {
    CASES[2][
        0
    ]: "<p><strong>a</strong> <strong>b</strong> <em>c</em> <em>d</em> <del>e</del> <strong><em>f</em></strong></p>",
    CASES[13][0]: f'<p><a href="https://b.c/d_(e)" {LINK}>a</a> <a href="mailto:a@b.c" {LINK}>m</a></p>',
}
TABLE = "| a | b |\n|---|:-:|\n| `c` | d |\nEnd"
TABLE_HTML = (
    '<div class="table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th>a</th>'
    "<th>b</th></tr></thead><tbody><tr><td><code>c</code></td><td>d</td></tr></tbody></table></div><p>End</p>"
)


@pytest.fixture
def page(playground: Playground) -> Page:
    return playground.page


def test_markdown_is_rendered(page: Page) -> None:
    """Use one page for all cases, because opening a page is slow."""
    rendered = {text: page.evaluate(RENDER, [text]) for text, _ in CASES}
    assert rendered == {text: html if html is not None else EXPECTED[text] for text, html in CASES}
    assert page.evaluate(RENDER, [TABLE]) == TABLE_HTML


def test_streamed_markdown_matches_complete_markdown(page: Page) -> None:
    """Each prefix is rendered into the same element."""
    text = "\n\n".join([text for text, _ in CASES] + [TABLE])
    prefixes = [text[:end] for end in range(0, len(text), 3)]
    assert page.evaluate(RENDER, [*prefixes, text]) == page.evaluate(RENDER, [text])


@pytest.mark.timeout(60)
def test_degenerate_text_is_rendered_quickly(page: Page) -> None:
    """Models in a loop write the same marker thousands of times."""
    for marker in ("*", "_a ", "[", "`", "> ", "- ", "**a", "|-", "<", "~~x ", "![](", "https://"):
        assert page.evaluate("(html) => html.length", page.evaluate(RENDER, [marker * 10_000])) > 0
    nested = "".join(f"{' ' * depth}- a\n" for depth in range(0, 400, 2))
    assert page.evaluate(RENDER, [nested])
