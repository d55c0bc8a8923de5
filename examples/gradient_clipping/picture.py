"""The gradient norm over time as a picture: where it was clipped, and to what."""

from colonnade.report import Chart


def draw(before, after, limit):
    """Norms before clipping as a line, clipped steps as dots with a bar down to the norm after it."""
    clipped = [(step, norm) for step, norm in enumerate(before) if norm > limit]
    chart = Chart("Norm of the whole gradient", logarithmic=True, height=420)
    chart.line("before clipping", list(enumerate(before))).level(f"clip_grad_norm = {limit:g}", limit)
    chart.dots(f"clipped step ({len(clipped)}), bar down to the norm after", clipped)
    for step, norm in clipped:
        chart.bar(step, norm, after[step])
    return chart.svg()
