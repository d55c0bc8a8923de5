"""The gradient norm over time as an SVG, written by hand: no plotting library needed."""

import math

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 72, 50
INK, FAINT, BLUE, RED = "#222", "#ddd", "#2b6cb0", "#c53030"


def draw(before, after, limit):
    """Norms before clipping as a line, clipped steps as red dots with a bar down to the norm after it; log scale."""
    low, high = math.log10(min(*before, limit) / 1.5), math.log10(max(*before, limit) * 1.5)

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, len(before) - 1)

    def y(norm):
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(norm)) / (high - low)

    points = " ".join(f"{x(step):.1f},{y(norm):.1f}" for step, norm in enumerate(before))
    parts = [
        *_frame(x, y, range(math.ceil(low), math.floor(high) + 1), len(before)),
        _line(LEFT, y(limit), WIDTH - RIGHT, y(limit), RED, 'stroke-dasharray="6 4"'),
        f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>',
    ]
    for step, (norm, left) in enumerate(zip(before, after, strict=True)):
        if norm > limit:
            parts.append(_line(x(step), y(norm), x(step), y(left), RED))
            parts.append(f'<circle class="clipped" cx="{x(step):.1f}" cy="{y(norm):.1f}" r="4" fill="{RED}"/>')
    parts += _legend(sum(norm > limit for norm in before), limit)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="13"'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', background, *parts, "</svg>\n"])


def _frame(x, y, powers, steps):
    """Grid lines, ticks and axis names."""
    for power in powers:
        yield _line(LEFT, y(10.0**power), WIDTH - RIGHT, y(10.0**power), FAINT)
        yield _text(LEFT - 8, y(10.0**power) + 4, f"{10.0**power:g}", "end")
    for step in range(0, steps, 20):
        yield _line(x(step), HEIGHT - BOTTOM, x(step), HEIGHT - BOTTOM + 5, INK)
        yield _text(x(step), HEIGHT - BOTTOM + 20, str(step), "middle")
    yield _line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, INK)
    yield _line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, INK)
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "step", "middle")


def _legend(clipped, limit):
    yield _text(LEFT, 28, "Norm of the whole gradient", "start", INK, 'font-size="17"')
    yield _line(LEFT, 50, LEFT + 30, 50, BLUE, 'stroke-width="2"')
    yield _text(LEFT + 38, 54, "before clipping", "start")
    yield f'<circle cx="{LEFT + 180}" cy="50" r="4" fill="{RED}"/>'
    yield _text(LEFT + 192, 54, f"clipped step ({clipped}), bar down to the norm after", "start")
    yield _line(LEFT + 530, 50, LEFT + 560, 50, RED, 'stroke-dasharray="6 4"')
    yield _text(LEFT + 568, 54, f"clip_grad_norm = {limit:g}", "start")


def _line(x1, y1, x2, y2, color, more=""):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" {more}/>'


def _text(x, y, words, anchor, color=INK, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" {more}>{words}</text>'
