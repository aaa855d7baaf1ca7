"""Chat prompts equal those of transformers, for the kinds of template that models use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from inflight.text.tokenizer import Tokenizer
from tests.fakes.tokenizers import BACKENDS, BOS, EOS

CHATML = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' -}}
{%- endif -%}
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set rest = messages[1:] %}
    {% set system = '<<SYS>>\\n' + messages[0]['content'].strip() + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set rest = messages %}
    {% set system = '' %}
{% endif %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('user and assistant must take turns') }}
    {% endif %}
    {% set content = system + message['content'] if loop.first else message['content'] %}
    {% if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{% endfor %}
"""

LLAMA_3 = """\
{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- for message in messages %}
    {%- set head = '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' %}
    {{- head + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0].role == 'system' -%}
    {%- set lead = messages[0].content + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set lead = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    <start_of_turn>{{ role }}
{{ (lead if loop.first else '') + message.content | trim }}<end_of_turn>
{{ '\\n' if not loop.last }}
{%- endfor -%}
{% if add_generation_prompt %}{{ '\\n<start_of_turn>model\\n' }}{% endif %}
"""

USER = {"role": "user", "content": "  stop the cab, 😊 {{ x }}\n"}
ANSWER = {"role": "assistant", "content": 'ab <b>"é"</b>'}
SYSTEM = {"role": "system", "content": "the top"}
CONVERSATIONS = [[USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER, USER]]


@pytest.mark.numeric
@pytest.mark.parametrize("family", ["byte_level", "llama"])
@pytest.mark.parametrize(
    "template", [CHATML, LLAMA_2, LLAMA_3, GEMMA], ids=["chatml", "llama_2", "llama_3", "gemma"]
)
def test_chat_prompts_equal_those_of_transformers(
    tmp_path: Path, family: str, template: str
) -> None:
    BACKENDS[family]().save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": template,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = Tokenizer.from_directory(tmp_path)
    for conversation in CONVERSATIONS:
        expected = theirs.apply_chat_template(conversation, add_generation_prompt=True)
        assert ours.encode_chat(json.dumps(conversation)) == expected["input_ids"]
