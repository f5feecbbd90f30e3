"""The script of a shell's completion knows every command and flag."""

import shutil
import subprocess
from pathlib import Path

import pytest

from pointsman_lab.cli.completion import every_command
from pointsman_lab.cli.main import COMMANDS, main


def test_every_command_and_flag_is_known() -> None:
    told = every_command(None)
    values = told.parse_args(["compare", "--routers", "smoe,xmoe", "--seeds", "2"])
    assert (values.routers, values.seeds) == (["smoe", "xmoe"], 2)
    assert told.parse_args(["trace", "place", "x", "--devices", "4"]).devices == 4
    assert all(name in told.format_help() for name in COMMANDS)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash", "--out", str(tmp_path)]) == 0
    ask = (
        f"source {tmp_path}/pointsman.bash; COMP_WORDS=(pointsman compare --ro); COMP_CWORD=2; "
        "_shtab_pointsman; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--routers"]


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "the package 'shtab' is not installed: pip install 'pointsman[completion]'" in capsys.readouterr().err
