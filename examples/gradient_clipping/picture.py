"""Draw the gradient norm over time, with the clipped steps and the clip level."""

from colonnade.proof.report import Series, line_chart


def draw(before, after, limit):
    """Draw the norms before clipping as a line, and mark the norm before and after clipping at clipped steps."""
    clipped = [(step, norm) for step, norm in enumerate(before) if norm > limit]
    return line_chart(
        [
            Series("before clipping", list(enumerate(before))),
            Series(f"clip_grad_norm = {limit:g}", [(0, limit)], "level", color=7),
            Series(f"clipped ({len(clipped)})", clipped, "dots", color=1),
            Series("after", [(step, after[step]) for step, _ in clipped], "dots", color=2),
        ],
        y="norm of the full gradient",
        logarithmic=True,
    )
