"""What a person sees while the command works, on a terminal that is as wide as it is."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from rankxform.display import progress
from rankxform.display.progress import bar_line
from tests import reference
from tests.cli.test_main import ROOT
from tests.mpi_launch import environment, mpirun

NAMES = [f"w{i}" for i in range(12)]
PARAMS = dict.fromkeys(NAMES, ((48, 32), "Float32"))
SRC = [dict.fromkeys(NAMES, ([4], [0, -1], 0, 0))]
DST = [dict.fromkeys(NAMES, ([3], [0, -1], 0, 0))]


@pytest.fixture
def words(tmp_path):
    src = reference.write_checkpoint(tmp_path / "src", SRC, PARAMS)
    a, b = (
        reference.write_strategy(tmp_path / f"{n}.ckpt", s) for n, s in (("a", SRC), ("b", DST))
    )
    return ["transform", src, str(tmp_path / "dst"), "--src-strategy", a, "--dst-strategy", b]


class Terminal:
    """A terminal of some columns, in which a command runs."""

    def __init__(self, columns, command, **options):
        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        streams = {"stdin": other, "stdout": other, "stderr": other, **options}
        self.process = subprocess.Popen(
            list(map(str, command)), **streams, start_new_session=True, cwd=ROOT,
            env=environment(SLOW_SECONDS="0.05", NO_COLOR="1"),
        )  # fmt: skip
        os.close(other)
        self.text = ""

    def read(self, until=None, seconds=60):
        """Read until the command has ended, or something is there; return all that was."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (until and re.search(until, self.text)):
            try:
                if select.select([self._own], [], [], 0.1)[0]:
                    data = os.read(self._own, 65536)
                    if not data:
                        break
                    self.text += data.decode()
                elif self.process.poll() is not None:
                    break
            except OSError:  # nobody has the other side open any more
                break
        return self.text

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._own)


def shown(text):
    """Return the lines as they stood on the screen at some time."""
    return [part.replace("\x1b[K", "") for line in text.split("\r\n") for part in line.split("\r")]


@pytest.fixture
def start(request):
    made = []

    def start(columns, command, **options):
        made.append(Terminal(columns, command, **options))
        return made[-1]

    yield start
    for terminal in made:
        terminal.close()


def slowly(words, processes):
    launcher = mpirun(processes) if processes else []
    return [*launcher, sys.executable, "-m", "tests.trust.slow", *words]


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize("columns", [100, 60, 30])
def test_a_bar_on_a_terminal_is_one_line(columns, processes, words, start):
    terminal = start(columns, slowly(words, processes))
    text = terminal.read()
    assert terminal.process.wait(30) == 0, text
    bars = [line for line in shown(text) if re.search(r"\d+%.* left$", line)]
    assert len(bars) >= 3, text
    assert all(len(line) < columns for line in bars)
    assert all(("#" in line) == (columns > 40) for line in bars[1:])
    assert "\r\n" not in text[text.index(bars[0]) : text.index(bars[-1])], "never a second line"
    assert re.search(r"\r\x1b\[K(?:\r\x1b\[K)*read +[\d.]+ ", text), "and it is gone at the end"


@pytest.mark.parametrize("processes", [None, 2])
def test_a_file_gets_lines(processes, words, start, tmp_path):
    with (tmp_path / "errors").open("w") as errors:
        terminal = start(80, slowly(words, processes), stderr=errors)
        text = terminal.read()
    assert terminal.process.wait(30) == 0, text
    assert not re.search(r"\d%", text)
    assert "\r" not in (tmp_path / "errors").read_text()


def test_a_message_does_not_hang_on_a_bar(words, start):
    terminal = start(60, slowly(words, None))
    terminal.read(until=r"\d+%")
    terminal.process.send_signal(signal.SIGINT)
    text = terminal.read()
    assert terminal.process.wait(30) == 75
    assert "\r\x1b[Krankxform: error: stopped by SIGINT\r\n  try  run the same" in text


@pytest.mark.parametrize("processes", [None, 2])
def test_a_sign_of_life_comes_before_all_is_read(processes, words, start):
    """Planning takes five seconds here."""
    program = (
        "import sys, time; import rankxform.target.resolve as resolve; from rankxform.cli.main import main\n"
        "resolve_target = resolve.resolve_target\n"
        "def slow(*a): time.sleep(5); return resolve_target(*a)\n"
        "resolve.resolve_target = slow\n"
        "sys.exit(main())"
    )
    launcher = mpirun(processes) if processes else []
    for more in ([], ["--progress", "none", "--overwrite"]):
        terminal = start(80, [*launcher, sys.executable, "-c", program, *words, *more])
        text = terminal.read()
        assert terminal.process.wait(30) == 0, text
        assert text.count("rankxform: reading and planning (") == (not more)
        if not more:
            assert text.index("reading and planning") < text.index("from  ")


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_lines_fit_the_terminal(columns, words, start, monkeypatch):
    """All but what is one word, as a path is; labels are bold, and errors red, if that is wanted."""
    command = [sys.executable, "-m", "rankxform"]
    wrong = ["verify", *words[1:3], "--src-strategy", "none", "--dst-strategy", "none"]
    for arguments, code, label in ((words, 0, "done"), (wrong, 2, "rankxform: error:")):
        for style, plain in ({"NO_COLOR": "1"}, True), ({"NO_COLOR": ""}, False):
            line = ["env", *(f"{k}={v}" for k, v in style.items()), *command, *arguments]
            terminal = start(columns, line + (["--overwrite"] if not code else []))
            text = terminal.read()
            assert terminal.process.wait(30) in (code, 3), text
            assert ("\x1b[1" in text) != plain and (f"{label}\x1b[0m" in text) != plain
            for one in shown(re.sub(r"\x1b\[[0-9;]*m", "", text)):
                is_command = "rankxform verify " in one[:30]  # whole, to be pasted
                assert is_command or len(one) < columns or len(one.split()[-1]) > columns - 20, one


@pytest.mark.parametrize("width", range(1, 120))
def test_a_bars_line_is_never_longer_than_the_terminal(width):
    words = (" 61%", "of 269 MB,", "165 MB/s,")
    line = bar_line(words, "1 h 12 min left", 0.61, width)
    assert len(line) <= width
    assert line.endswith((" 61%", "left")) or width < 4


def test_a_first_sign_that_is_being_written_comes_before_other_output(monkeypatch):
    said, is_written = [], threading.Event()

    def say(text):
        is_written.set()
        time.sleep(0.2)
        said.append(text)

    monkeypatch.setattr(progress, "_say", say)
    progress.await_first_word("auto", passed=60.0)
    assert is_written.wait(60)
    progress.clear_pending_output()
    assert len(said) == 1
