"""Run a command in a separate terminal, and write its screen as an animated SVG without a script.

python tools/record_demo.py docs/images/demo.svg colonnade demo        # or: make recording

Pauses are shortened. With the browser setting "reduced motion", only the last frame is shown. Needs pyte, a terminal in
Python.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import pyte

COLUMNS, ROWS = 100, 26
LONGEST_PAUSE, LAST_PAUSE, MOST_FRAMES = 0.25, 4.0, 64
CELL, LINE, EDGE = 7.8, 17, 14
COLOURS = {
    "default": "#d6deeb", "black": "#0b1220", "red": "#ff7b72", "green": "#7ee787", "brown": "#f2cc60", "blue": "#79c0ff",
    "magenta": "#d2a8ff", "cyan": "#76e3ea", "white": "#f0f6fc",
}  # fmt: skip

Line = tuple[tuple[str, str, bool], ...]
"""Runs of text of one colour: (text, colour, bold)."""


def recorded(command: list[str]) -> list[tuple[float, list[Line]]]:
    """Run the command; returns the frames of the screen with their times in seconds."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {' '.join(command)}\r\n".encode())
    frames = [(0.0, picture(screen))]
    began = time.monotonic()
    pid, master = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS), TORCH_DISTRIBUTED_DEBUG="OFF")
        os.execvp(command[0], command)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    while True:
        try:
            if select.select([master], [], [], 0.2)[0]:
                stream.feed(os.read(master, 1 << 16))
        except OSError:  # the command has ended
            break
        shown = picture(screen)
        if shown != frames[-1][1]:
            frames.append((time.monotonic() - began, shown))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        sys.exit(f"{' '.join(command)} ended with status {status}")
    return frames


def picture(screen: pyte.Screen) -> list[Line]:
    """The lines of the screen, without empty cells at their ends."""
    lines = []
    for row in range(ROWS):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        runs = [
            ("".join(cell.data for cell in group), colour, bold)
            for (colour, bold), group in groupby(cells, key=lambda cell: (hexed(cell.fg), cell.bold))
        ]
        while runs and not runs[-1][0].strip():
            runs.pop()
        lines.append(tuple(runs))
    return lines


def hexed(colour: str) -> str:
    """Convert a colour of the terminal to SVG."""
    return COLOURS.get(colour.removeprefix("bright"), f"#{colour}" if len(colour) == 6 else COLOURS["default"])


def timed(frames: list[tuple[float, list[Line]]]) -> list[tuple[float, list[Line]]]:
    """The duration of each frame. Pauses are shortened, and some frames are dropped if there are many."""
    step = -(-len(frames) // MOST_FRAMES)
    few = [*frames[:-1:step], frames[-1]]
    pauses = [min(LONGEST_PAUSE, after[0] - before[0]) for before, after in pairwise(few)]
    return [(pause, lines) for pause, (_, lines) in zip([*pauses, LAST_PAUSE], few, strict=True)]


def svg(frames: list[tuple[float, list[Line]]], title: str) -> str:
    """Draw all frames; a line that does not change between frames is drawn once."""
    width, height = COLUMNS * CELL + 2 * EDGE, ROWS * LINE + 2 * EDGE + 20
    total = sum(pause for pause, _ in frames)
    css, body = [], []
    for row in range(ROWS):
        at = 0.0
        for line, group in groupby(frames, key=lambda frame: frame[1][row]):
            start, at = at, at + sum(pause for pause, _ in group)
            if not line:
                continue
            always = start == 0 and at >= total - 1e-9
            name = f"k{len(css)}"
            if not always:
                css.append(keyframes(name, 100 * start / total, 100 * at / total))
            last = "" if at < total - 1e-9 else " z"
            style = "" if always else f' class="a{last}" style="animation-name:{name}"'
            body.append(f'<text y="{EDGE + 34 + row * LINE}"{style}>{spans(line)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n<style>text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;"
        f"fill:{COLOURS['default']}}}.a{{visibility:hidden;animation:{total:.2f}s step-end infinite}}"
        f"@media (prefers-reduced-motion:reduce){{.a{{animation:none}}.z{{visibility:visible}}}}\n{chr(10).join(css)}</style>\n"
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="#0b1220" stroke="#30405c"/>\n'
        + "".join(f'<circle cx="{EDGE + 6 + 18 * at}" cy="15" r="5" fill="{fill}"/>' for at, fill in enumerate(("#ff5f56", "#ffbd2e", "#27c93f")))
        + "\n" + "\n".join(body) + "\n</svg>\n"
    )  # fmt: skip


def keyframes(name: str, start: float, end: float) -> str:
    """CSS that makes a line visible between two percentages of the duration."""
    points = [f"{start:.2f}%{{visibility:visible}}"]
    if start > 0:
        points.insert(0, "0%{visibility:hidden}")
    if end < 100 - 1e-6:
        points.append(f"{end:.2f}%{{visibility:hidden}}")
    return f"@keyframes {name}{{{''.join(points)}}}"


def spans(line: Line) -> str:
    """The runs of a line, each placed at its column, because fonts differ in width."""
    parts, column = [], 0
    for text, colour, bold in line:
        if text.strip():
            lead = len(text) - len(text.lstrip())
            shown = text.strip()
            look = ("" if colour == COLOURS["default"] else f' fill="{colour}"') + (
                ' font-weight="bold"' if bold else ""
            )
            place = f'x="{EDGE + (column + lead) * CELL:.1f}" textLength="{len(shown) * CELL:.1f}"'
            parts.append(f"<tspan {place}{look}>{escape(shown)}</tspan>")
        column += len(text)
    return "".join(parts)


def main() -> None:
    target, command = Path(sys.argv[1]), sys.argv[2:]
    frames = timed(recorded(command))
    text = svg(frames, f"What `{' '.join(command)}` shows in a terminal")
    target.write_text(text, encoding="utf-8")
    print(
        f"{target}: {len(frames)} pictures, {sum(pause for pause, _ in frames):.0f} s, {len(text.encode()) / 1000:.0f} kB"
    )


if __name__ == "__main__":
    main()
