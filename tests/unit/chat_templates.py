"""Chat templates in the manner of the model families, and a reversible toy tokenizer, for the tests of messages."""

import json
import re
from collections.abc import Callable

import jinja2

Render = Callable[[list[dict]], str]

CHATML = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}
{%- for c in m.tool_calls or [] -%}
{{ '\n<tool_call>\n' }}{{ c.function | tojson }}{{ '\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# A default system message, tool messages inside a user turn, an empty reasoning block before the last answer.
QWEN = """{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\nYou are a default.<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] -%}
{{ '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif -%}"""

# The date in the system message, call arguments as a mapping, tool contents in JSON quotes, one call only.
LLAMA3 = """{{- '<|begin_of_text|>' -}}
{%- set ns = namespace(rest=messages, system='') -%}
{%- if messages[0].role == 'system' -%}
{%- set ns.rest = messages[1:] -%}{%- set ns.system = messages[0].content -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date + '\n\n' + ns.system + '<|eot_id|>' -}}
{%- for m in ns.rest -%}
{%- if m.tool_calls -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + m.tool_calls[0].function.name -}}
{{- '", "parameters": ' + (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""

# No system role, strict alternation, all in plain text but <s> and </s>.
MISTRAL_PLAIN = """{{- '<s>' -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if m.role == 'user' -%}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' -%}{{ ' ' + m.content + '</s>' }}
{%- else -%}{{ raise_exception('only user and assistant') }}{%- endif -%}
{%- endfor -%}"""

# The system message folded into the last user message, tools, call ids of nine characters.
MISTRAL_TOOLS = """{{- '<s>' -}}
{%- set ns = namespace(rest=messages, system='') -%}
{%- if messages[0].role == 'system' -%}
{%- set ns.rest = messages[1:] -%}{%- set ns.system = messages[0].content + '\n\n' -%}
{%- endif -%}
{%- for m in ns.rest -%}
{%- if m.role == 'user' -%}{{ '[INST] ' + (ns.system if loop.last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 -%}{{ raise_exception('tool call ids have nine characters') }}{%- endif -%}
{{ '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls -%}
{{ '[TOOL_CALLS] [{"name": "' + m.tool_calls[0].function.name + '", "arguments": ' }}
{{- (m.tool_calls[0].function.arguments | tojson) + ', "id": "' + m.tool_calls[0].id + '"}]</s>' }}
{%- elif m.role == 'assistant' -%}{{ ' ' + m.content + '</s>' }}
{%- else -%}{{ raise_exception('unknown role') }}{%- endif -%}
{%- endfor -%}"""

# The system message in a block of its own inside the first user message.
LLAMA2 = """{%- set ns = namespace(rest=messages, system='') -%}
{%- if messages[0].role == 'system' -%}
{%- set ns.rest = messages[1:] -%}{%- set ns.system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' -%}
{%- endif -%}
{%- for m in ns.rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if m.role == 'user' -%}{{ '<s>[INST] ' + (ns.system if loop.first else '') + m.content + ' [/INST]' }}
{%- else -%}{{ ' ' + m.content + ' </s>' }}{%- endif -%}
{%- endfor -%}"""

# The system message folded into the first user message without a mark.
GEMMA = """{{- '<bos>' -}}
{%- set ns = namespace(rest=messages, system='') -%}
{%- if messages[0].role == 'system' -%}
{%- set ns.rest = messages[1:] -%}{%- set ns.system = messages[0].content + '\n\n' -%}
{%- endif -%}
{%- for m in ns.rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- (ns.system if loop.first else '') + (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

# Closes the whole text where no generation prompt follows.
PHI = """{%- for m in messages -%}
{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- else -%}{{ '<|endoftext|>' }}{%- endif -%}"""

# Names inside headers, channels, another end of message after a call, a system message of the template's own.
HARMONY = """{{- '<|start|>system<|message|>You are a default. Date: ' + date + '<|end|>' -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{{- '<|start|>developer<|message|># Instructions\n\n' + m.content + '<|end|>' -}}
{%- elif m.role == 'user' -%}{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start|>functions.' + (m.name or 'unknown') + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- (m.content | tojson) + '<|end|>' -}}
{%- elif m.tool_calls -%}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' -}}
{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' -}}
{%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

# No header before the system message, calls only where the content is none, their arguments as text.
DEEPSEEK = """{{- '<|bos|>' -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<|User|>' + m.content -}}
{%- elif m.role == 'assistant' and m.content is none -%}
{{- '<|Assistant|><|call|>' + m.tool_calls[0].function.name + '\n```json\n' -}}
{{- m.tool_calls[0].function.arguments + '\n```<|eos|>' -}}
{%- elif m.role == 'assistant' -%}{{- '<|Assistant|>' + m.content + '<|eos|>' -}}
{%- elif m.role == 'tool' -%}{{- '<|output|>' + m.content + '<|/output|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|>' -}}{%- endif -%}"""

# All in plain text.
VICUNA = """{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ m.content + '\n\n' }}
{%- elif m.role == 'user' -%}{{ 'USER: ' + m.content }}
{%- else -%}{{ '\nASSISTANT: ' + m.content + '</s>\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\nASSISTANT:' }}{%- endif -%}"""


def renderer(template: str, date: str = "26 Jul 2024", generation: bool = False) -> Render:
    """Messages -> text, as a tokenizer's `apply_chat_template(tokenize=False)` does it."""
    environment = jinja2.Environment(undefined=jinja2.ChainableUndefined, keep_trailing_newline=True)
    environment.filters["tojson"] = json.dumps  # jinja's own escapes for HTML
    environment.globals["raise_exception"] = _refuse
    compiled = environment.from_string(template)
    return lambda messages: compiled.render(messages=messages, date=date, add_generation_prompt=generation)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class ToyTokenizer:
    """Reversible word tokenizer that merges as real ones do.

    Words take the space before them, signs take the newlines behind them, newlines stick together. With `metaspace`,
    a text that begins behind a special token gets a space in front, as SentencePiece adds it.
    """

    _WORDS = re.compile(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+\n*|\n+|[^\S\n]+")

    def __init__(self, specials: str, metaspace: bool = False) -> None:
        self._special = re.compile("(" + "|".join(re.escape(s) for s in specials.split()) + ")")
        self._metaspace = metaspace
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        words: list[str] = []
        for i, part in enumerate(self._special.split(text)):
            if i % 2:
                words.append(part)
            elif part:
                words += self._WORDS.findall((" " if self._metaspace else "") + part)
        return [self._ids.setdefault(word, len(self._ids)) for word in words]

    def decode(self, ids: list[int]) -> str:
        words = list(self._ids)
        return "".join(words[i] for i in ids)
