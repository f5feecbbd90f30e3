"""Files written whole or not at all, JSON read back, and folders held by one process."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman import _files as module
from pointsman._errors import RunError
from pointsman_lab._files import LOCK, alone, check_writable, find, read_json, read_whole_json, within, write_whole
from pointsman_lab.data.corpus import load_corpus
from pointsman_lab.data.subwords import open_tokenizer
from pointsman_lab.recipes import preset
from pointsman_lab.tasks.classification.data import find_task
from pointsman_lab.tasks.images.image_set import load_images
from pointsman_lab.tasks.masked_language_modelling.task import MaskedLanguageModelling
from pointsman_lab.tasks.masked_language_modelling.text import read_text
from pointsman_lab.tasks.translation.data import open_parallel


def _open_pieces(name: str) -> object:
    config = preset("tiny-mlm").with_overrides({"tokenizer": name})
    return MaskedLanguageModelling.open(config)


def test_write_whole_keeps_the_old_text_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    assert write_whole(file, "old") == file

    def failing(place: Path, content: bytes) -> None:
        place.write_bytes(b"n")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pointsman_lab._files.write_synced", failing)
    with pytest.raises(RunError, match="no space left on the disk"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    "read", [load_corpus, open_tokenizer, find_task, load_images, open_parallel, read_text, _open_pieces]
)
def test_the_home_of_nobody_is_a_folder_that_is_not_there(read: Callable[[str], object]) -> None:
    form = {open_parallel: "parallel:{}:from=de", read_text: "multilingual:{}"}.get(read, "{}")
    with pytest.raises(RunError, match="~nobody-here"):
        read(form.format("~nobody-here/text"))


def test_json_is_an_object_or_refused_by_name(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none.json") is None
    for content in ('{"cut', "[1]", "\xff"):
        (tmp_path / "file.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(RunError, match=r"file\.json: ") as caught:
            read_json(tmp_path / "file.json")
        assert "\n" not in str(caught.value)
        assert read_whole_json(tmp_path / "file.json") is None
    write_whole(tmp_path / "file.json", '{"a": 1}')
    assert read_json(tmp_path / "file.json") == read_whole_json(tmp_path / "file.json") == {"a": 1}


def test_a_folder_is_held_against_a_second_process_and_let_go(tmp_path: Path) -> None:
    second = (
        "import sys; from pathlib import Path; from pointsman_lab._files import alone\n"
        "with alone(Path(sys.argv[1])): pass"
    )
    command = [sys.executable, "-c", second, str(tmp_path / "run")]
    with alone(tmp_path / "run"):
        refused = subprocess.run(command, capture_output=True, text=True)
        assert refused.returncode == 1
        assert refused.stderr.strip().endswith("run: another process is working in this directory")
    assert subprocess.run(command).returncode == 0


def test_a_disk_without_locks_is_worked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refusing(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refusing)
    worked = False
    with alone(tmp_path):
        worked = True
    assert worked


def test_nothing_is_opened_through_a_link_and_nothing_is_truncated(tmp_path: Path) -> None:
    mine, run = tmp_path / "mine.txt", tmp_path / "run"
    mine.write_text("{}")
    run.mkdir()
    for name in (LOCK, "config.json"):
        (run / name).symlink_to(mine)
    with pytest.raises(RunError, match=r"\.lock: a link"), alone(run):
        pass
    with pytest.raises(RunError, match=r"config\.json: a link"):
        read_json(run / "config.json")
    write_whole(run / "config.json", '{"a": 1}')  # takes the link's place
    assert mine.read_text() == "{}"
    assert read_json(run / "config.json") == {"a": 1}
    (run / "pipe.json").symlink_to("config.json") if sys.platform == "win32" else module.os.mkfifo(run / "pipe.json")
    with pytest.raises(RunError, match=r"pipe\.json: "):
        read_json(run / "pipe.json")


def test_a_lock_keeps_the_content_of_its_file(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("somebody's")
    with alone(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == "somebody's"


def test_what_is_written_aside_goes_through_no_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("kept")
    (tmp_path / f".page.html.writing-{module.owner()}").symlink_to(mine)
    write_whole(tmp_path / "page.html", "new")
    assert (mine.read_text(), (tmp_path / "page.html").read_text()) == ("kept", "new")


def test_no_file_takes_the_place_of_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # as /dev/null would go, if the super-user gave it as --out
    os.mkfifo(pipe)
    with pytest.raises(RunError, match="no ordinary file, so nothing takes its place"):
        write_whole(pipe, "text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
    with pytest.raises(RunError, match="no ordinary file, so nothing takes its place"):
        write_whole(Path("/dev/pointsman-test"), "text")  # /dev/stdout is a link, to a file where it is redirected


def test_folders_below_a_root_stay_in_it(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (elsewhere / "seed-0").mkdir(parents=True)
    (run / "inside").mkdir(parents=True)
    (run / "runs").symlink_to(elsewhere)
    (run / "alias").symlink_to("inside")
    (tmp_path / "linked").symlink_to(run)
    for call in (lambda: within(run, "runs", "seed-0"), lambda: find(run, "*/seed-0"), lambda: within(run, "..", "x")):
        with pytest.raises(RunError, match=r"a link leads out of "):
            call()
    assert within(run, "alias", "new") == run / "alias" / "new"
    assert within(tmp_path / "linked", "inside") == tmp_path / "linked" / "inside"  # the way to a root is the user's


def test_deep_and_misshapen_json_is_refused_by_name(tmp_path: Path) -> None:
    for name, content in (
        ("config.json", "[" * 100_000),
        ("config.json", '{"a":' * 100_000),
        ("config.json", '{"a": ' + "[" * 32 + "0" + "]" * 32 + "}"),
        ("comparison.json", '{"settings": {"model": {}}, "routers": 5, "seeds": []}'),
        ("comparison.json", '{"routers": [], "seeds": []}'),
        ("evaluation.json", '{"results": [{"top_k": 1, "routers": {"0": {"load": ["x"]}}}]}'),
        ("manifest.json", '{"files": {"model.safetensors": {"bytes": "1", "sha256": ""}}}'),
        ("finetune.json", '{"task": 1}'),
        ("attacks-word-x-test.json", '{"results": {}}'),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(RunError, match=rf"{name}") as caught:
            read_json(tmp_path / name)
        assert len(str(caught.value)) < 300


def test_what_killed_writers_left_goes_with_the_next_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(module.platform, "node", lambda: "node1")
    left = tmp_path / f".config.json.writing-{gone.pid}-node1+"
    others = (f"{gone.pid}-{name}+" for name in ("node10", "node1-b", "node1.a", "anode1", "Node1"))
    kept = [tmp_path / f".a.json.writing-{name}" for name in ("1-node1+", f"{gone.pid}-node1", *others)]
    for file in (left, *kept):
        file.write_text("x")
    write_whole(tmp_path / "page.html", "new")
    assert not left.exists()
    assert all(file.exists() for file in kept)
    monkeypatch.setattr(module.platform, "node", lambda: "")  # a machine without a name knows no file for its own
    assert not module.is_abandoned(module.owner())
    monkeypatch.setattr(module.platform, "node", lambda: "a+b/c")
    monkeypatch.setattr(module.os, "getpid", lambda: gone.pid)
    write_whole(tmp_path / "page.html", "new")
    assert module.is_abandoned(module.owner() + "k3x_")


def test_a_scratch_folder_goes_and_takes_only_abandoned_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(module.platform, "node", lambda: "node1")
    names = {name: tmp_path / f"{module.SCRATCH}{name}x" for name in
             (f"{gone.pid}-node1+", "1-node1+", "1-node10+", f"{gone.pid}-node10+", "mine-")}  # fmt: skip
    mine = tmp_path / "mine"
    for place in (*names.values(), mine):
        place.mkdir()
    for name in ("1-node1+", "mine-", f"{gone.pid}-node10+"):
        module.os.utime(names[name], (0, 0))
    (tmp_path / f"{module.SCRATCH}{gone.pid}-node1+y").symlink_to(mine)
    with module.scratch_folder(tmp_path) as scratch:
        (scratch / "part").write_text("x")
    assert not scratch.exists()
    assert mine.is_dir()
    assert [name for name, place in names.items() if place.exists()] == ["1-node1+", "1-node10+", "mine-"]


def test_the_temporary_folder_of_a_killed_process_goes_with_the_next_one(tmp_path: Path) -> None:
    """`audit --on-disk` writes all experts of a model into one."""
    for end, left in (("os.kill(os.getpid(), 9)", 1), ("pass", 0)):
        code = f"import os\nfrom pointsman_lab._files import temporary_folder as new\n(new() / 'a').touch()\n{end}"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
        assert len([*tmp_path.iterdir()]) == left


def test_a_place_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Not a directory; nothing was begun"):
        check_writable(tmp_path / "file" / "a")
    with pytest.raises(RunError, match="this is no folder, and one is needed; nothing was begun"):
        check_writable(tmp_path / "file")
    with pytest.raises(RunError, match="nothing was begun"):
        check_writable(tmp_path / ("a" * 300))
    check_writable(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not hasattr(module.os, "fork"), reason="needs fork")
def test_a_forked_child_holds_no_folder(tmp_path: Path) -> None:
    out, into = module.os.pipe()
    with alone(tmp_path / "run"):
        child = module.os.fork()
        if child == 0:  # lives on after its parent has let go
            module.os.close(into)
            module.os.read(out, 1)
            module.os._exit(0)
    try:
        with alone(tmp_path / "run"):
            pass
    finally:
        module.os.close(into)
        module.os.waitpid(child, 0)
        module.os.close(out)
