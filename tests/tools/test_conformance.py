"""The table of originals: rows agree to rounding, the page has them all, and what cannot be fetched says so."""

import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from tools.conformance import originals
from tools.conformance.__main__ import EVERY, differences, line
from tools.conformance.originals import in_float64

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "routers" / "conformance.md"


def test_a_row_is_zero_and_a_difference_is_seen() -> None:
    (row,) = (one for one in EVERY if one.where == "transformers")
    with in_float64():
        mine, theirs = row.compare(None)
        others = replace(theirs, weights=theirs.weights * (1 + 1e-6))
        apart, losses, slopes = differences(*row.compare(None))
    assert losses is None
    assert slopes is not None
    assert max(apart, slopes) < 1e-14
    apart, _, slopes = differences(mine, others)
    assert 1e-7 < apart < 1e-4
    assert slopes is not None
    assert slopes > 1e-7


def test_the_page_has_every_row() -> None:
    page = PAGE.read_text()
    for row in EVERY:
        assert f"| `{row.spec}` | {row.original} | {row.where} |" in page


def test_what_cannot_be_fetched_says_so(tmp_path: Path) -> None:
    (row,) = (one for one in EVERY if one.original == "CosineTopKGate")
    assert "not fetched: 82af7aad9fc3 of microsoft/tutel is not in" in line(row, tmp_path)


def test_an_original_is_fetched_at_its_commit_and_a_missing_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class GitHub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path.endswith("gate.py") else 404)
            self.end_headers()
            self.wfile.write(b"raise SystemExit\ndef gate(x):\n    return torch.zeros(1, dtype=torch.float32) + x\n")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), GitHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(originals, "GITHUB", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        loaded = originals.File("owner/name", "c0ffee", "a/gate.py").load(None, ["gate"])
        assert loaded["gate"](2).dtype == torch.float64  # and the file's own statements did not run
        assert asked == ["/owner/name/c0ffee/a/gate.py"]
        with pytest.raises(originals.NotFetchedError, match="has no gone"):
            originals.File("owner/name", "c0ffee", "a/gate.py").load(None, ["gone"])
        with pytest.raises(originals.NotFetchedError, match="GitHub does not answer: HTTP Error 404"):
            originals.File("owner/name", "c0ffee", "gone").text(None)
        server.shutdown()
