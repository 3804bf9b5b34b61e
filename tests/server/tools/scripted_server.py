"""Server routes with a scripted engine that generates a given text, and with real chat templates."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from lorax_server.engine.remote import messages
from lorax_server.text.render_task import render
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import FinishReason, Request
from tests.server.fake_server import Reply, Routes
from tests.server.service_harness import TrustingTokenizers, settle
from tests.text.tokenizers import byte_level

LENGTH = 100_000
EOS = "<|im_end|>"
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|python_tag|>", EOS)
# A Qwen-style template that renders every kind of message content.
HERMES = """\
{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}{% endif %}
{#- calls are in <tool_call> #}
{%- for message in messages %}
{{- '<' + message.role + '>' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ':' + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{%- if message.role == 'tool' %}{{ '(' + message.name + ' ' + message.tool_call_id + ')' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% if think %}{{ '<think>\\n' }}{% endif %}{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look it up",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


@cache
def _tokenizer() -> TextTokenizer:
    backend = Tokenizer.from_str(byte_level(500).tokenizer.to_str())
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return TextTokenizer(backend, {}, {})


class ScriptedServer(Routes):
    """Generates `output` token by token and records the rendered `prompts`."""

    def __init__(self, output: str = "Hello.", template: str = HERMES, **config: Any) -> None:
        super().__init__(["poet"], **config)
        base = _tokenizer().with_overrides({"eos_token": EOS}, {"default": template})
        service = self.service
        service.tokenizers = TrustingTokenizers(base, Path("nowhere"))
        service.tokenizers.render = self._render  # type: ignore[method-assign]
        service.max_total_tokens = service.max_input_length = LENGTH
        self.output = output
        self.finish_reason = FinishReason.EOS_TOKEN
        self.prompts: list[str] = []

    async def _render(
        self, tokenizer: TextTokenizer, chat: list[dict[str, Any]], tenant: str = "", /, **variables: Any
    ) -> str:
        """Render in this process, without the sandbox."""
        template = self.service.tokenizers.find_template(tokenizer, bool(variables.get("tools")))
        assert template is not None
        self.prompts.append(render(template, chat, variables, 10**6).decode())
        return self.prompts[-1]

    def _handle_message(self, message: messages.ToEngine) -> None:
        if isinstance(message, messages.Add):
            messages.encode(message)
            self.engine.sent.append(message)
            self.answering = asyncio.create_task(self._generate(message.request))
        else:
            super()._handle_message(message)

    async def _generate(self, request: Request) -> None:
        end = EOS if self.finish_reason is FinishReason.EOS_TOKEN else ""
        *ids, last = self.service.tokenizers.base.encode(self.output + end, add_special_tokens=False)
        for token_id in ids:
            self.engine.emit_tokens(request.request_id, token_id)
            await settle()
        self.engine.emit_tokens(request.request_id, last, end=self.finish_reason)

    def chat(self, **fields: Any) -> Reply:
        body = {"model": "", "messages": [{"role": "user", "content": "ask"}], **fields}
        return self.post("/v1/chat/completions", body)

    def respond(self, **fields: Any) -> Reply:
        return self.post("/v1/responses", {"model": "", "input": "ask", **fields})

    @property
    def grammar(self) -> str:
        """The last request's grammar, or ""."""
        structure = self.engine.added[-1].structure
        return "" if structure is None else structure.grammar
