"""Chat templates: the same prompts as transformers makes, and hostile templates."""

import asyncio
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lorax_server.errors import BusyError, TemplateError
from lorax_server.text import chat_template
from lorax_server.text.chat_template import MANY, REFUSED_S, ChatTemplate, TemplateRenderer, _to_frame
from lorax_server.text.template_program import MAX_ERROR, Program, RenderLimits
from tests.test_imports import imported_by

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
HI = [{"role": "user", "content": "Hi"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PATIENCE_S = 60.0  # for templates that must succeed, however busy the machine
IMPATIENCE_S = 0.2  # for templates that never end


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


def run(test: Callable[[TemplateRenderer], Awaitable[Any]], cpu_s: float = PATIENCE_S, **limits: Any) -> Any:
    async def body() -> Any:
        renderer = TemplateRenderer(cpu_s, **{"wait_s": PATIENCE_S} | limits)
        try:
            return await test(renderer)
        finally:
            await renderer.close()

    return asyncio.run(body())


def render_once(source: str, messages: Any = HI, **variables: Any) -> str:
    """Render in this process, a template that does not try to be endless."""
    request = {"source": source, "messages": messages, "variables": {**SPECIAL, **variables}}
    reply = json.loads(Program(RenderLimits(10_000, 2**29, 60)).answer(json.dumps(request).encode()))
    if "error" in reply:
        raise TemplateError(reply["error"])
    return str(reply["text"])


async def pid(renderer: TemplateRenderer) -> int:
    await renderer.start()
    assert renderer._process is not None
    return renderer._process.pid


# --- The same as transformers -----------------------------------------------------------------------------------------

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


def test_prompts_are_those_of_transformers() -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    cases = [(source, *chat) for source in STYLES.values() for chat in CHATS]

    def prompt(source: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        found = oracle.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True, **variables
        )
        assert isinstance(found, str)
        return found

    async def body(renderer: TemplateRenderer) -> None:
        answers = [
            renderer.render(template(source), messages, add_generation_prompt=True, **variables)
            for source, messages, variables in cases
        ]
        num_prompts = 0
        for case, answer in zip(cases, await asyncio.gather(*answers, return_exceptions=True), strict=True):
            if isinstance(answer, TemplateError):
                with pytest.raises(Exception, match=re.escape(str(answer).split(": ", 1)[-1])):
                    prompt(*case)
            else:
                assert answer == prompt(*case)
                num_prompts += 1
        assert num_prompts >= 50

    run(body)


def test_time_is_told() -> None:
    year = render_once("{{ strftime_now('%Y') }}")
    assert year.isdecimal()
    assert len(year) == 4


# --- Refusals and their reasons ---------------------------------------------------------------------------------------


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
def test_a_template_that_cannot_be_used(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        render_once(source)


def test_as_much_as_is_allowed_is_written() -> None:
    assert len(render_once("{{ 'a' * 10000 }}")) == 10_000


def test_a_reason_is_short() -> None:
    with pytest.raises(TemplateError) as refused:
        render_once("{{ raise_exception('a' * 9999) }}")
    assert len(str(refused.value)) == MAX_ERROR


def test_templates_cannot_change_what_the_next_one_sees() -> None:
    worker = Program(RenderLimits(1000, 2**29, 60))
    request = {"source": "{% set bos_token = 'x' %}{{ bos_token }}", "messages": HI, "variables": SPECIAL}
    assert json.loads(worker.answer(json.dumps(request).encode())) == {"text": "x"}
    request["source"] = "{{ bos_token }}"
    assert json.loads(worker.answer(json.dumps(request).encode())) == {"text": "<s>"}


@pytest.mark.parametrize(
    ("messages", "variables", "reason"),
    [
        ([], {}, "at least one message"),
        (["hi"], {}, "an object"),
        ([{"role": "user", "content": "\ud800"}], {}, "lone surrogates"),
        (HI, {"name": "\udfff"}, "lone surrogates"),
        ([{"role": "user", "content": b"hi"}], {}, "not JSON"),
        ([{"role": "user", "content": 10**5000}], {}, "not JSON"),
    ],
)
def test_messages_that_cannot_be_sent(messages: Any, variables: dict[str, Any], reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        run(lambda renderer: renderer.render(template("x"), messages, **variables))


def test_messages_nested_deeply_end_nothing() -> None:
    deep: Any = "end"
    for _ in range(100_000):
        deep = [deep]

    async def both(renderer: TemplateRenderer) -> None:
        with pytest.raises(TemplateError, match="nested too deeply"):
            await renderer.render(template("x"), [{"content": deep}])
        assert await renderer.render(template("x"), HI) == "x"

    run(both)
    while isinstance(deep, list):  # freeing it at once would be as deep
        deep = deep[0]


# --- Hostile templates ------------------------------------------------------------------------------------------------


def test_an_endless_template_is_ended_and_refused_for_a_while() -> None:
    now = [0.0]

    async def body(renderer: TemplateRenderer) -> None:
        first = await pid(renderer)
        with pytest.raises(TemplateError, match="takes longer than"):
            await renderer.render(template(ENDLESS), HI)
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        await renderer.start()
        second = await pid(renderer)
        now[0] = REFUSED_S - 1
        with pytest.raises(TemplateError, match="not tried again"):
            await renderer.render(template(ENDLESS), HI)
        assert await pid(renderer) == second
        now[0] = REFUSED_S
        with pytest.raises(TemplateError, match="takes longer than"):
            await renderer.render(template(ENDLESS), HI)

    run(body, IMPATIENCE_S, clock=lambda: now[0])


def test_the_reason_is_known_also_where_asyncio_is_slow_to_learn_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has ended is killed all the same, and its own exit status is the one that counts."""
    may_learn = threading.Event()
    wait, kill = os.waitpid, chat_template._kill

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        assert may_learn.wait(PATIENCE_S)
        return wait(pid, options)

    def kill_and_learn(process: Process) -> None:
        kill(process)
        may_learn.set()

    monkeypatch.setattr("os.waitpid", waitpid)
    monkeypatch.setattr(chat_template, "_kill", kill_and_learn)
    with pytest.raises(TemplateError, match="takes longer than"):
        run(lambda renderer: renderer.render(template(ENDLESS), HI), IMPATIENCE_S)


def test_who_waits_behind_an_endless_template_is_answered() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        await renderer.start()
        sources = [ENDLESS, "{{ messages[0].content }}", ENDLESS, "{{ bos_token }}", "{{ 9 ** (9 ** 9) }}"]
        tasks = [renderer.render(template(source), HI) for source in sources]
        first, hi, again, bos, power = await asyncio.gather(*tasks, return_exceptions=True)
        assert (hi, bos) == ("Hi", "<s>")
        assert "takes longer" in str(first)
        assert "not tried again" in str(again)
        assert "takes longer" in str(power)

    run(body, 0.5)


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
def test_a_template_that_takes_all_memory(source: str) -> None:
    async def body(renderer: TemplateRenderer) -> None:
        first = await pid(renderer)
        with pytest.raises(TemplateError, match="memory"):
            await renderer.render(template(source), HI)
        assert await renderer.render(template("fine"), HI) == "fine"
        assert await pid(renderer) != first

    run(body)


def test_memory_that_a_template_keeps_is_not_kept_from_the_next() -> None:
    """jinja computes constants once, so they would stay as long as the template is cached."""

    async def body(renderer: TemplateRenderer) -> None:
        first = await pid(renderer)
        for size in range(10_000_000, 10_000_005):  # which would be more than it may use
            source = f"{{% set x = 'a' * {size} %}}{{{{ x | length }}}}"
            assert await renderer.render(template(source), HI) == str(size)
        assert await pid(renderer) != first

    run(body, max_memory=2**27)


def test_what_is_written_at_once_is_limited() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        with pytest.raises(TemplateError, match="more than 4000000 characters"):
            await renderer.render(template("{{ 'a' * 4000001 }}"), HI)
        assert len(await renderer.render(template("{{ '\x00' * 4000000 }}"), HI)) == 4_000_000

    run(body)


# --- A busy machine ---------------------------------------------------------------------------------------------------


def test_a_process_that_cannot_run_is_no_fault_of_the_template() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        first = await pid(renderer)
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(BusyError, match="the machine is busy") as refused:
            await renderer.render(template("fine"), HI)
        assert refused.value.retry_after_s is not None
        renderer._wait_s = PATIENCE_S
        assert await renderer.render(template("fine"), HI) == "fine"  # it is not refused, and has a new process
        assert await pid(renderer) != first

    run(body, wait_s=IMPATIENCE_S)


def test_time_in_which_a_process_cannot_run_is_not_charged() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        first = await pid(renderer)
        os.kill(first, signal.SIGSTOP)
        render = asyncio.create_task(renderer.render(template("fine"), HI))
        await asyncio.sleep(2 * IMPATIENCE_S)
        os.kill(first, signal.SIGCONT)
        assert await render == "fine"

    run(body, IMPATIENCE_S)


def test_a_line_that_is_too_long() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        process = await pid(renderer)
        os.kill(process, signal.SIGSTOP)
        first = asyncio.create_task(renderer.render(template("first"), HI))
        for _ in range(10):  # until it waits for the process
            await asyncio.sleep(0)
        renderer._wait_s = IMPATIENCE_S
        with pytest.raises(BusyError, match="other chats") as refused:
            await renderer.render(template("second"), HI)
        assert refused.value.retry_after_s is not None
        os.kill(process, signal.SIGCONT)
        assert await first == "first"
        assert await renderer.render(template("third"), HI) == "third"

    run(body)


# --- The process ------------------------------------------------------------------------------------------------------


def test_a_process_that_is_killed_in_a_render() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        victim = await pid(renderer)
        render = asyncio.create_task(renderer.render(template(ENDLESS), HI))
        waiting = asyncio.create_task(renderer.render(template("next"), HI))
        while renderer._running is None:
            await asyncio.sleep(0)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(TemplateError, match="ended the process"):
            await render
        assert await waiting == "next"

    run(body)


def test_a_process_that_dies_while_nobody_needs_it() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        first = await pid(renderer)
        process = renderer._process
        assert process is not None
        os.kill(first, signal.SIGKILL)
        await process.wait()
        assert await renderer.render(template("fine"), HI) == "fine"
        assert await pid(renderer) != first

    run(body)


def test_who_goes_away_leaves_no_answer_for_the_next() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        first = await pid(renderer)
        source = template("{% for i in range(99999) %}{% endfor %}gone")
        gone = [asyncio.create_task(renderer.render(source, HI)) for _ in range(3)]
        stays = asyncio.create_task(renderer.render(template("stays"), HI))
        while renderer._running is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the first one is asked for, and takes a while
        for task in gone:
            task.cancel()
        assert await stays == "stays"
        assert all(task.cancelled() for task in gone)
        assert await pid(renderer) == first

    run(body)


def test_many_at_once() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        chats = [[{"role": "user", "content": f"Größe {i} 日本語 👍🏽"}] for i in range(50)]
        source = template("{{ messages[0].content }}")
        answers = await asyncio.gather(*[renderer.render(source, chat) for chat in chats])
        assert answers == [chat[0]["content"] for chat in chats]

    run(body)


def test_a_large_chat() -> None:
    chat = [{"role": "user", "content": "x" * 1000}] * 3000

    async def body(renderer: TemplateRenderer) -> None:
        assert (
            await renderer.render(template("{% for m in messages %}{{ m.content }}{% endfor %}"), chat)
            == "x" * 3 * 10**6
        )

    run(body)


def test_thousands_of_messages_are_written_in_turns() -> None:
    chat = [{"role": "user", "content": f"Größe {i}"} for i in range(2 * MANY + 1)]

    async def body(renderer: TemplateRenderer) -> None:
        turns = [0]

        async def count() -> None:
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        frame = await _to_frame(template("x"), chat, {"name": "value"})
        counting.cancel()
        assert turns[0] == 2
        request = json.loads(frame)
        assert request == {"source": "x", "variables": {**SPECIAL, "name": "value"}, "messages": chat}
        source = "{% for m in messages %}{{ m.content }}{% endfor %}"
        assert await renderer.render(template(source), chat) == "".join(each["content"] for each in chat)

    run(body)


def test_closing_ends_who_waits() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        process = await pid(renderer)
        renders = [asyncio.create_task(renderer.render(template(ENDLESS), HI)) for _ in range(3)]
        while renderer._running is None:
            await asyncio.sleep(0)
        await renderer.close()
        for error in await asyncio.gather(*renders, return_exceptions=True):
            assert isinstance(error, BusyError)
            assert "stopping" in str(error)
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
        with pytest.raises(BusyError, match="stopping"):
            await renderer.render(template("x"), HI)

    run(body)


def test_it_knows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    start, environments = asyncio.create_subprocess_exec, []

    async def spy(*command: str, env: dict[str, str], **options: Any) -> Any:
        environments.append(env)
        return await start(*command, env=env, **options)

    monkeypatch.setattr("asyncio.create_subprocess_exec", spy)
    run(lambda renderer: renderer.start())
    assert len(environments) == 1
    assert "HF_TOKEN" not in environments[0]


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BusyError, match="does not start"):
        run(lambda renderer: renderer.render(template("x"), HI))


def test_frames_that_are_too_long_are_not_read() -> None:
    async def body(renderer: TemplateRenderer) -> None:
        await renderer.start()
        process = renderer._process
        assert process is not None
        assert process.stdout is not None
        process.stdout.feed_data(struct.pack(">I", 2**32 - 1))
        with pytest.raises(TemplateError, match="ended the process"):
            await renderer.render(template("x"), HI)
        assert await renderer.render(template("x"), HI) == "x"

    run(body)


def test_it_ends_itself_when_there_is_no_parent_to_do_it() -> None:
    request = json.dumps({"source": ENDLESS, "messages": HI, "variables": {}}).encode()
    frame = struct.pack(">I", len(request)) + request
    command = [sys.executable, "-m", "lorax_server.text.template_program", "1000", str(2**29), "0.05"]
    done = subprocess.run(command, input=frame, capture_output=True, check=False)
    assert done.returncode == -signal.SIGPROF


def test_it_ends_when_nothing_more_can_come() -> None:
    command = [sys.executable, "-m", "lorax_server.text.template_program", "1000", str(2**29), "60"]
    done = subprocess.run(command, input=b"\0\0", capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (bytes(4), b"")


def test_variables_may_have_any_name() -> None:
    names = {"self": 1, "template": 2, "messages": 3, "source": 4}
    source = "{{ template }}{{ source }}{{ messages[0].content }}"
    assert run(lambda renderer: renderer.render(template(source), HI, **names)) == "24Hi"


def test_it_imports_jinja_and_nothing_heavy() -> None:
    modules = imported_by("import lorax_server.text.template_program")
    assert "jinja2" in modules
    assert not modules & {"torch", "numpy", "transformers", "tokenizers", "asyncio.base_events", "msgspec"}
