"""Trace files: the dialects, and what hostile files are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.simulator import trace_file
from inflight.simulator.trace import MAX_TOKENS, PrefixPiece, TraceError, TraceRequest, prompt_ids
from inflight.simulator.trace_file import MAX_LINE_BYTES, load_trace


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def fault(folder: Path, text: str | bytes) -> str:
    with pytest.raises(TraceError) as caught:
        load_trace(write(folder, text))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_our_own_columns_in_any_order(tmp_path: Path) -> None:
    text = (
        "note,output_length,arrival,input_length,prefix_group,prefix_length\n"
        "x,7,12.5,100,chat,64\n\n"
        '"a, b",3,10.5,50,,\n'
        "y,0,11,20,chat,\n"
        "z,1,11,20,chat,0\n"
    )
    assert load_trace(write(tmp_path, text)) == [
        TraceRequest(0.0, 50, 3),
        TraceRequest(0.5, 20, 1, (PrefixPiece("chat", 20),)),
        TraceRequest(0.5, 20, 1),
        TraceRequest(2.0, 100, 7, (PrefixPiece("chat", 64),)),
    ]


def test_mooncakes_json_lines(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 9]},
        {"timestamp": 0, "input_length": 500, "output_length": 4, "hash_ids": [0, 7, 8]},
    ]
    text = "\n".join(json.dumps(row) for row in rows)
    assert load_trace(write(tmp_path, text)) == [
        TraceRequest(0.0, 500, 4, (PrefixPiece("0", 500),)),
        TraceRequest(
            3.0, 1100, 52, (PrefixPiece("0", 512), PrefixPiece("1", 512), PrefixPiece("9", 76))
        ),
    ]


def test_mooncakes_columns_as_csv(tmp_path: Path) -> None:
    text = 'timestamp,input_length,output_length,hash_ids\n10,20,3,"[4, 5]"\n'
    assert load_trace(write(tmp_path, text)) == [TraceRequest(0.0, 20, 3, (PrefixPiece("4", 20),))]


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.0319600", 0.052),
        ("2024-05-10 23:59:59.5+00:00", "2024-05-11 00:00:01+00:00", 1.5),
        ("2024-05-10T10:00:00Z", "2024-05-10T10:00:00-01:00", 3600.0),
    ],
)
def test_azures_columns(tmp_path: Path, first: str, second: str, seconds: float) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},4808,10\n{second},3180,8\n"
    one, two = load_trace(write(tmp_path, text))
    assert one == TraceRequest(0.0, 4808, 10)
    assert two[1:] == TraceRequest(0.0, 3180, 8)[1:]
    assert two.arrival == pytest.approx(seconds)


def test_only_the_first_requests_are_read(tmp_path: Path) -> None:
    text = "arrival,input_length,output_length\n5,1,1\n1,2,2\nnot,a,number\n"
    assert [r.input_length for r in load_trace(write(tmp_path, text), max_requests=2)] == [2, 1]


HEADER = "arrival,input_length,output_length,prefix_group,prefix_length,hash_ids\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no requests"),
        (HEADER, "holds no requests"),
        ("a,b\n1,2\n", "line 1: needs the columns arrival, input_length"),
        (HEADER + "1,2,3\n", "line 2: has 3 columns, the header has 6"),
        (HEADER + '1,"2,3,,,\n', "line 2: is not valid CSV"),
        (HEADER + "1,0,3,,,\n", "line 2: input_length: 0 must be a whole number from 1 to"),
        (HEADER + f"1,{MAX_TOKENS + 1},3,,,\n", "line 2: input_length: "),
        (HEADER + "1,2.5,3,,,\n", "line 2: input_length: 2.5 must be a whole number"),
        (HEADER + "1,2,-3,,,\n", "line 2: output_length: -3 must be"),
        (HEADER + "\n1,2,nan,,,\n", "line 3: output_length: nan is out of range"),
        (HEADER + "1e300,2,3,,,\n", "line 2: arrival: 1e300 is out of range"),
        (HEADER + "1e10,2,3,,,\n", "line 2: arrival: 1e+10 must be at most"),
        (HEADER + "soon,2,3,,,\n", "line 2: arrival: 'soon' is not a number"),
        (HEADER + f"1,2,3,{'g' * 300},,\n", "line 2: prefix_group: is longer than 256"),
        (HEADER + "1,2,3,g,x,\n", "line 2: prefix_length: 'x' is not a number"),
        (HEADER + "1,2,3,,,[1\n", "line 2: hash_ids: must be a list of whole numbers"),
        (HEADER + f"1,2,3,,,{'[' * 100_000}\n", "line 2: hash_ids: must be a list"),
        (HEADER + f"1,2,3,,,[{1 << 64}]\n", "line 2: hash_ids: must be smaller than 2**64"),
        ('{"arrival": 1}\n', "line 1: needs the columns"),
        ('{"arrival": 1,\n', "line 1: is not valid JSON"),
        ("{" + '"a":[' * 50_000 + "\n", "line 1: is not valid JSON"),
        ('{"arrival":0,"input_length":1,"output_length":1}\n[1]\n', "line 2: must hold a JSON"),
        ('{"arrival":true,"input_length":1,"output_length":1}\n', "arrival: must be a number"),
        ('{"arrival":0,"input_length":[1],"output_length":1}\n', "input_length: must be a number"),
        (
            '{"arrival":0,"input_length":1,"output_length":1,"prefix_group":{}}\n',
            "prefix_group: must be a name",
        ),
        (
            '{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[1.5]}\n',
            "hash_ids: must be a list",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "'now' is not a date"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-40 00:00:00,1,1\n", "is not a date"),
        (b"\xff\xfe\x00", "line 1: is not UTF-8 text"),
        ("x" * (MAX_LINE_BYTES + 1), f"line 1: is longer than {MAX_LINE_BYTES} bytes"),
    ],
)
def test_a_hostile_file_is_told_in_one_line_where_it_is_wrong(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    message = fault(tmp_path, text)
    assert message.startswith("trace.txt") and said in message


def test_too_many_requests_are_refused_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "MAX_REQUESTS", 2)
    row = '{"arrival":0,"input_length":1,"output_length":1}\n'
    assert "line 3: there are more than 2 requests" in fault(tmp_path, row * 3)
    assert len(load_trace(write(tmp_path, row * 3), max_requests=2)) == 2


def test_all_hash_ids_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MAX_PIECES", 3)
    row = '{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[1,2]}\n'
    assert len(load_trace(write(tmp_path, row))) == 1
    assert "line 2: hash_ids: more than 3" in fault(tmp_path, row * 2)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        load_trace(tmp_path / "nowhere.csv")


def test_prompts_share_what_their_prefixes_share() -> None:
    def ids(number: int, length: int, *pieces: tuple[str, int]) -> tuple[int, ...]:
        prefix = tuple(PrefixPiece(*piece) for piece in pieces)
        return prompt_ids(TraceRequest(0, length, 1, prefix), number)

    one, two = ids(1, 80, ("a", 40), ("b", 20)), ids(2, 90, ("a", 40), ("b", 30))
    assert (len(one), len(two)) == (80, 90)
    assert one[:60] == two[:60] and one[60] != two[60]
    assert ids(3, 60, ("b", 40))[:40] != one[:40]
    assert ids(1, 80, ("a", 40), ("b", 20)) == one
    assert ids(4, 5) != ids(5, 5)
    assert all(0 <= each < 2**31 for each in one)
