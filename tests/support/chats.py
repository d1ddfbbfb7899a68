"""Small tokenizers with chat templates of the kinds that models have, each as short as its traits allow."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.support import tiny

# A header before each message; tools as JSON in the first system message; one call at a time, without content.
LLAMA = """{{- bos_token }}
{%- set has_system = messages[0].role == 'system' %}
{%- if tools or has_system %}
{{- '<|head|>system<|body|>' }}
{%- if has_system %}{{ messages[0].content | trim }}{% endif %}
{%- if tools %}{{ ' Functions: ' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{{- '<|turn|>' }}
{%- endif %}
{%- for m in (messages[1:] if has_system else messages) %}
{%- if m.tool_calls is defined %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|head|>assistant<|body|>{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}<|turn|>' }}
{%- elif m.role == 'tool' %}
{{- '<|head|>ipython<|body|>' + m.content | tojson + '<|turn|>' }}
{%- else %}
{{- '<|head|>' + m.role + '<|body|>' + m.content | trim + '<|turn|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|body|>' }}{% endif %}"""

# Tools before the last user message, strict turns, ids of nine characters, the system text before the last user's.
MISTRAL = """{{- bos_token }}
{%- set ns = namespace(turn=0, last=-1) %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('user and assistant take turns') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}
{%- endif %}
{%- endfor %}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]' }}
{%- if system is defined and loop.index0 == ns.last %}{{ system + '\\n\\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- ', ' if not loop.first }}{{ '{"id": "' + c.id + '", "call": ' + c.function | tojson + '}' }}
{%- endfor %}
{{- ']</s>' }}
{%- elif m.role == 'assistant' %}
{{- m.content + '</s>' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS]{"id": "' + m.tool_call_id + '", "content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('unknown role ' + m.role) }}
{%- endif %}
{%- endfor %}"""

# ChatML with tools in tags, content beside calls, results as user turns.
QWEN = """{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}
{{- '\\n<tools>' }}{% for t in tools %}{{ '\\n' + t | tojson }}{% endfor %}{{ '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# No system role, strict turns, nothing of tools.
GEMMA = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

CHATML = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES = {"llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN, "gemma": GEMMA, "chatml": CHATML, "none": None}
KINDS = list(TEMPLATES)

_SPECIAL = {
    "llama": ["<|begin|>", "<|head|>", "<|body|>", "<|turn|>"],
    "mistral": [
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ],
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "none": [],
}
_BOS = {"llama": "<|begin|>", "mistral": "<s>", "gemma": "<bos>"}


@functools.cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of that kind with its template: SentencePiece for mistral and gemma, byte-level for others."""
    base = tiny.sentencepiece() if kind in ("mistral", "gemma") else tiny.byte_level()
    backend = Tokenizer.from_str(base.backend_tokenizer.to_str())
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=base.eos_token, bos_token=_BOS.get(kind))
    made.add_special_tokens({"additional_special_tokens": [t for t in _SPECIAL[kind] if t != made.bos_token]})
    if kind in _BOS:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{made.bos_token} $A", special_tokens=[(made.bos_token, made.bos_token_id)]
        )
    made.chat_template = TEMPLATES[kind]
    return made
