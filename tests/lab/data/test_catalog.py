from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.data.catalog import DataSpec, parse_data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stdlib", DataSpec("stdlib")),
        ("enwik8:newlines=drop", DataSpec("enwik8", "drop")),
        ("a/b.txt:level=word:newlines=keep", DataSpec("a/b.txt", "keep", "word")),
        ("C:\\texts\\a.txt:level=word", DataSpec("C:\\texts\\a.txt", "keep", "word")),
        ("no/such:dir/a.txt", DataSpec("no/such:dir/a.txt")),
    ],
)
def test_grammar(text: str, expected: DataSpec) -> None:
    assert parse_data(text) == expected


def test_spec_prints_as_it_is_written() -> None:
    for text in ("enwik8", "enwik8:newlines=drop", "x.txt:level=word", "x.txt:newlines=drop:level=word"):
        assert str(parse_data(text)) == text


def test_a_path_with_a_colon_that_exists_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "notes:level=word"
    path.write_text("text")
    assert parse_data(str(path)) == DataSpec(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enwik8:newline=drop", "unknown option 'newline': did you mean 'newlines'"),
        ("enwik8:newlines=dropp", "did you mean 'drop'"),
        ("enwik8:newlines", "newlines=''"),
        ("enwik8:level=char", "level='char': .*byte, word"),
        ("enwik8:level=word:level=byte", "level is given twice"),
        ("", "names no corpus"),
        (":level=word", "names no corpus"),
    ],
)
def test_bad_options(text: str, message: str) -> None:
    with pytest.raises(RunError, match=message) as caught:
        parse_data(text)
    assert "\n" not in str(caught.value)
