"""Tests for chat templates: parity with transformers, and hostile templates."""

import asyncio
import os
import re
import signal
from collections.abc import Coroutine, Iterator
from contextlib import closing
from typing import Any, TypeVar

import psutil
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lorax_server.errors import BusyError, TemplateError
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import MAX_ERROR_CHARACTERS, SandboxTask
from lorax_server.text.chat_template import (
    MAX_TEMPLATE_CHARACTERS,
    REJECTED_TEMPLATE_TTL_S,
    RENDER_TASK,
    ChatTemplate,
    TemplateRenderer,
)
from tests.grids import slow_except
from tests.test_imports import imported_by
from tests.text.sandbox_workers import find_workers, wait_until_busy

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
HI = [{"role": "user", "content": "Hi"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SLOW = "{% for a in range(600) %}{% for b in range(99999) %}{% endfor %}{% endfor %}cancelled"  # takes seconds
LONG_S = 120.0  # for renders that must succeed, however busy the machine
PATIENT = RENDER_TASK._replace(cpu_s=LONG_S, wall_s=LONG_S)
IMPATIENT = PATIENT._replace(cpu_s=0.2)  # for endless templates
_T = TypeVar("_T")


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


def run(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(asyncio.wait_for(work, LONG_S))


@pytest.fixture(scope="module")
def shared() -> Iterator[Sandbox]:
    """A sandbox shared by tests that do not inspect its workers."""
    with closing(Sandbox(2)) as sandbox:
        yield sandbox


class SingleWorkerRenderer:
    """A sandbox with one worker, and a renderer for templates that must succeed."""

    def __init__(self) -> None:
        self.sandbox = Sandbox(1)
        self.renderer = self.make_renderer()
        self._others = find_workers()

    def make_renderer(self, task: SandboxTask = PATIENT, **settings: Any) -> TemplateRenderer:
        return TemplateRenderer(self.sandbox, task, **{"timeout_s": LONG_S} | settings)

    def render(self, source: str, messages: Any = HI) -> str:
        return run(self.renderer.render(template(source), messages))

    def find_workers(self) -> list[psutil.Process]:
        return [worker for worker in find_workers() if worker not in self._others]

    async def start_worker(self) -> psutil.Process:
        """Render a template to start the worker. Return the worker."""
        assert await self.renderer.render(template("ready"), HI) == "ready"
        (worker,) = self.find_workers()
        return worker


@pytest.fixture
def single_worker() -> Iterator[SingleWorkerRenderer]:
    single_worker = SingleWorkerRenderer()
    with closing(single_worker.sandbox):
        yield single_worker


def render_short(sandbox: Sandbox, source: str, messages: Any = HI, **variables: Any) -> str:
    """Render a prompt of up to 10,000 characters."""
    renderer = TemplateRenderer(sandbox, PATIENT, max_characters=10_000, timeout_s=LONG_S)
    return run(renderer.render(template(source), messages, **variables))


# --- Same prompts as transformers -------------------------------------------------------------------------------------

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{%- if tools is not none %}
    {%- for t in tools %}{{ "\\n" + (t | tojson(indent=4)) }}{% endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}{% else %}
    {%- for item in message['content'] if item.type == 'text' %}{{ item.text | trim }}{% endfor %}{% endif %}
{{ '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
QWEN3 = """{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set reasoning_content = '' %}
    {%- if message.reasoning_content is string %}{% set reasoning_content = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if reasoning_content and loop.index0 > ns.last - 2 %}
        {{- '<think>\\n' + reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {%- generation %}{{ content + '<|im_end|>\\n' }}{% endgeneration %}
{%- endfor %}
{%- if tools %}{{ dict(names=tools | map(attribute='function.name') | list) | tojson }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
STYLES = {
    "llama3": LLAMA3,
    "chatml": CHATML,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "zephyr": ZEPHYR,
    "qwen3": QWEN3,
    "spaces": "a\n  {% if true %}\n  b\n  {% endif %}\n  c {# d #}\n{{ bos_token }}\n",
    "names": "{{ unk_token }}{{ pad_token }}{{ nobody }}{{ tools }}{{ documents }}{{ dict.fromkeys('ab', 1) }}"
    "{{ messages[0] | tojson(sort_keys=true) }}{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}"
    "{% endfor %}",
}
TOOLS = [{"type": "function", "function": {"name": "f<>&'\"é", "parameters": {"type": "object", "properties": {}}}}]
CHATS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    (HI, {}),
    (HI, {"enable_thinking": False, "date_string": "1 Jan 2025"}),
    (HI, {"tools": TOOLS, "bos_token": "other"}),
    ([{"role": "user", "content": " Größe 👍🏽 <b>&amp; "}, {"role": "assistant", "content": "日本語"}, *HI], {}),
    ([{"role": "system", "content": " Be brief. "}, *HI], {}),
    ([*HI, *HI], {}),
    ([*HI, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, *HI], {}),
    ([*HI, {"role": "assistant", "content": "yes", "reasoning": "hm"}], {"enable_thinking": True}),
    ([{"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "image"}]}], {}),
    ([*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"ä": [1, None]}}}]}], {}),
    ([{"role": "user"}], {}),
]


def test_prompts_match_transformers(single_worker: SingleWorkerRenderer) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    cases = [(source, *chat) for source in STYLES.values() for chat in CHATS]

    def prompt(source: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        actual = oracle.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True, **variables
        )
        assert isinstance(actual, str)
        return actual

    async def work() -> None:
        renders = [
            single_worker.renderer.render(template(source), messages, add_generation_prompt=True, **variables)
            for source, messages, variables in cases
        ]
        num_prompts = 0
        for case, result in zip(cases, await asyncio.gather(*renders, return_exceptions=True), strict=True):
            if isinstance(result, TemplateError):
                with pytest.raises(Exception, match=re.escape(str(result).split(": ", 1)[-1])):
                    prompt(*case)
            else:
                assert result == prompt(*case)
                num_prompts += 1
        assert num_prompts >= 50

    run(work())


def test_strftime_now_returns_current_time(shared: Sandbox) -> None:
    year = render_short(shared, "{{ strftime_now('%Y') }}")
    assert year.isdecimal()
    assert len(year) == 4


def test_template_variables_may_have_any_name(single_worker: SingleWorkerRenderer) -> None:
    names = {"self": 1, "template": 2, "messages": 3, "source": 4, "tenant": 5}
    source = "{{ template }}{{ source }}{{ tenant }}{{ messages[0].content }}"
    assert run(single_worker.renderer.render(template(source), HI, **names)) == "245Hi"


def test_concurrent_renders_do_not_mix_prompts(shared: Sandbox) -> None:
    async def work() -> None:
        renderer = TemplateRenderer(shared, PATIENT, timeout_s=LONG_S)
        chats = [[{"role": "user", "content": f"Größe {i} 日本語 👍🏽"}] for i in range(50)]
        source = template("{{ messages[0].content }}")
        tenants = [f"tenant {i % 3}" for i in range(len(chats))]
        renders = [renderer.render(source, chat, tenant) for chat, tenant in zip(chats, tenants, strict=True)]
        prompts = await asyncio.gather(*renders)
        assert prompts == [chat[0]["content"] for chat in chats]

    run(work())


def test_three_megabyte_chat_can_be_rendered(single_worker: SingleWorkerRenderer) -> None:
    chat = [{"role": "user", "content": "x" * 1000}] * 3000
    source = template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert run(single_worker.renderer.render(source, chat)) == "x" * 3 * 10**6


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "^Roles must alternate$"),
        ("a\n{% if %}", "line 2 of the template"),
        ("{% unknown %}", "unknown tag"),
        ("{{ nobody.name }}", "'nobody' is undefined"),
        ("{{ ''.__class__.x }}", "unsafe"),
        ("{{ ''['__class__'].x }}", "unsafe"),
        ("{{ ('' | attr('__class__')).x }}", "unsafe"),
        ("{{ messages.append.__self__.x }}", "unsafe"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.x }}", "unsafe"),
        ("{{ dict.__class__.x }}", "unsafe"),
        ("{{ self.__init__.x }}", "unsafe"),
        ("{{ '{0.__class__.x}'.format('') }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='x') }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
        ("{% import '/etc/passwd' as x %}", "no loader"),
        ("{{ range(10**6) }}", "[Rr]ange too big"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "nested too deeply"),
        ("{{ '\\ud800' }}", "lone surrogates"),
        ("{% for i in range(2000) %}{{ 'twenty characters...' }}{% endfor %}", "more than 10000 characters"),
        ("{{ 'a' * 10001 }}", "more than 10000 characters"),
    ],
)
def test_unusable_template_is_rejected_with_reason(source: str, reason: str, shared: Sandbox) -> None:
    with pytest.raises(TemplateError, match=reason):
        render_short(shared, source)


def test_prompt_at_character_limit_can_be_rendered(shared: Sandbox) -> None:
    assert len(render_short(shared, "{{ 'a' * 10000 }}")) == 10_000


@pytest.mark.parametrize("character", slow_except(["a"], ["\x00", "a", "👍"]))
def test_default_limit_counts_characters_not_bytes(character: str, single_worker: SingleWorkerRenderer) -> None:
    assert single_worker.render(f"{{{{ '{character}' * {MAX_TEMPLATE_CHARACTERS} }}}}") == (
        character * MAX_TEMPLATE_CHARACTERS
    )
    with pytest.raises(TemplateError, match="more than 4000000 characters"):
        single_worker.render(f"{{{{ '{character}' * {MAX_TEMPLATE_CHARACTERS + 1} }}}}")


def test_long_template_error_is_truncated(shared: Sandbox) -> None:
    with pytest.raises(TemplateError) as rejected:
        render_short(shared, "{{ raise_exception('a' * 9999) }}")
    assert len(str(rejected.value)) == MAX_ERROR_CHARACTERS


def test_template_cannot_change_next_render_variables(single_worker: SingleWorkerRenderer) -> None:
    assert single_worker.render("{% set bos_token = 'x' %}{{ bos_token }}") == "x"
    assert single_worker.render("{{ bos_token }}") == "<s>"


@pytest.mark.parametrize(
    ("messages", "variables", "reason"),
    [
        ([{"role": "user", "content": "\ud800"}], {"name": ""}, "lone surrogates"),
        (HI, {"name": "\udfff"}, "lone surrogates"),
    ],
)
def test_invalid_messages_are_rejected(messages: Any, variables: Any, reason: str, shared: Sandbox) -> None:
    with pytest.raises(TemplateError, match=reason):
        render_short(shared, "{{ messages[0].content }}{{ name }}", messages, **variables)


def test_deeply_nested_messages_fail_only_their_render(single_worker: SingleWorkerRenderer) -> None:
    deep: Any = "end"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested too deeply"):
        single_worker.render("x", [{"content": deep}])
    assert single_worker.render("x") == "x"
    while isinstance(deep, list):  # freeing the nested list in one step would also recurse
        deep = deep[0]


# --- Hostile templates ------------------------------------------------------------------------------------------------


def test_endless_template_is_killed_and_temporarily_rejected(single_worker: SingleWorkerRenderer) -> None:
    now = [0.0]
    impatient = single_worker.make_renderer(IMPATIENT, clock=lambda: now[0])

    async def work() -> None:
        first = await single_worker.start_worker()
        with pytest.raises(TemplateError, match=r"takes longer than 0\.2 s"):
            await impatient.render(template(ENDLESS), HI)
        assert not first.is_running()
        second = await single_worker.start_worker()
        now[0] = REJECTED_TEMPLATE_TTL_S - 1
        with pytest.raises(TemplateError, match="not tried again for 60 s"):
            await impatient.render(template(ENDLESS), HI)
        assert single_worker.find_workers() == [second]
        now[0] = REJECTED_TEMPLATE_TTL_S
        with pytest.raises(TemplateError, match="takes longer than"):
            await impatient.render(template(ENDLESS), HI)

    run(work())


@pytest.mark.slow
def test_template_with_zero_reject_time_is_retried(single_worker: SingleWorkerRenderer) -> None:
    """`rejected_ttl_s` is 0 for the base model's template, because messages can make it slow."""
    source = template("{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}done")
    renderer = single_worker.make_renderer(PATIENT._replace(cpu_s=1.0), rejected_ttl_s=0)
    with pytest.raises(TemplateError, match="takes longer than"):
        run(renderer.render(source, [{"content": "loop"}]))
    assert run(renderer.render(source, HI)) == "done"


def test_renders_queued_behind_endless_templates_finish(single_worker: SingleWorkerRenderer) -> None:
    impatient = single_worker.make_renderer(IMPATIENT)

    async def work() -> None:
        renders = [
            impatient.render(template(ENDLESS), HI),
            single_worker.renderer.render(template("{{ messages[0].content }}"), HI),
            impatient.render(template("{{ 9 ** (9 ** 9) }}"), HI),
            single_worker.renderer.render(template("{{ bos_token }}"), HI),
        ]
        loop, content, power, bos = await asyncio.gather(*renders, return_exceptions=True)
        assert (content, bos) == ("Hi", "<s>")
        assert "takes longer" in str(loop)
        assert "takes longer" in str(power)

    run(work())


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 'a' * 10**12 }}",
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[0]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ 'a' | center(10**9) }}",
    ],
)
def test_template_memory_limit_replaces_worker(source: str, single_worker: SingleWorkerRenderer) -> None:
    async def work() -> None:
        first = await single_worker.start_worker()
        with pytest.raises(TemplateError, match="memory"):
            await single_worker.renderer.render(template(source), HI)
        assert await single_worker.start_worker() != first

    run(work())


# --- Busy machines and lost workers -----------------------------------------------------------------------------------


def test_render_on_busy_machine_raises_busy_error(single_worker: SingleWorkerRenderer) -> None:
    stalled = single_worker.make_renderer(PATIENT._replace(wall_s=0.2))

    async def work() -> None:
        first = await single_worker.start_worker()
        first.send_signal(signal.SIGSTOP)
        with pytest.raises(BusyError, match="the machine is busy") as rejected:
            await stalled.render(template("fine"), HI)
        assert rejected.value.retry_after_s is not None
        assert await single_worker.start_worker() != first

    run(work())


def test_template_time_limit_counts_cpu_time_only(single_worker: SingleWorkerRenderer) -> None:
    task = PATIENT._replace(cpu_s=1.0)

    async def work() -> None:
        worker = await single_worker.start_worker()
        worker.send_signal(signal.SIGSTOP)
        render = asyncio.create_task(single_worker.make_renderer(task).render(template("fine"), HI))
        await asyncio.sleep(1.5 * task.cpu_s)
        worker.send_signal(signal.SIGCONT)
        assert await render == "fine"
        assert single_worker.find_workers() == [worker]

    run(work())


def test_render_queue_timeout_raises_busy_error(single_worker: SingleWorkerRenderer) -> None:
    async def work() -> None:
        worker = await single_worker.start_worker()
        worker.send_signal(signal.SIGSTOP)
        first = asyncio.create_task(single_worker.renderer.render(template("first"), HI))
        await asyncio.sleep(0)  # queue the first render
        with pytest.raises(BusyError, match="did not finish within") as rejected:
            await single_worker.make_renderer(timeout_s=0.2).render(template("second"), HI)
        assert rejected.value.retry_after_s is not None
        worker.send_signal(signal.SIGCONT)
        assert await first == "first"
        assert await single_worker.renderer.render(template("third"), HI) == "third"

    run(work())


def test_killed_worker_fails_its_render_and_is_replaced(single_worker: SingleWorkerRenderer) -> None:
    async def work() -> None:
        victim = await single_worker.start_worker()
        render = asyncio.create_task(single_worker.renderer.render(template(ENDLESS), HI))
        waiting = asyncio.create_task(single_worker.renderer.render(template("next"), HI))
        await wait_until_busy(victim)
        victim.kill()
        with pytest.raises(TemplateError, match=r"it crashed its process \(SIGKILL\)"):
            await render
        assert await waiting == "next"

    run(work())


def test_cancelled_render_does_not_affect_next_render(single_worker: SingleWorkerRenderer) -> None:
    async def work() -> None:
        worker = await single_worker.start_worker()
        slow = template(SLOW)
        cancelled = [asyncio.create_task(single_worker.renderer.render(slow, HI)) for _ in range(3)]
        kept = asyncio.create_task(single_worker.renderer.render(template("kept"), HI))
        await wait_until_busy(worker)
        for task in cancelled:
            task.cancel()
        assert await kept == "kept"
        assert all(task.cancelled() for task in cancelled)
        assert single_worker.find_workers() == [worker]

    run(work())


def test_sandbox_close_fails_queued_renders_with_busy_error(single_worker: SingleWorkerRenderer) -> None:
    async def work() -> None:
        worker = await single_worker.start_worker()
        renders = [asyncio.create_task(single_worker.renderer.render(template(ENDLESS), HI)) for _ in range(3)]
        await wait_until_busy(worker)
        await asyncio.to_thread(single_worker.sandbox.close)
        for error in await asyncio.gather(*renders, return_exceptions=True):
            assert isinstance(error, BusyError)
            assert "stopping" in str(error)
        assert not worker.is_running()
        with pytest.raises(BusyError, match="stopping"):
            await single_worker.renderer.render(template("x"), HI)

    run(work())


def test_render_worker_has_no_secrets(single_worker: SingleWorkerRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    environment = run(single_worker.start_worker()).environ()
    assert environment["LANG"] == "C.UTF-8"
    assert "HF_TOKEN" not in environment
    assert set(environment) < {*os.environ, "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HF_HUB_OFFLINE"}


def test_render_worker_has_no_heavy_imports() -> None:
    modules = imported_by("import lorax_server.sandbox.worker, lorax_server.text.render_task")
    assert "jinja2" in modules
    assert not modules & {"torch", "numpy", "transformers", "tokenizers", "asyncio.base_events", "msgspec"}
