"""The bar chart of docs/images/speed.svg, from the ratios in docs/evidence/speed.md. `python docs/_site/speed_chart.py` writes it."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1]
BARS = {
    "Llama 1.2 G, training step": r"`llama_cuda.py` \|",
    "clip + AdamW, 1.24 G, fp32": r"clipping and AdamW, 1.24 G parameters in fp32",
    "clip + AdamW, 1.24 G, bf16": r"1.24 G parameters in bf16",
    "ZeRO 1 and 2, 118 M, 2 ranks": r"ZeRO 1 and 2, side by side, 118 M",
    "ZeRO 3, 118 M, 2 ranks": r"ZeRO 3, side by side, 118 M",
    "data parallel, 118 M, 2 ranks": r"\| 118 M on 2 ranks",
    "ring attention, 4 ranks, causal": r"ring attention on 4 ranks",
    "Ulysses attention, 4 ranks, causal": r"Ulysses attention on 4 ranks",
    "100 M, compiled, slow host": r"`engine_cuda.py` \| training step with 100 M",
}
"""Label -> a pattern of its row in the tables; the first ratio of the row is the bar."""
AGAINST = (
    "model by hand in torch",
    "torch",
    "torch",
    "DDP + ZeroRedundancyOptimizer",
    "FSDP2",
    "DDP",
    "context_parallel",
    "context_parallel",
    "loop by hand",
)
LEFT, SCALE, ROW = 236, 300, 30


def ratios() -> dict[str, float]:
    """The ratio of each bar, as the page has it."""
    page = (DOCS / "evidence" / "speed.md").read_text(encoding="utf-8")
    found = {}
    for label, pattern in BARS.items():
        (row,) = [line for line in page.splitlines() if line.startswith("|") and re.search(pattern, line)]
        found[label] = float(re.findall(r"\d\.\d\d", row.rstrip("| ").rpartition("|")[2])[0])
    return found


def tokens_per_second() -> str:
    """Tokens per second and share of the peak of the first bar, as the page has them."""
    page = (DOCS / "evidence" / "speed.md").read_text(encoding="utf-8")
    return re.findall(r"[\d,]+ tokens/s, [\d.]+% of peak", page)[0]


def chart() -> str:
    """The chart as a standalone SVG, readable on a light and on a dark page."""
    height = 44 + ROW * len(BARS)
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" width="800" role="img" '
        f'aria-label="Time of Colonnade as a share of the alternative\'s">',
        "<style>text{font:13px system-ui,sans-serif;fill:#1f2933}.s{font-size:12px;fill:#52606d}.f{fill:#0b7285}.w{fill:#b45309}.i{font-size:12px;fill:#fff}</style>",
        f'<rect width="800" height="{height}" rx="8" fill="#fbfcfd"/>',
        f'<path d="M{LEFT + SCALE} 24 V{height - 10}" stroke="#52606d" stroke-dasharray="4 4"/>',
        f'<text class="s" x="{LEFT + SCALE}" y="17" text-anchor="middle">1.00: as long as the alternative</text>',
    ]
    for at, ((label, ratio), against) in enumerate(zip(ratios().items(), AGAINST, strict=True)):
        y = 32 + at * ROW
        shapes += [
            f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(label)}</text>',
            f'<rect class="{"f" if ratio <= 1 else "w"}" x="{LEFT}" y="{y + 2}" width="{ratio * SCALE:g}" height="{ROW - 10}" rx="3"/>',
            f'<text x="{LEFT + max(ratio, 1) * SCALE + 10:g}" y="{y + 16}">{ratio:.2f} <tspan class="s">of {escape(against)}</tspan></text>',
        ]
    shapes.append(f'<text class="i" x="{LEFT + 10}" y="48">{tokens_per_second()}</text>')
    return "\n".join([*shapes, "</svg>", ""])


if __name__ == "__main__":
    (DOCS / "images" / "speed.svg").write_text(chart(), encoding="utf-8")
