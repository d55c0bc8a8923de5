"""The gradient norm over time as a picture: where it was clipped, and to what."""

from colonnade.proof.report import Series, line_chart


def draw(before, after, limit):
    """Norms before clipping as a line; of clipped steps also what they were before, and after it."""
    clipped = [(step, norm) for step, norm in enumerate(before) if norm > limit]
    return line_chart(
        [
            Series("before clipping", list(enumerate(before))),
            Series(f"clip_grad_norm = {limit:g}", [(0, limit)], "level", color=7),
            Series(f"clipped ({len(clipped)})", clipped, "dots", color=1),
            Series("after", [(step, after[step]) for step, _ in clipped], "dots", color=2),
        ],
        y="norm of the whole gradient",
        logarithmic=True,
    )
