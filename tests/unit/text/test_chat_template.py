from __future__ import annotations

import json

import pytest

from inflight.errors import CheckpointError, InvalidRequestError
from inflight.text.chat_template import ChatTemplate, parse_messages


def test_contents_are_strings_or_text_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    assert parse_messages(json.dumps(messages)) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two"},
    ]


def user(content: object) -> str:
    return json.dumps([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON: Expecting value at character 0"),
        ("[{]", "is not JSON: .* at character 2"),
        ("[" * 100_000, "is not JSON that can be read"),
        ("[" + "9" * 5000 + "]", "is not JSON that can be read"),
        ("{}", "must be a list of at least one message"),
        ("[]", "must be a list of at least one message"),
        (json.dumps([{"role": "user", "content": "x"}] * 1025), "1025 messages: at most 1024"),
        ('["hi"]', "'message 0' must be an object with role and content"),
        ('[{"role": "user"}]', "'message 0' must be an object with role and content"),
        ('[{"role": "user", "content": "x", "tool_calls": []}]', "'tool_calls' .*not supported"),
        ('[{"role": 1, "content": "x"}]', "'message 0' has a role that is not a string"),
        (user(None), "neither a string nor a list"),
        (user([{"type": "image_url", "image_url": "x"}]), "only text is served"),
        (user([{"type": "text", "text": 5}]), "only text is served"),
        (user([{"type": "text", "text": "x", "more": 1}]), "only text is served"),
        (user(["text"]), "only text is served"),
        (user([{"type": "text", "text": ""}] * 1025), "1025 parts .*at most 1024"),
        (user("\ud800"), "'message 0' holds half of a surrogate pair"),
    ],
)
def test_bad_messages_are_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^messages: .*{reason}") as caught:
        parse_messages(text)
    assert "\n" not in str(caught.value)


def test_an_error_never_quotes_what_was_said() -> None:
    secret = "the launch code"
    for messages in ([{"role": 5, "content": secret}], [{"role": "user", "text": secret}], secret):
        with pytest.raises(InvalidRequestError) as caught:
            parse_messages(json.dumps(messages))
        assert secret not in str(caught.value)


def render(source: str, content: str = "hi") -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages %}\n  {% if m.role %}\n{{ m.content }}\n{% endif %}{% endfor %}",
            "hi\n",
        ),
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", "<s>True"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ ['é<'] | tojson(indent=1) }}", '[\n "é<"\n]'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_templates_find_what_transformers_gives_them(source: str, expected: str) -> None:
    assert render(source) == expected


def test_what_a_message_says_is_no_template() -> None:
    assert render("{{ messages[0].content }}", "{{ bos_token }}") == "{{ bos_token }}"


def test_the_refusal_of_a_template_reaches_the_client_within_bounds() -> None:
    with pytest.raises(InvalidRequestError, match=r"the chat template says: roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ raise_exception(messages[0].content * 1000) }}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.upper() }}",
        "{{ messages + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_a_template_that_fails_tells_the_client_nothing_of_itself(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source)
    assert str(caught.value) == (
        "messages: 1 messages: the chat template cannot render this conversation"
    )


def test_a_source_that_is_no_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="the chat template is not understood"):
        ChatTemplate("{% if %}", {})
